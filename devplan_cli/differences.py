"""What differs between two artifacts, and whether it matters to one who deploys them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ..runtime.program import Program
from .artifacts import Opened
from .words import shape, size, sizes_words

Json = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """One difference. ``matters`` is false for what got better, and for what no user notices."""

    kind: str
    method: str
    what: str
    old: Any
    new: Any
    matters: bool = True


def differences(old: Opened, new: Opened) -> list[Change]:
    """All differences, in a fixed order; none between an artifact and itself."""
    before, after = old.describe(), new.describe()
    return [
        *_architectures(before, after),
        *_methods(before, after),
        *_state(before, after),
        *_constants(old.planned.program, new.planned.program),
        *_kernels(old.planned.program, new.planned.program),
        *_tunings(before, after),
        *_file(before, after),
    ]


def document(changes: list[Change]) -> Json:
    """For JSON."""
    return {"equal": not any(c.matters for c in changes), "changes": [vars(c) for c in changes]}


def _architectures(before: Json, after: Json) -> Iterator[Change]:
    old, new = before["architectures"], after["architectures"]
    if old != new:
        lost = [name for name in old if name not in new]
        what = "no code any more for " + ", ".join(lost) if lost else "code for more architectures"
        yield Change("architectures", "", what, old, new, matters=bool(lost))


def _methods(before: Json, after: Json) -> Iterator[Change]:
    old = {method["name"]: method for method in before["methods"]}
    new = {method["name"]: method for method in after["methods"]}
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            yield Change("signature", name, f"method `{name}` is gone", name, None)
        elif name not in old:
            yield Change("signature", name, f"method `{name}` is new", None, name)
        else:
            yield from _method(name, old[name], new[name])


def _method(name: str, old: Json, new: Json) -> Iterator[Change]:
    for kind in ("inputs", "outputs"):
        yield from _ports(name, kind, old[kind], new[kind])
    yield from _copies(name, old["copies"], new["copies"])
    yield from _arenas(name, old["arenas"], new["arenas"])
    yield from _buckets(name, old["buckets"], new["buckets"])
    yield from _counts(name, old["kernels"], new["kernels"])


def _ports(method: str, kind: str, old: list[Json], new: list[Json]) -> Iterator[Change]:
    noun = kind[:-1]
    before, after = {port["name"]: port for port in old}, {port["name"]: port for port in new}
    if list(before) != list(after) and set(before) == set(after):
        yield Change("signature", method, f"the order of {kind} of `{method}`", list(before), list(after))
    for name in [*before, *(name for name in after if name not in before)]:
        was, now = before.get(name), after.get(name)
        if was is None or now is None:
            word = "new" if was is None else "gone"
            yield Change(
                "signature", method, f"{noun} `{name}` of `{method}` is {word}", _port(was), _port(now)
            )
        elif _port(was) != _port(now):
            yield Change("signature", method, f"{noun} `{name}` of `{method}`", _port(was), _port(now))


def _port(port: Json | None) -> str | None:
    if port is None:
        return None
    aliases = port.get("aliases")
    tail = f" = {next(iter(aliases.items()))}" if aliases else ""
    limit = f" up to {shape(port['max_shape'])}" if port.get("max_shape") not in (None, port["shape"]) else ""
    return f"{port['dtype']}[{shape(port['shape'])}]{limit} on {port['device']}{tail}"


def _copies(method: str, old: list[Json], new: list[Json]) -> Iterator[Change]:
    before, after = Counter(map(_copy, old)), Counter(map(_copy, new))
    for words, number in (after - before).items():
        yield Change("copies", method, f"`{method}` copies {words}", before[words], before[words] + number)
    for words, number in (before - after).items():
        what = f"`{method}` no longer copies {words}"
        yield Change("copies", method, what, before[words], before[words] - number, matters=False)


def _copy(copy: Json) -> str:
    return f"`{copy['tensor']}` {copy['kind']}, {copy['bytes']} bytes, {copy['from']} to {copy['to']}"


def _arenas(method: str, old: list[Json], new: list[Json]) -> Iterator[Change]:
    before = Counter[str]()
    after = Counter[str]()
    for total, arenas in ((before, old), (after, new)):
        for arena in arenas:
            total[arena["device"]] += arena["planned_bytes"]
    for device in sorted(before | after):
        was, now = before[device], after[device]
        if was != now:
            word = "grew" if now > was else "shrank"
            what = f"the arena of `{method}` on {device} {word} from {size(was)} to {size(now)}"
            yield Change("arenas", method, what, was, now, matters=now > was)


def _buckets(method: str, old: list[Json], new: list[Json]) -> Iterator[Change]:
    """A bucket that is gone costs its callers a graph; what one takes shows in the arenas."""
    before = [sizes_words(bucket["sizes"]) for bucket in old]
    after = [sizes_words(bucket["sizes"]) for bucket in new]
    for sizes in (sizes for sizes in before if sizes not in after):
        yield Change("buckets", method, f"`{method}` has no bucket {sizes} any more", before, after)
    for sizes in (sizes for sizes in after if sizes not in before):
        yield Change("buckets", method, f"`{method}` has a bucket {sizes}", before, after, matters=False)


def _counts(method: str, old: Mapping[str, int], new: Mapping[str, int]) -> Iterator[Change]:
    for kind in sorted({*old, *new}):
        was, now = old.get(kind, 0), new.get(kind, 0)
        if was != now:
            yield Change("kernels", method, f"`{method}` has {now} {kind} kernels instead of {was}", was, now)


def _state(before: Json, after: Json) -> Iterator[Change]:
    old = {v["name"]: f"{v['dtype']}[{shape(v['shape'])}] on {v['device']}" for v in before["state"]}
    new = {v["name"]: f"{v['dtype']}[{shape(v['shape'])}] on {v['device']}" for v in after["state"]}
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) != new.get(name):
            yield Change("state", "", f"state `{name}`", old.get(name), new.get(name))


def _constants(old: Program, new: Program) -> Iterator[Change]:
    before = {constant.name: constant for constant in old.constants}
    after = {constant.name: constant for constant in new.constants}
    gone = [name for name in before if name not in after]
    fresh = [name for name in after if name not in before]
    changed = [name for name in before if name in after and before[name].digest != after[name].digest]
    for names, word in ((gone, "gone"), (fresh, "new"), (changed, "with other values")):
        if names:
            some = ", ".join(f"`{name}`" for name in names[:3]) + (
                f" and {len(names) - 3} more" if len(names) > 3 else ""
            )
            yield Change("constants", "", f"constants {word}: {some}", len(before), len(after))


def _kernels(old: Program, new: Program) -> Iterator[Change]:
    """Kernels compare by their code, whatever they are called."""
    before, after = Counter(map(_code_of, old.kernels)), Counter(map(_code_of, new.kernels))
    changed = sum((after - before).values())
    if changed or before - after:
        what = f"{changed} of {len(new.kernels)} generated kernels have other code"
        yield Change("kernels", "", what, len(old.kernels), len(new.kernels))


def _code_of(kernel: Any) -> str:
    digest = sha256(repr((kernel.parameters, kernel.constants, kernel.num_warps)).encode())
    for code in kernel.codes:
        digest.update(code.architecture.encode() + code.form.encode() + code.data)
    if not kernel.codes:
        digest.update(kernel.source.encode())
    return digest.hexdigest()


def _tunings(before: Json, after: Json) -> Iterator[Change]:
    """Hints change no results; a GPU that has none any more may be slower."""
    old = {tuning["gpu"]: tuning for tuning in before["library_tunings"]}
    new = {tuning["gpu"]: tuning for tuning in after["library_tunings"]}
    for gpu in [*old, *(gpu for gpu in new if gpu not in old)]:
        if old.get(gpu) != new.get(gpu):
            word = "new" if gpu not in old else "gone" if gpu not in new else "others"
            what = f"library algorithms for {gpu} are {word}"
            yield Change("tuning", "", what, old.get(gpu), new.get(gpu), matters=gpu not in new)


def _file(before: Json, after: Json) -> Iterator[Change]:
    was, now = before["file"]["bytes"], after["file"]["bytes"]
    if was != now:
        yield Change("file", "", f"the file has {size(now)} instead of {size(was)}", was, now, matters=False)
    if before["devplan"] != after["devplan"]:
        yield Change(
            "file", "", "the version that wrote it", before["devplan"], after["devplan"], matters=False
        )
