"""Tensors of a program that other threads copy, while the program records its graphs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devplan.runtime.backend import Operand
from devplan.runtime.cuda.backend import CudaBackend
from devplan.runtime.dtypes import DType
from devplan.runtime.program import Device

COPIES = ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync", "cuMemsetD8Async", "cuEventRecord")


def operand(address: int) -> Operand:
    return Operand(address, DType.FLOAT32, (4,), (1,), Device("cuda", 0))


WORK: dict[str, Callable[[CudaBackend, int, int], Any]] = {
    "download": lambda gpu, at, to: gpu.download(at, memoryview(bytearray(16))),
    "upload": lambda gpu, at, to: gpu.upload(at, memoryview(bytes(16))),
    "fill": lambda gpu, at, to: gpu.fill(at, 16, 1),
    "copy": lambda gpu, at, to: gpu.copy(operand(at), operand(to)),
    "follow": lambda gpu, at, to: gpu.follow(5),
    "lead": lambda gpu, at, to: gpu.lead(5),
}


@pytest.mark.parametrize("what", WORK)
def test_what_another_thread_copies_never_ends_up_in_a_graph(gpu: CudaBackend, cu: Any, what: str) -> None:
    at, to = gpu.allocate(16), gpu.allocate(16)
    recording, is_tried = threading.Event(), threading.Event()

    def other() -> None:
        recording.wait(10)
        is_tried.set()
        WORK[what](gpu, at, to)

    def step() -> None:
        recording.set()
        is_tried.wait(10)
        thread.join(0.2)  # long enough, if nothing kept it waiting
        assert thread.is_alive()

    thread = threading.Thread(target=other)
    thread.start()
    gpu.capture([step])
    thread.join(10)
    names = cu.names()
    begin, end = names.index("cuStreamBeginCapture"), names.index("cuStreamEndCapture")
    assert not set(names[begin:end]).intersection(COPIES)
    assert set(names[end:]).intersection(COPIES)


def test_nor_what_is_copied_on_a_gpu_that_is_recorded_along(cu: Any) -> None:
    cu.count = 2
    gpus = [CudaBackend(Device("cuda", number), number) for number in (0, 1)]
    gpus[0].connect(gpus[1])
    at = gpus[1].allocate(16)
    recording = threading.Event()

    def other() -> None:
        recording.wait(10)
        gpus[1].download(at, memoryview(bytearray(16)))

    def step() -> None:
        recording.set()
        thread.join(0.2)
        assert thread.is_alive()

    thread = threading.Thread(target=other)
    thread.start()
    gpus[0].capture([step])
    thread.join(10)
    assert not thread.is_alive()
    for gpu in gpus:
        gpu.close()


def test_tensors_go_both_ways_between_gpus_at_once(cu: Any) -> None:
    """Each way takes both locks."""
    cu.count = 2
    gpus = [CudaBackend(Device("cuda", number), number) for number in (0, 1)]
    places = [gpu.allocate(16) for gpu in gpus]
    ends = [Operand(at, DType.FLOAT32, (4,), (1,), gpu.device) for at, gpu in zip(places, gpus, strict=True)]

    def use(sender: int, receiver: int) -> None:
        for _ in range(200):
            gpus[sender].send(ends[sender], gpus[receiver], ends[receiver])

    threads = [threading.Thread(target=use, args=way, daemon=True) for way in ((0, 1), (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    for gpu in gpus:
        gpu.close()


def test_a_thread_that_records_may_copy_itself(gpu: CudaBackend) -> None:
    """cuBLASLt's fill and moved ends do."""
    at = gpu.allocate(16)
    gpu.capture([lambda: gpu.fill(at, 16, 1)])


def test_large_uploads_of_many_threads_do_not_mix(gpu: CudaBackend) -> None:
    """They take turns with one staging memory."""
    arrays = [np.full(3 << 18, number, np.int32) for number in range(4)]
    places = [gpu.allocate(array.nbytes) for array in arrays]
    wrong: list[int] = []

    def use(number: int) -> None:
        out = np.empty_like(arrays[number])
        for _ in range(3):
            gpu.upload(places[number], arrays[number].data.cast("B"))
            gpu.download(places[number], out.data.cast("B"))
            if not (out == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


WHILE_CUDNN_WORKS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from devplan.runtime.cuda.cudnn import _without_torch
found = []
def other():
    import torch
    found.append(torch.is_real)
with _without_torch(), _without_torch():
    try:
        import torch
    except ImportError:
        found.append("refused")
    assert "torch" not in sys.modules
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
import torch
assert found == ["refused", True], found
"""


@pytest.mark.torch
def test_cudnn_gets_no_torch_and_other_threads_do(tmp_path: Path) -> None:
    """A thread may import torch at the moment when another makes a convolution ready."""
    (tmp_path / "torch.py").write_text("is_real = True\n")
    command = [sys.executable, "-c", WHILE_CUDNN_WORKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
