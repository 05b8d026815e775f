"""A kernel's Python, as the code that is emitted for it computes it: Python itself is the oracle."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba.core.registry import cpu_target

from blockconv.core import target
from blockconv.core.types import element
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.compiler import generate, link
from blockconv.jit.ir import as_float64, digits, emitted, load_f, load_i64, store_bits, store_f, store_i64
from blockconv.jit.values import KernelError, build
from blockconv.kernels.common.vectors import Vectors

NUMBERS = [0, 1, -1, 2, 3, -3, 7, -8, 64, 1000, -1001, 2**40 + 5, -(2**40)]


def compiled(name: str, body: Callable[..., Any]) -> Any:
    """A kernel's body as a function of Python's."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(link(name, generate(name, body).object))


def agrees(function: Callable[[int, int], Any], pairs: list[tuple[int, int]]) -> None:
    """The code of a function of two integers gives what Python does: an integer, or a tuple of them."""
    results = [np.atleast_1d(np.array(function(a, b), np.int64)) for a, b in pairs]
    width = results[0].size

    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        for k in range(first, last):
            found = function(load_i64(args, 2 * k), load_i64(args, 2 * k + 1))
            if width == 1:
                store_i64(scratch, k, found)
            else:
                for c in range(width):
                    store_i64(scratch, k * width + c, found[c])

    words, out = np.array(pairs, np.int64), np.full((len(pairs), width), 77, np.int64)
    compiled("agrees", kernel)(words.ctypes.data, 0, len(pairs), out.ctypes.data)
    np.testing.assert_array_equal(out, np.stack(results))


PAIRS = [(a, b) for a in NUMBERS for b in NUMBERS]
SIGNS = ("+", "-", "*", "//", "%", "&", "|", "^", "<", "<=", ">", ">=", "==", "!=")
OPERATIONS = ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor", "lt", "le", "gt", "ge", "eq", "ne")


class Span(Arguments):
    """A word and where it is copied to."""

    value = word("what is copied")
    to = word("where to", "address")


def test_a_kernel_takes_views_where_it_says_so_and_no_more_than_it_needs() -> None:
    def as_view(a: Span) -> None:
        store_i64(a.to, 0, a.value + (Span(a.address).value == a.value))

    def by_name(a: Span, first, last):  # type: ignore[no-untyped-def]
        store_i64(a.to, 0, first + last)

    def none() -> None: ...

    out = np.zeros(1, np.int64)
    block = np.array([41, out.ctypes.data], np.int64)
    for body, wanted in ((as_view, 42), (by_name, 9), (none, 9)):
        compiled("takes", body)(block.ctypes.data, 4, 5, 6)
        assert out[0] == wanted
    with pytest.raises(TypeError, match="missing a required argument: 'fifth'"):
        generate("takes", lambda a, b, c, d, fifth: None)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_pythons(name: str) -> None:
    signs = dict(zip(OPERATIONS, SIGNS, strict=True))
    two: Any = eval(f"lambda a, b: a {signs[name]} b")
    by_eight: Any = eval(f"lambda a, b: (a {signs[name]} 8) + (a {signs[name]} -8)")
    by_seven: Any = eval(f"lambda a, b: (a {signs[name]} 7) + (9 {signs[name]} b)")
    pairs = [(a, b) for a, b in PAIRS if (b or name not in ("floordiv", "mod")) and abs(operator.mul(a, b)) < 2**60]
    for function in (two, by_eight, by_seven):
        agrees(function, pairs)


