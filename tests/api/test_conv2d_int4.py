"""`conv2d` and `Conv2d` on packed integers of 4 bits, by MegEngine's formulas; packed weights in any layout."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import quantized_oracle
from quantized_oracle import Steps, limits

import blockconv as bc
from blockconv import Quantization
from blockconv.core import target
from blockconv.core.types import Types
from blockconv.kernels.common.dot import dot_for

RNG = np.random.default_rng(4)
SHAPE = (2, 19, 6, 6)
W = RNG.integers(-8, 8, (21, 19, 3, 3)).astype(np.int8)
B = RNG.integers(-300, 300, 21).astype(np.int32)
PADS = ((1, 1), (1, 1))


def some(dtype: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Integers of the whole range of a type, one a byte."""
    low, high = limits(dtype)
    return RNG.integers(low, high, shape, dtype.replace("int4", "int8"), endpoint=True)


def packed(x: np.ndarray, dtype: str, layout: str = "NCHW64", zero_point: int = 0) -> bc.BlockedArray:
    given = dtype if "int4" in dtype else None
    return bc.BlockedArray.from_numpy(x, layout, dtype=given, zero_point=zero_point)


def four(w: np.ndarray, layout: str = "OIHW") -> bc.BlockedArray:
    return bc.BlockedArray.from_numpy(w, layout, dtype="int4")


# ---------------------------------------------------------------- MegEngine's formulas

SRC, FILTER, BIAS_SCALE, ADDED, DST = (
    Fraction(1, 2),
    Fraction(1, 64),
    Fraction(1, 128),
    Fraction(3, 16),
    Fraction(3, 4),
)


def megengine(x, zero_point, z, z_zero_point, dst, dst_zero_point):
    """Q(relu(ss * fs * (conv + bias) + zs * (z - z_zp))) in exact arithmetic: Q rounds half away from zero."""
    total = quantized_oracle.sums(x, W, B, zero_point, pads=PADS)
    numerator = total.astype(np.int64) * int(SRC * FILTER * 1024)
    if z is not None:
        numerator = numerator + (z.astype(np.int64) - z_zero_point) * int(ADDED * 1024)
    numerator = np.maximum(numerator, 0)
    if dst == "float32":
        return (numerator / 1024).astype(np.float32)
    # numerator / 1024 / DST, a half away from zero: of numbers that are not negative, the floor of a half more.
    whole = (2 * numerator * DST.denominator + 1024 * DST.numerator) // (2 * 1024 * DST.numerator)
    return np.clip(whole + dst_zero_point, *limits(dst)).astype(dst.replace("int4", "int8"))


# (source, weights, destination, zero point of the source, of the destination): S8 and S4 have none.
FORMULAS = [
    ("int8", "int8", "int8", 0, 0),
    ("int8", "int8", "float32", 0, 0),
    ("int8", "int8", "int4", 0, 0),
    ("int4", "int4", "int4", 0, 0),
    ("int4", "int4", "int8", 0, 0),
    ("uint4", "int4", "uint4", 9, 0),
    ("uint4", "int4", "uint4", 15, 6),
    ("uint4", "int4", "uint8", 0, 0),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("src", "wei", "dst", "zero_point", "dst_zero_point"), FORMULAS)
