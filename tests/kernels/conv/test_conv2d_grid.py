"""Every kernel of the table on the grid of problems and pairs of layouts, against the oracle."""

from __future__ import annotations

import dataclasses
from collections import Counter

import conv_oracle
import numpy as np
import pytest
from conv_lab import NAMES, PAIRS, ROWS, check, data, rows
from conv_problems import AS_OTHERS, BATCHES, GRID, GROUPED, SAMPLED, SLOW, WHOLE, pairs

from blockconv.core import target
from blockconv.core.problem import Conv2dProblem
from blockconv.machine.profile import profile

MARKED = [pytest.param(d, marks=[pytest.mark.isa] * (d in AS_OTHERS) + [pytest.mark.slow] * (d in SLOW)) for d in GRID]


def read(descriptor: str) -> Conv2dProblem:
    return Conv2dProblem.from_descriptor(descriptor)


# ---------------------------------------------------------------- the oracle and the grid themselves


@pytest.mark.parametrize("descriptor", GRID)
@pytest.mark.parametrize("specials", [False, True], ids=["finite", "specials"])
def test_the_oracle_agrees_with_torch(descriptor, specials):
    torch = pytest.importorskip("torch")
    p = read(descriptor)
    given = data(p, "floats", "float64", residual=True, specials=specials)
    x = torch.nn.functional.pad(torch.from_numpy(given.x), (p.pw, p.pw_r, p.ph, p.ph_r))
    found = torch.nn.functional.conv2d(
        x, torch.from_numpy(given.w), torch.from_numpy(given.bias), (p.sh, p.sw), 0, (p.dh, p.dw), p.g
    ) + torch.from_numpy(given.residual)
    assert conv_oracle.error(found.numpy(), given.wanted) < 1e-13


def test_infinite_weights_meet_padding_as_in_torch():
    """Zero padding is multiplied: a border output whose infinite tap falls on it is NaN."""
    torch = pytest.importorskip("torch")
    x, w = np.ones((1, 1, 4, 4)), np.ones((1, 1, 3, 3))
    w[0, 0, 0, 0] = np.inf
    wanted = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1).numpy()
    found = conv_oracle.conv2d(x, w, pads=((1, 1), (1, 1)))
    assert np.array_equal(found, wanted, equal_nan=True)
    assert np.isnan(found[0, 0, 0]).all()
    assert np.isposinf(found[0, 0, 1:, 1:]).all()


def test_the_grid_covers_every_pair_many_times():
    for problems, least in ((GRID, 6), ([d for d in GRID if d not in SLOW], 4)):
        covered = Counter(pair for descriptor in problems for pair in pairs(descriptor))
        assert set(covered) == set(PAIRS)
        assert min(covered.values()) >= least
    assert len(NAMES) == 8


def test_the_table_has_its_rows():
    assert ROWS[-1].reference
    assert not any(row.reference for row in ROWS[:-1])
    p = read(WHOLE[0])
    assert all(rows(p, src, dst)[-1] is ROWS[-1] for src, dst in PAIRS)


# ---------------------------------------------------------------- the kernels


def each(descriptor, kind, dtype="float32", reference=True, turn=slice(None), **options):
    """Every row on every pair of a problem, or on the pairs of a turn; the threads go round from 1 to 4."""
    p = read(descriptor)
    given = data(p, kind, dtype, **options)
    for k, (src, dst) in enumerate(pairs(descriptor)[turn]):
        for row in rows(p, src, dst, dtype):
            if reference or not row.reference:
                check(row, p, src, dst, given, exact=kind == "integers", threads=1 + k % 4)


@pytest.mark.sampled(72)
@pytest.mark.slow
@pytest.mark.parametrize("descriptor", MARKED)
def test_float32(descriptor):
    """Exact on small integers, close on floats; NaN and infinity go where the definition sends them.

    One test, so that one process compiles a problem's kernels.
    """
    each(descriptor, "integers", residual=True)
    each(descriptor, "floats", reference=False, turn=slice(0, None, 3))
    each(descriptor, "floats", specials=True, turn=slice(1, None, 3))


@pytest.mark.slow
@pytest.mark.parametrize("descriptor", [WHOLE[1], SAMPLED[0], SAMPLED[8], GROUPED[0]])
@pytest.mark.sampled(2)
def test_float64(descriptor):
    each(descriptor, "floats", "float64", residual=True)
    each(descriptor, "floats", "float64", reference=False, specials=True)


@pytest.fixture
def small_cache(monkeypatch):
    """A second-level cache of 8 KiB, so that small problems are cut as large ones are."""
    monkeypatch.setattr(target, "second_level_cache", lambda: 8 << 10)


@pytest.mark.slow
@pytest.mark.parametrize("descriptor", [*WHOLE, *BATCHES, *SAMPLED[::3], *GROUPED[::2]])
@pytest.mark.sampled(20)
def test_cut_into_many_windows(descriptor, small_cache):
    each(descriptor, "integers", residual=True, reference=False)


def test_tiles_wider_than_would_be_chosen(monkeypatch):
    """Several vectors where a group ends inside a block: as if a tile took nothing but its multiply-adds."""
    known = profile()
    level = tuple(at._replace(step=at.pixels * at.vectors * known.fma) for at in known.tiles)
    pretended = dataclasses.replace(known, tiles=level)
    monkeypatch.setattr("blockconv.machine.machine.profile", lambda: pretended)
    for descriptor in SAMPLED[21:23]:
        each(descriptor, "integers", residual=True, reference=False)
