"""Committed artifacts of every format version load for ever, and mean what they meant.

A new version needs files of its own: raise `FORMAT_VERSION`, then ``pytest --update-goldens`` here writes
`tests/artifacts/vN`. Files that are there are never rewritten.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devplan.runtime.artifact import read, write
from devplan.runtime.artifact.layout import FORMAT_VERSION
from devplan.runtime.describe import describe

FOLDER = Path(__file__).parents[2] / "artifacts"
COMMITTED = sorted(FOLDER.glob("v*/*.pte"))


def covers(found: Any, told: Any) -> bool:
    """Whether a document still says all that an older one said; newer keys may stand beside."""
    if isinstance(told, dict):
        return isinstance(found, dict) and all(key in found and covers(found[key], told[key]) for key in told)
    if isinstance(told, list):
        return isinstance(found, list) and len(found) == len(told) and all(map(covers, found, told))
    return found == told


@pytest.mark.parametrize("weights", ["embed", "external"])
def test_the_current_version_has_a_committed_artifact(
    weights: Any, counted_sample: Any, request: pytest.FixtureRequest
) -> None:
    name = {"embed": "sample", "external": "external"}[weights]
    path = FOLDER / f"v{FORMAT_VERSION}" / f"{name}.pte"
    planned = counted_sample.planned
    if weights == "external":
        # Initial values of state are always embedded, and the sample's constant has the same bytes as one.
        (state,) = planned.program.state
        planned = replace(planned, program=replace(planned.program, state=(replace(state, initial=""),)))
    if request.config.getoption("--update-goldens") and not path.exists():
        path.parent.mkdir(exist_ok=True)
        write(path, planned, counted_sample.sources(), producer="0.1.0", weights=weights)
        path.with_suffix(".json").write_text(json.dumps(describe(read(path)), indent=1) + "\n")
    assert path.exists(), "run pytest --update-goldens and commit the file"
    assert repr(read(path).planned) == repr(planned)


@pytest.mark.parametrize("path", COMMITTED, ids=[f"{path.parent.name}/{path.stem}" for path in COMMITTED])
def test_committed_artifacts_load(path: Path) -> None:
    artifact = read(path)
    artifact.verify_constants()
    assert covers(describe(artifact), json.loads(path.with_suffix(".json").read_text()))
