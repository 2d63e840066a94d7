"""Resemblyzer's voice encoder with its real weights: 160 mel frames in, a speaker embedding of 256 numbers out.

Needs `pip install --no-deps resemblyzer`; only its weights are read, since its own code wants audio libraries.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn


class VoiceEncoder(nn.Module):
    """Three LSTM layers over mel frames; the last state, projected and of length one."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels):
        _, (hidden, _) = self.lstm(mels)
        return nn.functional.normalize(torch.relu(self.linear(hidden[-1])), dim=1)


def model():
    path = Path(find_spec("resemblyzer").origin).parent / "pretrained.pt"
    weights = torch.load(path, map_location="cpu", weights_only=False)["model_state"]
    network = VoiceEncoder()
    network.load_state_dict({k: v for k, v in weights.items() if k.startswith(("lstm", "linear"))})
    return network.eval()


def example_inputs():
    torch.manual_seed(0)
    return (torch.rand(1, 160, 40),)
