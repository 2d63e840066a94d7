"""A CUDA device that is only described: what Inductor and Triton would ask a driver is answered from data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.misc_patterns as misc_patterns
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch.utils._triton
from torch._inductor import lowering as inductor_lowering
from torch._inductor.codegen.common import init_backend_registration
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ..targets import Target
from . import combine_kernels, masked_loads
from .device_guard import cuda_guard

DEVICE = torch.device("cuda", 0)
"""The described device, as fake tensors name it."""

_OPTIONS: dict[str, Any] = {
    "fx_wrapper": True,
    "compile_threads": 1,
    "size_asserts": False,
    "nan_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "allow_buffer_reuse": False,
    "triton.autotune_at_compile_time": False,
    "triton.cooperative_reductions": False,
    "triton.mix_order_reduction": False,
    "triton.unique_kernel_names": True,
    "assert_indirect_indexing": False,
    "freezing": False,
    "comment_origin": False,
    "combo_kernels": combine_kernels.IS_POSSIBLE,
    "combo_kernels_pointwise_only": True,
    "combo_kernels_autotune": 0,
    "fallback_random": False,
}


def _properties(target: Target) -> Any:
    """The device properties that Inductor and Triton ask for."""

    class Properties:
        name, gcnArchName = target.part, ""
        major, minor = divmod(target.capability, 10)
        multi_processor_count = target.multiprocessors
        total_memory = target.memory_nbytes
        regs_per_multiprocessor = 65536
        max_threads_per_multi_processor = target.threads_per_multiprocessor
        max_threads_per_block = 1024
        warp_size = 32
        shared_memory_per_block = 49152
        shared_memory_per_block_optin = target.shared_per_block
        shared_memory_per_multiprocessor = target.shared_per_multiprocessor
        L2_cache_size = target.l2_nbytes

    return Properties


def _interface(target: Target) -> type:
    """Dynamo's device interface for the described device."""
    properties = _properties(target)

    class Interface(device_interface.CudaInterface):
        class Worker(device_interface.CudaInterface.Worker):
            current_device = staticmethod(lambda: 0)
            set_device = staticmethod(lambda device: None)
            get_device_properties = staticmethod(lambda device=None: properties)

        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)
        get_compute_capability = staticmethod(lambda device=None: target.capability)
        get_device_properties = staticmethod(lambda device=None: properties)
        get_raw_stream = staticmethod(lambda device=None: 0)
        synchronize = staticmethod(lambda device=None: None)
        is_bf16_supported = staticmethod(lambda including_emulation=False: target.capability >= 80)

    return Interface


class _TargetDriver:
    """The part of a Triton driver that code generation touches."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget("cuda", target.capability, 32)
        self._capability = divmod(target.capability, 10)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, *args: Any) -> tuple[int, int]:
        return self._capability


def _convolution_format(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """The layout that cuDNN gives a convolution's result; a CPU build of torch would answer for the CPU."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(weight.dim())
    if wanted is None:
        return torch.contiguous_format
    channels_last = any(not t.is_contiguous() and t.is_contiguous(memory_format=wanted) for t in (x, weight))
    return wanted if channels_last else torch.contiguous_format


@contextlib.contextmanager
def described_target(target: Target) -> Iterator[None]:
    """While active, PyTorch believes in one CUDA device with the target's properties.

    `torch.cuda.device_count` is left alone: Inductor's pattern set-up would then allocate on a GPU. A
    few call sites bypass the device interface, hence the patches of `torch.cuda` itself.
    """
    properties = _properties(target)
    device_interface.get_registered_device_interfaces()  # registers the real ones, which would win later
    table = device_interface.device_interfaces
    saved, was_active = dict(table), getattr(driver, "_active", None)
    interface = _interface(target)
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, interface)
    capability = divmod(target.capability, 10)
    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_capability", lambda device=None: capability),
        (torch.cuda, "current_device", lambda: 0),
        (torch._C, "_conv_determine_backend_memory_format", _convolution_format),
        (misc_patterns, "_misc_patterns_init", lambda device=None: None),  # traces real device tensors
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        # the hardware adds 64-bit integers, too
        (
            inductor_lowering,
            "needs_fallback_due_to_atomic_add_limitations",
            lambda dtype: dtype == torch.bool,
        ),
        (combine_kernels.OWNER, combine_kernels.ATTRIBUTE, combine_kernels.small_and_independent),
        (masked_loads.OWNER, masked_loads.ATTRIBUTE, masked_loads.MASKED),
        (masked_loads.KERNEL, masked_loads.LOAD, masked_loads.load_inside),
    ]
    known = {key: value for key, value in _OPTIONS.items() if _has_option(key)}
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, value in patches:
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, value))
            stack.enter_context(inductor_config.patch(known))
            stack.enter_context(cuda_guard())
            driver.set_active(_TargetDriver(target))  # pyright: ignore
            init_backend_registration()
            _forget_triton()  # tracing a condition or loop before has asked without a GPU
            yield
    finally:
        _forget_triton()
        table.clear()
        table.update(saved)
        driver._active = was_active


def _forget_triton() -> None:
    """Clear what torch remembers of whether Triton works here."""
    for value in vars(torch.utils._triton).values():
        if callable(value) and hasattr(value, "cache_clear"):
            value.cache_clear()


def _has_option(key: str) -> bool:
    owner: Any = inductor_config
    for part in key.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True
