"""Loading an artifact, quickly: the GPU starts while Python still imports."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import LoadedProgram
    from .program import PlannedProgram


def load(
    path: str | Path,
    device: str | None = None,
    *,
    device_map: Mapping[str, str] | None = None,
    allow_torch_ops: bool = False,
    poison: bool = False,
    scrub: bool = False,
    notify: Callable[[str], None] | None = None,
    tuning: str | Path | None = None,
    weights: str | Path | Sequence[str | Path] = (),
    verify: bool = False,
) -> LoadedProgram:
    """Read, check and load an artifact.

    Args:
        path: the ``.pte`` file.
        device: ``cuda``, ``cuda:N`` (everything on that GPU), ``emulator``, ``cpu`` (for programs without a
            device part), or None: CUDA where a driver and a GPU are, else the emulator (``notify`` says so).
            ``emulator:triton`` interprets generated kernels by Triton itself, and needs torch and triton.
        device_map: for programs on several GPUs, which GPU serves which slot: ``{"cuda:0": "cuda:1"}``.
        allow_torch_ops: whether operators of a CUDA program may run on the host through torch. A program
            exported for the cpu needs no leave.
        poison: on the emulator, overwrite every storage when its live range ends (for tests of plans).
        tuning: a file that `devplan tune` wrote, which goes before the algorithms that the artifact embeds;
            not used on another GPU or with another library, as ``notify`` is told.
        weights: safetensors files, or folders of them, for an artifact that was exported without its weights.
        scrub: fill the arenas with 0xFF (a NaN in every floating type) before each call, to show that nothing
            is read that the call did not write; always on the emulator.
        notify: told what a person should know, one line each; by default a `UserWarning`.
        verify: whether the constants' bytes are compared with their digests first, which reads all of them;
            everything else in the file is compared in any case.

    Raises:
        ArtifactError: the file is missing, damaged or foreign.
        DeviceError: no such device, or no code for it.
        UsageError: an unknown device name, operators that need torch and are not allowed to, or weights that
            are not the program's.
    """
    wants_cuda = device is None or str(device).partition(":")[0] == "cuda"
    if wants_cuda:
        from .cuda import warm

        warm.begin_driver()
        number = str(device).partition(":")[2] or "0"
        if device is not None and not device_map and number.isascii() and number.isdigit():
            warm.begin_context(int(number))  # known before the file is read, and before its name is checked
    from .artifact import read
    from .device_names import check_target, gpus_of

    check_target(device)
    gpus_of(device_map)

    files = [weights] if isinstance(weights, str | Path) else weights
    artifact = read(Path(path), weights=[Path(file) for file in files])
    if verify:
        artifact.verify_constants(made=False)
    if wants_cuda:
        _warm_up(artifact.planned, device, device_map)
    from .loading import load_planned

    program = load_planned(
        artifact.planned,
        artifact.constants,
        device,
        device_map=device_map,
        allow_torch_ops=allow_torch_ops,
        poison=poison,
        scrub=scrub,
        notify=notify,
    )
    _apply_tuning(program, None if tuning is None else Path(tuning), notify)
    if names := program.compiled_from_ptx:
        missing = " and ".join(names)
        count = sum(map(len, names.values()))
        what = f"{count} kernels" if count > 1 else "1 kernel"
        line = f"the driver compiles {what} from PTX: the artifact has no code for {missing}"
        _tell(f"{line}; export with `--arch {','.join(names)}` for a quicker start", notify)
    return program


def _tell(line: str, notify: Callable[[str], None] | None) -> None:
    warnings.warn(line, stacklevel=4) if notify is None else notify(line)


def _apply_tuning(program: LoadedProgram, path: Path | None, notify: Callable[[str], None] | None) -> None:
    """Take the file's algorithms, or where it has none for this GPU, those that the artifact embeds."""
    if path is None and not program.planned.program.tunings:
        return
    from .measure import tune

    try:
        reason = "" if path is None else tune.apply(program, tune.Tuning.read(path))
        if path is None or reason:
            program.tuning_note = tune.apply_embedded(program)
        else:
            program.tuning_note = f"library algorithms are those of `{path}`"
    except BaseException:
        program.close()
        raise
    if reason:
        _tell(f"`{path}` is not used: {reason}", notify)


def _warm_up(planned: PlannedProgram, device: str | None, device_map: Mapping[str, str] | None) -> None:
    """Begin what the program will need: contexts of its GPUs, and the libraries that it calls."""
    from .cuda import warm
    from .program import CPU, LibraryCall

    methods = planned.program.methods
    slots = {storage.device for method in methods for storage in method.storages} - {CPU}
    chosen = (device or "").partition(":")[2]
    texts = [
        chosen or (device_map or {}).get(str(slot), str(slot)).partition(":")[2] for slot in sorted(slots)
    ]
    ordinals = [int(text) for text in texts if text.isdigit()]
    for ordinal in ordinals:
        warm.begin_context(ordinal)
    for method in methods:
        for call in method.instructions:
            if not isinstance(call, LibraryCall) or not ordinals:
                continue
            if call.function == "matmul":
                warm.begin_cublaslt(ordinals[0], method.value(call.reads[0]).dtype)
            elif call.function in ("convolution", "attention"):
                warm.begin_cudnn()
