"""The document that `inspect --json` prints is the contract's, and tells the truth about the file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from devplan.runtime.artifact import read, write
from devplan.runtime.describe import describe

SCHEMA = Path(__file__).parents[3] / "runtime" / "artifact" / "inspect.schema.json"


@pytest.fixture
def document(sample: Any, tmp_path: Path) -> dict[str, Any]:
    write(tmp_path / "m.pte", sample.planned, sample.sources(), producer="1.2.3")
    found = describe(read(tmp_path / "m.pte"))
    assert found["file"]["sha256"] == hashlib.sha256((tmp_path / "m.pte").read_bytes()).hexdigest()
    return json.loads(json.dumps(found))


def test_it_follows_the_schema(document: dict[str, Any]) -> None:
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))


def test_the_schema_refuses_a_renamed_key(document: dict[str, Any]) -> None:
    document["methods"][0]["arenas"][0]["planned"] = document["methods"][0]["arenas"][0].pop("planned_bytes")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, json.loads(SCHEMA.read_text()))


def test_head(document: dict[str, Any]) -> None:
    assert (document["schema"], document["devplan"], document["file"]["format"]) == (1, "1.2.3", "ET12")
    assert document["architectures"] == ["sm_80", "sm_90"]
    assert document["constants"] == {"count": 1, "bytes": 64, "unique_bytes": 64, "location": "embed"}
    assert document["state"] == [
        {
            "name": "kv",
            "dtype": "float32",
            "shape": [4, 4],
            "bytes": 64,
            "device": "cuda:0",
            "methods": ["forward"],
        }
    ]


def test_ports(document: dict[str, Any]) -> None:
    (method,) = document["methods"]
    x, scale = method["inputs"]
    assert x == {
        "name": "x", "dtype": "float32", "shape": [4, 4], "max_shape": [4, 4], "device": "cpu", "bytes": 64,
    }  # fmt: skip
    assert (scale["name"], scale["dtype"], scale["bytes"]) == ("scale", "float", 0)
    assert [output["aliases"] for output in method["outputs"]] == [None, {"state": "kv"}]
    assert [output["device"] for output in method["outputs"]] == ["cpu", "cuda:0"]


def test_the_ledger_lists_transfers_and_leaves_out_local_copies(document: dict[str, Any]) -> None:
    copies = document["methods"][0]["copies"]
    assert [(copy["kind"], copy["tensor"], copy["bytes"], copy["from"], copy["to"]) for copy in copies] == [
        ("h2d", "x", 64, "cpu", "cuda:0"),
        ("d2h", "dx", 64, "cuda:0", "cpu"),
    ]
    assert copies[0]["reason"] == "`x` is kept on cpu, used on cuda:0"


def test_allocations_name_the_first_and_the_last_instruction(document: dict[str, Any]) -> None:
    arenas = {arena["memory_id"]: arena for arena in document["methods"][0]["arenas"]}
    assert arenas[2]["device"] == "cuda:0"
    assert (arenas[2]["planned_bytes"], arenas[2]["lower_bound_bytes"], arenas[2]["sum_bytes"]) == (
        768,
        192,
        192,
    )
    dx = next(item for item in arenas[2]["allocations"] if item["name"] == "s_dx")
    assert dx == {"name": "s_dx", "offset": 0, "bytes": 64, "first": 0, "last": 4, "role": "temporary"}
    assert arenas[3]["kind"] == "state"


def test_regions_and_kernels_are_counted(document: dict[str, Any]) -> None:
    (method,) = document["methods"]
    assert [(region["backend"], region["operators"], region["launches"]) for region in method["regions"]] == [
        ("triton", 2, 2),
        ("aten", 2, 3),
    ]
    assert method["kernels"] == {"generated": 1, "library": 1, "host": 0, "torch": 3}
