"""Scaled dot-product attention alone, causal."""

import torch
from torch.nn import functional


class Attention(torch.nn.Module):
    def forward(self, query, key, value):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


model = Attention()


def example_inputs():
    torch.manual_seed(0)
    return tuple(torch.randn(1, 4, 64, 32) for _ in range(3))
