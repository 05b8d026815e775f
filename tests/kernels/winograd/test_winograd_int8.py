"""Winograd convolution of integers: every bit that the definition gives, or a sentence that says why not."""

from __future__ import annotations

import dataclasses
import importlib

import guarded
import numpy as np
import pytest
from conv_lab import Memory, Paged
from quantized_lab import Case, case, check, finished, has_dot, run
from storage_oracle import places

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import LIGHT, Types
from blockconv.dispatch import selection
from blockconv.dispatch.quantizing import is_light, with_weights
from blockconv.kernels.common.dot import DOTS
from blockconv.kernels.common.request import Request
from blockconv.kernels.winograd.transforms import (
    EXACT_FORMS,
    destination_1d,
    source_1d,
    transform_2d,
    weight_factors,
)

ROW = selection.named("conv2d", "conv_winograd_f4_int8")
RAGGED = "mb2ic17ih13iw14oc33kh3kw3ph1pw1"
SMALL = "mb1ic9ih5iw7oc19kh3kw3ph1pw1"


def exact(made: Case, src: str = "NHWC", dst: str = "NHWC", threads: int = 2, memory: Memory | None = None) -> None:
    assert ROW.rejects(made.problem, Layout(src), Layout(dst), made.types) is None
    check(made, src, dst, threads, memory, [ROW])


# A kernel of each stage serves many of these: the layouts that it loads from, or stores to, as others do.
CASES = (
    ("NHWC", "NHWC", {"act": "relu"}),
    ("NCHW32", "NCHW64", {"residual": "uint8"}),
    ("NCHW64", "NCHW16", {"residual": "int8", "act": ("clip", -0.5, 2.0)}),
    ("NCHW", "NCHW4", {}),
    ("NCHW4", "NCHW", {"residual": "uint8", "act": "relu"}),
    ("CHWN4", "NHWC", {"dst": "int8"}),
    ("NCHW", "CHWN4", {"residual": "int8", "sum_scale": 0.03, "sum_zero_point": 117}),
    ("NHWC", "NHWC", {"act": "relu", "sum_scale": 0.03, "sum_zero_point": 117, "affine": True}),
    ("NCHW32", "NCHW64", {"residual": "uint8", "affine": True}),
    ("NCHW4", "NCHW", {"sum_scale": 0.03, "sum_zero_point": 117, "affine": True}),
    ("NHWC", "NHWC", {"src": "int8", "dst": "int32"}),
    ("NCHW64", "NCHW", {"src": "int8", "dst": "float32", "residual": "float32", "act": "relu"}),
)


@pytest.mark.isa
@pytest.mark.parametrize(("src", "dst", "kind"), CASES, ids=str)
@pytest.mark.sampled(3)
def test_layouts_and_what_becomes_of_sums(src, dst, kind):
    """Ragged channels, tiles over every edge, several images; one image smaller than a tile; several vectors."""
    for k, descriptor in enumerate((RAGGED, SMALL, "mb1ic96ih6iw29oc48kh3kw3ph0pw2", "mb3ic40ih9iw4oc16kh3kw3ph2pw0")):
        exact(case(descriptor, **kind), src, dst, threads=1 + k)


def test_what_bounds_no_bytes():
    """An activation that is computed, and ties that are rounded away from zero."""
    exact(case(RAGGED, act=("leaky_relu", 0.25), away=True, residual="uint8"))
    scales = {"src_scale": 1.0, "wei_scale": 0.5, "dst_scale": 1.0}
    made = case(RAGGED, act=("leaky_relu", 0.5), away=True, zero_point=0, **scales)
    exact(finished(dataclasses.replace(made, x=made.x % 2, w=made.w % 3 - 1, bias=made.bias % 8)))


@pytest.mark.isa
@pytest.mark.parametrize("src", ["uint8", "int8"])
def test_the_ends_of_ranges(src):
    """Nothing but the ends of ranges, of one sign and of both, and as many channels as surely fit."""
    low, high = (0, 255) if src == "uint8" else (-128, 127)
    for zero_point in (low, high):
        for descriptor in (SMALL, "mb1ic113ih6iw5oc16kh3kw3ph1pw1"):
            made = case(descriptor, src, "int32", zero_point=zero_point, ends=True)
            exact(made)
            for x in (low, high):
                exact(finished(dataclasses.replace(made, x=np.full_like(made.x, x), w=np.full_like(made.w, -128))))


def with_sums(positive: int, negative: int, src: str = "uint8") -> Case:
    """Weights whose positive and negative ones of an output channel add up to this, on the sources that meet them."""
    made = case("mb1ic256ih4iw4oc16kh3kw3", src, "int32", zero_point=0)
    w = np.zeros((16, 256 * 9), np.int8)
    for row, (most, total) in zip((w[:, ::2], w[:, 1::2]), ((127, positive), (-128, -negative)), strict=True):
        whole, rest = divmod(abs(total), abs(most))
        row[:, :whole], row[:, whole] = most, np.sign(most) * rest
    assert (np.maximum(w, 0).sum(1, np.int64) == positive).all()
    assert (np.minimum(w, 0).sum(1, np.int64) == -negative).all()
    ends = (0, 255) if src == "uint8" else (-128, 127)
    x = np.where(w[0].reshape(256, 3, 3) > 0, ends[1], ends[0])
    x = np.pad(x, ((0, 0), (0, 1), (0, 1)), mode="edge")[None]
    return finished(dataclasses.replace(made, x=x.astype(made.x.dtype), w=w.reshape(made.w.shape)))


