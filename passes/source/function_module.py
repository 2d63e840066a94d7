"""A function of tensors as a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch


class FunctionModule(torch.nn.Module):
    """A function as a module, so that `torch.export` sees the parameters of the modules it uses.

    A bound method of a module borrows that module's own parameter, buffer and submodule tables: names stay
    as they are there, and methods of one module share its state. Otherwise the modules that the function
    closes over, or reads as globals, become submodules under those names.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        if isinstance(function, MethodType) and isinstance(owner, torch.nn.Module):
            tables = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
            self.__dict__.update({table: owner.__dict__[table] for table in tables})
        else:
            for name, module in _used_modules(function).items():
                self.add_module(name, module)
        self.__dict__["forward"] = function
        self.__dict__["training"] = False

    def eval(self) -> FunctionModule:
        """Put the modules behind the function in evaluation mode."""
        for module in self._modules.values():
            if module is not None:
                module.eval()
        return self


def _used_modules(function: Callable[..., Any]) -> dict[str, torch.nn.Module]:
    if not isinstance(function, FunctionType):
        return {}
    scope = inspect.getclosurevars(function)
    names: dict[str, Any] = {**scope.globals, **scope.nonlocals}
    return {name: value for name, value in names.items() if isinstance(value, torch.nn.Module)}