def test_a_quotient_by_zero_is_zero() -> None:
    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        store_i64(scratch, 0, first // last)
        store_i64(scratch, 1, first % last)

    out = np.ones(2, np.int64)
    compiled("by_zero", kernel)(0, 5, 0, out.ctypes.data)
    assert out.tolist() == [0, 0]


class Pair(NamedTuple):
    """Two numbers."""

    low: Any
    high: Any


def _ordered(a, b):  # type: ignore[no-untyped-def]
    if a > b:
        return Pair(b, a)
    return Pair(a, b)


def _loops(a, b):  # type: ignore[no-untyped-def]
    total = 0
    for k in range(a % 7, b % 50, 3):
        if k == 9:
            continue
        for j in range(b % 11, a % 5, -2):
            total += j * k
            if total > 500:
                break
        while total > 100:
            total -= 37
    return total


def _tuples(a, b):  # type: ignore[no-untyped-def]
    (low, high), sizes = _ordered(a, b), (3, 5, 7)
    pair = Pair(low, high)._replace(high=high - 1)
    for size in sizes:
        pair = Pair(pair.low + size, pair.high)
    return pair.low + sizes[b % 3], pair[1], len(sizes) * (1 if a in (0, 7) else 2)


def _choices(a, b, first=2):  # type: ignore[no-untyped-def]
    both = (a > 0 and b > 0) or not a
    chosen = min(a, b, first) if both else max(a, b)
    flag = a == b
    flag |= b == 1
    return chosen + (both is None) + flag, abs(a) - (-b), ~a ^ b, (a << 2) + (b >> 3)


def _calls(a, b):  # type: ignore[no-untyped-def]
    return _loops(*(b, a)) + _choices(b=b, a=a)[0]


@pytest.mark.parametrize("function", [_loops, _tuples, _choices, _calls])
def test_a_function_is_pythons(function: Any) -> None:
    agrees(function, [(a, b) for a, b in PAIRS if max(abs(a), abs(b)) < 2000])


def _with_operators(a: Any, b: Any) -> Any:
    signs = (a < b) & (3 - a > b) | (a >= 7) & (b <= a)
    return (3 - a) * 5 + (a << 2) - (b >> 1), (-a & 12) ^ (7 | b), ~a, signs, a // 8 + b % 8, b // 5 - a % 5


def test_code_that_is_emitted_has_pythons_operators() -> None:
    @emitted
    def with_operators(a: Any, b: Any) -> Any:
        return _with_operators(a, b)

    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        found = with_operators(first, last)
        for k in range(6):
            store_i64(scratch, k, found[k])

    run, out = compiled("operators", kernel), np.zeros(6, np.int64)
    for a, b in PAIRS:
        run(0, a, b, out.ctypes.data)
        assert out.tolist() == [*_with_operators(a, b)]


def test_digits_of_a_number() -> None:
    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        low, middle, high = digits(first, last, 3)
        store_i64(scratch, 0, low)
        store_i64(scratch, 1, middle)
        store_i64(scratch, 2, high)

    run, out = compiled("digits", kernel), np.zeros(3, np.int64)
    for number, size in ((0, 1), (5, 7), (7, 7), (1000, 7), (2**40, 64)):
        run(0, number, size, out.ctypes.data)
        assert out.tolist() == [number % size, number // size % 3, number // size // 3]


def test_code_over_vectors_has_pythons_operators() -> None:
    @emitted
    def put(address: Any) -> None:
        v, narrow = Vectors(element("float32"), 4), Vectors(element("int8"), 4)
        x, n = v.load(address), narrow.load(address + 32)
        v.store(build.select(x < 1.5, -x, (2 - x) / 4 * x + 1), address + 16)
        narrow.store(build.select((n > 2) & ~(n > 4), n << 1, n - 1), address + 32)

    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        put(args)

    x, n = np.array([0.5, 1, 2, 3], np.float32), np.array([1, 3, 4, 5], np.int8)
    memory = np.zeros(36, np.uint8)
    memory[:16], memory[32:] = x.view(np.uint8), n.view(np.uint8)
    compiled("lanes", kernel)(memory.ctypes.data, 0, 0, 0)
    np.testing.assert_array_equal(memory[16:32].view(np.float32), np.where(x < 1.5, -x, (2 - x) / 4 * x + 1))
    np.testing.assert_array_equal(memory[32:].view(np.int8), [0, 6, 8, 4])


def test_what_is_known_costs_no_code() -> None:
    """A branch on it is no branch, and code behind it need not make sense."""

    def body(known: bool) -> Any:
        size = 4 if known else 8

        def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
            nbytes = size if known else scratch.nothing
            if known:
                store_bits(args, first, nbytes)
            else:
                nowhere(args)  # noqa: F821

        return kernel

    assert "br " not in generate("known", body(True)).llvm()
    with pytest.raises(KernelError, match="nothing"):
        generate("unknown", body(False))


HALF, LAST = np.float32(0.5), np.float32(0.3)


def test_equal_code_of_two_modules_has_each_ones_globals() -> None:
    code = "def kernel(args, first, last, scratch):\n    put(scratch, 0, NUMBER)"
    for number in (5, 6):
        scope: dict[str, Any] = {"put": store_i64, "NUMBER": number}
        exec(code, scope)
        out = np.zeros(1, np.int64)
        compiled("of_module", scope["kernel"])(0, 0, 0, out.ctypes.data)
        assert out[0] == number


def test_numbers_of_both_kinds() -> None:
    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        x = as_float64(args)
        store_f(scratch, (x * 2 + first) / last - 0.25, 8)
        store_f(scratch + 8, math.sqrt(x) if x > 1 else -x, 4)
        store_i64(scratch, 2, int(x * 10))
        store_f(scratch + 24, np.rint((load_f(scratch + 8, 4) + HALF) / LAST), 4)  # in float32

    out = np.zeros(4)
    bits = int(np.array([6.25]).view(np.int64)[0])
    compiled("both", kernel)(bits, 3, 4, out.ctypes.data)
    assert out[0] == (6.25 * 2 + 3) / 4 - 0.25
    assert (out.view(np.float32)[2], out.view(np.int64)[2]) == (2.5, 62)
    assert out.view(np.float32)[6] == np.rint((np.float32(2.5) + HALF) / LAST)


def _is_float_then_int(args, first, last, scratch):  # type: ignore[no-untyped-def]
    value = 0.5
    for k in range(last):
        value = k
    store_i64(scratch, 0, value)


def _lists(args, first, last, scratch):  # type: ignore[no-untyped-def]
    store_i64(scratch, 0, [first, last][0])


def _raises(args, first, last, scratch):  # type: ignore[no-untyped-def]
    if first > last:
        raise ValueError


def _takes_what_is_not_known(args, first, last, scratch):  # type: ignore[no-untyped-def]
    store_bits(scratch, first, last)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_is_float_then_int, "value has values of two types"),
        (_lists, "a kernel has no build_list"),
        (_raises, "a kernel has no .*Raise"),
        (_takes_what_is_not_known, "store_bits: nbytes is known while a kernel is built"),
    ],
)
def test_what_is_no_kernel_is_an_error_with_its_line(body: Any, message: str) -> None:
    with pytest.raises(KernelError, match=rf"{message}.*test_translate\.py"):
        generate("wrong", body)


