"""Kernels to machine code without a GPU: one cubin an architecture, PTX of the lowest, cached."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from devplan.passes.lowered import compile_kernels as compiling
from devplan.passes.lowered.compile_kernels import canonical, compile_kernel, compile_kernels, that_waits
from devplan.passes.tape import READY, KernelSpec
from devplan.passes.targets import TARGETS
from devplan.runtime.errors import PassError

pytestmark = pytest.mark.torch

DOUBLE = KernelSpec(
    name="double_3",
    source=(
        "@triton.jit\n"
        "def double_3(x, y, n, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(y + at, tl.load(x + at, at < n) * 2, at < n)\n"
    ),
    parameters=(("x", "*fp32"), ("y", "*fp32"), ("n", "i32")),
    constants=(("BLOCK", 128),),
    divisible_by_16=("x", "y"),
    num_warps=2,
    num_stages=1,
    grid=("-(n // -BLOCK)", "1", "1"),
    call_names=("x", "y", "n"),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEVPLAN_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def test_one_cubin_for_each_architecture_and_ptx_of_the_lowest(cache: Path) -> None:
    (kernel,) = compile_kernels([canonical(DOUBLE)], ("sm_80", "sm_90"))
    assert [(c.architecture, c.form) for c in kernel.codes] == [
        ("sm_80", "cubin"),
        ("sm_90", "cubin"),
        ("sm_80", "ptx"),
    ]
    assert all(c.data[:4] == b"\x7fELF" for c in kernel.codes[:2])
    assert b".target sm_80" in kernel.codes[2].data
    assert [(p.name, p.type) for p in kernel.parameters] == [("x", "*fp32"), ("y", "*fp32"), ("n", "i32")]
    assert {c.num_warps for c in kernel.codes} == {2}


def test_code_for_hopper_waits_for_the_launches_before(cache: Path) -> None:
    (kernel,) = compile_kernels([canonical(DOUBLE)], ("sm_80", "sm_90"))
    assert [code.waits for code in kernel.codes] == [False, True, False]
    assert "gdc_wait" not in kernel.source  # the emulator runs the portable text
    assert compile_kernels([canonical(DOUBLE)], ("sm_80", "sm_90"))[0].codes == kernel.codes  # from the cache


def test_the_wait_comes_first_unless_the_kernel_says_where() -> None:
    lines = that_waits(DOUBLE).source.splitlines()
    assert lines[2:4] == ["    tl.extra.cuda.gdc_launch_dependents()", "    tl.extra.cuda.gdc_wait()"]
    body = DOUBLE.source.replace("    tl.store", f"{READY}\n    tl.store")
    lines = that_waits(replace(DOUBLE, source=body)).source.splitlines()
    assert lines[2].startswith("    at = ")
    assert lines[3:5] == ["    tl.extra.cuda.gdc_launch_dependents()", "    tl.extra.cuda.gdc_wait()"]


def test_the_newest_architecture_alone_still_leaves_ptx_that_later_ones_can_run(cache: Path) -> None:
    (kernel,) = compile_kernels([canonical(DOUBLE)], ("sm_90",))
    assert b".target sm_89" in kernel.codes[-1].data  # PTX for sm_90a would run on nothing newer


def test_code_holds_no_path_of_the_machine_that_made_it(cache: Path) -> None:
    (kernel,) = compile_kernels([canonical(DOUBLE)], ("sm_80",))
    assert not any(re.search(rb"/tmp|/home|devplan-|\.py", c.data) for c in kernel.codes)


def test_equal_kernels_have_one_name_and_others_another() -> None:
    other = replace(DOUBLE, name="double_9", source=DOUBLE.source.replace("double_3", "double_9"))
    assert canonical(DOUBLE) == canonical(other)
    assert canonical(DOUBLE).name != canonical(replace(DOUBLE, num_warps=4)).name
    assert canonical(DOUBLE).name.startswith("double_")


def test_a_second_export_takes_kernels_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernels([canonical(DOUBLE)], ("sm_80",))
    monkeypatch.setattr(compiling, "compile_kernel", None)  # compiling again would fail
    assert compile_kernels([canonical(DOUBLE)], ("sm_80",)) == first


def test_a_damaged_cache_entry_is_compiled_again(cache: Path) -> None:
    first = compile_kernels([canonical(DOUBLE)], ("sm_80",))
    for entry in cache.iterdir():
        entry.write_bytes(b"damaged")
    assert compile_kernels([canonical(DOUBLE)], ("sm_80",)) == first


def test_a_kernel_that_does_not_compile_is_named(cache: Path) -> None:
    broken = replace(DOUBLE, source=DOUBLE.source.replace("* 2", "* missing"))
    with pytest.raises(PassError, match=r"double_.* does not compile for sm_80"):
        compile_kernels([canonical(broken)], ("sm_80",), jobs=1)


STAGED = """\
@triton.jit
def staged(a, b, c, steps, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    m = tl.arange(0, SIZE)
    k = tl.arange(0, DEPTH)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for step in range(0, steps):
        x = tl.load(a + m[:, None] * 4096 + step * DEPTH + k[None, :])
        y = tl.load(b + (step * DEPTH + k)[:, None] * 4096 + m[None, :])
        total += tl.dot(x, y)
    tl.store(c + m[:, None] * SIZE + m[None, :], total)
"""


def staged(depth: int) -> KernelSpec:
    """A product that keeps three blocks of 128 by ``depth`` of each operand ahead."""
    return KernelSpec(
        name="staged",
        source=STAGED,
        parameters=(("a", "*fp16"), ("b", "*fp16"), ("c", "*fp32"), ("steps", "i32")),
        constants=(("SIZE", 128), ("DEPTH", depth)),
        divisible_by_16=("a", "b", "c"),
        num_warps=8,
        num_stages=4,
        grid=("1", "1", "1"),
        call_names=("a", "b", "c", "steps"),
    )


@pytest.mark.slow
def test_a_kernel_takes_fewer_stages_where_shared_memory_is_scarce() -> None:
    large, small = (compile_kernel(staged(64), name, "cubin").shared_nbytes for name in ("sm_90", "sm_86"))
    assert small <= TARGETS["sm_86"].shared_per_block < large <= TARGETS["sm_90"].shared_per_block


@pytest.mark.slow
def test_ptx_suits_every_later_architecture() -> None:
    cubin, ptx = (compile_kernel(staged(128), "sm_80", form).shared_nbytes for form in ("cubin", "ptx"))
    assert ptx <= TARGETS["sm_120"].shared_per_block < cubin


@pytest.mark.slow
def test_a_kernel_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(PassError, match="kernel `staged` does not fit sm_86") as caught:
        compile_kernel(staged(512), "sm_86", "cubin")
    assert "shared memory" in caught.value.why


def test_sources_are_imported_from_a_folder_that_nobody_else_can_write_to(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling.tempfile, "tempdir", str(tmp_path))
    compiling._import_function(DOUBLE)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    held = len(list(folder.iterdir()))
    folder.chmod(0o777)  # as somebody else would leave it in wait
    compiling._import_function(replace(DOUBLE, source=DOUBLE.source + "\n"))
    assert len(list(folder.iterdir())) == held
    compiling._of_this_process.cache_clear()
