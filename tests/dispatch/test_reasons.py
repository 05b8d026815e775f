"""Every sentence by which a row refuses a problem is true of the problem: the problem breaks what the row needs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

import blockconv as bc
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels.common.request import Request
from blockconv.kernels.rewritten import runs_down, transposed_problem

LAYOUTS = ("NCHW", "NHWC", "NCHW4", "NCHW16", "NCHW64", "CHWN", "CHWN4")
TYPES = (Types.all("float32"), Types.all("float64"), Types.all("float16"), Types.quantized("uint8", "uint8"))
Broken = Callable[..., bool]  # of the problem and the numbers of the sentence: whether the problem breaks the rule


def of_group(p: Any) -> tuple[int, int]:
    return p.ic // p.g, p.oc // p.g


def always(p: Any, *numbers: int) -> bool:
    """Sentences about types and layouts: `unlike` names the layout that breaks the rule."""
    return True


# What a row needs, as a pattern with numbers. A new sentence is a new entry.
CLAIMS: dict[str, Broken] = {
    r"does not take .*": always,
    r"does not change the layout": always,
    r"is for processors with .*": always,
    r"needs .*, unlike .*": always,
    r"has an error of up to .*": always,
    r"needs sources of at least (\d+) (?:elements|bytes)": lambda p, least: True,
    r"needs weights that are known to be finite": always,
    r"needs groups of one input channel, not of (\d+)": lambda p, ic: ic == of_group(p)[0] != 1,
    r"needs fewer outputs of the only channel than .*": lambda p: (p.g, p.ic) == (1, 1) and p.oc > 1,
    r"needs several groups": lambda p: p.g == 1,
    r"needs groups of at least two input channels": lambda p: of_group(p)[0] < 2,
    r"needs groups of at most (\d+) (in|out)put channels, not (\d+)": lambda p, most, end, n: (
        n == of_group(p)[end == "out"] > most
    ),
    r"needs groups of at least (\d+) output channels, .*": lambda p, least: of_group(p)[1] < least,
    r"needs groups of a multiple of (\d+) channels": lambda p, unit: any(n % unit for n in of_group(p)),
    r"needs groups of a multiple of (\d+) input and (\d+) output channels": lambda p, *units: any(
        n % unit for n, unit in zip(of_group(p), units, strict=True)
    ),
    r"needs groups whose channels are contiguous in fours": lambda p: p.g > 1,
    r"needs groups that begin and end at .*": lambda p: p.g > 1,
    r"needs .*, unlike \w+, or at most (\d+) output channels in one group, not (\d+) in (\d+)": lambda p, most, oc, g: (
        (oc, g) == (p.oc, p.g) and (g > 1 or oc > most)
    ),
    r"needs rows of at least (\d+) output pixels, not (\d+)": lambda p, least, n: n < least,
    r"needs rows of fewer than (\d+) vectors": always,
    r"needs 3x3 windows": lambda p: (p.kh, p.kw) != (3, 3),
    r"needs stride (\d+)(?: or (\d+))? in both directions, and dilation 1": lambda p, *known: (
        p.sh != p.sw or p.sh not in known or (p.dh, p.dw) != (1, 1)
    ),
    r"needs stride 1": lambda p: (p.sh, p.sw) != (1, 1),
    r"needs stride 1 along the row, .*": lambda p: (p.sh, p.sw) != (1, 1),
    r"needs stride 1 and a dilation": lambda p: (p.sh, p.sw) != (1, 1) or (p.dh, p.dw) == (1, 1),
    r"needs (\d+) to (\d+) regions, not (\d+)": lambda p, least, most, n: not least <= n <= most,
    r"needs at most (\d+) channels, or weights that .*": lambda p, most: of_group(p)[0] > most,
    # pools
    r"needs several windows, which share columns": lambda p: p.oh * p.ow == 1 or p.ow == 1 or p.oh == 1,
    r"needs a stride of at most (\d+) along the row, not (\d+), .*": lambda p, most, n: n > most,
    r"needs a stride of at least (\d+) along the row, not (\d+)": lambda p, least, n: n == p.sw < least,
    r"needs stride 1, and as many output columns as input columns": lambda p: (
        (p.sh, p.sw) != (1, 1) or p.ow != p.iw or p.oh != p.ih
    ),
    r"needs windows of at most (\d+) rows and columns": lambda p, most: max(p.kh, p.kw) > most,
    r"needs strides up to (\d+), windows of up to (\d+) columns, and .*": lambda p, stride, columns: (
        max(p.sh, p.sw) > stride or p.kw > columns
    ),
    r"needs sums of the input's type, .*": always,
    r"a pixel of \w+ has (\d+) elements here, more than (\d+)": lambda p, n, most: n > most,
    r"a pixel of \w+ has (\d+) elements here, fewer than a vector's (\d+)": lambda p, n, least: n < least,
    r"a pixel of \w+ has (\d+) elements here, which fill whole vectors without shuffles": lambda p, n: n % 2 == 0,
    r"contiguous pixels at stride (\d+) fill vectors without shuffles": lambda p, stride: stride == p.sw,
    r"rows have at least (\d+) vectors, and shuffles are faster": always,
    r"the windows overlap, .*": lambda p: p.kw > p.sw or p.kh > p.sh,
    r"the vector registers hold (\d+) columns of a window, in tiles": lambda p, n: n == p.kw,
    r"the vector registers do not hold (\d+) columns of a window": lambda p, n: n == p.kw,
}


def read(text: str) -> Any:
    return int(text) if text and text.isdigit() else text


def false_of(problem: Any, reason: str) -> str | None:
    """Why a sentence is not true of a problem, or unknown."""
    for pattern, broken in CLAIMS.items():
        found = re.fullmatch(pattern, reason)
        if found and "unlike" in pattern and "or at most" in reason and "or at most" not in pattern:
            continue
        if found:
            return None if broken(problem, *map(read, found.groups())) else "is false"
    return "is no known sentence"


def conv(rng: random.Random) -> bc.Conv2dProblem:
    g = rng.choice([1, 1, 2, 8])
    ic, oc = (g * rng.choice([1, 1, 2, 4, 16]) for _ in range(2))
    kernel, step = rng.choice([(1, 1), (3, 3), (3, 3), (1, 3), (5, 3)]), rng.choice([1, 1, 2])
    d = rng.choice([1, 1, 2])
    ih, iw = (rng.choice([1, 5, 14, 56]) for _ in range(2))
    pads = [size // 2 * d for size in kernel]
    return bc.Conv2dProblem(
        rng.choice([1, 2, 16]), ic, ih, iw, oc, *kernel, step, rng.choice([1, step]), *pads, dh=d, dw=d, g=g
    )


def pool(rng: random.Random) -> bc.Pool2dProblem:
    ih, iw = (rng.choice([1, 5, 14, 56]) for _ in range(2))
    kernel = rng.choice([(1, 1), (2, 2), (3, 3), (1, 3), (5, 2), (ih, iw)])
    step = rng.choice([1, 1, 2, 9])
    kind: Any = rng.choice(["max", "avg_include_padding", "avg_exclude_padding"])
    pads = [size // 2 for size in kernel]
    return bc.Pool2dProblem(
        kind, rng.choice([1, 2, 16]), rng.choice([1, 3, 16]), ih, iw, *kernel, step, rng.choice([1, step]), *pads
    )


@pytest.mark.parametrize("op", ["conv2d", "pool2d"])
@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_every_refusal_is_true(op: str, count: int) -> None:
    rng = random.Random(5)
    wrong: dict[str, Any] = {}
    for _ in range(count):
        problem = conv(rng) if op == "conv2d" else pool(rng)
        src, dst = (Layout(rng.choice(LAYOUTS)) for _ in range(2))
        for types in TYPES:
            for row, one in selection.decisions(op, Request(problem, src, dst, types)).items():
                # A kernel gets an image that runs down as one that runs along, and says what that breaks.
                taken = transposed_problem(problem) if runs_down(problem, dst) else problem
                if isinstance(one, str) and (why := false_of(taken, one)) and false_of(problem, one):
                    said = re.sub(r"\d+", "#", one)
                    wrong.setdefault(f"{row.name}: {said}", f"{why}: {one}, {problem}, {src}, {dst}")
    assert not wrong, "\n".join(f"{said}: {why}" for said, why in wrong.items())


def test_few_outputs_of_one_channel_are_depthwise() -> None:
    for oc, wanted in ((1, None), (64, "needs fewer outputs of the only channel than a vector has, which other")):
        told = bc.explain(bc.Conv2dProblem(n=1, ic=1, ih=8, iw=8, oc=oc, kh=3, kw=3), "NCHW")
        (why,) = [one["why_not"] for one in told.candidates if one["kernel"] == "conv_depthwise"]
        assert (why and why.startswith(wanted)) if wanted else why is None
