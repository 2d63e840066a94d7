"""Sortformer ("Sortformer: Seamless Integration of Speaker Diarization and ASR", Park et al., 2024): who speaks when.

A Fast-Conformer hears mel frames, a Transformer sorts speakers by their arrival, and every 80 ms each of four speakers
has a probability. The Fast-Conformer is that of transformers, the rest is written here from the paper.
"""

import os

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import ParakeetEncoder, ParakeetEncoderConfig

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
SPEAKERS, WIDTH, HEADS, LAYERS, FRAMES = (4, 192, 8, 18, 3000) if FULL else (4, 32, 4, 2, 96)
HEARD = {"hidden_size": 512, "num_hidden_layers": 18, "num_attention_heads": 8, "intermediate_size": 2048}
if not FULL:
    HEARD = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    HEARD |= {"subsampling_conv_channels": 16}


class Layer(nn.Module):
    """Attention and a narrow network, each normalised after its sum."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        parts = [p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)]
        x = self.first(x + self.output(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)))
        return self.second(x + self.feed(x))


class Sortformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = ParakeetEncoder(ParakeetEncoderConfig(num_mel_bins=80, **HEARD))
        self.narrow = nn.Linear(HEARD["hidden_size"], WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.hidden, self.speakers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, SPEAKERS)

    def forward(self, mels):
        x = self.layers(self.narrow(self.encoder(mels).last_hidden_state))
        return torch.sigmoid(self.speakers(torch.relu(self.hidden(torch.relu(x)))))


def model():
    torch.manual_seed(0)
    network = Sortformer()
    for parameter in network.parameters():
        if parameter.dim() > 1:  # by default the input would fade layer by layer
            nn.init.normal_(parameter, std=(2 / parameter[0].numel()) ** 0.5)
    return network.eval()


def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(1, FRAMES, 80),)
