"""Llama in the shape of stories260K: a prompt, then token by token, over one KV cache on the device."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

PROMPT, CACHE = 8, 128


def make():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=512, max_position_embeddings=512,
    )  # fmt: skip
    network = LlamaForCausalLM(config).eval()
    network.generation_config.cache_implementation = "static"
    device = torch.get_default_device()
    return TorchExportableModuleWithStaticCache(network, batch_size=1, max_cache_len=CACHE, device=device)


def tokens(count, start):
    return {
        "input_ids": torch.arange(7, 7 + count)[None],
        "cache_position": torch.arange(start, start + count),
    }


model = make()
methods = {
    "prefill": {"module": model, "example_inputs": tokens(PROMPT, 0)},
    "decode": {"module": model, "example_inputs": tokens(1, PROMPT)},
}
