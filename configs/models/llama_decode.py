"""A Llama-shaped decoder that makes one token at a time over a KV cache on the device; weights are random."""

import os

import torch
from torch import nn
from torch.nn import functional as F

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN, WORDS, CACHE = (
    (2048, 22, 32, 4, 5632, 32000, 2048) if FULL else (128, 2, 8, 2, 320, 256, 320)
)
HEAD = WIDTH // HEADS
PROMPT = 128 if FULL else 8
DTYPE = torch.float16


def rotate(x, cosine, sine):
    """Turn pairs (x[i], x[i + HEAD / 2]) by their position's angles (rotary embedding, Su et al., 2021)."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)


class Attention(nn.Module):
    """Grouped-query attention; keys and values of all positions so far stay in buffers."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("keys", torch.zeros(1, KEY_HEADS, CACHE, HEAD))
        self.register_buffer("values", torch.zeros(1, KEY_HEADS, CACHE, HEAD))

    def forward(self, x, position, cosine, sine, mask):
        query, key, value = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        self.keys.index_copy_(2, position, rotate(key, cosine, sine))
        self.values.index_copy_(2, position, value)
        query = rotate(query, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, then a gated feed-forward network (SwiGLU, Shazeer, 2020), each behind a norm."""

    def __init__(self):
        super().__init__()
        self.before = nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention = Attention()
        self.between = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, *place):
        x = x + self.attention(self.before(x), *place)
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Tokens [1, T] at positions [T] -> logits [1, 1, WORDS] of what follows the last of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer().to(DTYPE) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        rates = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.arange(CACHE)[:, None] * rates
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, token, position):
        mask = torch.arange(CACHE, device=position.device) <= position[:, None]
        cosine, sine = self.cosines[position], self.sines[position]
        x = self.embedding(token)
        for layer in self.layers:
            x = layer(x, position, cosine, sine, mask)
        return self.head(self.norm(x[:, -1:]))


def make():
    torch.manual_seed(0)
    return Decoder().to(DTYPE).eval()


def tokens(count, start):
    """Example inputs: that many tokens from a position on."""
    return {"token": torch.arange(7, 7 + count)[None], "position": torch.arange(start, start + count)}


model = make()
example_inputs = tokens(1, PROMPT)
methods = {
    "prefill": {"module": model, "example_inputs": tokens(PROMPT, 0)},
    "decode": {"module": model, "example_inputs": tokens(1, PROMPT)},
}
