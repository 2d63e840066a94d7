"""Qwen3-0.6B: a prompt, then token by token, over one KV cache that stays on the device."""

import os

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
REAL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
REAL |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
PROMPT, CACHE = (128, 1024) if FULL else (8, 32)


def make():
    torch.manual_seed(0)
    config = Qwen3Config(**(REAL if FULL else SMALL), tie_word_embeddings=True)
    network = Qwen3ForCausalLM(config).eval()
    network.generation_config.cache_implementation = "static"
    return TorchExportableModuleWithStaticCache(
        network, batch_size=1, max_cache_len=CACHE, device=torch.get_default_device().type
    )


def tokens(count, start):
    ids = torch.arange(7, 7 + count)[None] % SMALL["vocab_size"]
    return {"input_ids": ids, "cache_position": torch.arange(start, start + count)}


model = make()
example_inputs = tokens(PROMPT, 0)
methods = {
    "prefill": {"module": model, "example_inputs": tokens(PROMPT, 0)},
    "decode": {"module": model, "example_inputs": tokens(1, PROMPT)},
}
