"""Each multiply-accumulate that this target has, and each emulated one, against sums of products in int64."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from blockconv import jit
from blockconv.core import target
from blockconv.core.types import INT8, Types, element
from blockconv.jit.ir import emitted
from blockconv.kernels.common.dot import DOTS, MULTIPLY_ADD, dot_for, multiply_accumulate
from blockconv.kernels.common.vectors import Vectors
from blockconv.runtime import address_of

X86 = platform.machine().lower() in ("x86_64", "amd64")


@jit.kernel
def dot_of_vectors(number, lanes):
    @emitted
    def emit(builder, x, w, acc):
        v = Vectors(builder, element("int32"), lanes)
        v.store(multiply_accumulate(v, number, v.load(x), v.load(w), v.load(acc)), acc)

    def kernel(x, w, acc, unused_scratch):
        emit(x, w, acc)

    return kernel


def there(name: str) -> bool:
    """LLVM would end the process for an instruction that the target lacks."""
    return "emulated" in name or (target.isa().vnni if name == "vpdpbusd" else X86)


@pytest.mark.isa
@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_products_are_added(name, parts):
    dot, lanes = DOTS[name], target.isa().vector_bytes // 4 // parts
    if not there(name) or lanes < 4:
        pytest.skip(f"{target.isa().name} has no {name} of {lanes} lanes")
    rng = np.random.default_rng(lanes)
    signed, unsigned = (np.int8, np.uint8) if dot.channels == 4 else (np.int16, np.int16)
    kernel = dot_of_vectors(dot.number, lanes)
    for x_ends, w_ends in (((0, 255), (-128, 127)), ((255, 255), (-128, -128)), ((-128, 255), (-128, 127))):
        for _ in range(50):
            low = max(x_ends[0], np.iinfo(unsigned).min)
            x = rng.integers(low, x_ends[1], (lanes, dot.channels), endpoint=True).astype(unsigned)
            w = rng.integers(*w_ends, (lanes, dot.channels), endpoint=True).astype(signed)
            acc = rng.integers(-(2**31), 2**31, lanes).astype(np.int32)
            wanted = (acc + (x.astype(np.int64) * w).sum(axis=1)).astype(np.int32)  # past the end it wraps around
            jit_call(kernel, x, w, acc)
            assert (acc == wanted).all()


def jit_call(kernel, x, w, acc):
    import ctypes

    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel.address)
    function(address_of(x), address_of(w), address_of(acc), 0)


def test_an_instruction_is_asked_for_only_where_there_is_one(monkeypatch):
    for isa in (target.Isa("avx512", 64, 32, True, vnni=True), target.Isa("avx2", 32, 16, True, vnni=True)):
        monkeypatch.setattr(target, "isa", lambda isa=isa: isa)
        assert {dot_for(types) for types in INT8} == {DOTS["vpdpbusd"]}
    for isa in (target.Isa("avx512", 64, 32, True), target.Isa("avx2", 32, 16, True), target.Isa("sse", 16, 16, False)):
        monkeypatch.setattr(target, "isa", lambda isa=isa: isa)
        assert {dot_for(types) for types in INT8} == {DOTS["vpmaddwd" if X86 else "vpmaddwd, emulated"]}
    assert dot_for(Types.all("float32")) == MULTIPLY_ADD


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
