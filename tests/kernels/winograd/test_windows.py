"""Windows of the source that Winograd's tiles share: every width, cut anyhow, at the ends of arrays; their weights."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
from conv_lab import Canaried, Paged, check, data, rows, run

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import packing
from blockconv.dispatch.packing import pack_weights
from blockconv.kernels.winograd import blocking as winograd_blocking
from blockconv.kernels.winograd.blocking import blocking
from blockconv.machine.machine import host

pytestmark = pytest.mark.isa
NHWC = Layout("NHWC")
LAYOUTS = ("NCHW", "NCHW4", "NCHW8", "NHCW4", "CHWN4", "NHWC", "NCHW16")
CUT = Conv2dProblem.from_descriptor("mb2ic20ih18iw21oc24kh3kw3ph1pw1")


def row(problem, m=4):
    (found,) = [r for r in rows(problem, "NHWC", "NHWC") if r.name == f"conv_winograd_f{m}"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.sampled(2)
def test_every_width(stride):
    for width in (*range(1, 20), 31, 33):
        p = Conv2dProblem(1, 9, 7, width, 10, 3, 3, sh=stride, sw=stride, ph=1, pw=1)
        given, layout = data(p, "floats"), LAYOUTS[width % 5]
        for src in ("NCHW", layout):
            check(row(p), p, src, "NCHW", given)


@pytest.mark.parametrize("m", [2, 4, 6])
def test_windows_cut_anyhow_give_the_same_bits(m, monkeypatch):
    given = data(CUT, "floats", residual=True)
    wanted = run(row(CUT, m), CUT, "NCHW16", "NCHW", given).tobytes()
    shapes = set()
    for nbytes in (1, 4 << 10, 16 << 10, 1 << 20):
        monkeypatch.setattr(winograd_blocking, "WINDOW", nbytes)
        blocking.cache_clear()
        window = blocking(host(), CUT, NHWC, m, 1).window
        shapes.add((window.rows, window.cols))
        for src in LAYOUTS:
            assert run(row(CUT, m), CUT, src, "NCHW", given).tobytes() == wanted, (src, nbytes)
    blocking.cache_clear()
    assert len(shapes) > 2, "windows of one tile, of parts of a row, of rows"


@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("where", ["start", "end"])
def test_nothing_is_touched_beyond_the_arrays(where):
    for text in ("mb1ic7ih5iw14oc13", "mb1ic19ih9iw7oc20", "g5mb1ic20ih6iw17oc20"):
        p = Conv2dProblem.from_descriptor(f"{text}kh3kw3ph1pw1")
        given = data(p, "floats", residual=True)
        for layout in LAYOUTS:
            check(row(p), p, layout, layout, given, memory=Paged(where))


@pytest.mark.parametrize("m", [2, 4, 6])
def test_weights_of_groups_that_do_not_exist_are_zeros(m, monkeypatch):
    """They are multiplied; what memory held before may be nearly 0, and products of that take a processor long."""
    p = Conv2dProblem.from_descriptor("g5mb1ic20ih9oc20kh3ph1")
    given, form = data(p, "floats"), row(p, m).prepare(p, NHWC, NHWC, Types.all("float32")).form
    at = blocking(host(), p, NHWC, m, 1)
    if at.sets * at.set_groups == p.g:
        pytest.skip("vectors of one group")

    def poisoned(nbytes):
        memory = Canaried().take("weights", nbytes, 4)
        memory[:] = 0x55
        return memory

    monkeypatch.setattr(packing, "aligned_empty", poisoned)
    packed = pack_weights(p, given.w, form).view(np.float32).reshape(at.sets * at.set_ocbs, at.wei_positions, -1)
    used = packed[p.g * at.ocbs :, :, : at.elements(p.ic // p.g) * at.width]
    assert used.size
    assert not np.any(used)
