"""What `verify` does: the eager model and the artifact on the same inputs, call by call, state included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..runtime.calls.buckets import bucket_title
from ..runtime.errors import UsageError
from ..runtime.program import Method
from .compare import Comparison, Tolerance, compare, dtype_name, on_host, tolerance_for
from .console import Output
from .eager import at_sizes, example_leaves, run_eagerly
from .failures import Differs
from .loading import as_it_was, device_label, load_program, to_places
from .words import count, table

if TYPE_CHECKING:
    from ..passes.source.model import MethodSource, ModelSource
    from ..runtime.engine import LoadedProgram


@dataclass(frozen=True)
class Check:
    """The options of one `verify`."""

    artifact: Path
    device: str | None = None
    calls: int = 3
    rtol: float | None = None
    atol: float | None = None
    seed: int = 0
    allow_torch_ops: bool = False
    weights: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One tensor of one call: an output, or a state variable after it."""

    method: str
    call: int
    kind: str
    comparison: Comparison
    tolerance: Tolerance
    sizes: str = ""
    """Of a bucket, where the call was for one."""

    @property
    def where(self) -> str:
        """``call 4 at batch=8``."""
        return f"call {self.call} at {self.sizes}" if self.sizes else f"call {self.call}"


_BISECT = "random weights need a fixed seed; bisect with `export --no-device-planning`"
_DRAWN = "the model draws random numbers, which are not eager PyTorch's: compare what does not depend on them"


@dataclass
class Verdict:
    """All comparisons of a verification, in the order in which they were made."""

    device: str
    findings: list[Finding] = field(default_factory=list[Finding])
    is_random: bool = False
    """Whether the program draws random numbers, which are never eager's."""

    @property
    def first_difference(self) -> Finding | None:
        """The first tensor that differs."""
        return next((f for f in self.findings if not f.comparison.equal), None)

    def raise_on_difference(self) -> None:
        """`Differs` that names the first tensor, call and index that differ."""
        if (first := self.first_difference) is not None:
            bad = sum(not f.comparison.equal for f in self.findings)
            what = f"{bad} of {count(len(self.findings), 'tensor')} differ from eager PyTorch"
            why = f"{first.kind} of `{first.method}`, {first.where}: {first.comparison.words()}"
            hint = _DRAWN if self.is_random else _BISECT
            raise Differs(what, self.document(), why=f"{why} ({first.tolerance})", hint=hint)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        worst: dict[str, float] = {}
        for finding in self.findings:
            name = f"{finding.method}.{finding.comparison.name}"
            worst[name] = max(worst.get(name, 0.0), finding.comparison.max_abs_error)
        rows = [
            {
                "method": f.method,
                "call": f.call,
                "kind": f.kind,
                "rtol": f.tolerance.rtol,
                "atol": f.tolerance.atol,
            }
            | {"reason": f.tolerance.reason}
            | ({"sizes": f.sizes} if f.sizes else {})
            | f.comparison.document()
            for f in self.findings
        ]
        return {
            "device": self.device,
            "equal": self.first_difference is None,
            "max_abs_error": worst,
            "comparisons": rows,
        }


def run_check(check: Check, source_text: str, output: Output) -> int:
    """Verify and print; 0, or `Differs`."""
    from ..passes.source.load import resolve

    with as_it_was():
        source = resolve(source_text)
    with load_program(
        check.artifact,
        check.device,
        output,
        allow_torch_ops=check.allow_torch_ops,
        weights=check.weights,
        verify=True,
    ) as program:
        for note in _rounding(program):
            output.say(f"eager weights are rounded likewise: {note}")
        verdict = verify_program(program, source, check)
    _show(verdict, output)
    verdict.raise_on_difference()
    output.document(verdict.document())
    return 0


def verify_program(program: LoadedProgram, source: ModelSource, check: Check) -> Verdict:
    """Every method in the source's order, ``check.calls`` times each; both states go along."""
    from ..passes.exported.random_numbers import STATE

    states = {variable.name for variable in program.planned.program.state}
    verdict = Verdict(device_label(program), is_random=STATE in states)
    for method in source.methods:
        if method.name not in program.methods:
            listed = ", ".join(f"`{name}`" for name in program.methods)
            why = f"the artifact has {listed}"
            raise UsageError(
                f"there is no method `{method.name}`", why=why, hint="verify against its own SOURCE"
            )
        verdict.findings += _verify_method(program, method, check)
    return verdict


def _verify_method(program: LoadedProgram, source: MethodSource, check: Check) -> list[Finding]:
    """The example's calls, then one for each bucket, the example cut or repeated to its sizes."""
    method = program.method(source.name).description
    leaves = example_leaves(source, method, check.seed)
    findings: list[Finding] = []
    for call in range(1, check.calls + 1):
        findings += _verify_call(program, source, leaves, check, call)
    plans = [plan for plan in program.planned.plan.methods if plan.method == source.name]
    for call, bucket in enumerate((b for plan in plans for b in plan.buckets), check.calls + 1):
        sized, resized = at_sizes(source, method, leaves, bucket.sizes)
        found = _verify_call(program, sized, resized, check, call)
        findings += [replace(each, sizes=bucket_title(method, bucket.sizes)) for each in found]
    return findings


