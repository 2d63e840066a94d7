"""Architectures of transformers, shrunk by one rule for all and with random weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from devplan.passes.source.model import MethodSource, ModelSource

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embed_dim": 64,
    "embedding_size": 64,
    "dim": 64,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "d_ff": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 16,
    "d_kv": 16,
    "image_size": 64,
    "patch_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What configurations have in common under many names, at the size of a test."""

_NEED_A_MASK = ("longt5", "switch_transformers")
"""Models that make their mask of ones themselves, but not while they are traced."""

_STEPS = 8


def architectures() -> list[str]:
    """Model types that `AutoModel` knows."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


class Plain(torch.nn.Module):
    """A model that answers with a tuple of tensors, without caches."""

    def __init__(self, network: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options: dict[str, Any] = {"return_dict": True}
        if "use_cache" in inspect.signature(self.network.forward).parameters:
            options["use_cache"] = False
        found = self.network(**dict(zip(self.names, inputs, strict=True)), **options)
        return tuple(value for value in found.values() if isinstance(value, torch.Tensor))


def build(kind: str) -> ModelSource:
    """The first model type from this one on, by name, that the rule shrinks to something that runs."""
    ordered = architectures()
    start = ordered.index(kind)
    failures: list[str] = []
    for candidate in ordered[start : start + _STEPS]:
        try:
            source = _build(candidate)
            with torch.no_grad():
                source.methods[0].module(*source.methods[0].args)
            return source
        except Exception as error:  # whatever transformers raises where the rule does not fit
            failures.append(f"{candidate}: {type(error).__name__}")
    raise RuntimeError("; ".join(failures))


def _build(kind: str) -> ModelSource:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(kind)
    _shrink(config)
    torch.manual_seed(0)
    network = AutoModel.from_config(config).float().eval()
    for parameter in network.parameters():
        if parameter.dim() > 1 and not parameter.any():  # a router of zeros leaves the choice to chance
            torch.nn.init.normal_(parameter, std=0.02)
    inputs = _inputs(network, config)
    method = MethodSource("forward", Plain(network, tuple(inputs)).eval(), tuple(inputs.values()))
    return ModelSource(kind, (method,), notes=(type(network).__name__,))


def _shrink(config: Any) -> None:
    for name, value in _SMALL.items():
        held = getattr(config, name, None)
        if (type(held) is type(value) and held > value and name not in ("pad_token_id", "bos_token_id")) or (
            name.endswith("token_id") and isinstance(held, int)
        ):
            setattr(config, name, value)
    is_derived = isinstance(getattr(type(config), "layer_types", None), property)  # from the number of layers
    if isinstance(getattr(config, "layer_types", None), list) and not is_derived:
        config.layer_types = config.layer_types[: _SMALL["num_hidden_layers"]]
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value)


def _inputs(network: Any, config: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    names = inspect.signature(network.forward).parameters
    ids = torch.arange(3, 11)[None]
    size = getattr(config, "image_size", 64)
    size = size if isinstance(size, int) else 64
    makers = {
        "input_ids": lambda: ids,
        "pixel_values": lambda: torch.randn(1, getattr(config, "num_channels", 3), size, size),
        "input_values": lambda: torch.randn(1, 4000),
        "input_features": lambda: torch.randn(1, 80, 64),
        "past_values": lambda: torch.randn(1, config.context_length, config.num_input_channels),
    }
    main = network.main_input_name
    if main not in makers:
        raise NotImplementedError(f"no recipe for the input `{main}`")
    found = {main: makers[main]()}
    if config.model_type in _NEED_A_MASK:
        found["attention_mask"] = torch.ones_like(ids)
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = ids[:, :4]
    return found
