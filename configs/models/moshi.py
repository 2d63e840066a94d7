"""Moshi ("Moshi: a speech-text foundation model", Défossez et al., 2024), 12.5 times a second.

`think` takes the last text token and the codes of both speakers, and gives the next text token and what the large
transformer thinks; its keys and values stay on the device. `speak` makes the codes of that thought, one after
another. `mimi.py` has the codec.
"""

import os

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import MoshiConfig, MoshiForCausalLM
from transformers.models.moshi.modeling_moshi import MoshiDepthDecoder

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
WIDTH, HEADS, LAYERS, CODEBOOKS, CACHE = (4096, 32, 32, 8, 3000) if FULL else (64, 4, 2, 4, 16)
DEPTH_HEADS = 16 if FULL else 4
LARGE = {"vocab_size": 32000, "ffn_dim": 22528} if FULL else {"vocab_size": 64, "ffn_dim": 128}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": DEPTH_HEADS, "ffn_dim": 64}
AUDIO = 2048 if FULL else 32


def turned(x, position):
    """Rotary positions ("RoFormer", Su et al., 2021) on the halves of each head."""
    half = x.shape[-1] // 2
    angle = position * 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Moshi(torch.nn.Module):
    """Its modules have the names that they have in the published weights."""

    def __init__(self):
        super().__init__()
        config = MoshiConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=LAYERS, num_codebooks=CODEBOOKS,
            audio_encoder_config={"model_type": "mimi", "codebook_size": AUDIO},
            depth_decoder_config={} if FULL else SMALL, **LARGE,
        )  # fmt: skip
        self.decoder = MoshiForCausalLM(config)
        self.depth_decoder = MoshiDepthDecoder(config.depth_decoder_config)
        self.embed_tokens = torch.nn.ModuleList(
            torch.nn.Embedding(AUDIO + 1, WIDTH) for _ in range(2 * CODEBOOKS)
        )
        for index in range(LAYERS):
            for name in ("key", "value"):
                cache = torch.zeros(1, HEADS, CACHE, WIDTH // HEADS)
                self.register_buffer(f"{name}_{index}", cache, persistent=False)
        self.register_buffer("position", torch.zeros(1, dtype=torch.long), persistent=False)

    def think(self, text, codes):
        network = self.decoder.model
        x = network.embed_tokens(text)
        for index, embed in enumerate(self.embed_tokens):
            x = x + embed(codes[:, index : index + 1])
        mask = (torch.arange(CACHE) <= self.position)[None, None, None]
        for index, layer in enumerate(network.layers):
            attention, y = layer.self_attn, layer.input_layernorm(x)
            query, new_key, new_value = (
                project.linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            key, value = self.get_buffer(f"key_{index}"), self.get_buffer(f"value_{index}")
            key.index_copy_(2, self.position, turned(new_key, self.position))
            value.index_copy_(2, self.position, new_value)
            seen = scaled_dot_product_attention(turned(query, self.position), key, value, attn_mask=mask)
            x = x + attention.o_proj.linear(seen.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.position.add_(1)
        thought = network.norm(x)
        return self.decoder.lm_head(thought).argmax(-1), thought

    def speak(self, text, thought):
        depth, codes = self.depth_decoder, []
        past = [[] for _ in depth.layers]
        for step in range(CODEBOOKS):
            said = depth.embed_tokens[step - 1](codes[-1]) if step else depth.text_embed_tokens(text)
            x = said + linear(thought, depth.input_projections.weight[step])
            for layer, seen in zip(depth.layers, past, strict=True):
                attention, y = layer.self_attn, layer.input_layernorm(x)
                query, key, value = (
                    linear(y, project.linear.weight[step]).unflatten(-1, (DEPTH_HEADS, -1)).transpose(1, 2)
                    for project in (attention.q_proj, attention.k_proj, attention.v_proj)
                )
                seen.append((key, value))
                keys, values = (torch.cat(parts, 2) for parts in zip(*seen, strict=True))
                y = scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(2)
                x = x + linear(y, attention.o_proj.linear.weight[step])
                gate, up = linear(layer.post_attention_layernorm(x), layer.mlp.fc1.weight[step]).chunk(2, -1)
                x = x + linear(silu(gate) * up, layer.mlp.fc2.weight[step])
            codes.append(linear(x, depth.lm_heads.weight[step]).argmax(-1))
        return torch.cat(codes, -1)


torch.manual_seed(0)
model = Moshi().eval()
start = torch.full((1, 2 * CODEBOOKS), AUDIO)
methods = {
    "think": {"function": model.think, "example_inputs": (torch.tensor([[3]]), start)},
    "speak": {"function": model.speak, "example_inputs": (torch.tensor([[5]]), torch.randn(1, 1, WIDTH))},
}
