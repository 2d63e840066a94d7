"""Voxtral-Mini-3B: `listen` turns a spectrogram into audio embeddings, `read` continues text from embeddings."""

import os

import torch
from transformers import VoxtralConfig, VoxtralModel

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
AUDIO = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
AUDIO |= {"num_mel_bins": 128, "max_source_positions": 48}
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
FULL_TEXT = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
}
FULL_TEXT |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072}


class Voxtral(torch.nn.Module):
    def __init__(self):
        super().__init__()
        text = {"model_type": "llama", "use_cache": False, **(FULL_TEXT if FULL else TEXT)}
        self.network = VoxtralModel(VoxtralConfig(audio_config=None if FULL else AUDIO, text_config=text))

    def listen(self, features):
        return self.network.get_audio_features(features, return_dict=True).pooler_output

    def embed(self, tokens):
        return self.network.get_input_embeddings()(tokens)

    def read(self, embeddings):
        return self.network.language_model(inputs_embeds=embeddings).last_hidden_state


torch.manual_seed(0)
model = Voxtral().eval()
hidden = (FULL_TEXT if FULL else TEXT)["hidden_size"]
methods = {
    "listen": {"function": model.listen, "example_inputs": (torch.randn(1, 128, 3000 if FULL else 96),)},
    "embed": {"function": model.embed, "example_inputs": (torch.arange(3, 11)[None],)},
    "read": {"function": model.read, "example_inputs": (torch.randn(1, 20, hidden),)},
}
