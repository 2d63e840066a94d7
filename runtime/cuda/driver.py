"""The driver: loaded late, every status checked, errors in words that a person can act on."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import DeviceError, DevplanError, ExecutionError

_NO_GPU_HINT = "run it with `--device emulator`, or on a machine with an NVIDIA GPU and its driver"

_MENDS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory on the GPU, lower the shapes' bounds, or use a larger GPU",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "this process's CUDA state is lost; start again under `compute-sanitizer`",
    "CUDA_ERROR_INVALID_DEVICE": "`devplan doctor` lists this machine's GPUs",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the kernel module and libcuda differ; reboot",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "export again with `--arch` for this GPU",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "update the driver, or export with `--arch` for this GPU",
    "CUDA_ERROR_INVALID_PTX": "export again with `--arch` for this GPU",
}
_DEVICE_KINDS = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "NO_DEVICE",
        "INVALID_DEVICE",
        "SYSTEM_DRIVER_MISMATCH",
        "NO_BINARY_FOR_GPU",
        "UNSUPPORTED_PTX_VERSION",
        "INVALID_PTX",
        "STUB_LIBRARY",
        "COMPAT_NOT_SUPPORTED_ON_DEVICE",
    )
)


@cache
def bindings() -> Any:
    """The module `cuda.bindings.driver`; DeviceError when cuda-python is not installed."""
    try:
        with _without_ldconfig():
            return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(
            "cuda-python is not usable", why=str(error), hint='install it: `pip install "cuda-python>=12.8"`'
        ) from error


@contextlib.contextmanager
def _without_ldconfig() -> Generator[None]:
    """Know where libdl is: cuda-python asks it as it is imported, and Python would run ``ldconfig -p``."""
    import ctypes.util as util

    ask = util.find_library
    util.find_library = lambda name: "libdl.so.2" if name == "dl" else ask(name)
    try:
        yield
    finally:
        util.find_library = ask


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Give what a driver call returned, without its status; raise when the status is an error.

    Args:
        result: what a function of `cuda.bindings.driver` returned: the status, then the values.
        doing: what was being done, for the message: ``allocate 4096 bytes on cuda:0``.

    Returns:
        None, the single value, or the tuple of values.
    """
    if result[0]:
        raise failure(result[0], doing)
    if len(result) == 2:
        return result[1]
    return result[1:] or None


def failure(status: Any, doing: str) -> DevplanError:
    """The error for a driver status: DeviceError when device or code are at fault, else ExecutionError."""
    name = _text(bindings().cuGetErrorName(status)) or f"status {int(status)}"
    text = _text(bindings().cuGetErrorString(status))
    kind = DeviceError if name in _DEVICE_KINDS else ExecutionError
    hint = _MENDS.get(name, _NO_GPU_HINT if kind is DeviceError else "")
    return kind(f"could not {doing}", why=f"{name}: {text}" if text else name, hint=hint)


def _text(result: tuple[Any, ...]) -> str:
    if result[0] or len(result) < 2 or not result[1]:
        return ""
    raw = result[1]
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


def initialise() -> Any:
    """Start the driver and give its module; DeviceError (exit 6) where there is no driver or no GPU."""
    cu = bindings()
    try:
        status = cu.cuInit(0)
    except RuntimeError as error:  # the library itself is missing: DynamicLibNotFoundError
        why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise DeviceError("there is no CUDA driver", why=why, hint=_NO_GPU_HINT) from error
    check(status, "start the CUDA driver")
    return cu


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A GPU of this machine. Memory in bytes; ``capability`` is (major, minor)."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    memory_nbytes: int
    multiprocessors: int
    shared_nbytes: int
    """Shared memory that one block may ask for."""

    @property
    def architecture(self) -> str:
        """Such as ``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


def device_info(cu: Any, ordinal: int) -> DeviceInfo:
    """Describe one GPU. Makes no context."""
    device = check(cu.cuDeviceGet(ordinal), f"find GPU {ordinal}")
    raw = bytes(check(cu.cuDeviceGetName(128, device), f"describe GPU {ordinal}"))
    name = raw.decode(errors="replace").partition("\0")[0]

    def attribute(key: str) -> int:
        number = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{key}")
        return int(check(cu.cuDeviceGetAttribute(number, device), f"describe GPU {ordinal}"))

    return DeviceInfo(
        ordinal,
        name,
        (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        int(check(cu.cuDeviceTotalMem(device), f"describe GPU {ordinal}")),
        attribute("MULTIPROCESSOR_COUNT"),
        attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


def devices() -> list[DeviceInfo]:
    """Every GPU that the driver shows; DeviceError where there is no driver."""
    cu = initialise()
    return [device_info(cu, ordinal) for ordinal in range(int(check(cu.cuDeviceGetCount(), "count GPUs")))]


def pointer_ordinal(address: int) -> int:
    """The GPU whose memory an address is in; 0 for the null pointer of an empty tensor."""
    cu = initialise()
    if not address or int(check(cu.cuDeviceGetCount(), "count GPUs")) < 2:
        return 0
    attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(check(cu.cuPointerGetAttribute(attribute, address), f"find the GPU of address {address:#x}"))


def driver_version() -> str:
    """The newest CUDA version that the driver knows, such as ``13.0``; DeviceError without a driver."""
    number = int(check(initialise().cuDriverGetVersion(), "ask for the driver's version"))
    return f"{number // 1000}.{number % 1000 // 10}"


def cuda_available() -> tuple[bool, str]:
    """Whether a program can run on CUDA here, and if not, why, in a line. Never raises, makes no context."""
    try:
        found = devices()
    except DevplanError as error:
        return False, str(error)
    return (True, "") if found else (False, "the driver shows no GPU")
