"""A configuration as a TOML file that says where each value came from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..narrow import is_sequence
from .setting import SETTINGS

if TYPE_CHECKING:
    from .read import Config


def lines(config: Config) -> list[str]:
    """The configuration as lines of TOML that `load_config` reads back."""
    out: list[str] = []
    if config.options.pipeline is not None:
        out += [f"pipeline = {_toml(config.options.pipeline)}", ""]
    for table in ("export", "plan", "budget"):
        out.append(f"[{table}]")
        for setting in (s for s in SETTINGS if s.table == table):
            value, origin = config.values[setting.name], config.origins[setting.name]
            unset = value is None or value == ()
            text = f"# {setting.key} is not set" if unset else f"{setting.key} = {_toml(value)}"
            out.append(text if unset else f"{text:<40}# {origin}")
        out.append("")
    out += _print_io(config)
    out += _print_buckets(config)
    for rule in config.options.placement:
        fields = ("device", "module", "operator", "method")
        out += ["[[placement]]", *(f"{f} = {_toml(v)}" for f in fields if (v := getattr(rule, f))), ""]
    for name, options in config.options.pass_options.items():
        out += [f"[pass.{name}]", *(f"{key} = {_toml(value)}" for key, value in options.items()), ""]
    return out[:-1]


def _print_io(config: Config) -> list[str]:
    """The rules in order; a later one for the same tensor wins, so only the last of a key is printed."""
    entries: dict[str, str] = {}
    skips: dict[str, list[str]] = {}
    for index, rule in enumerate(config.options.io):
        target = rule.method if rule.tensor == "*" else f"{rule.method}.{rule.tensor}"
        if rule.direction == "both":
            key = "default" if target == "*" else json.dumps(target)
            entries.pop(key, None)
            entries[key] = f"{f'{key} = {_toml(rule.location)}':<40}# {config.origins[f'io.{index}']}"
        else:
            skips.setdefault(f"skip-{rule.direction}", []).append(target)
    if not entries and not skips:
        return ["[io]", 'default = "host"'.ljust(40) + "# default", ""]
    return ["[io]", *entries.values(), *(f"{key} = {_toml(names)}" for key, names in skips.items()), ""]


def _print_buckets(config: Config) -> list[str]:
    """The last rule of each dimension; none, no table."""
    entries = {
        rule.dimension: (rule.sizes, config.origins[f"buckets.{index}"])
        for index, rule in enumerate(config.options.buckets)
    }
    lines = [f"{f'{json.dumps(k)} = {_toml(v)}':<40}# {origin}" for k, (v, origin) in entries.items()]
    return ["[buckets]", *lines, ""] if lines else []


def _toml(value: Any) -> str:
    if is_sequence(value):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)
