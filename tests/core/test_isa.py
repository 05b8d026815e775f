"""Code for other machines than this one: Numba's features decide, and registers are of their width."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from blockconv.core import target

pytestmark = pytest.mark.skipif(not target.is_x86(), reason="of x86-64")

# What .ci/run sets too, to run the tests of reorders as another machine.
TARGETS = {
    "avx512": ("skylake-avx512", "+avx2,+fma,+avx512f,+avx512dq,+avx512vl,+avx512bw"),
    "avx2": ("haswell", "+avx2,+fma"),
    "sse": ("nehalem", "+sse4.2"),
}
VECTORS = {"avx512": (64, 32, True), "avx2": (32, 16, True), "sse": (16, 16, False)}

CODE = """
from blockconv.core import target
from blockconv.jit import families
from blockconv.kernels import TABLE
from blockconv.kernels.common.request import Request
from blockconv.core.layout import Layout
from blockconv.core.problem import ReorderProblem
from blockconv.core.types import Types
found = target.isa()
print(found.name, found.vector_bytes, found.registers, int(found.fma))
texts, generate = [], families.generate
def noted(*given):
    code = generate(*given)
    texts.append(code.asm())
    return code
families.generate = noted
for src, dst in (("NCHW", "NCHW16"), ("NCHW16", "NCHW"), ("NCHW", "NHWC"), ("NCHW16", "NCHW64")):
    asked = Request(ReorderProblem((1, 64, 32, 32), src, dst, 4), Layout(src), Layout(dst), Types.bits(4))
    made = [row.decide(asked) for row in TABLE if row.op == "reorder"]
    for one in made:
        if not isinstance(one, str):  # the reason why this reorder is none of the row's
            one.launches()
assert len(texts) > 1
print(*[sum(text.count("%" + register) for text in texts) for register in ("zmm", "ymm", "xmm")])
"""


SHUFFLED = """
from blockconv.kernels.common.interleaved import DENSE
from blockconv.kernels.common.microkernel import TileSpec, conv_tile
# Three pixels of bytes, of vectors of eight channels, are stored as planes: the other five are undefined.
spec = TileSpec(20, 0, 2, 3, 2, 8, 16, 1, 0, DENSE, dot=2, dst=33)
print(*(line.split()[0] for line in conv_tile.compile(*spec).code.asm().splitlines() if line.strip()))
"""


def test_bytes_are_not_shuffled_by_what_amds_processors_are_slow_at(run_python: Any, tmp_path: Path) -> None:
    features = "+avx2,+fma,+f16c,+bmi,+bmi2,+sse4a"
    done = run_python(SHUFFLED, NUMBA_CPU_NAME="znver3", NUMBA_CPU_FEATURES=features, BLOCKCONV_CACHE_DIR=str(tmp_path))
    made = set(done.stdout.split())
    assert "vpmaddwd" in made
    assert not made & {"insertq", "extrq"}


ONE_TAP = """
from blockconv.kernels.depthwise.kernels import depthwise_pixels
# Rows of 5 pixels of 16 signed bytes, of which one tap finds the image, as NCHW16 has them.
spec = [64, 16, 1, 16, 2, 5, 1, 1, 1, 0, 1, 64, 0, 1, 0, 20, 0, 0, 0, 17, 1, 0, 0, 0,
        80, 80, 16, 1, 1, 1, 0, 80, 320, 64, 0, 0, 1]
print("vpermb" in depthwise_pixels.compile(*spec).code.asm())
"""


def test_shuffles_of_signed_bytes_compile_for_intels_processors(run_python: Any, tmp_path: Path) -> None:
    """LLVM's instruction selection did not end."""
    features = TARGETS["avx512"][1] + ",+avx512vnni,+avx512vbmi"
    machine = {"NUMBA_CPU_NAME": "icelake-server", "NUMBA_CPU_FEATURES": features}
    assert run_python(ONE_TAP, **machine, BLOCKCONV_CACHE_DIR=str(tmp_path)).stdout == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("isa", TARGETS)
@pytest.mark.sampled(3)
def test_registers_are_of_the_width_that_numba_targets(isa: str, run_python: Any, tmp_path: Path) -> None:
    cpu, features = TARGETS[isa]
    done = run_python(CODE, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features, BLOCKCONV_CACHE_DIR=str(tmp_path))
    facts, counts = done.stdout.splitlines()
    assert facts == " ".join(map(str, (isa, *map(int, VECTORS[isa]))))
    zmm, ymm, xmm = map(int, counts.split())
    assert (zmm > 0) is (isa == "avx512")
    assert (ymm == 0) if isa == "sse" else (isa != "avx2" or ymm > 0)
    assert isa != "sse" or xmm > 0


@pytest.mark.isa
def test_this_run_is_for_the_machine_that_it_says() -> None:
    """.ci/run says which it is; without that, a test of the above."""
    wanted = os.environ.get("BLOCKCONV_TEST_ISA", target.isa().name)
    assert target.isa().name == wanted


def test_a_name_of_a_processor_alone_decides_nothing(run_python: Any) -> None:
    """Numba then still has this machine's features, so tiles have to be this machine's too."""
    found = run_python(
        "from blockconv.core import target; print(target.isa().name)", NUMBA_CPU_NAME="haswell"
    ).stdout.strip()
    assert found == run_python("from blockconv.core import target; print(target.isa().name)").stdout.strip()


@pytest.mark.parametrize("features", ["nope", "avx2", "+avx2,nope", "+avx2, +fma"])
def test_features_without_a_sign_are_refused(features: str, run_python: Any) -> None:
    """LLVM would end the process, already in `import blockconv`."""
    done = run_python("import blockconv", status=1, NUMBA_CPU_FEATURES=features)
    assert f"NUMBA_CPU_FEATURES={features!r}: has to be features with + or - before each" in done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="without glibc's sysconf")
def test_caches_are_as_large_without_sys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else other kernels are chosen in a container without /sys than where its cache was filled."""
    facts = target.second_level_cache, target.first_level_ways, target.cache_line
    wanted = [fact() for fact in facts]
    if not target.caches_are_known():
        pytest.skip("this machine tells no sizes")
    target._cache_fact.cache_clear()
    monkeypatch.setattr(target, "read_fact", lambda path: "")
    assert [fact() for fact in facts] == wanted
    assert target.caches_are_known()
    target._cache_fact.cache_clear()
