"""Generated kernels to machine code, one cubin per architecture plus PTX, in parallel, with a cache.

Nothing here needs a GPU or a driver: Triton carries its own assembler. The cache lives under
``$DEVPLAN_CACHE_DIR`` (default ``~/.cache/devplan``) and is keyed by everything the code depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ...runtime.errors import DevplanError, PassError, UnsupportedOperatorError
from ...runtime.program import Kernel, KernelCode, KernelParameter
from ..tape import READY, SETTLED, KernelSpec
from ..targets import TARGETS, lowest, target_of

_HEADER = """\
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

"""

_FIRST_THAT_WAITS = 90
"""The compute capability that has `griddepcontrol`."""

_CACHE_VERSION = 4
"""Raised when the same kernel would be compiled to other code."""


def spec_digest(spec: KernelSpec) -> str:
    """Sixteen hexadecimal digits over all that a kernel's code depends on, its name apart."""
    body = spec.source.replace(spec.name, "kernel")
    rest = (spec.parameters, spec.constants, spec.divisible_by_16, spec.num_warps, spec.num_stages)
    hints = [spec.hints] if spec.hints else []
    return hashlib.sha256(json.dumps([body, rest, *hints], default=str).encode()).hexdigest()[:16]


def canonical(spec: KernelSpec) -> KernelSpec:
    """The kernel under a name that tells its content, so that equal kernels of all regions are one."""
    stem = spec.name.rsplit("_", 1)[0] if spec.name.rsplit("_", 1)[-1].isdigit() else spec.name
    name = f"{stem[:80]}_{spec_digest(spec)[:8]}"
    return replace(spec, name=name, source=spec.source.replace(f"def {spec.name}(", f"def {name}("))


def compile_kernels(
    specs: Iterable[KernelSpec],
    architectures: Sequence[str],
    jobs: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Kernel, ...]:
    """Compile every kernel for every architecture; PTX of the lowest serves newer GPUs.

    ``jobs`` processes work at once (0: one per processor). Raises PassError when a kernel does not compile.
    """
    unique = {spec.name: spec for spec in specs}
    wanted = [(arch, "cubin") for arch in architectures]
    wanted.append((f"sm_{min(lowest(tuple(architectures)).capability, 89)}", "ptx"))
    work = [(spec, arch, form) for spec in unique.values() for arch, form in wanted]
    codes, misses = _cached(work)
    report(len(codes), len(work))
    for (spec, arch, form), code in _compile_all(misses, jobs, compile_kernel):
        codes[spec.name, arch, form] = code
        report(len(codes), len(work))
    return tuple(_kernel(spec, [codes[spec.name, a, f] for a, f in wanted]) for spec in unique.values())


def _kernel(spec: KernelSpec, codes: Sequence[KernelCode]) -> Kernel:
    parameters = tuple(KernelParameter(name, kind) for name, kind in spec.parameters)
    return Kernel(
        spec.name, parameters, tuple(codes), spec.source, spec.constants, spec.num_warps, spec.num_stages
    )


def compile_candidates(specs: Sequence[KernelSpec], architecture: str, jobs: int = 0) -> dict[str, Kernel]:
    """Kernels for one architecture by name; what does not compile or fit there is left out."""
    unique = {spec.name: spec for spec in specs}
    codes, misses = _cached([(spec, architecture, "cubin") for spec in unique.values()])
    for (spec, arch, form), code in _compile_all(misses, jobs, _compiled_or_none):
        if code is not None:
            codes[spec.name, arch, form] = code
    found = {name: codes.get((name, architecture, "cubin")) for name in unique}
    return {name: _kernel(unique[name], [code]) for name, code in found.items() if code is not None}


def _compiled_or_none(spec: KernelSpec, architecture: str, form: str) -> KernelCode | None:
    try:
        return compile_kernel(spec, architecture, form)
    except DevplanError:
        return None


_Item = tuple[KernelSpec, str, str]
_Code = TypeVar("_Code", KernelCode, KernelCode | None)


def _cached(work: Sequence[_Item]) -> tuple[dict[tuple[str, str, str], KernelCode], list[_Item]]:
    """What the cache has, by name, architecture and form, and what it lacks."""
    codes: dict[tuple[str, str, str], KernelCode] = {}
    misses: list[_Item] = []
    for spec, architecture, form in work:
        cached = _read_cache(_cache_key(spec, architecture, form))
        if cached is None:
            misses.append((spec, architecture, form))
        else:
            codes[spec.name, architecture, form] = replace(cached, symbol=spec.name)
    return codes, misses


def _compile_all(
    work: Sequence[_Item], jobs: int, compiled: Callable[[KernelSpec, str, str], _Code]
) -> Iterator[tuple[_Item, _Code]]:
    """Compile in worker processes where that pays, and keep it; forked ones share the imports of this one."""
    jobs = min(jobs or os.cpu_count() or 1, len(work))
    if jobs <= 1 or sys.platform != "linux":
        for item in work:
            yield item, _kept(item, compiled(*item))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        futures = {pool.submit(compiled, *item): item for item in work}
        for future in as_completed(futures):
            item = futures[future]
            yield item, _kept(item, future.result())


def _kept(item: _Item, code: _Code) -> _Code:
    """The code, which is in the cache from now on."""
    if code is not None:
        _write_cache(_cache_key(*item), code)
    return code


