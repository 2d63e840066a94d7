"""Two GPUs of one program: copies between them in order, graphs over both, and parting again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from devplan.runtime.backend import Operand
from devplan.runtime.cpu.backend import CpuBackend
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.errors import ExecutionError
from devplan.runtime.memory.peers import introduce
from devplan.runtime.program import Copy, CopyKind, Device

ZERO, ONE = Device("cuda", 0), Device("cuda", 1)
ACROSS = Copy(CopyKind.D2D, "a", "b")


@pytest.fixture
def pair(cu: Any) -> Iterator[list[CudaBackend]]:
    cu.count = 2
    made = [CudaBackend(ZERO, 0), CudaBackend(ONE, 1)]
    introduce([CpuBackend(), *made])
    yield made
    for backend in made:
        backend.close()


def operands(pair: list[CudaBackend]) -> dict[str, Operand]:
    return {
        name: Operand(backend.allocate(16), DType.INT32, (4,), (1,), backend.device)
        for name, backend in zip("ab", pair, strict=True)
    }


def test_peer_access_is_given_both_ways_once(pair: list[CudaBackend], cu: Any) -> None:
    introduce(pair)
    assert [call[1] for call in cu.calls if call[0] == "cuCtxEnablePeerAccess"] == ["context 1", "context 0"]


def test_a_copy_waits_for_the_receiver_and_the_receiver_for_it(pair: list[CudaBackend], cu: Any) -> None:
    given = operands(pair)
    pair[0].upload(given["a"].address, memoryview(np.arange(4, dtype=np.int32)).cast("B"))
    step = pair[1].bind(ACROSS, given, {})
    cu.calls.clear()
    step()
    sender, receiver = pair[0].stream, pair[1].stream
    order = [(call[0], call[-1]) for call in cu.calls if call[0] in ("cuEventRecord", "cuMemcpyPeerAsync")]
    assert order == [("cuEventRecord", receiver), ("cuMemcpyPeerAsync", sender), ("cuEventRecord", sender)]
    waits = [call[1] for call in cu.calls if call[0] == "cuStreamWaitEvent"]
    assert waits == [sender, receiver]
    assert [call for call in cu.calls if call[0] == "cuCtxSetCurrent"][-1][1] == "context 1"
    out = bytearray(16)
    pair[1].download(given["b"].address, memoryview(out))
    assert np.array_equal(np.frombuffer(out, np.int32), [0, 1, 2, 3])


def test_a_graph_draws_the_other_stream_in_and_back(pair: list[CudaBackend], cu: Any) -> None:
    cu.calls.clear()
    pair[0].capture([])
    names = cu.names()
    begin, end = names.index("cuStreamBeginCapture"), names.index("cuStreamEndCapture")
    waits = [call[1] for call in cu.calls[begin:end] if call[0] == "cuStreamWaitEvent"]
    assert waits == [pair[1].stream, pair[0].stream]


def test_without_an_introduction_there_is_no_copy(cu: Any) -> None:
    cu.count = 2
    strangers = [CudaBackend(ZERO, 0), CudaBackend(ONE, 1)]
    with pytest.raises(ExecutionError, match="no backend is connected for `cuda:0`"):
        strangers[1].bind(ACROSS, operands(strangers), {})


def test_a_closed_backend_is_no_peer_any_more(pair: list[CudaBackend], cu: Any) -> None:
    pair[1].close()
    cu.calls.clear()
    pair[0].capture([])
    assert "cuStreamWaitEvent" not in cu.names()
