"""Arrays of others as NumPy arrays, without a copy, and results as the kind of array that the caller gave."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import MOST_BYTES, check_bytes
from blockconv.core.errors import ArgumentError, DtypeError
from blockconv.core.types import element

__all__ = ["as_numpy", "like", "like_any"]

Array: TypeAlias = npt.NDArray[Any]


def as_numpy(x: Any, op: str, argument: str, write: bool = False) -> Array:
    """An array, a torch CPU tensor or nested lists as an array, without a copy but for bytes that are swapped.

    write: it is to be written, so it has to be memory that the caller sees. Raises ArgumentError and its kinds for
    what is no array, or holds more than an array can: a mask, a gradient.
    """
    if type(x) is np.ndarray:
        array = x
    elif _is_tensor(x):
        array = _of_tensor(x, op, argument)
    elif isinstance(x, np.ma.MaskedArray):
        rule = "is a masked array, and its mask would be lost"
        raise ArgumentError(op, argument, x, rule, "give x.filled(value), or x.data to have the mask ignored")
    elif isinstance(x, np.ndarray):
        array = x
    elif write or isinstance(x, (str, bytes)) or x is None:
        raise ArgumentError(op, argument, x, "has to be an array")
    else:
        array = _of_object(x, op, argument)
    if array.nbytes > MOST_BYTES:  # broadcast: a copy of it would be so large
        check_bytes(op, argument, array, array.nbytes)
    if write and not array.flags.writeable:
        raise ArgumentError(op, argument, array, "has to be writeable")
    if not write and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def like(input: Any, result: Array) -> Any:
    """`result` as the kind of array that the input was: a torch tensor of the same memory for a tensor."""
    if type(input) is np.ndarray or not _is_tensor(input):
        return result
    torch = sys.modules["torch"]
    if result.dtype == _BFLOAT16:
        return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(result)


def like_any(inputs: Iterable[Any], result: Array) -> Any:
    """`result` as a torch tensor of the same memory if any of the inputs is one, else as it is."""
    return like(next((x for x in inputs if _is_tensor(x)), None), result)


_BFLOAT16 = element("bfloat16").dtype


@functools.lru_cache(maxsize=256)
def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _is_torch(x: object) -> bool:
    return _is_torchs(type(x).__module__)


def _is_tensor(x: object) -> bool:
    return _is_torchs(type(x).__module__) and hasattr(x, "numpy")  # not torch's modules


def _of_tensor(x: Any, op: str, argument: str) -> Array:
    torch = sys.modules["torch"]
    try:
        if x.dtype is torch.bfloat16:  # of which NumPy knows the bits
            bits: Array = (x if x.requires_grad else x.view(torch.int16)).numpy()
            return bits.view(_BFLOAT16)
        array: Array = x.numpy()
    except (TypeError, RuntimeError) as error:
        raise _unreadable(x, op, argument, error) from None
    return array


def _unreadable(x: Any, op: str, argument: str, error: Exception) -> Exception:
    """Why a tensor cannot be read as an array."""
    if x.requires_grad:
        return ArgumentError(op, argument, x, "requires a gradient, and this library computes none", "give x.detach()")
    if x.device.type != "cpu":
        return ArgumentError(op, argument, x, "has to be on the CPU", "give x.cpu()")
    return DtypeError(op, argument, x, f"cannot be read as an array ({error})")  # sparse, quantized, conjugated


def _of_object(x: Any, op: str, argument: str) -> Array:
    if _is_torch(x) and hasattr(x, "weight"):
        kind = type(x).__name__
        remedy = "give its parameters: module.weight.detach(), module.bias.detach(), module.stride, module.padding, ..."
        raise ArgumentError(op, argument, kind, f"is a torch module, and the {argument} has to be an array", remedy)
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, arrays of other devices
        raise ArgumentError(op, argument, x, f"cannot be read as an array ({error})") from None
