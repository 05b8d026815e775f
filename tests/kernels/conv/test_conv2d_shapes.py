"""Every 2-D problem of benchdnn's shape files, one image each, in NCHW and one of two other layouts, against torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import conv_oracle
import numpy as np
import pytest

import blockconv as bc
from bench.shape_files import read_shape_file
from blockconv.core.problem import Conv2dProblem

torch = pytest.importorskip("torch")

SHAPES = Path(__file__).parents[3] / "bench" / "shapes"
FILES = sorted(path for path in SHAPES.glob("*.txt") if not path.name.startswith("pool"))


def problems(path: Path) -> dict[Conv2dProblem, str]:
    """With their names; a problem that two files hold is run for the first."""
    found = read_shape_file(path, "conv2d", skip_unsupported=True)
    return {dataclasses.replace(p, n=1): p.name for p in found}  # type: ignore[arg-type]


ALL: dict[Conv2dProblem, str] = {}
for file in FILES:
    ALL = {**problems(file), **ALL}


def test_the_files_hold_what_they_should():
    assert len(FILES) >= 6
    assert len(ALL) >= 120


# Every other one where tests may take long, in pairs, so that each layout has both.
CASES = [pytest.param(k, p, marks=[pytest.mark.slow] * (k % 4 > 1), id=name) for k, (p, name) in enumerate(ALL.items())]


@pytest.mark.parametrize(("number", "problem"), CASES)
@pytest.mark.sampled(9)
def test_problem(number, problem):
    p = problem
    rng = np.random.default_rng(0)
    x = rng.standard_normal(p.src_shape, np.float32)
    w = rng.standard_normal((p.oc, p.ic // p.g, p.kh, p.kw), np.float32)
    bias = rng.standard_normal(p.oc, np.float32)
    pads = ((p.ph, max(p.ph_r, 0)), (p.pw, max(p.pw_r, 0)))
    padded = torch.from_numpy(np.pad(x, ((0, 0), (0, 0), *pads)))
    with torch.no_grad():
        wanted = torch.nn.functional.conv2d(
            padded, torch.from_numpy(w), torch.from_numpy(bias), (p.sh, p.sw), 0, (p.dh, p.dw), p.g
        ).numpy()
    conv = bc.Conv2d(w, bias, (p.sh, p.sw), pads, (p.dh, p.dw), p.g)
    for given in (x, bc.to_layout(x, ("NHWC", "NCHW16")[number % 2])):
        found = conv(given)
        found = found.numpy() if isinstance(found, bc.BlockedArray) else found
        assert conv_oracle.error(found[:, :, : p.oh, : p.ow], wanted[:, :, : p.oh, : p.ow]) < 1e-5
