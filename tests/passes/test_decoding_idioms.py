"""What models that make token after token do with their past, as users and `transformers` write it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from devplan.passes.api import export
from devplan.passes.exported.capture import export_method
from devplan.passes.source.load import resolve
from devplan.passes.source.model import MethodSource
from devplan.runtime.errors import UnsupportedOperatorError
from devplan.tests.zoo.measure import measure

pytestmark = pytest.mark.torch


class Past:
    """Kept rows and how many of them there are, in an object that is no module."""

    def __init__(self) -> None:
        self.rows, self.count = torch.zeros(8, 4), torch.tensor(0)

    def update(self, new: torch.Tensor) -> torch.Tensor:
        at = torch.arange(new.size(0)) + self.count
        self.count.add_(new.size(0))
        return self.rows.index_copy_(0, at, new)


class Decoder(nn.Module):
    """Rows so far, and where the next one goes; the past is registered, or a plain attribute alone."""

    def __init__(self, is_registered: bool) -> None:
        super().__init__()
        self.past = Past()
        if is_registered:
            self.register_buffer("rows", self.past.rows)
            self.register_buffer("count", self.past.count)

    def forward(self, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self.past.count + 0
        return self.past.update(new) * 2, begin


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_count_in_an_object_is_not_advanced_by_the_export(is_registered: bool) -> None:
    module = Decoder(is_registered)
    eager = copy.deepcopy(module)
    steps = [torch.full((2, 4), float(number)) for number in range(1, 4)]
    with export(module, (steps[0],)).load("emulator") as program:
        for step in steps:
            rows, begin = program.method("forward")(step.numpy()).values()
            expected_rows, expected_begin = eager(step)
            assert np.array_equal(rows, expected_rows.numpy())
            assert begin == expected_begin
    assert int(module.past.count) == 0


def test_a_saved_program_whose_past_is_an_object_is_exported(tmp_path: Path) -> None:
    saved = tmp_path / "saved.pt2"
    torch.export.save(torch.export.export(Decoder(is_registered=True), (torch.ones(2, 4),)), saved)
    row = measure("saved", "idioms", lambda: resolve(str(saved)), "cuda", code=False, calls=2)
    assert (row.status, row.error) == ("right", "")


def attend(query: torch.Tensor, new: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of grouped heads over a past of any length and one more."""
    keys = torch.cat([past, new], 2)
    batch, heads, length, head = keys.shape
    every = keys[:, :, None].expand(batch, heads, 2, length, head).reshape(batch, 2 * heads, length, head)
    return F.scaled_dot_product_attention(query, every, every), keys


class Attend(nn.Module):
    """`attend` as a module."""

    def forward(self, query: torch.Tensor, new: torch.Tensor, past: torch.Tensor) -> Any:
        return attend(query, new, past)


def test_a_past_of_any_declared_length_goes_in_and_comes_out_longer() -> None:
    shapes = ((1, 4, 1, 16), (1, 2, 1, 16), (1, 2, 9, 16))
    args = tuple(torch.randn(*shape, generator=torch.Generator().manual_seed(7)) for shape in shapes)
    past = torch.export.Dim("past", min=2, max=40)
    made = export(Attend(), args, dynamic_shapes=(None, None, {2: past}))
    with made.load("emulator") as program:
        for length in (9, 2, 33):
            given = (*args[:2], torch.randn(1, 2, length, 16))
            ours = program.method("forward")(*(tensor.numpy() for tensor in given))
            for output, expected in zip(ours.values(), attend(*given), strict=True):
                np.testing.assert_allclose(output, expected.numpy(), atol=1e-5)


def test_a_range_of_which_only_a_part_was_traced_is_refused() -> None:
    class Short(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.size(0) < 20 else x * 2

    size = torch.export.Dim("size", min=2, max=40)
    with pytest.raises(UnsupportedOperatorError, match=r"Constraints violated \(size\)") as caught:
        export_method(MethodSource("forward", Short(), (torch.ones(5),), dynamic_shapes=({0: size},)))
    assert "declare a smaller range, `size = Dim('size', max=19)`" in caught.value.hint


@pytest.mark.parametrize("kind", ["decoder", "encoder and decoder"])
def test_caches_of_transformers_are_among_the_outputs(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = torch.arange(3, 9)[None]
    if kind == "decoder":
        sizes |= {"hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1}
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
        given = {"input_ids": ids}
    else:
        sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        module = transformers.T5Model(transformers.T5Config(**sizes)).eval()
        given = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    with torch.no_grad():
        eager = module(**given).past_key_values
    own = getattr(eager, "self_attention_cache", eager).layers[0]
    with export(module, given).load("emulator") as program:
        ours = program.method("forward")(*(tensor.numpy() for tensor in given.values()))
    pair = "" if kind == "decoder" else "self_attention_cache."
    for part in ("keys", "values"):  # versions of the library call the cache itself differently
        (output,) = (ours[name] for name in ours if name.endswith(f".{pair}layers.0.{part}"))
        np.testing.assert_allclose(output, getattr(own, part).numpy(), atol=1e-5)
