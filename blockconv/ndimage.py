"""`scipy.ndimage`'s filters, with its signatures and results, by kernels of this library.

    from blockconv import ndimage

Integers are scipy's to the last bit. Floats are within a share of the sum of the magnitudes that are added: 1e-12 in
float64, and in float32 n times 6e-8 for windows of n elements. The functions are scipy's own, on blockconv's kernels in
place of its compiled code: pip install 'blockconv[scipy]'. What blockconv has no kernel for is computed by scipy's
code, with one warning for each cause.
"""

from __future__ import annotations

import contextvars
import functools
import importlib.util
import operator
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from blockconv.core.errors import needing, warn
from blockconv.core.types import Array
from blockconv.filters import codegen, passes

_NAMES = """
    convolve convolve1d correlate correlate1d gaussian_filter gaussian_filter1d gaussian_gradient_magnitude
    gaussian_laplace grey_closing grey_dilation grey_erosion grey_opening laplace maximum_filter maximum_filter1d
    median_filter minimum_filter minimum_filter1d percentile_filter prewitt rank_filter sobel uniform_filter
    uniform_filter1d
"""
__all__ = [*_NAMES.split()]
_MODES = ("nearest", "wrap", "reflect", "mirror", "constant", "wrap", "constant")  # by scipy's numbers
_DTYPES = frozenset(map(np.dtype, (*passes.TYPES, "bool")))
_MOST_RANKED = 128  # elements of a window that is sorted in registers
_warned: set[str] = set()


class Elsewhere(Exception):  # noqa: N818  # it is no error
    """The call is not one that blockconv computes; the text says why."""


# ---------------------------------------------------------------- scipy's functions