def compile_kernel(spec: KernelSpec, architecture: str, form: str) -> KernelCode:
    """One kernel for one architecture; ``form`` is ``cubin`` or ``ptx``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    waits = form == "cubin" and target_of(architecture).capability >= _FIRST_THAT_WAITS
    settled = that_settles(spec) if form == "cubin" and target_of(architecture).capability == 90 else spec
    function = _import_function(that_waits(settled) if waits else settled)
    constants: dict[str, Any] = dict(spec.constants)
    names: list[str] = list(function.arg_names)
    types = {**dict(spec.parameters), **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=function,
        signature={n: types[n] for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in spec.divisible_by_16},
    )
    target = GPUTarget("cuda", target_of(architecture).capability, 32)
    # Line tables would put this machine's paths into the code, and the bytes must depend on the input alone.
    triton.knobs.compilation.disable_line_info = True
    limit = shared_limit(architecture, form)
    for stages in range(spec.num_stages, 0, -1):  # fewer, where a GPU has not the shared memory for them
        options = {"num_warps": spec.num_warps, "num_stages": stages}
        try:
            compiled = triton.compile(source, target=target, options=options)
        except Exception as error:
            raise PassError(
                f"kernel `{spec.name}` does not compile for {architecture}",
                why=str(error).splitlines()[-1][:200],
            ) from error
        metadata = compiled.metadata
        if metadata.shared <= limit:
            break
    else:
        raise PassError(
            f"kernel `{spec.name}` does not fit {architecture}",
            why=f"it needs {metadata.shared} bytes of shared memory, a block has {limit} there",
            hint="leave that architecture out of `--arch`",
        )
    if getattr(metadata, "global_scratch_size", 0):
        raise UnsupportedOperatorError(f"kernel `{spec.name}` needs scratch memory of its own")
    data: bytes | str = compiled.asm[form]
    data = data.encode() if isinstance(data, str) else data
    return KernelCode(architecture, form, metadata.name, data, metadata.num_warps, metadata.shared, waits)


def shared_limit(architecture: str, form: str) -> int:
    """Bytes of shared memory that a block may have; PTX has to suit every later architecture."""
    here = target_of(architecture)
    if form == "cubin":
        return here.shared_per_block
    return min(t.shared_per_block for t in TARGETS.values() if t.capability >= here.capability)


def that_waits(spec: KernelSpec) -> KernelSpec:
    """The kernel with a wait for the launches before it, so that it may be launched while they end.

    That hides what a launch costs where kernels take a few microseconds (programmatic dependent launch, CUDA
    C++ Programming Guide). The wait is at the line `tape.READY`, up to which a kernel reads constants only,
    or else comes first. The next launch may begin at once: it waits for all of this one.
    """
    calls = f"    tl.extra.cuda.gdc_launch_dependents()\n{spec.hints}    tl.extra.cuda.gdc_wait()"
    if READY in spec.source:
        return replace(spec, source=spec.source.replace(READY, calls))
    head = re.search(rf"^def {re.escape(spec.name)}\([^)]*\):$", spec.source, re.MULTILINE)
    assert head is not None, spec.name
    return replace(spec, source=f"{spec.source[: head.end()]}\n{calls}{spec.source[head.end() :]}")


def that_settles(spec: KernelSpec) -> KernelSpec:
    """The kernel with a wait for the tensor cores at its lines `tape.SETTLED`."""
    wait = "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;"
    call = f'tl.inline_asm_elementwise("{wait}", "=r,r", [tl.program_id(0)], tl.int32, False, 1)'
    indent = " " * (len(SETTLED) - len(SETTLED.lstrip()))
    return replace(spec, source=spec.source.replace(SETTLED, indent + call))


def _import_function(spec: KernelSpec) -> Any:
    """The kernel as Triton's JITFunction; Triton reads a function's source from a file."""
    import importlib.util

    path = _source_folder() / f"{spec.name}_{hashlib.sha256(spec.source.encode()).hexdigest()[:8]}.py"
    text = _HEADER + spec.source
    if not path.exists() or path.read_text("utf-8") != text:
        _write_atomically(path, text.encode())
    module_spec = importlib.util.spec_from_file_location(spec.name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, spec.name)


def _source_folder() -> Path:
    """Where sources of kernels lie to be imported, and so run: nobody else can write to this folder."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"devplan-{user}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    is_private = stat.S_ISDIR(about.st_mode) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if os.name == "nt" or (is_private and about.st_uid == user):
        return folder
    return Path(_of_this_process().name)


@cache
def _of_this_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="devplan-")


# --- the cache ---------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled kernels are kept between exports."""
    return Path(os.environ.get("DEVPLAN_CACHE_DIR") or Path.home() / ".cache" / "devplan") / "kernels"


def _cache_key(spec: KernelSpec, architecture: str, form: str) -> Path:
    import torch
    import triton

    versions = (torch.__version__, triton.__version__)  # helpers inlined into kernels belong to torch
    text = json.dumps([_CACHE_VERSION, spec_digest(spec), spec.name, architecture, form, versions])
    return cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.pickle"


def _read_cache(path: Path) -> KernelCode | None:
    """A cached kernel, or None; a damaged entry is a miss."""
    try:
        fields = pickle.loads(path.read_bytes())
        return KernelCode(*fields)
    except (OSError, ValueError, TypeError, EOFError, pickle.UnpicklingError):
        return None


def _write_cache(path: Path, code: KernelCode) -> None:
    fields = tuple(getattr(code, each.name) for each in dataclass_fields(code))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, pickle.dumps(fields))
    except OSError:
        return  # a cache that cannot be written is no reason to fail


def _write_atomically(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).replace(path)