def test_megengines_formulas(src, wei, dst, zero_point, dst_zero_point):
    """Its pairs of types: S8 x S8, S4 x S4, 4Asymm x S4, to the same type, to 4 or 8 bits, to float32 and to S32."""
    assert SRC * FILTER == BIAS_SCALE, "biases have the scale of source times filter"
    x, w = some(src), four(W, "oIhw64i") if wei == "int4" else W
    given = {
        "input_quantization": Quantization(float(SRC), zero_point),
        "weight_quantization": Quantization(float(FILTER)),
    }
    there = packed(x, src, zero_point=zero_point)
    sums = bc.conv2d(there, w, B, padding=1, out_dtype="int32", **given)
    assert (sums.numpy() == quantized_oracle.sums(x, W, B, zero_point, pads=PADS)).all()
    given |= {"activation": "relu", "rounding": "half_away", "out_dtype": dst}
    if dst != "float32":
        given["out_quantization"] = Quantization(float(DST), dst_zero_point)
    conv = bc.Conv2d(w, B, padding=1, **given)
    found = conv(there)
    wanted = megengine(x, zero_point, None, 0, dst, dst_zero_point)
    assert (found.numpy() == wanted).all()
    assert (str(found.dtype), found.zero_point) == (dst, dst_zero_point)
    if dst != "float32":
        z, z_zero_point = some(dst, wanted.shape), 0 if dst.startswith("int") else 5
        conv = bc.Conv2d(w, B, padding=1, residual_quantization=Quantization(float(ADDED), z_zero_point), **given)
        found = conv(there, residual=packed(z, dst, "NCHW32", z_zero_point))
        assert (found.numpy() == megengine(x, zero_point, z, z_zero_point, dst, dst_zero_point)).all()


# ---------------------------------------------------------------- arrays


def test_the_output_is_of_the_inputs_type_and_layout():
    x = some("uint4")
    given = {"input_quantization": Quantization(0.5, 3), "out_quantization": Quantization(60.0, 14)}
    wanted = quantized_oracle.requantize(
        quantized_oracle.sums(x, W, B, 3, pads=PADS), Steps("uint4", 0.5, 1.0, 60.0, 14)
    )
    conv = bc.Conv2d(W, B, padding=1, **given)
    found = conv(packed(x, "uint4", zero_point=3))
    assert (found.dtype, found.layout, found.zero_point) == ("uint4", bc.Layout("NCHW64"), 14)
    assert (found.numpy() == wanted).all()
    assert (found.storage.reshape(2, 36, 32)[..., 11:] == 0xEE).all(), "the padding is the zero point"
    out = bc.empty(found.shape, "NCHW64", "uint4", zero_point=14)
    assert conv(packed(x, "uint4"), out=out) is out, "an array may leave its zero point unsaid"
    assert (out.storage == found.storage).all()
    with pytest.raises(bc.DtypeError, match="has to have dtype uint4"):
        conv(packed(x, "uint4"), out=bc.empty(found.shape, "NCHW64", "uint8", zero_point=14))


def test_no_whole_array_is_unpacked():
    """A call allocates little, however large its arrays are; packing weights, these once more as bytes."""
    x, out = bc.empty((1, 64, 128, 128), "NCHW64", "int4"), bc.empty((1, 64, 128, 128), "NCHW64", "int4")
    weight = four(RNG.integers(-8, 8, (64, 1024, 3, 3)).astype(np.int8))
    few = bc.Conv2d(four(W[:1, :1].repeat(64, 0).repeat(64, 1)), padding=1, out_quantization=Quantization(9.0))
    many = {"input": bc.empty((1, 1024, 4, 4), "NCHW64", "int4"), "out": bc.empty((1, 64, 2, 2), "NCHW64", "int32")}
    few(x, out=out)
    bc.Conv2d(weight)(**many)  # kernels are compiled, and workers have their scratch
    tracemalloc.start()
    try:
        few(x, out=out)
        assert tracemalloc.get_traced_memory()[1] < x.storage.nbytes // 16
        tracemalloc.clear_traces()
        bc.Conv2d(weight)(**many)
        assert tracemalloc.get_traced_memory()[1] < (2 * bytes_of_weight() + 1.5) * 64 * 1024 * 9
    finally:
        tracemalloc.stop()


def bytes_of_weight() -> int:
    """Of one as this machine multiplies it."""
    return dot_for(Types.quantized("int4", "int4"), target.isa()).itemsize


# ---------------------------------------------------------------- weights

