"""Weights of linear layers as small integers: how they are rounded, packed and read back.

A weight is ``(code - bias) * scale + zero``, where a code has 8 or 4 bits, ``bias`` is 128 or 8, and scale
and zero belong to a row or to a group of columns of a row. int8 has one scale a row and no zeros; int4 has a
scale and a zero (in the weight's own unit) for each group. These are torchao's conventions, so that the same
weights give the same codes.

Codes are packed for kernels that unpack them in registers. Columns are taken in chunks of 128; a chunk of a
row is ``H = 4 * bits`` words of 32 bits, and the code at position ``t`` of word ``i`` belongs to column
``chunk * 128 + t * H + i``. So neighbouring words (which neighbouring threads load) hold neighbouring columns
at every position: a thread that shifts and masks its own words has a tile of the matrix, and no value moves
to another thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 128
"""Columns that are packed together."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A packed matrix [N, K]; ``group`` columns share a scale, 0 stands for a whole row."""

    words: torch.Tensor
    """int32 [N, chunks * H]."""
    scales: torch.Tensor
    """[N, groups], groups enough for whole chunks."""
    zeros: torch.Tensor | None
    """[N, groups], or None where a code of ``bias`` is zero."""
    bits: int
    group: int

    def dequantized(self, columns: int) -> torch.Tensor:
        """The weights [N, columns] that the codes stand for, in float32."""
        codes = unpack(self.words, self.bits, columns).float() - bias_of(self.bits)
        width = self.group or columns
        scales, zeros = (
            None if t is None else t.float().repeat_interleave(width, 1)[:, :columns]
            for t in (self.scales, self.zeros)
        )
        assert scales is not None
        return codes * scales if zeros is None else codes * scales + zeros


def bias_of(bits: int) -> int:
    """What is taken from a code before it is scaled."""
    return 1 << (bits - 1)


def words_per_chunk(bits: int) -> int:
    """H: words of a row for 128 columns."""
    return CHUNK * bits // 32


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] from 0 to 2**bits - 1 as words; columns up to a whole chunk stand for zeros."""
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -columns % CHUNK), value=bias_of(bits))
    chunks = padded.reshape(rows, -1, 32 // bits, words_per_chunk(bits))
    if bits == 4:
        chunks = chunks[:, :, ::2] | chunks[:, :, 1::2] << 4
    in_words = chunks.transpose(2, 3).contiguous()  # a word's bytes are neighbours, the lowest first
    return in_words.view(torch.int32).reshape(rows, -1)


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The codes [N, columns] of packed words."""
    rows = words.shape[0]
    chunks = words.reshape(rows, -1, 1, words_per_chunk(bits))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)[:, None]
    return (chunks >> shifts & ((1 << bits) - 1)).reshape(rows, -1)[:, :columns]


def quantized(weight: torch.Tensor, bits: int, group: int) -> QuantizedWeight:
    """Round a matrix [N, K]: symmetrically by row for 8 bits, by ``group`` columns with zeros for 4.

    Several matrices [E, N, K] lie one below the other; they are rounded one by one, to need little memory.
    """
    if weight.dim() == 3:
        parts = [quantized(matrix, bits, group) for matrix in weight]
        words, scales = (torch.cat([getattr(p, name) for p in parts]) for name in ("words", "scales"))
        zeros = [p.zeros for p in parts if p.zeros is not None]
        return QuantizedWeight(words, scales, torch.cat(zeros) if zeros else None, bits, group)
    return _int8(weight) if bits == 8 else _int4(weight, group)


def _int8(weight: torch.Tensor) -> QuantizedWeight:
    """The largest magnitude of a row becomes 127.5, which rounds into the range."""
    largest = torch.maximum(-weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True))
    scale = (largest / 127.5).clamp(min=torch.finfo(torch.float32).eps).float()
    codes = (weight.float() * (1.0 / scale)).round().clamp(-128, 127)
    return QuantizedWeight(pack(codes + 128, 8), scale, None, 8, 0)


def _int4(weight: torch.Tensor, group: int) -> QuantizedWeight:
    """Each group's range in 15 steps; the zero is the value of code 8.

    A last group may be shorter, and groups fill whole chunks: kernels read their scales, too.
    """
    rows, columns = weight.shape
    padding = -columns % max(group, CHUNK)
    whole = torch.cat([weight, weight[:, -1:].expand(rows, padding)], 1) if padding else weight
    groups = whole.reshape(rows, -1, group)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15.0).clamp(min=torch.finfo(weight.dtype).smallest_normal)
    zeros = low + scales * 8.0
    codes = ((groups - (zeros - scales * 8.0)[:, :, None]) / scales[:, :, None]).round().clamp(0, 15)
    packed = pack(codes.reshape(rows, -1)[:, :columns], 4)
    return QuantizedWeight(packed, scales, zeros, 4, group)
