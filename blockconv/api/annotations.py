"""Types of what the public functions take and give, for checkers and readers: nothing here runs.

A function of an `ActivationsT` gives the kind of array that it was given: an array for an array, a tensor for a
tensor, a BlockedArray for a BlockedArray. PyTorch need not be installed; tensors are then of type Any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy.typing as npt

from blockconv.dispatch.array import BlockedArray

if TYPE_CHECKING:
    import torch

__all__ = ["ActivationLike", "ActivationsT", "AnyArray", "Dense", "DenseT", "Padding", "PoolPadding", "Sizes"]

# The tensor comes first: where PyTorch is not installed it is Any, and a checker takes the most precise of those
# that fit, the last one in doubt.
ActivationsT = TypeVar("ActivationsT", "torch.Tensor", npt.NDArray[Any], BlockedArray)
DenseT = TypeVar("DenseT", "torch.Tensor", npt.NDArray[Any])

AnyArray: TypeAlias = "torch.Tensor | npt.NDArray[Any] | BlockedArray"
Dense: TypeAlias = "torch.Tensor | npt.ArrayLike"

Sizes: TypeAlias = int | tuple[int, int]  # one number for both, or (height, width)
PoolPadding: TypeAlias = int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]
Padding: TypeAlias = PoolPadding | str
ActivationLike: TypeAlias = "str | tuple[Any, ...] | None"
