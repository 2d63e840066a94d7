"""What `tune` does; the measuring itself is `runtime.tune`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .artifacts import choose_method
from .console import Output
from .loading import load_program, to_places
from .run_inputs import gather_inputs
from .words import count, microseconds, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..runtime.tune import Finding


@dataclass(frozen=True)
class Wanted:
    """The options of one `tune`."""

    artifact: Path
    output: Path | None
    method: str | None
    inputs: Path | None
    shapes: tuple[str, ...]
    seed: int
    device: str | None
    allow_torch_ops: bool
    weights: tuple[Path, ...] = ()


def run_tuning(wanted: Wanted, output: Output) -> int:
    """Measure, write the file and print; 0."""
    from ..runtime.tune import tune

    path = wanted.output or Path(f"{wanted.artifact.stem}.tuning.json")
    with load_program(
        wanted.artifact,
        wanted.device,
        output,
        allow_torch_ops=wanted.allow_torch_ops,
        weights=wanted.weights,
    ) as program:
        method = program.method(choose_method(wanted.method, list(program.methods)))
        inputs, _ = gather_inputs(method.description, (), wanted.inputs, wanted.shapes, wanted.seed)
        method.run(to_places(program, method.description, inputs))
        tuning, findings = tune(program, method)
    tuning.save(path)
    output.document(
        {
            "file": str(path),
            "gpu": tuning.gpu,
            "versions": dict(tuning.versions),
            "calls": [
                {
                    "key": found.key,
                    "candidates": found.candidates,
                    "chosen": found.best,
                    "first_us": found.first_seconds * 1e6,
                    "best_us": found.best_seconds * 1e6,
                }
                for found in findings
            ],
        }
    )
    output.show(_view(findings))
    output.say(f"wrote {path}: {count(len(tuning.algorithms), 'choice')} other than the library's own")
    return 0


def _view(findings: Sequence[Finding]) -> RenderableType:
    made = table("Library calls", "what", "algorithms>", "chosen>", "library's choice>", "best>")
    for found in findings:
        times = (microseconds(found.first_seconds * 1e6), microseconds(found.best_seconds * 1e6))
        made.add_row(
            found.key.partition(" aligned")[0],
            str(found.candidates),
            "-" if found.best is None else str(found.best),
            *times,
        )
    return made
