"""The types in the signatures of public functions, for type checkers and readers.

A function of an `Array` returns the kind that it gets: an array, a tensor or a BlockedArray. `Array` and `DenseArray`
are type variables with names that read well in `help`. Without PyTorch, tensors have type Any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy.typing as npt

from blockconv.dispatch.array import BlockedArray

if TYPE_CHECKING:
    import torch


# The tensor comes first. Without PyTorch it is Any, and a type checker takes the most precise type that fits, in
# doubt the last one.
Array = TypeVar("Array", "torch.Tensor", npt.NDArray[Any], BlockedArray)
DenseArray = TypeVar("DenseArray", "torch.Tensor", npt.NDArray[Any])

AnyArray: TypeAlias = "torch.Tensor | npt.NDArray[Any] | BlockedArray"
ArrayLike: TypeAlias = "torch.Tensor | npt.ArrayLike"

Sizes: TypeAlias = int | tuple[int, int]  # one number for both, or (height, width)
PoolPadding: TypeAlias = int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]
Padding: TypeAlias = PoolPadding | str
ActivationLike: TypeAlias = "str | tuple[Any, ...] | None"
