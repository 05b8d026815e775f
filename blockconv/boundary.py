"""The boundary between callers' arrays and the library: what comes in, what goes out, and what is refused.

The public functions of every op share these checks, so that they say the same of the same mistake.
"""

from __future__ import annotations

import marshal
import operator
import warnings
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockconv.array import BlockedArray, to_layout
from blockconv.errors import ArgumentError, DtypeError, LayoutError, SlowPathWarning
from blockconv.layout import NATIVE, Layout
from blockconv.runtime import address_of

__all__ = [
    "NATIVE_SET",
    "NCHW",
    "NHWC",
    "Array",
    "apart",
    "as_numpy",
    "check_out",
    "dense_layout",
    "like",
    "like_any",
    "native_layout",
    "pads",
    "pair",
    "reordered",
    "single",
    "spelt",
    "storage_of",
    "whole",
]

Array: TypeAlias = npt.NDArray[Any]
NATIVE_SET = frozenset(NATIVE)
NCHW, NHWC = Layout("NCHW"), Layout("NHWC")


def as_numpy(x: Any, op: str, argument: str, write: bool = False) -> Array:
    """An array or a torch CPU tensor as an array, without a copy but for bytes that are swapped."""
    if isinstance(x, np.ndarray):
        array = x
    elif _is_tensor(x):
        try:
            array = x.numpy()
        except (TypeError, RuntimeError) as error:
            raise _unreadable(x, op, argument, error) from None
    elif write or isinstance(x, (str, bytes)) or x is None:
        raise ArgumentError(op, argument, x, "has to be an array")
    else:
        array = np.asarray(x)
    if write and not array.flags.writeable:
        raise ArgumentError(op, argument, array, "has to be writeable")
    if not write and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _is_tensor(x: object) -> bool:
    module = type(x).__module__
    return module == "torch" or module.startswith("torch.")


def _unreadable(x: Any, op: str, argument: str, error: Exception) -> Exception:
    """Why a tensor cannot be read as an array."""
    if x.requires_grad:
        return ArgumentError(op, argument, x, "requires a gradient, and this library computes none", "give x.detach()")
    if x.device.type != "cpu":
        return ArgumentError(op, argument, x, "has to be on the CPU", "give x.cpu()")
    return DtypeError(op, argument, x, f"cannot be read as an array ({error})")  # bfloat16, sparse


def like(input: Any, result: Array) -> Any:
    """`result` as the kind of array that the input was: a torch tensor of the same memory for a tensor."""
    if type(input) is np.ndarray:
        return result
    if _is_tensor(input):
        import torch

        return torch.from_numpy(result)
    return result


def like_any(inputs: Iterable[Any], result: Array) -> Any:
    """`result` as a torch tensor of the same memory if any of the inputs is one, else as it is."""
    return like(next((x for x in inputs if _is_tensor(x)), None), result)


def storage_of(x: Array, channels_last: bool) -> tuple[Array, Layout]:
    """A 4-D array's storage and layout; strides that are dense in neither order are copied once."""
    layout = NHWC if channels_last else NCHW
    storage = x.transpose(layout.outer)
    if not (storage.flags.c_contiguous and storage.flags.aligned and storage.dtype.isnative):
        storage = np.ascontiguousarray(storage, dtype=storage.dtype.newbyteorder("="))
    return storage, layout


def dense_layout(op: str, out: Array, channels_last: bool) -> Layout:
    """NHWC or NCHW, as the strides of the 4-D array `out` are; where both fit, as `channels_last` says."""
    if out.ndim != 4:
        raise ArgumentError(op, "out", out, "has to be of as many dimensions as the input")
    for layout in (NHWC, NCHW) if channels_last else (NCHW, NHWC):
        if out.transpose(layout.outer).flags.c_contiguous:
            return layout
    raise LayoutError(op, "out", out, "has to be dense in NCHW or NHWC order")


