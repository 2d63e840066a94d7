"""The parts of a configuration that are lists of rules: input and output locations, buckets, placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ..narrow import is_list, is_mapping, is_tuple
from ..options import BucketRule, IoRule, PlacementRule
from .setting import LOCATIONS, nearest

_PLACEMENT_KEYS = ("device", "module", "operator", "method")
_SKIPS: dict[str, Literal["h2d", "d2h"]] = {"skip-h2d": "h2d", "skip-d2h": "d2h"}


def parse_io(text: str) -> IoRule:
    """Read ``host``, ``device``, ``METHOD=device`` or ``METHOD.TENSOR=device``, or raise ValueError."""
    target, equals, location = text.rpartition("=")
    if equals and not target:
        raise ValueError("expected `host`, `device` or `METHOD.TENSOR=device`")
    return io_rule("both", location, target)


def parse_skip(direction: Literal["h2d", "d2h"], target: str) -> IoRule:
    """Read ``METHOD``, ``METHOD.TENSOR`` or ``*``: keep these on the device in one direction."""
    return io_rule(direction, "device", target)


def io_rule(direction: Literal["h2d", "d2h", "both"], location: Any, target: str) -> IoRule:
    """A rule for a ``METHOD.TENSOR`` target, where an empty part means all."""
    if location not in LOCATIONS:
        raise ValueError(f"`{location}` is no location; {nearest(str(location), LOCATIONS)}")
    method, _, tensor = target.partition(".")
    return IoRule(direction, location, method or "*", tensor or "*")


def io_rules(table: Mapping[str, Any]) -> Iterator[tuple[str, IoRule]]:
    """(key, rule) of an ``[io]`` table; ValueError says what is wrong with which key."""
    for key, value in table.items():
        if key == "default":
            yield key, io_rule("both", value, "")
        elif key in _SKIPS:
            for target in _skip_targets(key, value):
                yield key, parse_skip(_SKIPS[key], target)
        elif is_mapping(value):
            for tensor, location in value.items():
                yield f"{key}.{tensor}", io_rule("both", location, f"{key}.{tensor}")
        else:
            yield key, io_rule("both", value, key)


def _skip_targets(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("*",) if value else ()
    targets: Any = [value] if isinstance(value, str) else value
    if not (is_list(targets) and all(isinstance(target, str) for target in targets)):
        raise ValueError(f"`{key}` must be true, `METHOD`, `METHOD.TENSOR` or a list of these")
    return tuple(targets)


def parse_bucket(text: str) -> BucketRule:
    """Read ``batch=1,8,32``, ``x:0=1,8`` or ``prefill.length=128,512``, or raise ValueError."""
    target, equals, sizes = text.rpartition("=")
    parts = [part.strip() for part in sizes.split(",")]
    if not (equals and target.strip() and all(part.isascii() and part.isdigit() for part in parts)):
        raise ValueError("expected `DIMENSION=SIZE,SIZE`, such as `batch=1,8,32` or `x:0=1,8`")
    return bucket_rule(target.strip(), [int(part) for part in parts])


def bucket_rule(target: str, sizes: Any) -> BucketRule:
    """A rule for ``DIMENSION`` or ``METHOD.DIMENSION``; ValueError for anything but sizes of 1 or more."""
    listed: Any = [sizes] if isinstance(sizes, int) else sizes
    is_listed = (is_list(listed) or is_tuple(listed)) and len(listed) > 0
    if not (is_listed and all(type(size) is int and size >= 1 for size in listed)):
        raise ValueError(f"the sizes of `{target}` must be whole numbers, 1 or more, such as [1, 8, 32]")
    return BucketRule(target, tuple(sorted(set(listed))))


def bucket_rules(table: Mapping[str, Any]) -> Iterator[tuple[str, BucketRule]]:
    """(key, rule) of a ``[buckets]`` table; ValueError says what is wrong with which key."""
    for key, value in table.items():
        if is_mapping(value):
            for name, sizes in value.items():
                yield f"{key}.{name}", bucket_rule(f"{key}.{name}", sizes)
        else:
            yield key, bucket_rule(key, value)


def placement_rules(tables: Any) -> tuple[PlacementRule, ...]:
    """The rules of the ``[[placement]]`` tables; ValueError says what is wrong."""
    if not is_list(tables):
        raise ValueError("write it as `[[placement]]` tables")
    return tuple(_placement_rule(table) for table in tables)


def _placement_rule(table: Any) -> PlacementRule:
    if not is_mapping(table):
        raise ValueError("write it as `[[placement]]` tables")
    for key, value in table.items():
        if key not in _PLACEMENT_KEYS:
            raise ValueError(f"unknown key `{key}`; {nearest(key, _PLACEMENT_KEYS)}")
        if not isinstance(value, str):
            raise ValueError(f"`{key}` is {value!r}, expected a text")
    if "device" not in table:
        raise ValueError('a rule needs a `device`, such as `device = "cpu"`')
    return PlacementRule(**table)
