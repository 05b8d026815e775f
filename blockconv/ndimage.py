"""`scipy.ndimage`'s filters, with its signatures and results, by kernels of this library.

    from blockconv import ndimage

Integers are scipy's to the last bit. Floats are within a share of the sum of the magnitudes that are added: 1e-12 in
float64, and in float32 n times 6e-8 for windows of n elements. The functions are scipy's own, on blockconv's kernels in
place of its compiled code, so they need it: pip install scipy. Its own code computes what blockconv has no kernel for,
with one warning for each cause.
"""

from __future__ import annotations

import contextvars
import functools
import importlib.util
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from blockconv.core.errors import needing, warn
from blockconv.core.python import bounded_cache, zipped
from blockconv.core.types import Array
from blockconv.filters import codegen, passes
from blockconv.nopython import teach

_NAMES = """
    convolve convolve1d correlate correlate1d gaussian_filter gaussian_filter1d gaussian_gradient_magnitude
    gaussian_laplace grey_closing grey_dilation grey_erosion grey_opening laplace maximum_filter maximum_filter1d
    median_filter minimum_filter minimum_filter1d percentile_filter prewitt rank_filter sobel uniform_filter
    uniform_filter1d
"""
__all__ = [*_NAMES.split()]
# NumPy adds what several filters make: Numba's functions have no such calls.
_OF_SEVERAL = ("gaussian_gradient_magnitude", "gaussian_laplace", "laplace")
_MODES = ("nearest", "wrap", "reflect", "mirror", "constant", "wrap", "constant")  # by scipy's numbers
_DTYPES = frozenset(map(np.dtype, (*passes.TYPES, "bool")))
_MOST_RANKED = 128  # elements of a window that is sorted in registers


class Elsewhere(Exception):  # noqa: N818  # it is no error
    """The call is not one that blockconv computes; the text says why."""


# ---------------------------------------------------------------- scipy's functions