def twin_of(name: str) -> Any:
    """A second instance of a module of scipy, whose functions may be given other globals than the first one's."""
    with needing("blockconv.ndimage and blockconv.signal", "scipy", "'blockconv[scipy]'"):
        spec: Any = importlib.util.find_spec(name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def with_kernels(compiled: Any, found: Mapping[str, Callable[..., Any]]) -> SimpleNamespace:
    """A compiled module of scipy, some of whose functions are others, which compute or raise `Elsewhere`."""

    def replaced(name: str) -> Callable[..., Any]:
        scipys = getattr(compiled, name)

        @functools.wraps(scipys)
        def call(*args: Any) -> Any:
            try:
                return found[name](*args)
            except (Elsewhere, TypeError) as error:  # scipy raises its own, if an argument is wrong
                why = f"{name}: {error}, so scipy computes it"
            _compute(_pending.get())
            result = scipys(*args)
            if why not in _warned:
                _warned.add(why)
                warn(why, stacklevel=3)
            return result

        return call

    return SimpleNamespace(**{**vars(compiled), **{name: replaced(name) for name in found}})


@functools.cache
def _functions() -> dict[str, Any]:
    """scipy's filters and its morphology, on blockconv's kernels."""
    filters, morphology = map(twin_of, ("scipy.ndimage._filters", "scipy.ndimage._morphology"))
    computed = {name: functools.partial(_computed, window_of) for name, window_of in _WINDOWS.items()}
    filters._nd_image, morphology._filters = with_kernels(filters._nd_image, computed), filters
    for name in _CHAINS:
        setattr(filters, name, _chain(getattr(filters, name)))
    return {**vars(morphology), **vars(filters)}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _functions()[name]
    found.__module__ = __name__
    return globals().setdefault(name, found)


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
        pending: list[Any] = []
        token = _pending.set(pending)
        try:
            result = function(input, *args, **kwargs)
            _compute(pending)
        finally:
            _pending.reset(token)
        return result

    return call


def _compute(pending: list[Any] | None) -> None:
    """Compute the windows that are pending."""
    if pending:
        passes.run(*pending)
        pending.clear()


def _computed(window_of: Callable[..., tuple[Array, passes.ImageWindow]], x: Array, *args: Any) -> None:
    """Do what a function of scipy's compiled module does."""
    out, window = window_of(x, *args)
    check_types(x, out)
    if window.kind == codegen.MEAN and out.dtype.kind != "f" and (x.dtype.kind == "f" or window.cval % 1):
        raise Elsewhere("a mean of floats is stored as integers")
    pending = _pending.get()
    if pending and pending[2] is out is x:
        pending[0].append(window)
        return
    _compute(pending)
    if pending is None:
        passes.run([window], x, out)
    else:
        pending.extend(([window], x, out))


# ---------------------------------------------------------------- windows


def check_types(*arrays: Array) -> None:
    """Raise `Elsewhere` for an array that no kernel reads or writes."""
    for x in arrays:
        if x.dtype not in _DTYPES or not x.flags.aligned or x.ndim == 0:
            raise Elsewhere(f"{x.dtype} has no kernel")


def window_of(
    kind: int, chosen: Array, starts: Any, mode: int, cval: Any, weights: Sequence[float] = (), rank: int = 0
) -> passes.ImageWindow:
    """A window. chosen: whether each of its elements is a term. starts: the offset of the first one along each axis."""
    if not isinstance(cval, (int, float, np.integer, np.floating)) or not chosen.any():
        raise Elsewhere("the window has no element, or cval is no real number")
    offsets = np.zeros((np.count_nonzero(chosen), 1 + chosen.ndim), int)
    offsets[:, 1:] = np.argwhere(chosen) + np.array(starts)
    each = tuple(map(tuple, offsets.tolist()))
    return passes.ImageWindow(kind, each, tuple(weights), _MODES[mode], float(cval), rank)


def _around(kind: int, chosen: Array, origins: Any, mode: int, cval: Any, *more: Any) -> passes.ImageWindow:
    """A window around an element."""
    starts = [-(n // 2) - operator.index(origin) for n, origin in zip(chosen.shape, origins, strict=True)]
    return window_of(kind, chosen, starts, mode, cval, *more)


@functools.lru_cache(maxsize=256)
def _line(
    kind: int, ndim: int, axis: int, size: int, weights: tuple[float, ...], mode: int, cval: Any, origin: int
) -> passes.ImageWindow:
    """A window along an axis."""
    sizes, origins = [1] * ndim, [0] * ndim
    sizes[axis], origins[axis] = operator.index(size), origin
    return _around(kind, np.ones(sizes, bool), origins, mode, cval, weights)


def _over(kind: int, x: Array, mask: Array, mode: int, cval: Any, origins: Any, rank: int = 0) -> passes.ImageWindow:
    """A window over the true elements of a mask. Outside is cval in the image's type."""
    if kind == codegen.RANK and np.count_nonzero(mask) > _MOST_RANKED:
        raise Elsewhere(f"a rank of more than {_MOST_RANKED} elements has no kernel")
    outside = np.array(cval).astype(x.dtype).item() if abs(cval) < 2**31 else None  # which is no number
    return _around(kind, mask, origins, mode, outside, (), rank)


def _correlate(x: Array, weights: Array, out: Array, mode: int, cval: Any, origins: Any) -> Any:
    chosen = np.abs(weights) > np.finfo(np.float64).eps  # scipy leaves out the others
    return out, _around(codegen.WEIGHTED, chosen, origins, mode, cval, weights[chosen].tolist())


def _extreme(x: Array, mask: Array, structure: Any, out: Array, mode: int, cval: Any, at: Any, is_least: int) -> Any:
    if structure is not None:
        raise Elsewhere("a structure is given")
    return out, _over(codegen.LEAST if is_least else codegen.GREATEST, x, mask, mode, cval, at)


# For functions of scipy's compiled module the result, and the window of their arguments.
_WINDOWS: dict[str, Callable[..., tuple[Array, passes.ImageWindow]]] = {
    "correlate": _correlate,
    "correlate1d": lambda x, weights, axis, out, *border: (
        out,
        _line(codegen.WEIGHTED, x.ndim, axis, weights.size, tuple(weights.tolist()), *border),
    ),
    "min_or_max_filter": _extreme,
    "min_or_max_filter1d": lambda x, size, axis, out, mode, cval, origin, is_least: (
        out,
        _line(codegen.LEAST if is_least else codegen.GREATEST, x.ndim, axis, size, (), mode, cval, origin),
    ),
    "rank_filter": lambda x, rank, mask, out, mode, cval, origins: (
        out,
        _over(codegen.RANK, x, mask, mode, cval, origins, int(rank)),
    ),
    "uniform_filter1d": lambda x, size, axis, out, *border: (
        out,
        _line(codegen.MEAN, x.ndim, axis, size, (), *border),
    ),
}
