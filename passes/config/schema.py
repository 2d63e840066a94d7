"""The JSON schema of configuration files, for editors.

``python -m devplan.passes.config.schema > configs/devplan.schema.json`` writes it again.
"""

from __future__ import annotations

import json
from typing import Any

from .setting import LOCATIONS, SETTINGS

_TARGETS = {
    "oneOf": [{"type": "boolean"}, {"type": "string"}, {"type": "array", "items": {"type": "string"}}]
}
_LOCATION = {"enum": list(LOCATIONS)}
_SIZE = {"type": "integer", "minimum": 1}
_SIZES = {"oneOf": [_SIZE, {"type": "array", "items": _SIZE, "minItems": 1}]}


def config_schema() -> dict[str, Any]:
    """The schema, made from the table of settings."""
    tables = {table: _table(table) for table in dict.fromkeys(setting.table for setting in SETTINGS)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "devplan export configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "pipeline": {"type": "array", "items": {"type": "string"}, "description": "passes in order"},
            **tables,
            "io": {
                "type": "object",
                "description": "where callers keep inputs and outputs: METHOD or METHOD.TENSOR to a location",
                "properties": {"default": _LOCATION, "skip-h2d": _TARGETS, "skip-d2h": _TARGETS},
                "additionalProperties": {
                    "oneOf": [_LOCATION, {"type": "object", "additionalProperties": _LOCATION}]
                },
            },
            "buckets": {
                "type": "object",
                "description": "sizes of dynamic dimensions with a plan and a CUDA graph of their own",
                "additionalProperties": {
                    "oneOf": [_SIZES, {"type": "object", "additionalProperties": _SIZES}]
                },
            },
            "placement": {"type": "array", "items": _placement()},
            "pass": {
                "type": "object",
                "description": "options of passes by their names",
                "additionalProperties": {"type": "object"},
            },
        },
    }


def _table(table: str) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for setting in (s for s in SETTINGS if s.table == table):
        is_unset = setting.default is None or setting.default == ()
        default = {} if is_unset else {"default": setting.default}
        entries[setting.key] = {
            **setting.kind.schema,
            "description": f"{setting.flag}: {setting.help}",
            **default,
        }
    return {"type": "object", "additionalProperties": False, "properties": entries}


def _placement() -> dict[str, Any]:
    texts = {key: {"type": "string"} for key in ("device", "module", "operator", "method")}
    return {"type": "object", "additionalProperties": False, "required": ["device"], "properties": texts}


if __name__ == "__main__":
    print(json.dumps(config_schema(), indent=2))