def twin_of(name: str) -> Any:
    """A second instance of a module of scipy, whose functions may be given other globals than the first one's."""
    with needing("blockconv.ndimage and blockconv.signal", "scipy"):
        spec: Any = importlib.util.find_spec(name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@functools.cache  # once for each cause
def _warn(why: str) -> None:
    warn(why, stacklevel=4)


def with_kernels(compiled: Any, found: Mapping[str, Callable[..., Any]]) -> SimpleNamespace:
    """A compiled module of scipy, some of whose functions are others, which compute or raise `Elsewhere`."""

    def replaced(name: str) -> Callable[..., Any]:
        scipys = getattr(compiled, name)

        @functools.wraps(scipys)
        def call(*args: Any) -> Any:
            try:
                return found[name](*args)
            except (Elsewhere, TypeError, ValueError) as error:  # scipy raises its own, if an argument is wrong
                why = f"{name}: {error}, so scipy computes it"
            _flush()
            result = scipys(*args)
            _warn(why)
            return result

        return call

    return SimpleNamespace(**{**vars(compiled), **{name: replaced(name) for name in found}})


@functools.cache
def _functions() -> dict[str, Any]:
    """scipy's filters and its morphology, on blockconv's kernels."""
    filters, morphology = map(twin_of, ("scipy.ndimage._filters", "scipy.ndimage._morphology"))
    computed = {name: functools.partial(_computed, *how) for name, how in _COMPILED.items()}
    filters._nd_image, morphology._filters = with_kernels(filters._nd_image, computed), filters
    ranked = functools.partial(_ranked, filters._rank_filter_1d.rank_filter)
    filters._rank_filter_1d = SimpleNamespace(rank_filter=ranked)
    for name in _CHAINS:
        setattr(filters, name, _chain(getattr(filters, name)))
    return {**vars(morphology), **vars(filters)}


def _ranked(scipys: Callable[..., None], x: Array, rank: int, size: int, out: Array, *border: Any) -> None:
    """scipy's ranks along an array of one dimension. It writes them in the type of x, whatever the type of `out`."""
    found = np.empty_like(x)
    scipys(x, rank, size, found, *border)
    out[...] = found


def lookup(module: str, names: Sequence[str], functions: Callable[[], Mapping[str, Any]]) -> Callable[[str], Any]:
    """`__getattr__` of a module that has these functions."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = functions()[name]
        found.__module__ = module
        return found

    return find


__getattr__ = lookup(__name__, __all__, _functions)


# ---------------------------------------------------------------- filters of several windows

# Functions that call compiled code again and again on one array, and do nothing else with it: their windows are joined.
_CHAINS = ("gaussian_filter", "uniform_filter", "sobel", "prewitt", "_min_or_max_filter")
# Within these: (windows, image, result), if there are windows that are not computed yet.
_pending: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("_pending", default=None)


def _chain(function: Callable[..., Array]) -> Callable[..., Array]:
    @functools.wraps(function)
    def call(input: Any, *args: Any, **kwargs: Any) -> Array:
        if any(isinstance(x, np.ndarray) and np.may_share_memory(input, x) for x in (*args, *kwargs.values())):
            input = np.array(input)
        token = _pending.set([])
        try:
            result = function(input, *args, **kwargs)
            _flush()
        finally:
            _pending.reset(token)
        return result

    return call


def _flush() -> None:
    """Compute the windows that are pending."""
    pending = _pending.get()
    if pending:
        passes.run(*pending)
        pending.clear()


def compute(x: Array, out: Array, window: passes.ImageWindow) -> None:
    """Compute a window's results now, or with the next window."""
    for array in (x, out):
        if array.dtype not in _DTYPES or not array.flags.aligned or array.ndim == 0:
            raise Elsewhere(f"{array.dtype} has no kernel")
    if window.kind == codegen.MEAN and out.dtype.kind != "f" and (x.dtype.kind == "f" or window.cval % 1):
        raise Elsewhere("a mean of floats is stored as integers")
    pending = _pending.get()
    if pending and pending[2] is out is x:
        pending[0].append(window)
        return
    _flush()
    if pending is None:
        passes.run([window], x, out)
    else:
        pending.extend(([window], x, out))


# ---------------------------------------------------------------- windows


@bounded_cache
def window_of(
    kind: int,
    shape: tuple[int, ...],
    chosen: bytes,
    origins: tuple[int, ...],
    mode: int,
    cval: Any,
    weights: tuple[float, ...],
    *more: Any,
) -> passes.ImageWindow:
    """A window. chosen: whether each of its elements is a term. origins: by which it is moved along each axis."""
    if not isinstance(cval, numbers.Real) or not any(chosen):
        raise Elsewhere("the window has no element, or cval is no real number")
    starts = (-(n // 2) - operator.index(origin) for n, origin in zipped(shape, origins))
    offsets = np.argwhere(np.frombuffer(chosen, bool).reshape(1, *shape)) + np.array([0, *starts])
    return passes.ImageWindow(kind, tuple(map(tuple, offsets.tolist())), _MODES[mode], float(cval), weights, *more)


def _computed(kind: int, names: str, x: Array, *args: Any) -> None:
    """Do what a function of scipy's compiled module does. names: of its arguments behind the image."""
    given: dict[str, Any] = dict(zipped(names.split(), args))
    mask: Any = given.get("mask")
    weights, cval, origins = given.get("weights"), given["cval"], given["origins"]
    axis, rank = given.get("axis"), given.get("rank", 0)
    if given.get("structure") is not None or (rank and np.count_nonzero(mask) > _MOST_RANKED):
        raise Elsewhere(f"a structure, or a rank of more than {_MOST_RANKED} elements, has no kernel")
    if axis is not None:
        size = given["size"] if weights is None else weights.size
        shape, ends, chosen = [1] * x.ndim, [0] * x.ndim, b"\1" * size
        shape[axis], ends[axis] = size, origins
    else:
        if weights is not None:
            mask = np.abs(weights) > np.finfo(np.float64).eps  # scipy leaves out the others
            weights = weights[mask]
        else:  # outside is cval in the image's type, as C converts it
            dtype = np.uint8 if x.dtype.kind == "b" else x.dtype
            cval = np.array(cval).astype(dtype).item() if abs(cval) < 2**31 else None  # which is no number
        shape, ends, chosen = mask.shape, origins, mask.tobytes()
    kind = codegen.EXTREMES[given["is_least"]] if "is_least" in given else kind
    of_terms = () if weights is None else tuple(weights.tolist()), int(rank), axis is not None
    border = tuple(ends), given["mode"], cval
    compute(x, given["out"], window_of(kind, tuple(shape), chosen, *border, *of_terms))


# Functions of scipy's compiled module: what they compute, and the names of their arguments behind the image.
_COMPILED = {
    "correlate": (codegen.WEIGHTED, "weights out mode cval origins"),
    "correlate1d": (codegen.WEIGHTED, "weights axis out mode cval origins"),
    "min_or_max_filter": (codegen.GREATEST, "mask structure out mode cval origins is_least"),
    "min_or_max_filter1d": (codegen.GREATEST, "size axis out mode cval origins is_least"),
    "rank_filter": (codegen.RANK, "rank mask out mode cval origins"),
    "uniform_filter1d": (codegen.MEAN, "size axis out mode cval origins"),
}


def _native() -> dict[str, Any]:
    """The functions that Numba's functions may call: none without scipy."""
    if importlib.util.find_spec("scipy") is None:
        return {}
    return {name: _functions()[name] for name in __all__ if name not in _OF_SEVERAL}


teach(_native)
