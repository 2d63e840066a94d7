"""A Llama (3.2-1B at full size) whose query and value projections carry low-rank adapters ("LoRA", Hu et al., 2021)."""

import os

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
SMALL = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 4, "vocab_size": 512}
REAL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
REAL |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True}
RANK, SCALE = 8, 2.0


class Adapted(nn.Module):
    """A frozen linear layer and what a narrow detour adds to it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + SCALE * self.up(self.down(x))


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = LlamaForCausalLM(LlamaConfig(use_cache=False, **(REAL if FULL else SMALL)))
        for layer in self.network.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
            layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)

    def forward(self, input_ids):
        return self.network(input_ids).logits


def model():
    torch.manual_seed(0)
    return Logits().eval()


example_inputs = (torch.arange(32)[None] % 512,)
dynamic_shapes = {"input_ids": {1: torch.export.Dim("tokens", min=2, max=128)}}
