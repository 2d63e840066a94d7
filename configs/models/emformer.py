"""Emformer transducer ("Emformer", Shi et al., 2021): `transcribe` hears, `join` scores the next label.

Attention sees its own segment, the segments to its left, a few frames ahead (copied before the utterance, so
that each segment has its own), and a memory: a summary of each earlier segment.
"""

import os

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
WIDTH, HEADS, LAYERS, LEFT, LABELS, FRAMES = (512, 8, 20, 7, 4097, 128) if FULL else (64, 4, 3, 2, 128, 16)
SEGMENT, AHEAD, MELS = 4, 1, 80


def visible(segments):
    """May a row of [ahead, frames, summaries] look at a column of [memory, ahead, frames]?"""
    ahead, frames, every = (torch.arange(segments).repeat_interleave(n) for n in (AHEAD, SEGMENT, 1))
    rows = torch.cat([ahead, frames, every])[:, None]
    behind = rows - frames
    mask = torch.cat([every < rows, rows == ahead, (behind >= 0) & (behind <= LEFT)], 1)
    mask[-segments:, :segments] = False  # a summary is of frames alone
    return mask


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.output, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        layers = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.feed = nn.Sequential(*layers)

    def forward(self, ahead, frames, memory, mask):
        x = torch.cat([ahead, frames], 1)
        y = self.norm(x)
        segments = y[:, ahead.shape[1] :].unflatten(1, (-1, SEGMENT)).mean(2)
        query = self.query(torch.cat([y, segments], 1))
        key, value = self.both(torch.cat([memory, y], 1)).chunk(2, -1)
        parts = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (query, key, value)]
        seen = self.output(scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2).flatten(2))
        x = x + seen[:, : x.shape[1]]
        x = x + self.feed(x)
        return x[:, : ahead.shape[1]], x[:, ahead.shape[1] :], torch.tanh(seen[:, x.shape[1] :])


class Emformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.reduce, self.layers = nn.Linear(4 * MELS, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.encoded, self.predicted = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.label = nn.Linear(WIDTH, LABELS)

    def transcribe(self, mels):
        """Mel frames [batch, 4 * frames, mels], ``AHEAD`` of the reduced frames beyond the last segment."""
        x = self.reduce(mels.unflatten(1, (-1, 4)).flatten(2))
        frames = x[:, :-AHEAD]
        count = frames.shape[1] // SEGMENT
        ahead = torch.cat([x[:, (i + 1) * SEGMENT :][:, :AHEAD] for i in range(count)], 1)
        memory, mask = frames.unflatten(1, (count, SEGMENT)).mean(2), visible(count)
        for layer in self.layers:
            ahead, frames, memory = layer(ahead, frames, memory, mask)
        return frames

    def join(self, encoded, predicted):
        return self.label(torch.relu(self.encoded(encoded)[:, :, None] + self.predicted(predicted)[:, None]))


torch.manual_seed(0)
model = Emformer().eval()
pair = (torch.randn(1, FRAMES, WIDTH), torch.randn(1, 4, WIDTH))
methods = {
    "transcribe": {
        "function": model.transcribe,
        "example_inputs": (torch.randn(1, 4 * (FRAMES + AHEAD), MELS),),
    },
    "join": {"function": model.join, "example_inputs": pair},
}
