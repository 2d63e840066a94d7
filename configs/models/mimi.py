"""Mimi, Moshi's codec: `encode` turns sound into discrete codes, `decode` codes into sound."""

import os

import torch
from transformers import MimiConfig, MimiModel
from transformers.models.mimi.modeling_mimi import MimiConv1d

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
SMALL = {"hidden_size": 32, "num_filters": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SMALL |= {"num_key_value_heads": 4, "intermediate_size": 64, "codebook_size": 32, "codebook_dim": 16}
SMALL |= {"vector_quantization_hidden_dimension": 16, "num_quantizers": 4, "upsample_groups": 32}
SAMPLES = 24000 if FULL else 3840


def extra_padding(conv, x):
    """What completes the last frame, as a number: made with tensors, as Mimi does, the size would be open."""
    covered = conv.kernel_size - conv.padding_total
    frames = -(-(x.shape[-1] - covered) // conv.stride)
    return frames * conv.stride + covered - x.shape[-1]


class Mimi(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = MimiModel(MimiConfig(**({} if FULL else SMALL), use_cache=False))
        for name, codebook in self.network.named_buffers():
            if name.endswith("embed_sum"):  # zeros until trained: every sound would have the same codes
                codebook.normal_()
        for module in self.network.modules():
            if isinstance(module, MimiConv1d):
                for name in ("stride", "kernel_size", "padding_total"):
                    setattr(module, name, int(module._buffers.pop(name, getattr(module, name, 0))))
                module._get_extra_padding_for_conv1d = extra_padding.__get__(module)

    def encode(self, sound):
        return self.network.encode(sound, return_dict=True).audio_codes

    def decode(self, codes):
        return self.network.decode(codes, return_dict=True).audio_values


torch.manual_seed(0)
model = Mimi().eval()
codes = torch.arange(8)[None, None] * torch.ones(1, 4, 1, dtype=torch.long)
methods = {
    "encode": {"function": model.encode, "example_inputs": (torch.randn(1, 1, SAMPLES),)},
    "decode": {"function": model.decode, "example_inputs": (codes,)},
}
