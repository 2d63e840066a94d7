"""Backends of one program that must know each other, so that copies and graphs can span their devices."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

from ..backend import Backend


def introduce(backends: Iterable[Backend]) -> None:
    """Connect every two backends that can be connected (GPUs); others have nothing to be told."""
    able: list[Any] = [backend for backend in backends if hasattr(backend, "connect")]
    for one, other in combinations(able, 2):
        one.connect(other)
