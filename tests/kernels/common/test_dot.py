"""Each multiply-accumulate that this target has, and each emulated one, against sums of products in int64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import emulated
import numpy as np
import pytest
from quantized_lab import has_dot

from blockconv import jit
from blockconv.core import target
from blockconv.core.types import HALVES, INT8, ElementType, Types, element
from blockconv.dispatch.quantizing import is_narrow
from blockconv.jit.ir import emitted
from blockconv.kernels.common.dot import (
    BRAIN_DOTS,
    DOTS,
    MULTIPLY_ADD,
    WIDENED,
    dot_for,
    multiply_accumulate,
    source_element,
)
from blockconv.kernels.common.vectors import Vectors
from blockconv.runtime import address_of

BRAIN = BRAIN_DOTS | emulated.BRAIN
INT32, FLOAT32 = element("int32").code, element("float32").code


@jit.kernel
def dot_of_vectors(number, lanes, accs=INT32, fma=0, first=0):
    """first: whether the first element of x is taken against every lane of w, as tiles take it."""

    @emitted
    def emit(x, w, acc):
        v = Vectors(ElementType.of(accs), lanes, bool(fma))
        taken = source_element(v, number, x) if first else v.load(x)
        v.store(multiply_accumulate(v, number, taken, v.load(w), v.load(acc)), acc)

    def kernel(x, w, acc, unused_scratch):
        emit(x, w, acc)

    return kernel


@pytest.mark.isa
@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_products_are_added(name, parts, first):
    dot, lanes = DOTS[name], target.isa().vector_bytes // 4 // parts
    if not has_dot(name) or lanes < 4:
        pytest.skip(f"{target.isa().name} has no {name} of {lanes} lanes")
    rng = np.random.default_rng(lanes)
    signed, unsigned = (np.int8, np.uint8) if dot.channels == 4 else (np.int16, np.int16)
    unsigned = signed if dot.is_signed else unsigned
    kernel = dot_of_vectors(dot.number, lanes, INT32, 0, first)
    least, most = (-64, 64) if name == "vpmaddubsw" else (-128, 127)  # narrow weights
    for x_ends, w_ends in (((0, 255), (least, most)), ((255, 255), (least, least)), ((-128, 255), (least, most))):
        for _ in range(50):
            low = min(max(x_ends[0], np.iinfo(unsigned).min), np.iinfo(unsigned).max)
            x = rng.integers(low, min(x_ends[1], np.iinfo(unsigned).max), (lanes, dot.channels), endpoint=True).astype(
                unsigned
            )
            w = rng.integers(*w_ends, (lanes, dot.channels), endpoint=True).astype(signed)
            acc = rng.integers(-(2**31), 2**31, lanes).astype(np.int32)
            taken = x[:1] if first else x
            wanted = (acc + (taken.astype(np.int64) * w).sum(axis=1)).astype(np.int32)  # past the end it wraps around
            jit_call(kernel, x, w, acc)
            assert (acc == wanted).all()


@pytest.mark.isa
@pytest.mark.skipif(not has_dot("vpmaddubsw"), reason="the target has no vpmaddubsw")
def test_where_pairs_of_bytes_saturate():
    """The largest sums of two products that are an int16, and the next ones: why weights have to be narrow."""
    lanes = target.isa().vector_bytes // 4
    kernel, x = dot_of_vectors(DOTS["vpmaddubsw"].number, lanes), np.full((lanes, 4), 255, np.uint8)
    fitting, others = ((64, 64), (127, 1), (-128, 0), (-64, -64), (-128, 127)), ((64, 65), (127, 2), (-128, -1))
    for first, second in fitting + others:
        is_exact = (first, second) in fitting
        for both in ((first, second, 0, 0), (0, 0, second, first), (first, second, first, second)):
            w, acc = np.tile(np.array(both, np.int8), (lanes, 1)), np.zeros(lanes, np.int32)
            jit_call(kernel, x, w, acc)
            assert (acc == 255 * sum(both)).all() == is_exact
            assert is_narrow(w[:, :, None, None]) == is_exact


@pytest.mark.isa
@pytest.mark.parametrize("name", BRAIN)
@pytest.mark.parametrize("first", [0, 1])
def test_pairs_of_bfloat16_are_added(name, first):
    """Small integers exactly; random numbers to what three sums err by, each by 2^-23 of the sizes of its terms."""
    dot, lanes = BRAIN[name], target.isa().vector_bytes // 4
    if not has_dot(name):
        pytest.skip(f"{target.isa().name} has no {name}")
    kernel, rng = (
        dot_of_vectors(dot.number, lanes, FLOAT32, int(target.isa().fma), first),
        np.random.default_rng(0),
    )
    for k in range(100):
        x, w = (rng.standard_normal((lanes, 2)) * 10 for _ in "xw")
        acc = (rng.standard_normal(lanes) * 100).astype(np.float32)
        if k % 2:
            x, w, acc = (np.rint(array).astype(np.float32) for array in (x, w, acc))
        x, w = (array.astype(np.float32).astype(element("bfloat16").dtype) for array in (x, w))
        products = (x[:1] if first else x).astype(np.float64) * w.astype(np.float64)
        wanted, sizes = acc + products.sum(axis=1), np.abs(acc) + np.abs(products).sum(axis=1)
        jit_call(kernel, x, w, acc)
        assert (np.abs(acc - wanted) <= (0 if k % 2 else 3 * 2.0**-23) * sizes).all()


@pytest.mark.isa
@pytest.mark.parametrize("name", BRAIN)
def test_what_is_no_number_stays_none(name):
    dot, lanes = BRAIN[name], target.isa().vector_bytes // 4
    if not has_dot(name):
        pytest.skip(f"{target.isa().name} has no {name}")
    kernel = dot_of_vectors(dot.number, lanes, FLOAT32, int(target.isa().fma))
    x = np.ones((lanes, 2), element("bfloat16").dtype)
    w, acc = x.copy(), np.zeros(lanes, np.float32)
    x[0, 0], x[1, 1], x[2, 1], w[2, 1], acc[3] = np.nan, np.inf, np.inf, 0, -np.inf
    jit_call(kernel, x, w, acc)
    assert np.array_equal(acc[:4], [np.nan, np.inf, np.nan, -np.inf], equal_nan=True)


def jit_call(kernel, x, w, acc):
    import ctypes

    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel.address)
    function(address_of(x), address_of(w), address_of(acc), 0)


def test_an_instruction_is_asked_for_only_where_there_is_one():
    for isa in (target.Isa("avx512", 64, 32, True, vnni=True), target.Isa("avx2", 32, 16, True, vnni=True)):
        assert {dot_for(types, isa) for types in INT8} == {DOTS["vpdpbusd"]}
    some = target.Isa("avx512", 64, 32, True), target.Isa("avx2", 32, 16, True), target.Isa("sse", 16, 16, False)
    for isa in (*some, *(replace(one, ssse3=True) for one in some)):
        exact = DOTS["vpmaddwd"]
        fast = DOTS["vpmaddubsw"] if isa.ssse3 else exact
        assert all(dot_for(types, isa) == (fast if types.wei.narrow else exact) for types in INT8)
    neon = target.Isa("neon", 16, 32, True)
    assert {dot_for(types, neon) for types in INT8} == {DOTS["vpmaddwd, emulated"]}
    assert dot_for(Types.all("float32"), neon) == MULTIPLY_ADD
    assert {dot_for(types, neon) for types in HALVES} == {WIDENED}
    dots = replace(neon, dotprod=True)
    assert {dot_for(types, dots) for types in INT8} == {DOTS["sdot"]}
    mixed = replace(dots, i8mm=True, bf16=True)
    assert all(dot_for(types, mixed) == DOTS["sdot" if types.src.name[0] == "i" else "usdot"] for types in INT8)
    assert {dot_for(types, mixed) for types in HALVES if types.src.name == "bfloat16"} == {BRAIN_DOTS["bfdot"]}
    brain = target.Isa("avx512", 64, 32, True, bf16=True)
    assert {types.src.name: dot_for(types, brain) for types in HALVES} == {
        "bfloat16": BRAIN_DOTS["vdpbf16ps"],
        "float16": WIDENED,
    }
    assert {dot_for(types, replace(brain, amx=True)) for types in HALVES} == {WIDENED}  # which is faster there


@pytest.mark.parametrize(
    ("features", "vnni"),
    [
        ({"avx512f", "avx512dq", "avx512vl", "avx512bw", "avx512vnni"}, True),
        ({"avx512f", "avx512dq", "avx512vl", "avx512bw"}, False),
        ({"avx2", "fma", "avxvnni"}, True),
        ({"avx2", "fma", "avx512vnni"}, False),  # its vectors of 256 bits need avx512vl
        ({"avx2", "fma"}, False),
        ({"avxvnni"}, False),
    ],
)
def test_the_targets_features_say_whether_there_is_one(monkeypatch, features, vnni):
    monkeypatch.setattr(target, "target_features", lambda: frozenset(features))
    assert target.isa.__wrapped__().vnni == vnni


@pytest.mark.parametrize(
    ("features", "bf16", "f16"),
    [
        ({"avx512f", "avx512dq", "avx512vl", "avx512bw", "avx512bf16"}, True, True),
        ({"avx512f", "avx512dq", "avx512vl", "avx512bw"}, False, True),
        ({"avx512f", "avx512bf16", "avx2", "fma"}, False, False),  # vectors of 256 bits
        ({"avx2", "fma", "f16c"}, False, True),
        ({"sse4.2"}, False, False),
    ],
)
def test_the_targets_features_say_what_it_has_for_floats_of_16_bits(monkeypatch, features, bf16, f16):
    monkeypatch.setattr(target, "target_features", lambda: frozenset(features))
    monkeypatch.setattr(target, "is_x86", lambda: True)
    found = target.isa.__wrapped__()
    assert (found.bf16, found.f16) == (bf16, f16)


@pytest.mark.parametrize(
    ("features", "ssse3"), [({"avx2", "fma"}, True), ({"sse4.2"}, True), ({"ssse3"}, True), ({"sse2"}, False)]
)
def test_the_targets_features_say_whether_pairs_of_bytes_are_multiplied(monkeypatch, features, ssse3):
    monkeypatch.setattr(target, "target_features", lambda: frozenset(features))
    monkeypatch.setattr(target, "is_x86", lambda: True)
    assert target.isa.__wrapped__().ssse3 == ssse3


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_the_system_says_which_dot_products_an_arm_processor_has(monkeypatch, system):
    """Linux by two words of bits, macOS by names; Windows knows one."""
    import ctypes

    def told(name, value, size, *unused):
        value._obj.value = int(name in (b"hw.optional.arm.FEAT_DotProd", b"hw.optional.arm.FEAT_BF16"))
        return 0 if value._obj.value else -1

    words = {16: 1 << 20 | 0xFF, 26: 1 << 14}

    class GetAuxVal:
        restype = None

        def __call__(self, entry):
            return words[entry]

    library = SimpleNamespace(getauxval=GetAuxVal(), sysctlbyname=told)
    kernel = SimpleNamespace(IsProcessorFeaturePresent=lambda feature: feature == 43)
    monkeypatch.setattr(
        target,
        "ctypes",
        SimpleNamespace(
            CDLL=lambda name: library,
            c_ulong=None,
            c_int=ctypes.c_int,
            c_size_t=ctypes.c_size_t,
            byref=ctypes.byref,
            windll=SimpleNamespace(kernel32=kernel),
        ),
    )
    monkeypatch.setattr(target.sys, "platform", system)
    assert target._dot_products_of_arm() == ({"dotprod"} if system == "win32" else {"dotprod", "bf16"})