def test_sums_up_to_the_bound_are_exact_and_others_are_refused():
    for src in ("uint8", "int8"):
        made = with_sums(LIGHT - 1, LIGHT - 1, src)
        assert is_light(made.w)
        assert np.abs(made.wanted).max() > 2**24
        exact(made)
    for sums in ((LIGHT, 0), (0, LIGHT)):
        made = with_sums(*sums)
        assert not is_light(made.w)
        assert "sums below 33554432" in ROW.rejects(made.problem, Layout("NHWC"), Layout("NHWC"), made.types)


def test_beyond_the_bound_sums_are_wrong(monkeypatch):
    """As they wrap at 2^25: why weights have to be light."""
    made = case("mb1ic256ih4iw4oc16kh3kw3", "int8", "int32", zero_point=0)
    full = finished(dataclasses.replace(made, x=np.full_like(made.x, -128), w=np.full_like(made.w, -128)))
    types = made.types._replace(wei=dataclasses.replace(made.types.wei, light=True))  # as if the weights were
    monkeypatch.setattr(type(made), "types", types)
    out = run(ROW, full, "NHWC", "NHWC")[places("NHWC", made.problem.dst_shape)[0]]
    difference = full.wanted.astype(np.int64) - full.bias[:, None, None]
    assert (difference == 256 * 9 * 2**14).all()
    assert (out.astype(np.int64) - full.bias[:, None, None] == difference - 2**26).all()


def test_weights_of_few_products_are_light_whatever_they_are():
    for ic, light in ((113, True), (114, False)):
        w = np.full((4, ic, 3, 3), -128, np.int8)
        assert is_light(w) == light
        assert with_weights(Types.quantized("uint8", "uint8"), w).wei.light == light
        p = Conv2dProblem(1, ic, 8, 8, 4, 3, 3)
        assert (ROW.rejects(p, *map(Layout, ("NHWC", "NHWC")), Types.quantized("uint8", "uint8")) is None) == light


@pytest.mark.isa
def test_groups_are_whole_vectors():
    exact(case("g3mb1ic192ih6iw7oc96kh3kw3ph1pw1"))
    p = Conv2dProblem.from_descriptor("g2mb1ic40ih6iw7oc64kh3kw3ph1pw1")
    assert "groups of a multiple" in ROW.rejects(p, Layout("NHWC"), Layout("NHWC"), Types.quantized("uint8", "uint8"))


@pytest.mark.skipif(not guarded.available(), reason="needs mprotect")
@pytest.mark.isa
@pytest.mark.parametrize("where", ["start", "end"])
def test_nothing_is_touched_beyond_the_arrays(where):
    for descriptor in (RAGGED, SMALL, "mb1ic3ih3iw4oc5kh3kw3ph1pw1"):
        for src, dst in (("NHWC", "NHWC"), ("NCHW", "NCHW"), ("NCHW4", "NCHW64"), ("NCHW32", "CHWN4")):
            exact(case(descriptor), src, dst, memory=Paged(where))


@pytest.mark.parametrize("name", ["vpmaddwd", "vpmaddwd, emulated"])
def test_every_multiply_accumulate(name, monkeypatch):
    if not has_dot(name):
        pytest.skip(f"{target.isa().name} has no {name}")
    module = importlib.import_module("blockconv.kernels.winograd.blocking")
    monkeypatch.setattr(module, "dot_of_words", lambda isa: DOTS[name])
    exact(case(RAGGED, ends=True))


class Growth:
    """Stands for the transforms' vectors: values are factors of what goes in, in the last axis; all are whole."""

    @staticmethod
    def add_multiple(acc, factor, x):
        assert float(factor).is_integer()
        return int(factor) * x if acc is None else acc + int(factor) * x

    @classmethod
    def sum_of_multiples(cls, factors, values):
        return sum(cls.add_multiple(None, factor, x) for factor, x in zip(factors, values, strict=True))


@pytest.mark.parametrize("form", EXACT_FORMS)
def test_transforms_are_whole_and_fit_16_bits(form):
    side, v = form.side, Growth()
    tile = np.eye(side**2, dtype=np.int64).reshape(side, side, -1)
    source = np.array(list(transform_2d(v, source_1d, form, lambda k: list(tile[:, k]), side)))
    assert 255 * np.abs(source).sum(-1).max() < 2**15
    factors = np.array(weight_factors(form)).astype(np.int64)
    weights = np.einsum("ar,bc->abrc", factors, factors).reshape(side, side, -1)
    assert 128 * np.abs(weights).sum(-1).max() < 2**15
    products = np.einsum("abp,abt->abpt", source, weights).reshape(side, side, -1)
    pixels = np.array(list(transform_2d(v, destination_1d, form, lambda k: list(products[:, k]), side)))
    pixels = pixels.reshape(form.m, form.m, side, side, 3, 3)
    wanted = np.zeros_like(pixels)
    for row, col, r, c in np.ndindex(form.m, form.m, 3, 3):
        wanted[row, col, row + r, col + c, r, c] = form.unit**2
    assert np.array_equal(pixels, wanted)


def test_predictions_choose():
    """Where tiles are whole it multiplies less than the direct kernel, and where most of a tile is not, more."""
    for ic, size, wanted in ((64, 56, True), (512, 1, False)):
        p = Conv2dProblem(1, ic, size, size, ic, 3, 3, ph=1, pw=1)
        types = Types.quantized("uint8", "uint8")
        types = types._replace(wei=dataclasses.replace(types.wei, light=True))
        found = selection.decisions("conv2d", Request(p, Layout("NHWC"), Layout("NHWC"), types))
        direct, ours = (
            next(one for row, one in found.items() if row.name == name) for name in ("conv_direct", ROW.name)
        )
        assert (ours.seconds < direct.seconds) == wanted