def reordered(op: str, x: BlockedArray, layout: Layout, stacklevel: int = 4) -> BlockedArray:
    """`x` in another layout, by a reorder that the caller is warned of."""
    text = f"blockconv: {op} reorders its input from {x.layout} to {layout} at every call"
    warnings.warn(text + "; give it in that layout", SlowPathWarning, stacklevel=stacklevel)
    return to_layout(x, layout)


def check_out(
    op: str, out: Any, kind: type[Any], shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout | None
) -> None:
    """Raise unless `out` is a writeable array of this kind, shape, dtype and (for a BlockedArray) layout."""
    if not isinstance(out, kind):
        raise ArgumentError(op, "out", type(out).__name__, f"has to be a {kind.__name__}, as the input is")
    if out.shape != shape:
        raise ArgumentError(op, "out", out, f"has to be of shape {shape}")
    if out.dtype != dtype:
        raise DtypeError(op, "out", str(out.dtype), f"has to be of dtype {dtype}")
    if layout is not None and out.layout != layout:
        raise LayoutError(op, "out", out, f"has to be in {layout}")
    flags = (out.storage if kind is BlockedArray else out).flags
    if not flags.writeable or not flags.aligned:
        raise ArgumentError(op, "out", out, "has to be writeable and aligned to its elements")


def apart(op: str, src: Array, dst: Array, what: str = "input") -> tuple[int, int]:
    """The addresses of two contiguous arrays, of which one is written: ArgumentError if they overlap."""
    start, to = address_of(src), address_of(dst)
    if start < to + dst.nbytes and to < start + src.nbytes:
        raise ArgumentError(op, "out", dst, f"must not overlap the {what}", "give another array")
    return start, to


def spelt(values: tuple[Any, ...]) -> bytes | str:
    """A key that tells apart what is equal but no int, 2 from 2.0 and True, and that lists have too."""
    try:
        key = marshal.dumps(values, 2)  # a quarter of the time of a repr
    except ValueError:
        return repr(values)
    return repr(values) if b"s" in key else key  # NumPy's numbers are written as their bytes ("s"), whatever they are


def whole(value: Any) -> int | None:
    """An int, NumPy's ones too, but no bool; None for anything else."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def single(value: Any) -> Any:
    """What a sequence of one holds, as torch has it; else the value."""
    return value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value


def two(value: Any) -> tuple[Any, ...]:
    """A value or a sequence of one, twice; a sequence as a tuple."""
    value = single(value)
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


def pair(op: str, argument: str, value: Any) -> tuple[int, int]:
    """A positive int, or two of them, as a pair."""
    numbers = [number for v in two(value) if (number := whole(v)) is not None]
    if len(numbers) != 2 or len(two(value)) != 2 or min(numbers) < 1:
        raise ArgumentError(op, argument, value, "has to be a positive int or a pair of them")
    return numbers[0], numbers[1]


def pads(
    op: str, padding: Any, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((top, bottom), (left, right))."""
    if padding == "valid":
        return (0, 0), (0, 0)
    if padding == "same":
        if stride != (1, 1):
            raise ArgumentError(op, "padding", padding, "'same' needs a stride of 1")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return (total[0] // 2, total[0] - total[0] // 2), (total[1] // 2, total[1] - total[1] // 2)
    both = [[whole(v) for v in (two(p) if isinstance(p, (tuple, list)) else (p, p))] for p in two(padding)]
    ends = [end for pair in both for end in pair if end is not None and end >= 0]
    if [len(pair) for pair in both] != [2, 2] or len(ends) != 4:
        rule = "has to be an int of at least 0, a pair, 'same', 'valid', or ((top, bottom), (left, right))"
        raise ArgumentError(op, "padding", padding, rule)
    return (ends[0], ends[1]), (ends[2], ends[3])


def native_layout(layout: Layout | str, op: str, argument: str) -> Layout:
    """The layout, if kernels run in it."""
    found = Layout(layout)
    if found not in NATIVE_SET:
        names = ", ".join(str(n) for n in NATIVE)
        raise LayoutError(op, argument, str(found), f"has to be one of {names}", "see to_layout")
    return found
