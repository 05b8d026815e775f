"""The gradients of pools from and to every layout, between pages that no one may touch, against their definition."""

from __future__ import annotations

from typing import Any

import guarded
import numpy as np
import pool_oracle
import pytest
from guarded import Guarded
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_cases import cases
from storage_oracle import stored

import blockconv as bc
from blockconv import AdaptivePool2dProblem, Pool2dBackwardProblem, Pool2dProblem
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.runtime import Program, address_of

pytestmark = pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
NAMES = tuple(str(layout) for layout in bc.NATIVE)
LAYOUTS = (*NAMES, "abdc", "cdba", "bcda", "adcb", "aBcd24b", "aBcd5b", "acBd4b", "ABcd2a4b", "ABcd16a16b")
POOLS = (
    Pool2dProblem("max", 2, 20, 9, 11, 3, 3, 2, 2, 1, 1),
    Pool2dProblem("max", 3, 5, 7, 6, 2, 3, 1, 2, 1, 0, 0, 1, 2, 1),
    Pool2dProblem("max", 1, 33, 8, 8, 2, 2, 3, 3, ceil_mode=True),
    Pool2dProblem("avg_include_padding", 2, 18, 9, 10, 4, 2, 2, 2, 2, 1),
    Pool2dProblem("avg_exclude_padding", 1, 7, 9, 10, 4, 4, 2, 2, 2, 1, ceil_mode=True),
    Pool2dProblem("avg_include_padding", 2, 4, 6, 6, 2, 2, 2, 2, divisor=-4),
    AdaptivePool2dProblem(2, 9, 8, 8, 2, 4),
    AdaptivePool2dProblem(1, 17, 3, 4, 5, 4),
    AdaptivePool2dProblem(2, 19, 5, 7, 1, 1),
    AdaptivePool2dProblem(2, 3, 1, 5, 2, 1),  # two windows of all there is
    AdaptivePool2dProblem(1, 3, 2, 5, 3, 90),
    Pool2dProblem("max", 2, 18, 6, 40, 5, 5, 1, 1, 2, 2),
    Pool2dProblem("avg_exclude_padding", 2, 5, 6, 40, 3, 3, 2, 2, 1, 1),
    Pool2dProblem("max", 2, 19, 5, 7, 5, 7, 1, 1),  # all pixels of a plane
    Pool2dProblem("avg_include_padding", 2, 6, 5, 7, 5, 7, 1, 1, divisor=3),
    # Averages that have no pixel in common: of whole vectors, cut at the end of a row, with pixels that no window has.
    Pool2dProblem("avg_include_padding", 2, 5, 5, 64, 2, 2, 2, 2),
    Pool2dProblem("avg_exclude_padding", 2, 5, 8, 67, 3, 2, 3, 2, 1, 0, ceil_mode=True),
    Pool2dProblem("avg_include_padding", 1, 3, 9, 53, 2, 5, 4, 5),
    AdaptivePool2dProblem(2, 3, 6, 72, 3, 24),
)
Pool = Pool2dProblem | AdaptivePool2dProblem


def arrays(p: Pool) -> tuple[Any, Any, Any]:
    """(gradient, indices, what has to come out): by each element's share of what a pool of it alone gives."""
    rng = np.random.default_rng(3)
    grad = 60.0 * rng.integers(-4, 5, p.dst_shape)
    indices, wanted = np.zeros(p.dst_shape, np.int64), np.zeros(p.src_shape)
    if isinstance(p, Pool2dProblem):
        given = (p.oh, p.ow), (p.kh, p.kw), (p.sh, p.sw), (p.ph, p.pw), (p.ph_r, p.pw_r), (p.dh, p.dw), p.divisor
        if p.kind == "max":
            x = rng.integers(-3, 4, p.src_shape).astype(np.float32)
            indices = pool_oracle.pool(x, "max", *given)[1]
            for place in np.ndindex(*p.dst_shape):
                wanted[place[:2]].reshape(-1)[indices[place]] += grad[place]
            return grad, indices, wanted
    for h, w in np.ndindex(p.ih, p.iw):
        one = np.zeros((1, 1, p.ih, p.iw))
        one[..., h, w] = 1
        shares = (
            pool_oracle.adaptive(one, (p.oh, p.ow))
            if isinstance(p, AdaptivePool2dProblem)
            else pool_oracle.pool(one, p.kind, *given)[0]
        )
        wanted[..., h, w] = (grad * shares).sum((2, 3))
    return grad, indices, wanted


def check(p: Pool, src: str, dst: str, dtype: str = "float32", threads: int = 2) -> None:
    grad, indices, wanted = arrays(p)
    problem, types = Pool2dBackwardProblem(p), Types.all(dtype)
    row = selection.choose("pool2d_backward", problem, Layout(src), Layout(dst), types)
    program = Program(row.prepare(problem, Layout(src), Layout(dst), types, threads).launches())
    source, where = stored(grad.astype(types.src.dtype), src, np.nan), stored(indices, src, -1)
    expected = stored(wanted.astype(types.src.dtype), dst, 0)
    for at in ("end", "start"):
        memories = [Guarded(array.nbytes) for array in (source, where, expected)]
        x, idx, out = (
            m.take(array.nbytes, at).view(array.dtype)
            for m, array in zip(memories, (source, where, expected), strict=True)
        )
        x[:], idx[:], out[:] = source.reshape(-1), where.reshape(-1), np.nan
        program.run((address_of(x), address_of(out), address_of(idx)), threads)
        assert all(memory.intact() for memory in memories)
        limit = {"float64": 1e-13, "float32": 1e-5}.get(dtype, 1e-2) * max(1.0, float(np.abs(wanted).max()))
        assert np.abs(out.astype(np.float64) - expected.reshape(-1)).max() <= limit, f"{p} {src} {dst} {dtype}"
        if problem.is_max and dtype in ("float32", "float64"):
            assert np.array_equal(out, expected.reshape(-1)), f"{p} {src} {dst}"


