"""The module that touches private interfaces: lowering for a GPU that is only described."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devplan.passes.inductor import lowering as inductor
from devplan.passes.inductor.described_gpu import described_target
from devplan.passes.tape import Alias, Allocate, ExternCall, KernelCall, Tape
from devplan.passes.targets import TARGETS
from devplan.runtime.expr import Expr

pytestmark = pytest.mark.torch


def lowered(
    module: torch.nn.Module, *args: torch.Tensor, dynamic_shapes: Any = None, on: str = "sm_80"
) -> Tape:
    """The tape of a module's exported graph, parameters as inputs."""
    with torch.no_grad():
        exported = torch.export.export(module.eval(), args, dynamic_shapes=dynamic_shapes).run_decompositions(
            {}
        )
    graph = exported.graph_module
    examples = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    shape_env = next(e.fake_mode.shape_env for e in examples if isinstance(e, torch.Tensor))
    with described_target(TARGETS[on]):
        traced, mode = inductor.trace_on_target(graph, examples, shape_env)
        fakes = [inductor.on_target(mode, e) for e in examples]
        return inductor.lower_graph(traced, fakes, mode)


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x)))


def test_a_small_network_becomes_products_and_one_kernel_in_place() -> None:
    tape = lowered(TwoLayers(), torch.randn(3, 8))
    assert [type(step) for step in tape.steps] == [
        Allocate,
        ExternCall,
        Alias,
        KernelCall,
        Allocate,
        ExternCall,
    ]
    products = [step for step in tape.steps if isinstance(step, ExternCall)]
    assert [p.operator for p in products] == ["mm", "addmm"]  # the first bias is added with the activation
    (kernel,) = tape.kernels.values()
    assert [kind for _, kind in kernel.parameters] == ["*fp32", "*fp32", "i32"]
    assert "import" not in kernel.source and kernel.source.startswith("@triton.jit")
    assert len(tape.inputs) == 5 and tape.outputs[0].sizes == (3, 4)


def test_parameters_are_inputs_and_never_baked_in() -> None:
    first, second = TwoLayers(), TwoLayers()
    kernels = [next(iter(lowered(m, torch.randn(3, 8)).kernels.values())).source for m in (first, second)]
    assert kernels[0] == kernels[1]


def test_sizes_of_dynamic_dimensions_stay_expressions() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    tape = lowered(TwoLayers(), torch.randn(3, 8), dynamic_shapes={"x": {0: batch}})
    (call,) = [step for step in tape.steps if isinstance(step, KernelCall)]
    (numel,) = [a for a in call.arguments if isinstance(a, Expr)]
    (symbol,) = numel.symbols
    assert numel.evaluate({symbol: 7}) == 7 * 16


def test_the_origin_of_a_step_names_module_operator_and_line() -> None:
    tape = lowered(TwoLayers(), torch.randn(3, 8))
    product = next(step for step in tape.steps if isinstance(step, ExternCall))
    assert product.origin.module == "first"
    assert "aten.mm.default" in product.origin.operator
    assert product.origin.file == "test_inductor.py" and product.origin.line > 0


def test_the_described_gpu_is_gone_afterwards() -> None:
    before = torch.cuda.get_device_properties
    with described_target(TARGETS["sm_90"]):
        assert torch.cuda.get_device_properties(0).multi_processor_count == 132
        assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties is before
    assert not torch.cuda.is_available()


def test_the_described_gpu_is_gone_after_a_failure() -> None:
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError), described_target(TARGETS["sm_80"]):
        raise RuntimeError
    assert torch.cuda.current_device is before


def test_what_inductor_leaves_to_eager_is_an_extern_call_by_name() -> None:
    class Values(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svdvals(x)

    (call,) = [step for step in lowered(Values(), torch.randn(4, 4)).steps if isinstance(step, ExternCall)]
    assert call.operator == "aten._linalg_svd.default"
    assert call.origin.line > 0


@pytest.mark.parametrize(
    ("operator", "has"),
    [
        (torch.ops.aten.add.Tensor, True),
        (torch.ops.aten.native_layer_norm.default, True),
        (torch.ops.aten._linalg_svd.default, False),
    ],
)
def test_what_has_a_cuda_lowering(operator: Any, has: bool) -> None:
    assert inductor.has_cuda_lowering(operator) is has


class OneNumberForAll(torch.nn.Module):
    """A number that many steps read: a tensor without dimensions."""

    def forward(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        turn = angle.cos()
        for _ in range(12):
            x = torch.softmax(x * turn, -1) + x
        return x


def test_what_all_layers_read_may_be_a_single_number() -> None:
    tape = lowered(OneNumberForAll(), torch.randn(2, 4), torch.tensor(0.5))
    cosines = [kernel for kernel in tape.kernels.values() if "cos(" in kernel.source]
    assert len(cosines) == 1
