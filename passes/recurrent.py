"""Recurrent layers as matrix products and element-wise steps, one per frame.

The products with the inputs are made for all frames at once; what is left of a step is one product with the
last state and one fused kernel. Signatures are those of ``aten.lstm.input`` and its kin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

Run = Callable[[Tensor, int, Sequence[Tensor]], Tensor]
"""One layer in one direction: (frames first, index of layer and direction, weights) -> outputs."""


def lstm(
    x: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Long short-term memory; with a projection where the weights have one. Dropout is ignored."""
    hidden, cells = list(hx[0].unbind(0)), list(hx[1].unbind(0))

    def run(frames: Tensor, index: int, weights: Sequence[Tensor]) -> Tensor:
        w_ih, w_hh, *rest = weights
        bias = rest[0] + rest[1] if has_biases else None
        project = rest[-1] if len(rest) % 2 else None
        inputs, outputs = linear(frames, w_ih, bias), list[Tensor]()
        h, c = hidden[index], cells[index]
        for step in inputs.unbind(0):
            i, f, g, o = torch.addmm(step, h, w_hh.t()).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            h = h if project is None else linear(h, project)
            outputs.append(h)
        hidden[index], cells[index] = h, c
        return torch.stack(outputs)

    output = _stack(x, params, num_layers, bidirectional, batch_first, run)
    return output, torch.stack(hidden), torch.stack(cells)


def gru(
    x: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """Gated recurrent units. Dropout is ignored."""
    hidden = list(hx.unbind(0))

    def run(frames: Tensor, index: int, weights: Sequence[Tensor]) -> Tensor:
        w_ih, w_hh, *rest = weights
        b_ih, b_hh = rest if has_biases else (None, None)
        inputs, outputs, h = linear(frames, w_ih, b_ih), list[Tensor](), hidden[index]
        for step in inputs.unbind(0):
            xr, xz, xn = step.chunk(3, -1)
            hr, hz, hn = linear(h, w_hh, b_hh).chunk(3, -1)
            z = torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
            outputs.append(h)
        hidden[index] = h
        return torch.stack(outputs)

    return _stack(x, params, num_layers, bidirectional, batch_first, run), torch.stack(hidden)


def simple(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """An Elman network with the given activation."""

    def rnn(
        x: Tensor,
        hx: Tensor,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        hidden = list(hx.unbind(0))

        def run(frames: Tensor, index: int, weights: Sequence[Tensor]) -> Tensor:
            w_ih, w_hh, *rest = weights
            inputs = linear(frames, w_ih, rest[0] + rest[1] if has_biases else None)
            outputs, h = list[Tensor](), hidden[index]
            for step in inputs.unbind(0):
                h = activation(torch.addmm(step, h, w_hh.t()))
                outputs.append(h)
            hidden[index] = h
            return torch.stack(outputs)

        return _stack(x, params, num_layers, bidirectional, batch_first, run), torch.stack(hidden)

    return rnn


def _stack(
    x: Tensor, params: Sequence[Tensor], num_layers: int, bidirectional: bool, batch_first: bool, run: Run
) -> Tensor:
    """Layers one after the other, each in one or both directions."""
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(num_layers):
        made: list[Tensor] = []
        for direction in range(directions):
            index = layer * directions + direction
            frames = x.flip(0) if direction else x
            out = run(frames, index, params[index * each : (index + 1) * each])
            made.append(out.flip(0) if direction else out)
        x = torch.cat(made, -1) if bidirectional else made[0]
    return x.transpose(0, 1) if batch_first else x