@pytest.mark.parametrize("pool", POOLS, ids=lambda p: f"{type(p).__name__}-{getattr(p, 'kind', '')}-{p.ic}")
@pytest.mark.sampled(10)
def test_every_layout(pool: Pool) -> None:
    for k, src in enumerate(LAYOUTS):
        check(pool, src, LAYOUTS[(5 * k + 2) % len(LAYOUTS)], threads=1 + k % 3)
        check(pool, src, src)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.sampled(6)
def test_types(dtype: str) -> None:
    for pool in (POOLS[0], POOLS[3], *POOLS[8:]):
        for src, dst in (("NCHW", "NHWC"), ("NCHW16", "NCHW16"), ("CHWN4", "NCHW")):
            check(pool, src, dst, dtype)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    n, c, h, w = (draw(st.integers(1, most)) for most in (3, 40, 12, 12))
    kernel, stride = (draw(st.tuples(*[st.integers(1, most)] * 2)) for most in (4, 3))
    kind = draw(st.sampled_from(("max", "avg_include_padding", "avg_exclude_padding", "adaptive")))
    if kind == "adaptive":
        return AdaptivePool2dProblem(n, c, h, w, *kernel)
    pads = draw(st.tuples(*[st.integers(0, kernel[k % 2] // 2) for k in range(4)]))
    dilation = draw(st.tuples(*[st.integers(1, 2)] * 2)) if kind == "max" else (1, 1)
    try:
        return Pool2dProblem(kind, n, c, h, w, *kernel, *stride, *pads, *dilation, ceil_mode=draw(st.booleans()))
    except ArgumentError:  # smaller than its kernel
        assume(False)
        raise


@pytest.mark.slow
@settings(max_examples=cases(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(pool=pools(), src=st.sampled_from(LAYOUTS), dst=st.sampled_from(LAYOUTS))
def test_random_pools(pool: Pool, src: str, dst: str) -> None:
    check(pool, src, dst)


def test_bits_are_the_same_for_any_number_of_threads() -> None:
    """Windows overlap, and bands and channels of tasks end between them."""
    for pool in (
        Pool2dProblem("max", 2, 40, 60, 50, 3, 3, 1, 1, 1, 1),
        Pool2dProblem("avg_include_padding", 1, 40, 90, 64, 3, 3, 1, 1),
    ):
        problem, rng = Pool2dBackwardProblem(pool), np.random.default_rng(0)
        grad, indices = (
            rng.standard_normal(pool.dst_shape),
            arrays(pool)[1] if pool.kind == "max" else np.zeros(1, np.int64),
        )
        for dtype, layout in (("float32", "NHWC"), ("float32", "NCHW"), ("bfloat16", "NCHW16")):
            types, found = Types.all(dtype), []
            x, where = (
                stored(grad.astype(types.src.dtype), layout, 0),
                stored(indices, layout, -1) if pool.kind == "max" else indices,
            )
            for threads in (1, 2, 3, 8):
                row = selection.choose("pool2d_backward", problem, Layout(layout), Layout(layout), types)
                out = np.empty(Layout(layout).size(pool.src_shape), types.src.dtype)
                program = Program(row.prepare(problem, Layout(layout), Layout(layout), types, threads).launches())
                program.run((address_of(x), address_of(out), address_of(where)), threads)
                found.append(out.tobytes())
            assert len(set(found)) == 1, (pool, dtype, layout)


def test_an_index_past_the_plane_names_no_pixel() -> None:
    """Nor does one that is a pixel's in its lowest 32 bits."""
    pool, types = Pool2dProblem("max", 1, 32, 8, 8, 2, 2, 2, 2), Types.all("float32")
    grad, indices, _ = arrays(pool)
    for layout in ("NCHW", "NHWC", "NCHW16"):
        problem = Pool2dBackwardProblem(pool)
        row = selection.choose("pool2d_backward", problem, Layout(layout), Layout(layout), types)
        program = Program(row.prepare(problem, Layout(layout), Layout(layout), types, 1).launches())
        x, where = stored(grad.astype("float32"), layout, 0), stored(indices + (1 << 32), layout, -1)
        out = np.full(Layout(layout).size(pool.src_shape), np.nan, "float32")
        program.run((address_of(x), address_of(out), address_of(where)), 1)
        assert not out.any(), layout


def test_a_problem_needs_a_pool() -> None:
    for bad in (5, None, Pool2dBackwardProblem(POOLS[0])):
        with pytest.raises(bc.ArgumentError, match=r"pool2d_backward: pool=.*: has to be a Pool2dProblem"):
            Pool2dBackwardProblem(bad)  # type: ignore[arg-type]


def test_explain_names_it() -> None:
    assert "pool_backward" in bc.explain(Pool2dBackwardProblem(POOLS[0]), "NHWC")
