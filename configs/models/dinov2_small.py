"""DINOv2-small: an image in, features of its patches out."""

import os

import torch
from transformers import Dinov2Config, Dinov2Model

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
HIDDEN, HEADS, LAYERS, PIXELS = (384, 6, 12, 224) if FULL else (48, 3, 2, 56)


class Features(torch.nn.Module):
    """The last hidden state and the class token's."""

    def __init__(self):
        super().__init__()
        config = Dinov2Config(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_hidden_layers=LAYERS,
            image_size=PIXELS,
            patch_size=14,
        )
        self.dino = Dinov2Model(config)

    def forward(self, image):
        found = self.dino(image)
        return found.last_hidden_state, found.pooler_output


def model():
    torch.manual_seed(0)
    return Features().eval()


def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, PIXELS, PIXELS),)
