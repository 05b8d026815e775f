"""The same kernels as another machine would compile them: results, width of the registers, no trace of the GIL.

A child is told by NUMBA_CPU_NAME and NUMBA_CPU_FEATURES what to be. The widest is what the other tests run on
where the machine has it, so there only the assembly is looked at.
"""

from __future__ import annotations

import re
import sys

import pytest
from conv_lab import check, data, rows

from blockconv import jit
from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types, element
from blockconv.kernels.common.microkernel import conv_tile
from blockconv.kernels.common.pixel_tile import pixel_tile
from blockconv.kernels.table import Epilogue
from blockconv.kernels.winograd.source import winograd_source

# name: (processor, features, registers that have to be there, registers that must not)
MACHINES = {
    "sse": ("nehalem", "+sse4.2", "xmm", "[yz]mm"),
    "avx2": ("haswell", "+avx2,+fma", "ymm", "zmm"),
    "avx512": (None, None, "zmm", "none"),
}
LAYOUTS = ("NCHW", "NHWC", "NCHW16")
PROBLEMS = (
    "mb1ic17ih7oc33kh3ph1",
    "mb2ic5ih7oc65kh1",
    "g3mb1ic12ih7oc18kh3ph1",
)  # few: CI runs the tests that are marked `isa` as these machines

ALONG_PIXELS = "mb1ic64ih56oc256kh1"
ENDS_INSIDE = "g2mb1ic12ih7oc30kh3ph1"  # groups that end inside a block, but fill a vector


@pytest.mark.nightly
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.sampled(3)
def test_as_another_machine(name, run_python):
    if not target.is_x86():
        pytest.skip("of x86 processors")
    if name == "avx512" and target.isa().name != "avx512":
        pytest.skip("this machine has no AVX-512")
    processor, features, *_ = MACHINES[name]
    done = run_python([__file__, name], NUMBA_CPU_NAME=processor, NUMBA_CPU_FEATURES=features)
    runs = re.search(r"right: (\d+) runs", done.stdout)
    # Two rows at least, in each layout.
    assert int(runs[1]) >= 2 * len(LAYOUTS) * len(PROBLEMS) if processor else runs is None
    assert "compiled: 6" in done.stdout


def test_no_kernel_of_a_convolution_takes_the_gil():
    """As this machine compiles them."""
    for descriptor, dst in ((PROBLEMS[0], "NCHW"), (PROBLEMS[2], "NCHW16")):
        assert_clean(fresh(descriptor, "NHWC", dst))


def fresh(
    descriptor: str, src: str, dst: str, dtype: str = "float32", act: int = 0, name: str = "conv_direct"
) -> jit.Kernel:
    """The kernel that computes tiles in a row for a problem, compiled now."""
    p, family = Conv2dProblem.from_descriptor(descriptor), pixel_tile if name == "conv_pixels" else conv_tile
    row = next(row for row in rows(p, src, dst) if row.name == name)
    source, destination = (Layout(name) for name in (src, dst))
    (op,) = row.prepare(p, source, destination, Types.all(dtype)).launches(Epilogue(act))
    params, _ = next(item for item in family._kernels.items() if item[1].address == op.args.tile)
    return family.compile(*params)


def assert_clean(kernel: jit.Kernel) -> None:
    found = re.findall(r"gil_ensure|PyGIL\w+|PyErr\w+|NRT_\w+|numba_unpickle|\bmalloc\b", kernel.code.llvm())
    assert not found, f"{kernel.name}: {found}"


def run_as(name: str) -> None:
    *_, wide, too_wide = MACHINES[name]
    assert target.isa().name == name, target.isa()
    if MACHINES[name][0] is not None:
        run_problems()
    look_at_assembly(wide, too_wide)


def run_problems() -> None:
    runs = 0
    for descriptor in PROBLEMS:
        p = Conv2dProblem.from_descriptor(descriptor)
        given = data(p, residual=True)
        for layout in LAYOUTS:
            for row in rows(p, layout, layout):
                check(row, p, layout, layout, given, exact=True)
                runs += 1
    print(f"right: {runs} runs")


def look_at_assembly(wide: str, too_wide: str) -> None:
    plain = [
        fresh(PROBLEMS[0], "NHWC", "NCHW16"),
        fresh(PROBLEMS[0], "NCHW", "NCHW"),
        fresh(PROBLEMS[0], "NHWC", "NHWC", "float64"),
        fresh(ALONG_PIXELS, "NCHW", "NCHW", name="conv_pixels"),
        fresh(ALONG_PIXELS, "NCHW", "NCHW", "float64", name="conv_pixels"),
    ]
    kernels = [*plain, fresh(ENDS_INSIDE, "NCHW16", "NCHW16", act=2)]
    for kernel in kernels:
        assert_clean(kernel)
        assembly = kernel.code.asm()
        multiplied = re.findall(r"\bv?(?:fmadd\w+|mul)p[sd]\b.*", assembly)
        assert any(wide in line for line in multiplied), f"{kernel.name} multiplies without {wide}"
        assert kernel not in plain or not spills(assembly), f"{kernel.name} spills where it multiplies"
        beyond = re.findall(rf".*%{too_wide}[0-9].*", assembly)
        assert not beyond, f"{kernel.name} uses {beyond[0]}"
    look_at_spills()
    print(f"compiled: {len(kernels)}")


def look_at_spills() -> None:
    """A kernel that has to spill keeps vectors at addresses of whole vectors: no one is in two lines of the cache."""
    lanes, fma = target.isa().vector_bytes // 4, int(target.isa().fma)
    assembly = winograd_source.compile(4, 1, 0, lanes, lanes, fma, 0, element("float32").code).code.asm()
    assert re.search(r"\bv?mova\w+\s.*\(%rsp\)", assembly), "it spills nothing, and shows nothing"
    cut = re.findall(r"\bv?movu\w+\s.*\(%rsp\).*", assembly)
    assert not cut, cut


def spills(assembly: str) -> list[str]:
    """Vector registers kept on the stack inside the blocks of code that hold a tile's multiplications."""
    blocks = re.split(r"^\.LBB.*$", assembly, flags=re.MULTILINE)
    inner = [block for block in blocks if len(re.findall(r"\bv?(?:fmadd\w+|mul)p[sd]\b", block)) >= 4]
    assert inner, "no block multiplies a tile"
    return re.findall(r".*\(%rsp\).*%[xyz]mm.*|.*%[xyz]mm.*\(%rsp\).*", "".join(inner))


if __name__ == "__main__":
    run_as(sys.argv[1])
