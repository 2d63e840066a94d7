"""The settings of an export: the table that flags, TOML files and the editors' schema share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from ..narrow import is_list
from ..quantized.scheme import PATTERN as SCHEME_PATTERN
from ..quantized.scheme import Scheme

DTYPES = ("float32", "bfloat16", "float16")
EFFORTS = ("fast", "default", "max")
WEIGHTS = ("embed", "external", "reference", "none")
LOCATIONS = ("host", "device")
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


@dataclass(frozen=True)
class Kind:
    """How a value is read: ``read`` raises ValueError with what was expected."""

    read: Callable[[Any], Any]
    schema: dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One setting: its TOML table and key, its flag, how it is read, and what it is for."""

    table: str
    key: str
    kind: Kind
    default: Any
    flag: str
    help: str

    @property
    def name(self) -> str:
        """``table.key``, by which flags are handed over."""
        return f"{self.table}.{self.key}"


def parse_size(value: Any) -> int:
    """Bytes of ``2GiB``, ``512k``, ``1.5 GB`` or a number; ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower()) if isinstance(value, str) else None
    )
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a size such as `2GiB`, `500MB` or a number of bytes")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def nearest(name: str, valid: tuple[str, ...] | list[str]) -> str:
    """A hint for a mistyped name: the closest valid one, else all of them."""
    close = get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`" if close else "valid are " + ", ".join(f"`{word}`" for word in valid)


def choice(*words: str) -> Kind:
    """One of some words."""

    def read(value: Any) -> str:
        if value not in words:
            raise ValueError("expected one of " + ", ".join(f"`{word}`" for word in words))
        return str(value)

    return Kind(read, {"enum": list(words)})


def _read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _read_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("expected a whole number, 0 or more")
    return value


def _read_text(value: Any) -> str:
    if not (isinstance(value, str) and value):
        raise ValueError("expected a text that is not empty")
    return value


def _read_words(value: Any) -> tuple[str, ...]:
    words: Any = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not (is_list(words) and words and all(isinstance(word, str) and word for word in words)):
        raise ValueError("expected names such as `sm_80,sm_90`")
    return tuple(dict.fromkeys(words))


def _read_scheme(value: Any) -> str:
    return str(Scheme.parse(_read_text(value)))


FLAG = Kind(_read_bool, {"type": "boolean"})
COUNT = Kind(_read_count, {"type": "integer", "minimum": 0})
TEXT = Kind(_read_text, {"type": "string", "minLength": 1})
SIZE = Kind(parse_size, {"type": ["string", "integer"], "minimum": 0})
SCHEME = Kind(_read_scheme, {"type": "string", "pattern": SCHEME_PATTERN})
WORDS = Kind(_read_words, {"type": ["string", "array"], "items": {"type": "string"}, "minItems": 1})

SETTINGS = (
    Setting("export", "device", choice("cuda", "cpu"), "cuda", "--device", "where the graph is placed"),
    Setting("export", "dtype", choice(*DTYPES), None, "--dtype", "cast parameters and floating inputs first"),
    Setting("export", "quantize", SCHEME, None, "--quantize", "round weights of linear layers"),
    Setting("export", "arch", WORDS, None, "--arch", "GPU architectures to compile for, or `native`"),
    Setting("export", "weights", choice(*WEIGHTS), "embed", "--weights", "where the constants are kept"),
    Setting(
        "export",
        "weights-file",
        WORDS,
        (),
        "--weights-file",
        "safetensors files that `reference` leaves alone",
    ),
    Setting("export", "allow-host-ops", FLAG, False, "--allow-host-ops", "let operators run on the host"),
    Setting("export", "allow-tf32", FLAG, False, "--allow-tf32", "float32 products may use TF32"),
    Setting("export", "library-calls", FLAG, True, "--library-calls", "use cuBLASLt and cuDNN"),
    Setting(
        "export",
        "library-workspace",
        SIZE,
        None,
        "--library-workspace",
        "most bytes reserved for one call of a library",
    ),
    Setting("export", "tuning", TEXT, None, "--tuning", "a file of `devplan tune`"),
    Setting("export", "jobs", COUNT, 0, "--jobs", "processes that compile kernels; 0: one per processor"),
    Setting("export", "check", FLAG, False, "--check", "run `verify` before the artifact is written"),
    Setting("export", "output", TEXT, None, "--output", "the artifact"),
    Setting("export", "report", TEXT, None, "--report", "the memory report as an HTML page"),
    Setting("plan", "device-planning", FLAG, True, "--device-planning", "static arenas on the device"),
    Setting("plan", "effort", choice(*EFFORTS), "default", "--planning-effort", "how long to search"),
    Setting("plan", "reorder", FLAG, True, "--reorder", "reorder instructions to lower the peak"),
    Setting("budget", "memory", SIZE, None, "--memory-budget", "most bytes of planned memory on a device"),
    Setting("budget", "artifact-size", SIZE, None, "--max-artifact-size", "most bytes of the artifact"),
    Setting("budget", "copies", COUNT, None, "--max-copies", "most copies of all methods together"),
    Setting("budget", "fail-on-copy", FLAG, False, "--fail-on-copy", "refuse any copy"),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
