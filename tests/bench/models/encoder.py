"""A six-layer half-size encoder: width 384, 12 heads, 128 tokens, attention spelled out."""

import torch
from torch import nn

WIDTH, HEADS, TOKENS, LAYERS = 384, 12, 128, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (
            self.projections(x).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        )
        weights = ((q @ k.transpose(-1, -2)) * (width // HEADS) ** -0.5).softmax(-1)
        x = self.first(x + self.output((weights @ v).transpose(1, 2).reshape(batch, tokens, width)))
        return self.second(x + self.narrow(nn.functional.gelu(self.widen(x))))


def model():
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(LAYERS)]).eval()


def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(1, TOKENS, WIDTH),)
