"""`blockconv.ndimage` beside scipy: integers to the bit, floats within the bound that it states."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from guarded import Guarded, available
from hypothesis import given, settings
from hypothesis import strategies as st

import blockconv as bc
from blockconv import ndimage
from blockconv.core import target
from blockconv.filters import passes
from blockconv.filters.codegen import network
from blockconv.jit import cache

scipy = pytest.importorskip("scipy.ndimage")

MODES = ("reflect", "constant", "nearest", "mirror", "wrap", "grid-mirror", "grid-constant", "grid-wrap")
DTYPES = ("uint8", "uint16", "int16", "int32", "float32", "float64", "bool", "int8", "uint32", "int64")
BOUND = {"float32": 2e-6, "float64": 1e-12, "complex64": 2e-6, "complex128": 1e-12}
Array = np.ndarray[Any, Any]


def image(shape: tuple[int, ...], dtype: str, seed: int = 0, most: int = 1 << 15) -> Array:
    """Random numbers, over the type's whole range up to `most`."""
    rng = np.random.default_rng(seed)
    if dtype.startswith("float"):
        return (rng.standard_normal(shape) * 50).astype(dtype)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    info = np.iinfo(dtype)
    return rng.integers(max(info.min, -most), min(info.max, most), shape, dtype, endpoint=True)


def check(wanted: Array, found: Array, size: float) -> None:
    """size: the sum of the magnitudes that are added, at most."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if found.dtype.name in BOUND:
        apart = np.abs(found.astype(complex) - wanted.astype(complex))
        assert apart.max(initial=0) <= BOUND[found.dtype.name] * size
    else:
        np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), wanted.view(f"u{wanted.itemsize}"))


def compare(name: str, x: Array, *args: Any, gain: float = 4, in_place: bool = False, **kwargs: Any) -> None:
    """The function on an image, which may be the output too. gain: the sum of the weights' magnitudes."""
    mine, given = (x.copy(), x.copy()) if in_place else (x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bc.SlowPathWarning)
        found = getattr(ndimage, name)(mine, *args, **kwargs, **{"output": mine} if in_place else {})
    size = np.abs(x.astype(complex)).max(initial=1) + abs(kwargs.get("cval", 0))
    # Ranks of these types along an array of one dimension: scipy writes behind the end of an output of a smaller type.
    is_ranked = x.ndim == 1 and name in ("median_filter", "percentile_filter", "rank_filter")
    own = is_ranked and x.dtype.name in ("int64", "float32", "float64")
    later = kwargs.pop("output", None) if own else None
    wanted = getattr(scipy, name)(given, *args, **kwargs, **{"output": given} if in_place else {})
    wanted = wanted.astype(later or wanted.dtype)
    check(wanted, found, size * gain)


# Each of them with arguments after the image.
CASES: dict[str, Callable[[np.random.Generator, int], tuple[Any, ...]]] = {
    "correlate1d": lambda rng, n: (rng.random(n) - 0.3,),
    "convolve1d": lambda rng, n: (rng.integers(-3, 4, n),),
    "gaussian_filter": lambda rng, n: (0.3 + n / 4, int(rng.integers(3))),
    "gaussian_laplace": lambda rng, n: (0.4 + n / 5,),
    "gaussian_gradient_magnitude": lambda rng, n: (0.4 + n / 5,),
    "laplace": lambda rng, n: (),
    "sobel": lambda rng, n: (),
    "prewitt": lambda rng, n: (0,),
    "uniform_filter": lambda rng, n: (n,),
    "maximum_filter": lambda rng, n: (n,),
    "minimum_filter": lambda rng, n: (n,),
    "grey_opening": lambda rng, n: (n,),
    "grey_closing": lambda rng, n: (n,),
    "grey_dilation": lambda rng, n: (n,),
    "median_filter": lambda rng, n: (min(n, 3),),
    "percentile_filter": lambda rng, n: (float(rng.random() * 100), min(n, 3)),
}


