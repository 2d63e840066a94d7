"""Whisper: `encode` hears 30 seconds once, `decode` says one token a call from caches that stay on the device.

Only the start token goes to the device and only the next token comes back: the encoder's keys and values, the
decoder's own and the position are state. DEVPLAN_MODEL_SIZE is `small` (a toy), `full` (whisper-small) or
`turbo` (whisper-large-v3-turbo).
"""

import os

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import WhisperConfig, WhisperForConditionalGeneration

SIZES = {  # width, heads, encoder layers, decoder layers, mel bins, encoder frames, vocabulary
    "small": (64, 4, 2, 2, 80, 50, 128),
    "full": (768, 12, 12, 12, 80, 1500, 51865),
    "turbo": (1280, 20, 32, 4, 128, 1500, 51866),
}
WIDTH, HEADS, ENCODER, DECODER, MELS, FRAMES, VOCABULARY = SIZES[
    os.environ.get("DEVPLAN_MODEL_SIZE", "small")
]
CACHE = 448 if FRAMES == 1500 else 16


class Whisper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = WhisperConfig(
            d_model=WIDTH, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_layers=ENCODER,
            decoder_layers=DECODER, encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH, num_mel_bins=MELS,
            max_source_positions=FRAMES, max_target_positions=CACHE, vocab_size=VOCABULARY,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        )  # fmt: skip
        self.network = WhisperForConditionalGeneration(config)
        for index in range(DECODER):
            for name, length in (
                ("key", CACHE),
                ("value", CACHE),
                ("heard_key", FRAMES),
                ("heard_value", FRAMES),
            ):
                self.register_buffer(f"{name}_{index}", torch.zeros(1, HEADS, length, WIDTH // HEADS))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def heads(self, x):
        return x.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)

    def encode(self, features):
        heard = self.network.model.encoder(features).last_hidden_state
        for index, layer in enumerate(self.network.model.decoder.layers):
            self.get_buffer(f"heard_key_{index}").copy_(self.heads(layer.encoder_attn.k_proj(heard)))
            self.get_buffer(f"heard_value_{index}").copy_(self.heads(layer.encoder_attn.v_proj(heard)))
        self.position.zero_()
        return heard

    def attend(self, attention, x, key, value, mask=None):
        query = self.heads(attention.q_proj(x))
        seen = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attention.out_proj(seen.transpose(1, 2).reshape(1, -1, WIDTH))

    def decode(self, token):
        decoder = self.network.model.decoder
        x = decoder.embed_tokens(token) + decoder.embed_positions.weight[self.position]
        mask = (torch.arange(CACHE) <= self.position)[None, None, None]
        for index, layer in enumerate(decoder.layers):
            key, value, heard_key, heard_value = (
                self.get_buffer(f"{name}_{index}") for name in ("key", "value", "heard_key", "heard_value")
            )
            y = layer.self_attn_layer_norm(x)
            key.index_copy_(2, self.position, self.heads(layer.self_attn.k_proj(y)))
            value.index_copy_(2, self.position, self.heads(layer.self_attn.v_proj(y)))
            x = x + self.attend(layer.self_attn, y, key, value, mask)
            y = layer.encoder_attn_layer_norm(x)
            x = x + self.attend(layer.encoder_attn, y, heard_key, heard_value)
            x = x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x))))
        self.position.add_(1)
        return self.network.proj_out(decoder.layer_norm(x)).argmax(-1)


torch.manual_seed(0)
model = Whisper().eval()
features = torch.randn(1, MELS, 2 * FRAMES)
methods = {
    "encode": {"function": model.encode, "example_inputs": (features,)},
    "decode": {"function": model.decode, "example_inputs": (torch.tensor([[3]]),)},
}
