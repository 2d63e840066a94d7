"""Depthwise convolutions of MobileNet v2: our kernel in many block shapes beside torch's, on one GPU.

    python tests/bench/bench_depthwise.py [--images 1,32]

Every line that is measured is compared with torch first. `strided` is the chosen shape with weights as PyTorch
stores them. Times are medians of CUDA graphs of launches in a row, a launch's share; operands larger than the L2
cache are read from memory.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from bench_row_product import Kernel, compiled, microseconds
from torch.nn import functional as F

from devplan.passes.kernels.depthwise import OPERATOR, Blocks, blocks_for, to_steps_with
from devplan.passes.lowered.compile_kernels import canonical
from devplan.passes.tape import ExternCall, KernelSpec, Window
from devplan.runtime.dtypes import DType

LAUNCHES = 24


@dataclass(frozen=True)
class Shape:
    """Channels, pixels of a side, and the stride; 3 x 3 taps."""

    images: int
    channels: int
    side: int
    stride: int = 1

    @property
    def out_side(self) -> int:
        return -(-self.side // self.stride)


SIDES = ((32, 112, 1), (96, 112, 2), (144, 56, 1), (192, 28, 1), (384, 14, 1), (960, 7, 1))


def call_for(shape: Shape, packed: bool) -> ExternCall:
    """The operator's call that lowering would make; channels are the densest of all but strided weights."""

    def window(name: str, *sizes: int) -> Window:
        n, c, h, w = sizes
        return Window(name, DType.FLOAT16, (n, c, h, w), (h * w * c, 1, w * c, c))

    c, side, out = shape.channels, shape.side, shape.out_side
    weight = Window("weight", DType.FLOAT16, (c, 1, 3, 3), (1, 9 * c, 3 * c, c) if packed else (9, 9, 3, 1))
    bias = Window("bias", DType.FLOAT16, (c,), (1,))
    ends = ([shape.stride] * 2, [1, 1], [1, 1], "relu6")
    operands = (window("x", shape.images, c, side, side), weight, bias, None, *ends)
    return ExternCall(OPERATOR, operands, {}, (window("output", shape.images, c, out, out),))


def candidates(shape: Shape) -> list[Blocks]:
    """Block shapes worth a measurement, the chosen one first."""
    found = [blocks_for(shape.channels)]
    for channels, each, warps in product((16, 32, 64), (8, 16, 32), (2, 4, 8)):
        if channels <= 2 * shape.channels and (shape.images > 1 or each < 32):
            found.append(Blocks(each * warps * 32 // channels, channels, warps))
    return list(dict.fromkeys(found))


class Data:
    """Operands on the GPU."""

    def __init__(self, shape: Shape) -> None:
        made = {"device": "cuda", "dtype": torch.float16}
        self.shape, c = shape, shape.channels
        size, out = (
            (shape.images, c, shape.side, shape.side),
            (shape.images, c, shape.out_side, shape.out_side),
        )
        last = torch.channels_last
        self.x = torch.randn(size, **made).contiguous(memory_format=last)
        self.weight, self.bias = torch.randn(c, 1, 3, 3, **made) / 3, torch.randn(c, **made)
        self.packed = self.weight.permute(1, 2, 3, 0).contiguous()
        self.output = torch.zeros(out, **made).contiguous(memory_format=last)

    def torch(self) -> torch.Tensor:
        """The same by torch."""
        made = F.conv2d(self.x, self.weight, self.bias, self.shape.stride, 1, groups=self.shape.channels)
        return F.relu6(made)

    def launch(self, kernel: Kernel, spec: KernelSpec, blocks: Blocks, packed: bool) -> None:
        """One launch."""
        pixels, c = self.shape.images * self.shape.out_side**2, self.shape.channels
        tensors = {"x": self.x, "weight": self.packed if packed else self.weight, "bias": self.bias}
        tensors |= {"added": self.x, "output": self.output}
        values = [tensors[n].data_ptr() if n in tensors else pixels for n, _ in spec.parameters]
        kernel((-(-pixels // blocks.pixels), -(-c // blocks.channels), 1), values)

    def error(self, launch: Any) -> float:
        """The largest difference, relative to the largest value."""
        self.output.fill_(float("nan"))
        launch()
        wanted = self.torch().float()
        return float((self.output.float() - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", default="1,32")
    parser.add_argument("--best", type=int, default=3, help="lines of each shape besides the chosen one")
    asked = parser.parse_args()
    shapes = [Shape(int(images), *side) for images in asked.images.split(",") for side in SIDES]
    work = [(s, b, True) for s in shapes for b in candidates(s)]
    work += [(s, candidates(s)[0], False) for s in shapes]
    specs = [canonical(to_steps_with(call_for(s, packed), b)[0].kernel) for s, b, packed in work]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # before there is a CUDA context
        codes = list(pool.map(compiled, specs))
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    from devplan.runtime.cuda.driver import bindings

    torch.cuda.set_stream(torch.cuda.Stream())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float16, {len(work)} kernels")
    for shape in shapes:
        data, tried = Data(shape), list[tuple[float, str]]()
        print(f"{shape}: torch {microseconds(lambda i, d=data: d.torch(), LAUNCHES):8.2f} us")
        for (of, blocks, packed), spec, code in zip(work, specs, codes, strict=True):
            if of is not shape:
                continue
            kernel = Kernel(bindings(), code, False)

            def launch(
                _: int = 0, k: Kernel = kernel, s: KernelSpec = spec, b: Blocks = blocks, p: bool = packed
            ) -> None:
                data.launch(k, s, b, p)  # noqa: B023

            if not (error := data.error(launch)) < 1e-2:
                print(f"  WRONG {blocks}: {error:.1e}")
            name = f"{blocks.pixels} x {blocks.channels}, {blocks.warps} warps{'' if packed else ', strided'}"
            tried.append((microseconds(launch, LAUNCHES), name))
        for mark, (took, name) in [
            ("chosen", tried[0]), ("", tried[-1]), *(("", t) for t in sorted(tried[1:-1])[: asked.best]),
        ]:  # fmt: skip
            print(f"  {mark:7}{name:34}{took:8.2f} us", flush=True)


if __name__ == "__main__":
    main()