@pytest.mark.isa
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
@pytest.mark.parametrize("name", ["gaussian_filter", "uniform_filter", "sobel", "maximum_filter", "median_filter"])
def test_the_filters_of_images(name: str, dtype: str) -> None:
    shapes = ((37, 150), (3, 4), (1, 1), (90, 7), (5, 6, 70), (20, 24, 3), (200,), (2, 9))
    for mode, shape, n in zip(MODES, shapes, (9, 3, 5, 31, 3, 4, 17, 8), strict=True):
        x = image(shape, dtype, n)
        args = CASES[name](np.random.default_rng(n), min(n, 5) if name == "median_filter" else n)
        compare(name, x, *args, mode=mode, gain=64, cval=3)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_windows_over_several_axes(dtype: str) -> None:
    rng = np.random.default_rng(5)
    shapes = (((40, 70), (3, 5)), ((9, 8, 75), (3, 2, 3)), ((30,), (4,)), ((6, 300), (7, 7)))
    for mode, (shape, kernel) in zip(MODES, shapes, strict=False):
        x = image(shape, dtype)
        for weights in (rng.standard_normal(kernel), rng.integers(-3, 4, kernel)):
            compare("correlate", x, weights, mode=mode, cval=-1.5, gain=np.abs(weights).sum())
            compare("convolve", x, weights, mode=mode, cval=2, gain=np.abs(weights).sum(), origin=-1)
        compare("maximum_filter", x, footprint=rng.random(kernel) < 0.6, mode=mode, cval=7)


def test_correlate_along_one_axis_adds_from_first_to_last() -> None:
    """`correlate1d` adds in pairs instead: sums that are integers but for rounding are truncated otherwise."""
    rng = np.random.default_rng(2)
    for _ in range(30):
        half = rng.integers(0, 20, 2) / 20
        weights = np.array([*half, 1 - 2 * half.sum(), *half[::-1]])
        x = image((4, 50), "uint8", int(rng.integers(99)))
        compare("correlate", x, weights[None])
        compare("correlate", x[0], weights)
        compare("correlate1d", x, weights)
        compare("correlate1d", x, weights * [1, 1, 0, -1, -1])


def test_ranks_along_one_dimension_have_the_outputs_type() -> None:
    x = image((64,), "int64", most=1000)
    for dtype in ("int16", "float32", "float64"):
        compare("median_filter", x, 3, output=dtype)
        compare("percentile_filter", x, 30, 5, output=dtype)
    y = np.zeros(128, np.int16)
    ndimage.median_filter(x, 3, output=y[::2])
    check(scipy.median_filter(x, 3).astype(np.int16), y[::2], 0)


