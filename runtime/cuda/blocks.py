"""Strided copies as a few rectangles that a two-dimensional memory copy can move."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..backend import Operand
from ..errors import ExecutionError, ScatteredCopyError

MAX_BLOCKS = 4096
"""Copies that one instruction may become; more would take longer to enqueue than a kernel takes to run."""


@dataclass(frozen=True, slots=True)
class Block:
    """``rows`` runs of ``width`` bytes. Offsets and pitches in bytes, from the operands' first elements."""

    source: int
    destination: int
    width: int
    rows: int = 1
    source_pitch: int = 0
    destination_pitch: int = 0


def blocks_of(source: Operand, destination: Operand) -> tuple[Block, ...]:
    """Split a copy between two operands of equal shape and dtype into blocks; no bytes in gaps are written.

    Raises:
        ExecutionError: shapes or types differ, or the strides would take more than `MAX_BLOCKS` copies.
    """
    if source.shape != destination.shape or source.dtype != destination.dtype:
        raise ExecutionError(
            "a copy needs operands of one shape and dtype",
            why=f"got {source.dtype}{list(source.shape)} and {destination.dtype}{list(destination.shape)}",
        )
    if 0 in source.shape:
        return ()
    dims = _merged(source, destination)
    itemsize = source.dtype.itemsize
    width = itemsize
    if dims and dims[-1][1] == dims[-1][2] == itemsize:
        width = dims.pop()[0] * itemsize
    rows, source_pitch, destination_pitch = 1, 0, 0
    # A pitch must hold a row: broadcast (stride 0) and overlapping dimensions are walked one by one.
    pitched = [index for index, (_, s, d) in enumerate(dims) if s >= width and d >= width]
    if pitched:
        rows, source_pitch, destination_pitch = dims.pop(max(pitched, key=lambda index: dims[index][0]))
    count = prod(extent for extent, _, _ in dims)
    if count > MAX_BLOCKS:
        raise ScatteredCopyError(
            "a copy is too scattered",
            why=f"strides {list(source.strides)} to {list(destination.strides)} take {count} separate copies",
            hint="export it as a kernel: make the tensor contiguous in the model",
        )
    offsets = [(0, 0)]
    for extent, s, d in dims:
        offsets = [(a + i * s, b + i * d) for a, b in offsets for i in range(extent)]
    return tuple(Block(a, b, width, rows, source_pitch, destination_pitch) for a, b in offsets)


def _merged(source: Operand, destination: Operand) -> list[tuple[int, int, int]]:
    """Dimensions as (extent, source and destination stride in bytes), outermost first, fused where dense."""
    itemsize = source.dtype.itemsize
    triples = [
        (extent, s * itemsize, d * itemsize)
        for extent, s, d in zip(source.shape, source.strides, destination.strides, strict=True)
        if extent != 1
    ]
    triples.sort(key=lambda dim: (dim[2], dim[1]), reverse=True)
    merged: list[tuple[int, int, int]] = []
    for extent, s, d in triples:
        if merged and merged[-1][1] == extent * s and merged[-1][2] == extent * d:
            merged[-1] = (merged[-1][0] * extent, s, d)
        else:
            merged.append((extent, s, d))
    return merged
