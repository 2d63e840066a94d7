"""Gemma-3-4B's language model: a prompt, then token by token, over one KV cache on the device."""

import os

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
REAL = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8}
REAL |= {"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
PROMPT, CACHE = (128, 1024) if FULL else (8, 32)


def make():
    torch.manual_seed(0)
    network = Gemma3ForCausalLM(Gemma3TextConfig(**(REAL if FULL else SMALL))).eval()
    network.generation_config.cache_implementation = "static"
    return TorchExportableModuleWithStaticCache(
        network, batch_size=1, max_cache_len=CACHE, device=torch.get_default_device().type
    )


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
