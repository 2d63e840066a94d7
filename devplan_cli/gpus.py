"""The GPUs of this machine, without torch; none where there is no driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU: ``capability`` is 90 for ``sm_90``."""

    name: str
    capability: int
    nbytes: int

    @property
    def architecture(self) -> str:
        """``sm_90``."""
        return f"sm_{self.capability}"


_MAJOR, _MINOR = 75, 76
"""Numbers of two `CUdevice_attribute` values: the compute capability's parts."""


def driver_version() -> int | None:
    """The CUDA version that the driver supports, 12080 for 12.8; None without a driver."""
    driver = _driver()
    version = ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value


def present_gpus() -> list[Gpu]:
    """The GPUs that the driver shows; an empty list without a driver. Makes no context on any of them."""
    driver = _driver()
    total = ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(total)) != 0:
        return []
    return [_describe(driver, index) for index in range(total.value)]


def present_architectures() -> tuple[str, ...]:
    """The architectures of the GPUs that are present, each once."""
    return tuple(dict.fromkeys(gpu.architecture for gpu in present_gpus()))


def _driver() -> ctypes.CDLL | None:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, nbytes = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    parts = [ctypes.c_int(), ctypes.c_int()]
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, 256, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
    for part, attribute in zip(parts, (_MAJOR, _MINOR), strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    return Gpu(name.value.decode(errors="replace"), parts[0].value * 10 + parts[1].value, nbytes.value)
