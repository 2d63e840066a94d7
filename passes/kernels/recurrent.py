"""Recurrent layers: the products with the inputs for all frames at once, then step by step.

On a GPU a step is one launch of a kernel of ours (`recurrent_step.py`); elsewhere, and for layers with a
projection, it is a product and element-wise operators. Signatures are those of ``aten.lstm.input`` and its
kin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from .recurrent_step import is_possible, recurrent

Run = Callable[[Tensor, int, Sequence[Tensor], bool], Tensor]
"""One layer in one direction: (frames first, index of layer and direction, weights, whether backwards)."""


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

    def run(frames: Tensor, index: int, weights: Sequence[Tensor], backwards: bool) -> Tensor:
        w_ih, w_hh, *rest = weights
        bias = rest[0] + rest[1] if has_biases else None
        project = rest[-1] if len(rest) % 2 else None
        inputs, h, c = linear(frames, w_ih, bias), hidden[index], cells[index]
        if project is None and is_possible(inputs, w_hh):
            made, last = recurrent(inputs, h, c, w_hh, None, "lstm", backwards=backwards)
            assert last is not None
            hidden[index], cells[index] = made[0 if backwards else -1], last
            return made
        outputs: list[Tensor] = []
        for step in _in_order(inputs, backwards):
            i, f, g, o = torch.addmm(step, h, w_hh.t()).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            h = h if project is None else linear(h, project)
            outputs.append(h)
        hidden[index], cells[index] = h, c
        return _stacked(outputs, backwards)

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

    def run(frames: Tensor, index: int, weights: Sequence[Tensor], backwards: bool) -> Tensor:
        w_ih, w_hh, *rest = weights
        b_ih, b_hh = rest if has_biases else (None, None)
        inputs, h = linear(frames, w_ih, b_ih), hidden[index]
        if is_possible(inputs, w_hh):
            made, _ = recurrent(inputs, h, None, w_hh, b_hh, "gru", backwards=backwards)
            hidden[index] = made[0 if backwards else -1]
            return made
        outputs: list[Tensor] = []
        for step in _in_order(inputs, backwards):
            xr, xz, xn = step.chunk(3, -1)
            hr, hz, hn = linear(h, w_hh, b_hh).chunk(3, -1)
            z = torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
            outputs.append(h)
        hidden[index] = h
        return _stacked(outputs, backwards)

    return _stack(x, params, num_layers, bidirectional, batch_first, run), torch.stack(hidden)


def simple(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """An Elman network with the given activation, `torch.tanh` or `torch.relu`."""
    kind = "relu" if activation is torch.relu else "tanh"

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

        def run(frames: Tensor, index: int, weights: Sequence[Tensor], backwards: bool) -> Tensor:
            w_ih, w_hh, *rest = weights
            inputs, h = linear(frames, w_ih, rest[0] + rest[1] if has_biases else None), hidden[index]
            if is_possible(inputs, w_hh):
                made, _ = recurrent(inputs, h, None, w_hh, None, kind, backwards=backwards)
                hidden[index] = made[0 if backwards else -1]
                return made
            outputs: list[Tensor] = []
            for step in _in_order(inputs, backwards):
                h = activation(torch.addmm(step, h, w_hh.t()))
                outputs.append(h)
            hidden[index] = h
            return _stacked(outputs, backwards)

        return _stack(x, params, num_layers, bidirectional, batch_first, run), torch.stack(hidden)

    return rnn


def lstm_cell(
    x: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``aten.lstm_cell``: one frame of `lstm`; the new hidden and cell state [batch, units]."""
    params = _params(w_ih, w_hh, b_ih, b_hh)
    states = [state.unsqueeze(0) for state in hx]
    made, _, cells = lstm(x.unsqueeze(0), states, params, len(params) > 2, 1, 0.0, False, False, False)
    return made[0], cells[0]


def gru_cell(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """As ``aten.gru_cell``: one frame of `gru`."""
    return _one_frame(gru, x, hx, _params(w_ih, w_hh, b_ih, b_hh))


def simple_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """As ``aten.rnn_tanh_cell`` and ``aten.rnn_relu_cell``: one frame of `simple`."""
    layer = simple(activation)

    def cell(
        x: Tensor,
        hx: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor:
        return _one_frame(layer, x, hx, _params(w_ih, w_hh, b_ih, b_hh))

    return cell


def _one_frame(
    layer: Callable[..., tuple[Tensor, Tensor]], x: Tensor, hidden: Tensor, params: Sequence[Tensor]
) -> Tensor:
    has_biases = len(params) > 2
    made, _ = layer(x.unsqueeze(0), hidden.unsqueeze(0), params, has_biases, 1, 0.0, False, False, False)
    return made[0]


def _params(w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> Sequence[Tensor]:
    """A layer's weights: both biases or none of them."""
    if b_ih is None and b_hh is None:
        return (w_ih, w_hh)
    none = w_ih.new_zeros(w_ih.size(0))
    return (w_ih, w_hh, none if b_ih is None else b_ih, none if b_hh is None else b_hh)


def _in_order(frames: Tensor, backwards: bool) -> Sequence[Tensor]:
    return frames.unbind(0)[:: -1 if backwards else 1]


def _stacked(outputs: list[Tensor], backwards: bool) -> Tensor:
    return torch.stack(outputs[:: -1 if backwards else 1])


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
            made.append(run(x, index, params[index * each : (index + 1) * each], bool(direction)))
        x = torch.cat(made, -1) if bidirectional else made[0]
    return x.transpose(0, 1) if batch_first else x
