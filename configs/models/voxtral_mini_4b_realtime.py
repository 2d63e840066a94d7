"""Voxtral-Mini-4B-Realtime: causal audio encoder, and a language model that hears each token's share of audio."""

import os

import torch
from transformers import VoxtralRealtimeConfig, VoxtralRealtimeModel

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
AUDIO = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
AUDIO |= {"head_dim": 16, "num_mel_bins": 128, "sliding_window": 32}
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
FULL_TEXT = {
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 32,
}
FULL_TEXT |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072}
TOKENS = 64 if FULL else 8


class Voxtral(torch.nn.Module):
    def __init__(self):
        super().__init__()
        text = {"model_type": "voxtral_realtime_text", **(FULL_TEXT if FULL else TEXT)}
        config = VoxtralRealtimeConfig(audio_config=None if FULL else AUDIO, text_config=text)
        self.network = VoxtralRealtimeModel(config)

    def forward(self, tokens, features):
        found = self.network(input_ids=tokens, input_features=features, num_delay_tokens=6, use_cache=False)
        return found.last_hidden_state


def model():
    torch.manual_seed(0)
    return Voxtral().eval()


def example_inputs():
    torch.manual_seed(1)
    return torch.arange(3, 3 + TOKENS)[None], torch.randn(1, 128, 8 * TOKENS)
