"""A stand-in for `libcublasLt` that records what is asked of it."""

from __future__ import annotations

import ctypes
from typing import Any


class _Function:
    """A foreign function: records plain values of its arguments, answers with a status."""

    def __init__(self, library: FakeLt, name: str) -> None:
        self.library, self.name, self.restype = library, name, None

    def __call__(self, *arguments: Any) -> int:
        return self.library.answer(self.name.removeprefix("cublasLt"), arguments)


class FakeLt:
    """`libcublasLt`: offers ``offered`` algorithms, whose first bytes are their numbers."""

    def __init__(self) -> None:
        self.offered, self.status = 3, {}
        self.attributes: list[tuple[str, int, bytes]] = []
        self.limits: list[bytes] = []
        self.products: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cublasLt"):
            raise AttributeError(name)
        return _Function(self, name)

    def answer(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name == "GetVersion":
            return 130100
        if name.endswith("SetAttribute"):
            _, attribute, value, size = arguments
            raw = ctypes.string_at(ctypes.addressof(value._obj), size)
            self.attributes.append((name.removesuffix("SetAttribute"), attribute, raw))
        if name == "MatmulAlgoGetHeuristic":
            *_, wanted, results, number = arguments
            number._obj.value = min(self.offered, wanted)
            for index in range(number._obj.value):
                results[index].algorithm[0] = index
        if name == "Matmul":
            self.products.append(arguments[12]._obj[0])
        return self.status.get(name, 0)