def _verify_call(
    program: LoadedProgram, source: MethodSource, leaves: Sequence[Any], check: Check, call: int
) -> list[Finding]:
    import torch

    from ..passes.quantized.eager import RoundedWeights

    method = program.method(source.name)
    ports = method.description
    inputs = {
        port.name: _as_program_input(leaf, ports, port.value)
        for port, leaf in zip(ports.inputs, leaves, strict=True)
    }
    rounded = RoundedWeights(source.module, ports.notes, _scale_dtype(program))
    with torch.no_grad(), rounded:
        eager = run_eagerly(source, leaves)
    results = method.run(to_places(program, ports, inputs))
    ours = {name: on_host(value) for name, value in results.items()}
    findings: list[Finding] = []
    for name, expected in zip((port.name for port in ports.outputs), eager, strict=True):
        tolerance = _tolerance(program, ours[name], check)
        comparison = compare(name, ours[name], _host_array(expected), tolerance)
        findings.append(Finding(source.name, call, "output", comparison, tolerance))
    return findings + _verify_state(program, source, check, call)


def _verify_state(program: LoadedProgram, source: MethodSource, check: Check, call: int) -> list[Finding]:
    buffers = dict(source.module.named_buffers())
    findings: list[Finding] = []
    for variable in program.planned.program.state:
        if variable.name in buffers:
            ours = program.state.get(variable.name)
            tolerance = _tolerance(program, ours, check)
            comparison = compare(variable.name, ours, _host_array(buffers[variable.name]), tolerance)
            findings.append(Finding(source.name, call, "state", comparison, tolerance))
    return findings


def _as_program_input(leaf: Any, method: Method, value: str) -> Any:
    """An example input in the artifact's own element type (an export with ``--dtype`` has another)."""
    import torch

    from ..runtime.dtypes import DType
    from ..runtime.tensors.host import HostTensor, is_native

    if not (value and isinstance(leaf, torch.Tensor)):
        return leaf
    wanted = method.value(value).dtype
    if wanted.is_floating and not is_native(wanted):
        dtype = getattr(torch, str(wanted))
        same = leaf.detach().to("cpu", dtype).contiguous()
        raw = same.view(torch.uint16 if wanted is DType.BFLOAT16 else torch.uint8).numpy()
        return HostTensor(raw, wanted)
    array = _host_array(leaf)
    return array.astype(str(wanted)) if wanted.is_floating else array


def _host_array(value: Any) -> Any:
    """A torch tensor as an array; bfloat16 and 8-bit floats as float32."""
    import torch

    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    host = value.detach().to("cpu")
    narrow = host.dtype.is_floating_point and host.dtype not in (torch.float16, torch.float32, torch.float64)
    return (host.float() if narrow else host).contiguous().numpy()


def _rounding(program: LoadedProgram) -> list[str]:
    """The notes that tell of rounded weights."""
    from ..passes.quantized.scheme import Selection

    notes = (note for method in program.planned.program.methods for note in method.notes)
    return [note for note in dict.fromkeys(notes) if Selection.parse(note) is not None]


def _scale_dtype(program: LoadedProgram) -> Any:
    """What quantised weights were cast to before: scales of 4-bit ones have that type."""
    import torch

    constants = program.planned.program.constants
    found = {str(c.dtype) for c in constants if c.name.endswith("scales")} - {"float32"}
    return getattr(torch, found.pop()) if len(found) == 1 else None


def _tolerance(program: LoadedProgram, value: Any, check: Check) -> Tolerance:
    dtypes = [str(constant.dtype) for constant in program.planned.program.constants]
    found = tolerance_for(dtypes, dtype_name(value))
    if check.rtol is not None or check.atol is not None:
        return Tolerance(check.rtol or 0.0, check.atol or 0.0, "as given")
    return found


def _show(verdict: Verdict, output: Output) -> None:
    made = table(
        f"Against eager PyTorch on {verdict.device}",
        "method",
        "tensor",
        "call>",
        "largest error>",
        "relative>",
        "",
        "note+",
    )
    for finding in verdict.findings:
        comparison = finding.comparison
        mark = "ok" if comparison.equal else "DIFFERS"
        note = (
            finding.sizes
            if comparison.equal
            else comparison.problem or f"first at {list(comparison.first or ())}"
        )
        errors = (f"{comparison.max_abs_error:.3g}", f"{comparison.max_rel_error:.3g}")
        made.add_row(finding.method, comparison.name, str(finding.call), *errors, mark, note)
    output.show(made)
    for line in dict.fromkeys(str(finding.tolerance) for finding in verdict.findings):
        output.show(line)
