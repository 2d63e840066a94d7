"""Where in the user's model a graph node comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from ...runtime.program import NOWHERE, SourceLocation
from ..source.frames import is_torchs

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def origin_of(nodes: Sequence[Any]) -> SourceLocation:
    """One location for nodes that were fused: the operators of all, module and line of the last known."""
    if not nodes:
        return NOWHERE
    operators = list(dict.fromkeys(str(n.target) for n in nodes if n.op == "call_function"))
    shown = ", ".join(operators[:4]) + (", ..." if len(operators) > 4 else "")
    module, file, line = "", "", 0
    for node in nodes:
        module = module_path(node) or module
        found = source_line(node)
        if found is not None:
            file, line = found
    return SourceLocation(module, shown, file, line)


def module_path(node: Any) -> str:
    """Dotted path of the module whose forward made the node, empty for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    for prefix in ("L['self'].", "L['self']", "getattr(L['self'], "):
        path = path.removeprefix(prefix)
    return path


def source_line(node: Any) -> tuple[str, int] | None:
    """File name (without folders) and line of the innermost frame that is not torch's own."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [(file, line) for file, line in found if not file.startswith("<")]  # code made by torch
    for file, line in reversed(frames):
        if not is_torchs(file):
            return PurePath(file).name, int(line)
    return (PurePath(frames[-1][0]).name, int(frames[-1][1])) if frames else None