# ---------------------------------------------------------------- what Numba decides


USE = """
import sys, warnings
import numpy as np
{damage}
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as seen:
    import blockconv as bc
    from blockconv.runtime import launcher
    launcher.GRAIN = 1e-12
    bc.set_num_threads(2)
    x = np.arange(2 * 8 * 5 * 6, dtype=np.float32).reshape(2, 8, 5, 6)
    for layout in ("NHWC", "NCHW8"):
        array = bc.BlockedArray.from_numpy(x, "NCHW")
        assert np.array_equal(bc.to_layout(array, layout).numpy(), x)
slow = [str(one.message) for one in seen if issubclass(one.category, bc.SlowPathWarning)]
print(len(slow), *slow, bc.get_threading(), sep="|")
"""


def test_a_pool_that_numba_hides_is_threads_of_pythons(run_python: Any, tmp_path: Any) -> None:
    damage = "import llvmlite.binding as llvm\nllvm.address_of_symbol = lambda name: None"
    done = run_python(USE.format(damage=damage), BLOCKCONV_CACHE_DIR=str(tmp_path))
    count, told, pool = done.stdout.strip().split("|")
    assert (count, "numba_parallel_for" in told, pool) == ("1", True, "python")


def test_a_numba_that_is_unknown_is_an_error_with_a_remedy(run_python: Any, tmp_path: Any) -> None:
    run_python(
        """
import sys
import numba.core
del numba.core.interpreter
sys.modules["numba.core.interpreter"] = None
import blockconv as bc
import numpy as np
try:
    bc.to_layout(np.ones((1, 3, 2, 2), np.float32), "NCHW16")
except ImportError as error:
    assert "is unknown to blockconv" in str(error) and "or an older Numba" in str(error), error
else:
    raise AssertionError
""",
        BLOCKCONV_CACHE_DIR=str(tmp_path),
    )


SETTINGS = """
import os, sys
from blockconv.core import target
names = ["CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "DISABLE_JIT", "THREADING_LAYER", "NUMBA_NUM_THREADS"]
variables = [
    {}, {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"}, {"NUMBA_CPU_FEATURES": ""},
    {"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_NAME": "sandybridge"}, {"NUMBA_ENABLE_AVX": "0"},
    {"NUMBA_DISABLE_JIT": "1"}, {"NUMBA_THREADING_LAYER": "omp"}, {"NUMBA_NUM_THREADS": "3"},
]
def read(given):
    for name in [name for name in os.environ if name.startswith("NUMBA_")]:
        del os.environ[name]
    os.environ.update(given)
    return [target.numba_setting(name) for name in names]
ours = [read(given) for given in variables]
assert "numba" not in sys.modules
from numba import config
for given, found in zip(variables, ours):
    read(given)
    config.reload_config()
    assert found == [getattr(config, name) for name in names] == read(given), (given, found)
os.environ["NUMBA_DISABLE_JIT"] = "no number"
del sys.modules["numba.core.config"]
assert target.numba_setting("DISABLE_JIT") == 0
"""


def test_settings_are_numbas_without_an_import_of_it(run_python: Any) -> None:
    run_python(SETTINGS)


def test_features_are_those_that_numba_targets() -> None:
    """Numba keeps them to itself; they are worked out from its settings and LLVM."""
    assert set(target.feature_text().split(",")) == set(
        (cpu_target.target_context.codegen()._tm_features or "").split(",")
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"NUMBA_ENABLE_AVX": "0"},
        {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
        {"NUMBA_CPU_NAME": "generic"},
    ],
    ids=str,
)
def test_features_that_settings_of_numba_change(run_python: Any, variables: dict[str, str]) -> None:
    run_python(
        """
from numba.core.registry import cpu_target
from blockconv.core import target
wanted = cpu_target.target_context.codegen()._tm_features or ""
assert set(target.feature_text().split(",")) == set(wanted.split(",")), (target.feature_text(), wanted)
""",
        **variables,
    )
