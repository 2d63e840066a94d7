"""On Hopper no register of a product's operand is written while the tensor cores may still read it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from devplan.passes.lowered.compile_kernels import canonical, compile_kernel  # noqa: E402
from devplan.passes.quantized.linear import OPERATOR, Blocks, tile_steps  # noqa: E402
from devplan.passes.tape import SETTLED, ExternCall, KernelSpec, OwnLaunch, Window  # noqa: E402
from devplan.runtime.dtypes import DType  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
WITHOUT_RESULT = re.compile(
    r"(ST|RED|LDGSTS|BAR|BRA|ISETP|FSETP|DEPBAR|MEMBAR|NOP|WARP|LDGDEPBAR|FENCE|R2UR)"
)
Instruction = tuple[int, str]


def kernel_of(blocks: Blocks, bits: int, group: int) -> KernelSpec:
    """A product of many rows in float16."""

    def window(name: str, dtype: DType, *sizes: int) -> Window:
        return Window(name, dtype, sizes, (sizes[1], 1))

    words = window("words", DType.INT32, 512, 2048 * bits // 32)
    scales = window("scales", DType.FLOAT16 if group else DType.FLOAT32, 512, 2048 // group if group else 1)
    x, output = window("x", DType.FLOAT16, 512, 2048), window("output", DType.FLOAT16, 512, 512)
    operands = (x, words, scales, scales if group else None, None, bits, group)
    (step,) = tile_steps(ExternCall(OPERATOR, operands, {}, (output,)), blocks)
    assert isinstance(step, OwnLaunch)
    return canonical(step.kernel)


def loop_of(spec: KernelSpec, folder: Path) -> list[Instruction]:
    """The instructions of the longest loop: addresses and text."""
    path = folder / "kernel.cubin"
    path.write_bytes(bytes(compile_kernel(spec, "sm_90", "cubin").data))
    told = subprocess.run([DISASSEMBLER, "-sass", path], capture_output=True, text=True, check=True).stdout
    found = [(int(m[1], 16), m[2].strip()) for m in re.finditer(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", told)]
    addresses = [address for address, _ in found]
    loops: list[list[Instruction]] = [[]]
    for end, (address, text) in enumerate(found):
        back = re.search(r"BRA\S*\s.*?0x([0-9a-f]+)", text)
        if back and int(back[1], 16) < address and int(back[1], 16) in addresses:
            loops.append(found[addresses.index(int(back[1], 16)) : end + 1])
    return max(loops, key=len)


def written(text: str) -> set[int]:
    """Registers that an instruction writes."""
    operation = re.sub(r"^@!?U?P\w+\s+", "", text)
    found = re.match(r"(\S+)\s+(?:U?P\w+,\s*)?R(\d+)\b", operation)
    if found is None or WITHOUT_RESULT.match(operation):
        return set()
    width = next(
        (n for mark, n in ((".128", 4), ("LDSM", 4), (".64", 2), (".WIDE", 2)) if mark in found[1]), 1
    )
    return {int(found[2]) + i for i in range(width)}


def overwritten(loop: list[Instruction]) -> Iterator[str]:
    """Instructions of two rounds of a loop that write what a product still in flight reads."""
    groups: list[set[int]] = []
    current: set[int] = set()
    for _, text in loop * 2:
        product = re.search(r"HGMMA\S+ R\d+, R(\d+), gdesc", text)
        wait = re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x([0-9a-f]+)", text)
        if product:
            current |= {int(product[1]) + i for i in range(4)}
            if "gsb0" in text:
                groups, current = [*groups, current], set()
        elif wait:
            left = int(wait[1], 16)
            groups = groups[len(groups) - left :] if left else []
        elif "HGMMA" not in text and written(text) & set().union(current, *groups):
            yield text


@pytest.mark.parametrize(
    "blocks", [Blocks(64, 64), Blocks(128, 64), Blocks(64, 128, 1, 8), Blocks(256, 128, 1, 8)]
)
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 128)])
def test_operands_stay_until_they_are_read(blocks: Blocks, bits: int, group: int, tmp_path: Path) -> None:
    loop = loop_of(kernel_of(blocks, bits, group), tmp_path)
    assert sum("HGMMA" in text for _, text in loop) >= 8
    assert list(overwritten(loop)) == []


def test_without_the_wait_the_next_round_overwrites_them(tmp_path: Path) -> None:
    spec = kernel_of(Blocks(64, 128, 1, 8), 4, 128)
    loop = loop_of(replace(spec, source=spec.source.replace(SETTLED, "")), tmp_path)
    assert list(overwritten(loop))
