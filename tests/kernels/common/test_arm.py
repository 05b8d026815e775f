"""Code for Arm, which LLVM makes on any processor that its wheel knows Arm's on: read, and not run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import pytest
from machines import MACHINES, stand_in

from blockconv.core.types import element
from blockconv.jit import compiler
from blockconv.jit.families import KernelFamily
from blockconv.kernels.common.dot import tiles_of_registers
from blockconv.kernels.common.interleaved import DENSE
from blockconv.kernels.common.microkernel import TileSpec, conv_tile
from blockconv.kernels.common.pixel_tile import pixel_tile

NEON = MACHINES["neon, 1 MiB"]
FLOAT32, LANES = element("float32").code, 4
TRIPLE = "aarch64-unknown-linux-gnu"


@pytest.fixture(scope="module")
def neoverse() -> Iterator[Any]:
    """A target machine of Arm's, in place of this one's."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    with pytest.MonkeyPatch.context() as patched, stand_in(NEON):
        machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu="neoverse-v1", opt=3)
        patched.setattr(compiler, "_machine", lambda: machine)
        yield machine


def assembly(machine: Any, family: KernelFamily, given: tuple[int, ...]) -> str:
    """The assembly of a kernel."""
    body = family._build(given)
    body.__name__ = body.__qualname__ = "tile"
    return compiler.generate("tile", body).asm()


def loop_of_products(text: str) -> list[str]:
    """The instructions of the loop with the most multiply-adds: from its label to its branch."""
    lines = [line.strip() for line in text.splitlines()]
    labels = {line[:-1]: k for k, line in enumerate(lines) if line.startswith(".LBB") and line.endswith(":")}
    ends = ((labels.get(line.split()[-1]), k) for k, line in enumerate(lines) if line.startswith("b."))
    loops = [lines[start + 1 : k] for start, k in ends if start is not None and start < k]
    inner = [loop for loop in loops if not any(line in {f"{name}:" for name in labels} for line in loop)]
    return max(inner, key=lambda loop: sum("fmla" in line for line in loop))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("vectors", "pixels"), tiles_of_registers(NEON.isa, True))
@pytest.mark.parametrize("step", [4, 16])
def test_tiles_of_channels_are_in_registers(neoverse: Any, vectors: int, pixels: int, step: int) -> None:
    """Each product is one instruction, which broadcasts the source's scalar itself, and nothing is spilled."""
    spec = TileSpec(FLOAT32, 1, 1, pixels, vectors, LANES, step, LANES, 0, DENSE)
    loop = loop_of_products(assembly(neoverse, conv_tile, spec))
    products = [line for line in loop if line.startswith("fmla")]
    assert len(products) == vectors * pixels
    assert sum(bool(re.search(r"\.s\[\d\]$", line)) for line in products) >= len(products) - 2 * vectors
    spilled = [line for line in loop if "[sp" in line]
    assert not spilled or vectors == 1  # whose loads take longer than the products


@pytest.mark.parametrize(("vectors", "channels"), [(2, 13), (3, 8), (4, 6), (6, 4)])
def test_tiles_of_pixels_are_in_registers(neoverse: Any, vectors: int, channels: int) -> None:
    spec = TileSpec(FLOAT32, 1, 1, channels, vectors, LANES, 16, LANES, 0, DENSE, src_channel=4 * LANES * vectors)
    loop = loop_of_products(assembly(neoverse, pixel_tile, spec))
    assert sum(line.startswith("fmla") for line in loop) == vectors * channels
    assert not any("[sp" in line for line in loop)
