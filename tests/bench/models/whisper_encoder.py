"""Whisper-small's encoder with random weights: 80 mel bins by 3,000 frames in, 1,500 states out."""

import torch
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = WhisperConfig(
            d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072, num_mel_bins=80,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.encoder = WhisperEncoder(config)

    def forward(self, features):
        return self.encoder(features).last_hidden_state


def model():
    torch.manual_seed(0)
    return Encoder().eval()


def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 80, 3000),)