def test_the_constant_outside_booleans_is_what_c_makes_of_it() -> None:
    x = image((20, 30), "bool")
    for cval in (0.1, 0.9, 1, 0):
        compare("median_filter", x, 3, mode="constant", cval=cval)
        compare("maximum_filter", x, footprint=np.eye(3), mode="constant", cval=cval)


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[str, ...], most: int) -> tuple[str, Array, tuple[Any, ...], dict[str, Any]]:
    name, dtype = draw(st.sampled_from(sorted(CASES))), draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.integers(0, most), min_size=1, max_size=3)))
    x = image(shape, dtype, draw(st.integers(0, 99)), draw(st.sampled_from([3, 200, 1 << 15, 1 << 40])))
    for axis in range(x.ndim):  # strides: of parts, and backwards
        step = draw(st.sampled_from([1, 1, 1, 2, -1]))
        x = x[(slice(None),) * axis + (slice(None, None, step),)]
    x = x.T if draw(st.booleans()) else x
    n = draw(st.integers(1, 20))
    kwargs: dict[str, Any] = {"mode": draw(st.sampled_from(MODES)), "cval": draw(st.sampled_from([0, 1, 2.5, -3, 300]))}
    output = draw(st.sampled_from(["", "", "image", "float64", "float32", "int16"]))
    if output == "image":  # but for those that read it again when they have written to it
        kwargs["in_place"] = "laplace" not in name and "gradient" not in name
    elif output:
        kwargs["output"] = output
    if name in ("maximum_filter", "uniform_filter", "grey_dilation", "median_filter"):
        size = min(n, 3) if name == "median_filter" else n
        kwargs["origin"] = draw(st.integers(-((size - 1) // 2), (size - 1) // 2))
    return name, x, CASES[name](np.random.default_rng(n), n), kwargs


@given(calls(("uint8", "float32"), 40))
@settings(max_examples=60, deadline=None)
def test_any_call(call: tuple[str, Array, tuple[Any, ...], dict[str, Any]]) -> None:
    name, x, args, kwargs = call
    compare(name, x, *args, gain=200, **kwargs)


@pytest.mark.slow
@given(calls(DTYPES, 90))
@settings(max_examples=600, deadline=None)
def test_any_call_of_every_type(call: tuple[str, Array, tuple[Any, ...], dict[str, Any]]) -> None:
    test_any_call.hypothesis.inner_test(call)  # type: ignore[attr-defined]


def test_flat_images_are_computed_again() -> None:
    """A sum of weights that is 1 but for rounding: all results are near integers, and scipy truncates some down."""
    for level in (0, 1, 7, 200, 255):
        x = np.full((40, 60), level, np.uint8)
        x[10:20, 10:30] //= 2
        for sigma in (0.7, 1.0, 2.0, 3.3):
            compare("gaussian_filter", x, sigma)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
def test_sums_of_the_largest_integers_do_not_wrap(dtype: str) -> None:
    for value in (np.iinfo(dtype).max, np.iinfo(dtype).min):
        x = np.full((70, 80), value, dtype)
        for size in (3, 31, 33, 65, 200, 300):
            compare("uniform_filter", x, size)
        for weights in ([100.0] * 3, [40000.0], [-9.0, 300.0]):
            compare("correlate1d", x, weights)


def test_outputs() -> None:
    x = image((30, 50), "uint8")
    for output in (np.float32, np.dtype("int16"), "float64", "uint16"):
        check(scipy.gaussian_filter(x, 1.5, output=output), ndimage.gaussian_filter(x, 1.5, output=output), 255)
    other = np.zeros((60, 100), np.int32)[::2, ::2]
    assert ndimage.sobel(x, output=other) is other
    check(scipy.sobel(x, output=np.int32), other, 1)
    for name in ("gaussian_filter", "maximum_filter", "median_filter"):
        own = x.copy()
        assert getattr(ndimage, name)(own, 3, output=own) is own, "the image itself"
        check(getattr(scipy, name)(x, 3), own, 255)


def test_axes_of_colours_and_volumes() -> None:
    x = image((40, 50, 3), "uint8")
    for axes in ((0, 1), (1, 0), (-3,), 1, ()):
        compare("gaussian_filter", x, 1.2, axes=axes)
        compare("uniform_filter", x, 5, axes=axes)
    compare("median_filter", x, 3, axes=(0, 1))
    if "axes" in inspect.signature(scipy.correlate).parameters:
        compare("correlate", image((6, 50, 60), "float32"), np.ones((3, 3)), axes=(0, 2), origin=(1, 0))


def test_threads_give_the_same_bits() -> None:
    x = image((700, 500), "float32")
    given = bc.get_num_threads()
    try:
        bc.set_num_threads(1)
        wanted = ndimage.gaussian_filter(x, 2), ndimage.uniform_filter(x, 31), ndimage.median_filter(x, 3)
        bc.set_num_threads(2)
        passes._program.cache_clear()
        found = ndimage.gaussian_filter(x, 2), ndimage.uniform_filter(x, 31), ndimage.median_filter(x, 3)
    finally:
        bc.set_num_threads(given)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(wanted, found, strict=True))


@pytest.mark.isa
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
def test_stores_past_the_caches(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large image: whole vectors at their own addresses, wherever the rows of the result begin."""
    monkeypatch.setattr(target, "last_level_cache", lambda: 0)
    passes._program.cache_clear()
    x = image((9, 211), dtype)
    for width in (203, 61, 5):
        for name, args in (("maximum_filter", (3,)), ("uniform_filter", (3,)), ("median_filter", (3,))):
            out = np.zeros((9, 211), dtype)
            getattr(ndimage, name)(x[:, 3 : 3 + width], *args, output=out[:, 1 : 1 + width])
            check(getattr(scipy, name)(x[:, 3 : 3 + width], *args), out[:, 1 : 1 + width], 2000)
            assert not out[:, 0].any()
            assert not out[:, 1 + width :].any()
    passes._program.cache_clear()


@pytest.mark.parametrize("mode", ["reflect", "wrap", "constant"])
def test_wide_images_are_cut_into_tiles(mode: str) -> None:
    for dtype, width in (("float32", 40000), ("uint8", 90000)):
        x = image((12, width), dtype)
        for name, args in (("gaussian_filter", (3,)), ("maximum_filter", (15,)), ("correlate", (np.ones((3, 5)),))):
            compare(name, x, *args, mode=mode, gain=20)


def test_kernels_are_compiled_anew_after_a_change() -> None:
    assert {"filters/kernels.py", "filters/codegen.py"} <= {*cache.sources()}


@pytest.mark.isa
@pytest.mark.skipif(not available(), reason="pages without access rights")
@pytest.mark.parametrize("where", ["start", "end"])
def test_nothing_outside_an_array_is_touched(where: str) -> None:
    for dtype, shape in (("float32", (9, 33)), ("uint8", (70, 131)), ("uint16", (1, 5)), ("float64", (40, 16))):
        x = image(shape, dtype)
        source, to = Guarded(x.nbytes), Guarded(x.nbytes)
        mine, out = (m.take(x.nbytes, where).view(dtype).reshape(shape) for m in (source, to))
        mine[...] = x
        for name in ("gaussian_filter", "uniform_filter", "maximum_filter", "median_filter", "sobel"):
            args = {"sobel": (), "median_filter": (3,), "maximum_filter": (15,)}.get(name, (2,))
            getattr(ndimage, name)(mine, *args, output=out)
            check(getattr(scipy, name)(x, *args), out, 400 * np.abs(x.astype(float)).max())
            assert source.intact()
            assert to.intact()


def test_what_has_no_kernel_goes_to_scipy_with_one_warning() -> None:
    x = image((9, 9), "float32")
    for name, args, kwargs, compiled in (
        ("grey_erosion", (), {"structure": np.eye(3)}, "min_or_max_filter"),
        ("median_filter", (13,), {}, "rank_filter"),
        ("uniform_filter", (3,), {"output": np.uint8}, "uniform_filter1d"),
        ("gaussian_filter", (1,), {"output": np.uint64}, "correlate1d"),
    ):
        ndimage._warn.cache_clear()
        call = functools.partial(getattr(ndimage, name), abs(x), *args, **kwargs)
        with pytest.warns(bc.SlowPathWarning, match=rf"{compiled}: .*, so scipy computes it"):
            found = call()
        with warnings.catch_warnings():
            warnings.simplefilter("error", bc.SlowPathWarning)
            call()
        np.testing.assert_array_equal(found, getattr(scipy, name)(abs(x), *args, **kwargs))


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("gaussian_filter", (1,), {"mode": "mirrored"}),
        ("uniform_filter", (3,), {"origin": 2}),
        ("maximum_filter", (), {}),
        ("correlate", (np.ones(3),), {}),
        ("sobel", (5,), {}),
        ("median_filter", (3,), {"output": np.zeros((2, 2))}),
        ("percentile_filter", (101, 3), {}),
        ("gaussian_filter", (1,), {"axes": (0, 0)}),
    ],
)
def test_errors_are_scipys(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = image((6, 7), "float32")
    with pytest.raises((ValueError, RuntimeError, TypeError)) as wanted:
        getattr(scipy, name)(x, *args, **kwargs)
    with pytest.raises(wanted.type) as found:
        getattr(ndimage, name)(x, *args, **kwargs)
    assert str(found.value) == str(wanted.value)


def test_without_scipy_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    ndimage._functions.cache_clear()
    with pytest.raises(bc.UnsupportedError, match=r"needs scipy.*pip install scipy"):
        ndimage.__getattr__("laplace")


def test_signatures_are_scipys() -> None:
    for name in ndimage.__all__:
        own, other = (inspect.signature(getattr(module, name)).parameters for module in (ndimage, scipy))
        # Older versions of scipy have no `axes` in some functions.
        found = [(p.name, p.kind, p.default) for p in own.values() if p.name in other or p.name != "axes"]
        assert found == [(p.name, p.kind, p.default) for p in other.values()], name


@pytest.mark.parametrize("count", [*range(2, 12)])
def test_the_network_sorts(count: int) -> None:
    """Of zeros and ones, which suffice."""
    numbers = np.arange(1 << count)[:, None] >> np.arange(count) & 1
    for low, high in network(count):
        pair = np.sort(numbers[:, [low, high]], axis=1)
        numbers[:, [low, high]] = pair
    assert (np.diff(numbers, axis=1) >= 0).all()


@pytest.mark.parametrize("size", [(3, 3), (2, 3), (4, 2), (5, 5), (3, 7)])
def test_ranks_of_rectangles(size: tuple[int, int]) -> None:
    """Whose columns are sorted once: many elements are equal."""
    x = image((20, 45), "uint8", most=40)
    for rank in range(1, size[0] * size[1] - 1):
        compare("rank_filter", x, rank, size)


def test_complex_arrays_are_two_real_ones() -> None:
    x = image((9, 40), "float32") + 1j * image((9, 40), "float32", 1)
    compare("gaussian_filter", x.astype(np.complex64), 1.5)
    compare("correlate", x, np.array([[1, 2j, 3]]))


def test_functions_are_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(ndimage.sobel)) is ndimage.sobel
    assert ndimage.sobel is not scipy.sobel
