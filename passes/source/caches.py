"""Caches of keys and values that models of `transformers` take and return, as trees of their tensors.

The library registers the growing cache where it exports itself, but makes it anew by joining tensors, which
would be traced; here what was taken apart is put together again.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ..inductor.interfaces import pytree

_HOME = "transformers.cache_utils"
_PAIR = ("self_attention_cache", "cross_attention_cache")
_LAYER = ("keys", "values")


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of `transformers` that grows, or a decoder's pair of those."""
    kind = type(value)
    return kind.__module__ == _HOME and kind.__name__ in ("DynamicCache", "EncoderDecoderCache")


def know_caches() -> None:
    """Register both kinds, unless the library or the user has done so."""
    home: Any = importlib.import_module(_HOME)
    _know(home.DynamicCache, _layers, _from_layers)
    _know(home.EncoderDecoderCache, lambda both: ([(n, getattr(both, n)) for n in _PAIR], None), _pair)


def _know(kind: Any, named: Any, made: Any) -> None:
    if kind in pytree.SUPPORTED_NODES:
        return

    def parts(cache: Any) -> tuple[list[Any], Any]:
        children, context = named(cache)
        return [child for _, child in children], context

    def keyed(cache: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = named(cache)
        return [(pytree.GetAttrKey(name), child) for name, child in children], context

    pytree.register_pytree_node(
        kind, parts, made, serialized_type_name=f"{_HOME}.{kind.__name__}", flatten_with_keys_fn=keyed
    )


def _layers(cache: Any) -> tuple[list[tuple[str, Any]], list[int | None]]:
    """Keys and values of each layer, and the layers' windows."""
    home: Any = importlib.import_module(_HOME)
    for layer in cache.layers:
        if type(layer) not in (home.DynamicLayer, home.DynamicSlidingWindowLayer):
            raise TypeError(f"a cache with a `{type(layer).__name__}` has no place among inputs and outputs")
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    return [("layers", [{name: getattr(layer, name) for name in _LAYER} for layer in cache.layers])], windows


def _from_layers(children: Sequence[Any], windows: Sequence[int | None]) -> Any:
    home: Any = importlib.import_module(_HOME)
    cache: Any = home.DynamicCache()
    (held,) = children
    cache.layers = [_layer(home, each, window) for each, window in zip(held, windows, strict=True)]
    return cache


def _layer(home: Any, held: dict[str, Any], window: int | None) -> Any:
    """A layer that holds keys and values; nothing is computed."""
    layer: Any = home.DynamicLayer()
    keys: Any = held["keys"]
    if window is not None:  # its own constructor would make a tensor
        layer = home.DynamicSlidingWindowLayer.__new__(home.DynamicSlidingWindowLayer)
        home.DynamicLayer.__init__(layer)
        layer.sliding_window, layer.record_past = window, False
        layer.cumulative_length = keys.shape[-2] if hasattr(keys, "shape") else 0
    layer.keys, layer.values, layer.is_initialized = keys, held["values"], keys is not None
    layer.dtype, layer.device = getattr(keys, "dtype", None), getattr(keys, "device", None)
    return layer


def _pair(caches: Sequence[Any], _: Any) -> Any:
    """Both caches as one; whether the second is filled is what its layers say."""
    home: Any = importlib.import_module(_HOME)
    both: Any = home.EncoderDecoderCache.__new__(home.EncoderDecoderCache)
    for name, cache in zip(_PAIR, caches, strict=True):
        setattr(both, name, cache)
    layers: Any = getattr(caches[1], "layers", ())
    both.is_updated = {at: bool(layer.is_initialized) for at, layer in enumerate(layers)}
    return both