WEIGHT_LAYOUTS = ("OIHW", "OHWI", "HWIO", "oIhw64i", "Ihwo4i", "OIhw16i16o", "OIhw4i16o4i", "ohwI4i")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
def test_weights_in_any_layout(layout):
    """For inputs of 4 and 8 bits, of arrays too; dense, grouped and depthwise."""
    x, s = some("uint4"), some("uint8", (2, 20, 6, 6))
    assert (bc.conv2d(packed(x, "uint4"), four(W, layout), padding=1).numpy() == plain(x, W)).all()
    for groups, oc in ((1, 21), (2, 22), (20, 20)):
        w = np.resize(W[:, : 20 // groups], (oc, 20 // groups, 3, 3))
        conv = bc.Conv2d(four(w, layout), padding=1, groups=groups)
        assert (conv(s) == plain(s, w, groups)).all()
        assert (conv(s.view(np.int8)) == plain(s.view(np.int8), w, groups)).all()


def plain(x, w, groups=1):
    return quantized_oracle.sums(x, w, None, 0, pads=PADS, groups=groups)


def test_sums_of_weights_of_four_bits_are_bounded_by_these():
    most = (2**31 - 1) // (255 * 8)
    assert bc.Conv2d(bc.empty((1, most, 1, 1), "OIHW", "int4"))
    more = bc.empty((1, most + 1, 1, 1), "OIHW", "int4")
    with pytest.raises(bc.ArgumentError, match=f"{most + 1} products.*at most {most}"):
        bc.Conv2d(more)


# ---------------------------------------------------------------- what is refused

X = packed(some("uint4"), "uint4")
Q = Quantization(0.5)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: bc.conv2d(bc.to_layout(X, "NCHW"), W),
            bc.LayoutError,
            "input='NCHW'.*multiple of 4, unlike NCHW; give it in NCHW64",
        ),
        (lambda: bc.conv2d(X, W, out_layout="NHWC", out_quantization=Q), bc.LayoutError, "out_layout='NHWC'"),
        (
            lambda: bc.conv2d(X, W[:19, :1], groups=19),
            bc.LayoutError,
            "need a multiple of 4 channels in each group, not 1",
        ),
        (
            lambda: bc.conv2d(some("uint8"), W, out_dtype="int4", out_quantization=Q),
            bc.DtypeError,
            "give a BlockedArray",
        ),
        (lambda: bc.conv2d(X, W.astype(np.float32)), bc.DtypeError, "input='uint4': has to have the weight's dtype"),
        (lambda: bc.conv2d(X, W, input_quantization=Quantization(1.0, 16)), bc.ArgumentError, "from 0 to 15"),
        (lambda: bc.conv2d(X, W, out_dtype="int4", out_quantization=Quantization(1.0, 8)), bc.ArgumentError, "-8 to 7"),
        (lambda: bc.conv2d(X, W, out_dtype="int4"), bc.ArgumentError, "out_dtype='int4': needs out_quantization"),
        (lambda: bc.Conv2d(packed(W & 7, "uint4", "OIHW")), bc.DtypeError, "weight='uint4': has to be int4"),
        (
            lambda: bc.Conv2d(four(W), weight_quantization=Quantization(1.0, 1)),
            bc.ArgumentError,
            "has to have zero point 0",
        ),
        (
            lambda: bc.conv2d(
                X, W, padding=1, out_quantization=Q, residual=np.zeros((2, 21, 6, 6), np.uint8), residual_quantization=Q
            ),
            bc.DtypeError,
            "residual='uint8': has to be a BlockedArray of uint4 or int4",
        ),
    ],
)
def test_what_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_explain_tells_of_integers_of_four_bits():
    problem = bc.Conv2dProblem(1, 64, 7, 7, 64, 3, 3, ph=1, pw=1)
    (line,) = (line for line in bc.explain(problem, "NCHW64", dtype="int4").splitlines() if "taken" in line)
    assert "conv_direct" in line or "conv_matrix" in line
