"""Tensors that a model reaches around its registered buffers, a cache object's own reference to one say."""

from __future__ import annotations

import torch
from torch.export.graph_signature import InputKind, InputSpec

from ..inductor.overloads import arguments, is_overload
from ..source.hollow import is_hollow


def merge_lifted_tensors(exported: torch.export.ExportedProgram) -> None:
    """Make one placeholder of a buffer and of the constants that are the same memory.

    `torch.export` gives a buffer that is also read through a plain Python attribute a second placeholder
    and then refuses to write to either. A constant that is no buffer but is written to becomes one.
    Works in place, on a program straight from `torch.export.export`.
    """
    specs = exported.graph_signature.input_specs
    nodes = [n for n in exported.graph.nodes if n.op == "placeholder"]
    buffers: dict[tuple[object, ...], torch.fx.Node] = {}
    for node, spec in zip(nodes, specs, strict=True):
        tensor = _tensor(exported, spec)
        if spec.kind == InputKind.BUFFER and tensor is not None:
            buffers.setdefault(_identity(tensor), node)
    kept: list[InputSpec] = []
    for node, spec in zip(nodes, specs, strict=True):
        tensor = _tensor(exported, spec)
        twin = None if tensor is None else buffers.get(_identity(tensor))
        if spec.kind != InputKind.CONSTANT_TENSOR or tensor is None:
            kept.append(spec)
        elif twin is not None:
            node.replace_all_uses_with(twin)
            exported.graph.erase_node(node)
            exported.constants.pop(str(spec.target))
        elif _is_written(node):
            kept.append(InputSpec(InputKind.BUFFER, spec.arg, spec.target, persistent=False))
            buffers[_identity(tensor)] = node
        else:
            kept.append(spec)
    specs[:] = kept
    exported.graph_module.recompile()


def _tensor(exported: torch.export.ExportedProgram, spec: InputSpec) -> torch.Tensor | None:
    found = exported.state_dict.get(str(spec.target), exported.constants.get(str(spec.target)))
    return found if isinstance(found, torch.Tensor) else None


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    if is_hollow(tensor) or tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _is_written(node: torch.fx.Node) -> bool:
    """Whether an operator writes to the node's tensor or to a view of it."""
    for user in node.users:
        if not is_overload(user.target):
            continue
        for argument, given in zip(arguments(user.target), user.args, strict=False):
            aliased = argument.alias_info if given is node else None
            if aliased is not None and (aliased.is_write or _is_written(user)):
                return True
    return False
