"""Arrays that carry their layout, and the reorder from any layout to any other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from blockconv.core import target
from blockconv.core.checks import Shape, check_bytes, check_extents, check_same, checked_whole, read_shape
from blockconv.core.errors import ArgumentError, DtypeError, LayoutError
from blockconv.core.files import StrPath, as_path, reading, replacing
from blockconv.core.interop import as_numpy
from blockconv.core.layout import NHWC, Layout, read_layout, row_major
from blockconv.core.python import bounded_cache
from blockconv.core.types import NIBBLES, Array, ArrayDtype, FloatType, Types, element, numpy_dtype
from blockconv.dispatch.selection import Ends, reorder_program
from blockconv.runtime import address_of, aligned_empty, get_num_threads


class BlockedArray:
    """An array with a logical shape, and a storage in a layout.

    storage: a C-contiguous ndarray of shape ``layout.storage_shape(shape)``, with numbers of 1, 2, 4 or 8 bytes. It is
        not copied.
    layout: a `Layout`, or a name or tag in any notation that `Layout` reads.
    shape: the logical shape, (N, C, H, W) for activations.
    dtype: "int4" or "uint4" for packed 4-bit integers: two to a byte, low half first, in a flat uint8 storage of
        ceil(size / 2) bytes. Default: the storage's dtype.
    zero_point: the integer in the padding of a quantized array. Default: 0, which floats need.

    The attributes have the same names. The padding of the storage must hold the zero point; this library writes it so.
    ``numpy.asarray`` returns the logical array, like `numpy`.
    Raises LayoutError, DtypeError or ArgumentError for a storage that does not fit.

    >>> import numpy as np, blockconv as bc
    >>> x = bc.BlockedArray(np.zeros((1, 2, 5, 5, 16), np.float32), "NCHW16", (1, 30, 5, 5))
    >>> np.asarray(x).shape
    (1, 30, 5, 5)
    """

    __slots__ = ("dtype", "layout", "shape", "storage", "zero_point")

    def __init__(
        self,
        storage: Array,
        layout: Layout | str,
        shape: Sequence[int],
        *,
        dtype: npt.DTypeLike | None = None,
        zero_point: int = 0,
    ) -> None:
        self.layout = read_layout("BlockedArray", "layout", layout)
        self.shape = read_shape("BlockedArray", "shape", shape)
        require_rank("BlockedArray", self.layout, "shape", len(self.shape))
        if not isinstance(storage, np.ndarray) or isinstance(storage, np.ma.MaskedArray):
            rule = "has to be a NumPy array without a mask"
            raise ArgumentError("BlockedArray", "storage", type(storage).__name__, rule, "see to_layout")
        named = storage.dtype if dtype is None else checked_dtype("BlockedArray", dtype)
        self.dtype: ArrayDtype = named
        _, wanted, held = storage_for(self.layout, self.shape, named)
        require_dtype("BlockedArray", "storage", storage.dtype, held)
        require_movable("BlockedArray", "storage", storage.dtype)
        if storage.shape != wanted:
            rule = f"has to have shape {wanted} for the logical shape {self.shape} in {self.layout}"
            raise LayoutError("BlockedArray", "storage", storage, rule, "to_layout puts an array into a layout")
        if not storage.flags.c_contiguous:
            rule = "has to be C-contiguous: the layout alone gives the offsets"
            raise LayoutError("BlockedArray", "storage", storage, rule, "give np.ascontiguousarray(storage)")
        self.storage = storage
        self.zero_point = checked_zero_point(zero_point, self.dtype)

    @classmethod
    def from_numpy(
        cls,
        array: npt.ArrayLike,
        layout: Layout | str | None = None,
        *,
        dtype: str | None = None,
        zero_point: int = 0,
    ) -> BlockedArray:
        """`array`, of logical shape, in `layout`.

        array: an array of 1 to 6 dimensions, or a torch CPU tensor without gradient; numbers of 1, 2, 4 or 8 bytes.
        layout: a `Layout`, or a name of one. Default: the layout of the array's strides, without a copy. 4-D strides
            mean NHWC or NCHW by PyTorch's rule (`is_channels_last`). Other strides are copied once.
        dtype: "int4" or "uint4" to pack an array of small integers. Default: the array's.
        zero_point: the integer in the padding. Default: 0.

        Raises LayoutError, DtypeError or ArgumentError for a bad argument.
        """
        op = "BlockedArray.from_numpy"
        if dtype is not None and not (isinstance(dtype, str) and dtype in PACKED):
            raise DtypeError(op, "dtype", dtype, f"has to be one of {', '.join(PACKED)}, or left out")
        made = entered(op, "array", as_numpy(array, op, "array", kept=True), zero_point)
        if dtype is not None:
            made = _pack(made, dtype)
        return made if layout is None else to_layout(made, layout)

    @property
    def ndim(self) -> int:
        """The number of logical dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the storage, with its padding."""
        return self.storage.nbytes

    def numpy(self) -> Array:
        """The logical array: a view if the layout only permutes dimensions, else a new array."""
        if self.dtype in PACKED:
            return _unpack(self).numpy()
        if not self.layout.is_blocked:
            return self.storage.transpose(self.layout.logical)
        return to_layout(self, row_major(self.ndim)).storage

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self.numpy()
        if copy is False and (not np.shares_memory(array, self.storage) or dtype not in (None, array.dtype)):
            raise ValueError(f"{self.layout} needs a copy to become an array, and copy=False forbids it")
        return np.array(array, dtype=dtype) if copy else np.asarray(array, dtype=dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """The storage (not the logical array), by the array API's protocol."""
        return self.storage.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.storage.__dlpack_device__()

    def image(self) -> Array:
        """The storage as MACE's image, [height][width][4], without a copy.

        Raises LayoutError if the layout is no image of MACE.
        """
        height, width = self.layout.image_shape(self.shape)
        if self.dtype in PACKED:
            raise DtypeError(
                "BlockedArray.image",
                "dtype",
                self.dtype,
                "two values to a byte make no pixels of four",
            )
        return self.storage.reshape(height, width, 4)

    def save(self, path: StrPath) -> None:
        """Write storage, layout, shape, dtype and zero point to an .npz file, which replaces `path` when complete."""
        with replacing("BlockedArray.save", path) as file:
            np.savez(
                file,
                storage=self.storage,
                tag=self.layout.tag,
                shape=np.array(self.shape, np.int64),
                dtype=str(self.dtype),
                zero_point=self.zero_point,
            )

    @classmethod
    def load(cls, path: StrPath) -> BlockedArray:
        """Read a file of `save`. Raises ArgumentError for any other file."""
        op = "BlockedArray.load"
        with open(as_path(op, path), "rb") as opened, reading(op, path), np.load(opened, allow_pickle=False) as file:
            dtype = str(file["dtype"])
            return cls(
                file["storage"],
                str(file["tag"]),
                file["shape"].tolist(),
                dtype=dtype if dtype in PACKED else None,
                zero_point=file["zero_point"].item(),
            )

    def __reduce__(self) -> tuple[Any, ...]:
        dtype = self.dtype if self.dtype in PACKED else None
        return _rebuild, (self.storage, self.layout.tag, self.shape, dtype, self.zero_point)

    def __repr__(self) -> str:
        zero = f", zero_point={self.zero_point}" if self.zero_point else ""
        return (
            f"BlockedArray({self.layout}, shape={self.shape}, dtype={self.dtype}, storage={self.storage.shape}{zero})"
        )


def _rebuild(storage: Array, tag: str, shape: Shape, dtype: str | None, zero_point: int) -> BlockedArray:
    return BlockedArray(storage, tag, shape, dtype=dtype, zero_point=zero_point)


def empty(
    shape: Sequence[int], layout: Layout | str, dtype: npt.DTypeLike = np.float32, zero_point: int = 0
) -> BlockedArray:
    """A BlockedArray with uninitialised storage, aligned to 128 bytes, to pass as ``out=``.

    shape: the logical shape, (N, C, H, W) for activations.
    layout: a `Layout`, or a name or tag in any notation that `Layout` reads.
    dtype: numbers of 1, 2, 4 or 8 bytes; "int4" or "uint4" for two values to a byte.
    zero_point: the integer in the padding of a quantized array. Default: 0, which floats need.

    Raises LayoutError, DtypeError or ArgumentError for a bad argument.

    >>> import blockconv as bc
    >>> bc.empty((1, 30, 8, 8), "NCHW16").storage.shape
    (1, 2, 8, 8, 16)
    """
    layout, shape = read_layout("empty", "layout", layout), read_shape("empty", "shape", shape)
    require_rank("empty", layout, "shape", len(shape))
    element = checked_dtype("empty", dtype)
    if not isinstance(element, str):
        require_movable("empty", "dtype", element)
    made = allocate(shape, layout, element)
    made.zero_point = checked_zero_point(zero_point, element)
    return made


def allocate(shape: Shape, layout: Layout, dtype: ArrayDtype, zero_point: int = 0) -> BlockedArray:
    """`empty` for arguments that are known to be right, in a quarter of its time: what a kernel is about to write."""
    nbytes, stored, held = storage_for(layout, shape, dtype)
    made = object.__new__(BlockedArray)
    made.storage = np.ndarray(stored, held, aligned_empty(nbytes))
    made.layout, made.shape, made.dtype, made.zero_point = layout, shape, dtype, zero_point
    return made


def to_layout(
    x: BlockedArray | npt.ArrayLike,
    layout: Layout | str,
    *,
    dtype: npt.DTypeLike | None = None,
    axes: Layout | str | None = None,
    out: BlockedArray | None = None,
) -> BlockedArray:
    """Reorder: `x` as a BlockedArray in `layout`.

    x: a BlockedArray, an array of 1 to 6 dimensions, or a torch CPU tensor without gradient. Its shape is logical: (N,
        C, H, W) for activations, whatever `layout` is. 4-D strides mean NHWC if `is_channels_last`, else NCHW. An array
        that is dense in neither order is copied once. Elements: numbers of 1, 2, 4 or 8 bytes; in a BlockedArray also
        packed 4-bit integers.
    layout: a `Layout`, or a name or tag in any notation that `Layout` reads.
    dtype: the result's dtype. Default: x's. float32, bfloat16 and float16 convert to each other in the same pass,
        rounded to the nearest, halves to even.
    axes: the order of an array's axes if its shape is not logical: "NHWC" for (N, H, W, C). An image of shape (H, W, C)
        is ``to_layout(image[None], layout, axes="NHWC")``. This makes a view, not a copy.
    out: the BlockedArray to write and return, in `layout`, of x's shape and zero point and the result's dtype. It must
        not overlap `x`; its padding is written too. Default: a new one. If `x` has this layout and dtype already, the
        result is `x`, or shares an array's memory.

    Raises LayoutError, DtypeError or ArgumentError for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.ones((1, 30, 8, 8), np.float32)
    >>> blocked = bc.to_layout(x, "NCHW16")
    >>> blocked
    BlockedArray(NCHW16, shape=(1, 30, 8, 8), dtype=float32, storage=(1, 2, 8, 8, 16))
    >>> bool((blocked.numpy() == x).all())
    True
    >>> bc.to_layout(np.zeros((1, 48, 64, 3), np.uint8), "NHWC", axes="NHWC").shape
    (1, 3, 48, 64)
    """
    target = read_layout("to_layout", "layout", layout)
    if out is not None and not isinstance(out, BlockedArray):
        rule = "has to be a BlockedArray"
        raise ArgumentError("to_layout", "out", type(out).__name__, rule, "see blockconv.empty")
    given = out if dtype is None else None
    if isinstance(x, BlockedArray):
        if axes is not None:
            raise ArgumentError("to_layout", "axes", axes, "is for arrays, and x is a BlockedArray")
        src = x
    else:
        src = entered("to_layout", "x", _logical(as_numpy(x, "to_layout", "x", kept=True), axes), 0, given)
    wanted = src.dtype if dtype is None else _converted(src.dtype, dtype)
    require_rank("to_layout", target, "array", src.ndim)
    if out is None:
        if src.layout == target and src.dtype == wanted:
            return src
        out = empty(src.shape, target, wanted, src.zero_point)
    else:
        check_out("to_layout", out, BlockedArray, src.shape, wanted, target, src.zero_point)
        check_alias("to_layout", src.storage, out.storage, "source")
    reorder_into(src, out)
    return out


def reorder_into(src: BlockedArray, out: BlockedArray, quantizations: Ends = (None, None)) -> None:
    """Write `src` to `out`, of its shape, as elements of `out`; quantizations: of both, where integers convert."""
    packed = src.dtype in PACKED
    addresses = [address_of(src.storage), address_of(out.storage)]
    # Past the caches, lines that are written whole need not be read first.
    stream = 2 * (src.nbytes + out.nbytes) > target.last_level_cache() and addresses[1] % 64 == 0
    if out.dtype == src.dtype and quantizations == (None, None):
        how: tuple[Any, ...] = 0 if packed else src.storage.itemsize, None, stream, _fill(out)
    else:
        how = Types.converted(src.dtype, out.dtype), quantizations, stream
    program = reorder_program(src.shape, src.layout, out.layout, *how)
    if packed:
        # One byte an element in between; an odd last nibble is zero.
        wide = [np.zeros(2 * a.nbytes, np.uint8) for a in (src, out)]
        addresses += [address_of(a) for a in wide]
    program.run(addresses, get_num_threads())


# ---------------------------------------------------------------- the boundary with NumPy


def is_channels_last(array: Array) -> bool:
    """Whether the strides of a 4-D array mean NHWC.

    array: an array or a torch CPU tensor of any dimensions; False unless it has four.

    The rule is PyTorch's (``suggest_memory_format``), also for ambiguous arrays (C=1, or H=W=1). NumPy gives an axis of
    size 1 any stride, such as 0 in ``x[None]``. If only such a stride breaks PyTorch's rule, and only NHWC fits the
    other axes, the result is True.
    """
    if type(array) is not np.ndarray:
        array = as_numpy(array, "is_channels_last", "array")
    if array.ndim != 4:
        return False
    shape, strides = array.shape, array.strides
    if strides[1] * shape[1] > strides[3] and array.flags.c_contiguous:  # most arrays
        return False
    if strides[1] and _nested(shape, strides, (1, 3, 2, 0)) and strides[2] * shape[2] != strides[1]:
        return True
    if array.flags.c_contiguous or (shape[1] > 1 and not strides[1]):
        return False
    longer = [d for d in (1, 3, 2, 0) if shape[d] != 1]
    return _nested(shape, strides, longer) and not _nested(shape, strides, sorted(longer, reverse=True))


def _logical(array: Array, axes: Layout | str | None) -> Array:
    """An array whose axes are in this order as one of logical shape, a view of it."""
    if axes is None:
        return array
    rule = f"has to name each of the {array.ndim} axes of x once, in order, like 'NHWC'"
    remedy = "give image[None] and axes='NHWC'" if str(axes) == "HWC" else ""
    try:
        order = Layout(axes)
    except LayoutError:
        raise LayoutError("to_layout", "axes", axes, rule, remedy) from None
    if order.is_blocked or order.ndim != array.ndim:
        raise LayoutError("to_layout", "axes", str(order), rule, remedy)
    return array.transpose(order.logical)


def _nested(shape: Shape, strides: tuple[int, ...], axes: Sequence[int]) -> bool:
    """Whether axes of an array, none of them empty, follow one another in memory, innermost first."""
    least = 0
    for d in axes:
        if shape[d] == 0 or strides[d] < least:
            return False
        least = strides[d] * shape[d]
    return True


def entered(op: str, argument: str, array: Array, zero_point: int = 0, out: BlockedArray | None = None) -> BlockedArray:
    """An array of logical shape as a BlockedArray, uncopied if its strides are dense NCHW or NHWC.

    An array has no zero point of its own: it takes the zero point of `out`, if there is one.
    """
    require_movable(op, argument, array.dtype)
    if array.ndim == 0 or array.ndim > 6:
        raise ArgumentError(op, argument, array, "has to have 1 to 6 dimensions")
    check_extents(op, argument, array, array.shape)
    if out is not None:
        require_dtype(op, "out", out.dtype, array.dtype.newbyteorder("="))
        zero_point = out.zero_point
    storage, layout = storage_of(array, is_channels_last(array))
    return BlockedArray(storage, layout, array.shape, zero_point=zero_point)


def storage_of(x: Array, channels_last: bool) -> tuple[Array, Layout]:
    """An array's storage and layout; strides that are dense in neither order are copied once."""
    layout = NHWC if channels_last else row_major(x.ndim)
    storage = x.transpose(layout.outer)
    if not (storage.flags.c_contiguous and storage.flags.aligned and storage.dtype.isnative):
        storage = np.ascontiguousarray(storage, dtype=storage.dtype.newbyteorder("="))
    return storage, layout


def _pack(x: BlockedArray, dtype: str) -> BlockedArray:
    low, high = element(dtype).bounds
    if x.storage.dtype.kind not in "iu" or (x.storage.size and not low <= x.storage.min() <= x.storage.max() <= high):
        raise DtypeError("BlockedArray.from_numpy", "array", x.storage, f"{dtype} holds integers from {low} to {high}")
    values = np.zeros(-(-x.storage.size // 2) * 2, np.uint8)
    values[: x.storage.size] = x.storage.reshape(-1) & 15
    return BlockedArray(values[::2] | values[1::2] << 4, x.layout, x.shape, dtype=dtype, zero_point=x.zero_point)


def _unpack(x: BlockedArray) -> BlockedArray:
    """One element a byte, sign-extended for int4."""
    pairs = np.empty((x.storage.size, 2), PACKED[str(x.dtype)])
    pairs[:, 0], pairs[:, 1] = x.storage & 15, x.storage >> 4
    if x.dtype == "int4":
        pairs ^= 8
        pairs -= 8
    stored = x.layout.storage_shape(x.shape)
    return BlockedArray(pairs.reshape(-1)[: math.prod(stored)].reshape(stored), x.layout, x.shape)


def _fill(array: BlockedArray) -> int:
    """The bits that the padding of `array` holds, as an int64."""
    if isinstance(array.dtype, str):
        return array.zero_point & 15
    if not array.zero_point:
        return 0
    # In the array's own byte order, which need not be the machine's.
    bits = np.array(array.zero_point, array.dtype).view(f"i{array.dtype.itemsize}")
    return int(bits) & ((1 << 8 * array.dtype.itemsize) - 1) if bits.itemsize < 8 else int(bits)


# ---------------------------------------------------------------- checks


PACKED = {name: element(name).dtype for name in NIBBLES}  # two values a byte, and what they unpack to


@bounded_cache
def storage_for(layout: Layout, shape: Shape, dtype: ArrayDtype) -> tuple[int, Shape, np.dtype[Any]]:
    """(bytes, shape, dtype) of a storage."""
    nbytes = element(dtype).nbytes(layout.size(shape))
    check_bytes("BlockedArray", "shape", shape, nbytes)
    if isinstance(dtype, str):
        return nbytes, (nbytes,), np.dtype(np.uint8)
    return nbytes, layout.storage_shape(shape), dtype


def checked_dtype(op: str, dtype: npt.DTypeLike) -> ArrayDtype:
    """The dtype of that name; "int4" and "uint4" stay strings."""
    if isinstance(dtype, str) and dtype in PACKED:
        return dtype
    try:
        return numpy_dtype(dtype)
    except TypeError:
        raise DtypeError(op, "dtype", dtype, f"has to be a dtype of NumPy, or one of {', '.join(PACKED)}") from None


CONVERTED = get_args(FloatType)  # what becomes each other as it is reordered


def _converted(src: ArrayDtype, dtype: npt.DTypeLike) -> ArrayDtype:
    """The dtype that elements of `src` are to become. Raises DtypeError for one that they cannot."""
    wanted = checked_dtype("to_layout", dtype)
    if wanted != src and not {str(src), str(wanted)} <= set(CONVERTED):
        rule = f"x is {src}, and only {', '.join(CONVERTED)} convert to each other"
        remedy = "for integers call quantize_linear or dequantize_linear"
        raise DtypeError("to_layout", "dtype", str(wanted), rule, remedy)
    return wanted


def require_movable(op: str, argument: str, dtype: np.dtype[Any]) -> None:
    if dtype.hasobject or dtype.itemsize not in (1, 2, 4, 8):
        raise DtypeError(op, argument, str(dtype), "has to have elements of 1, 2, 4 or 8 bytes")


def require_rank(op: str, layout: Layout, what: str, ndim: int) -> None:
    """Raise LayoutError unless the layout is one of so many dimensions, which the argument `what` has."""
    if layout.ndim != ndim:
        raise LayoutError(op, "layout", str(layout), f"has {layout.ndim} dimensions, and the {what} has {ndim}")


def require_dtype(op: str, argument: str, found: ArrayDtype, wanted: ArrayDtype) -> None:
    if isinstance(found, str) != isinstance(wanted, str) or found != wanted:
        raise DtypeError(op, argument, str(found), f"has to have dtype {wanted}")


def check_out(
    op: str, out: Any, kind: type[Any], shape: Shape, dtype: ArrayDtype, layout: Layout | None, zero_point: int
) -> None:
    """Raise unless `out` is a writeable array of this kind, shape, dtype; a BlockedArray of layout and zero point."""
    if not isinstance(out, kind):
        raise ArgumentError(op, "out", type(out).__name__, f"has to be a {kind.__name__}, like the input")
    check_same(op, "out", out, shape)
    require_dtype(op, "out", out.dtype, dtype)
    if layout is not None and out.layout != layout:
        raise LayoutError(op, "out", out, f"has to be in {layout}")
    if layout is not None and out.zero_point != zero_point:
        raise ArgumentError(op, "out", out, f"has to have the output's zero point, {zero_point}")
    flags = (out.storage if kind is BlockedArray else out).flags
    if not flags.writeable or not flags.aligned:
        raise ArgumentError(op, "out", out, "has to be writeable and aligned to its elements")


def check_alias(op: str, src: Array, dst: Array, what: str) -> None:
    """Raise ArgumentError if two contiguous arrays overlap, one read and one written."""
    start, to = address_of(src), address_of(dst)
    if start < to + dst.nbytes and to < start + src.nbytes:
        raise ArgumentError(op, "out", dst, f"must not overlap the {what}", "give another array")


def checked_zero_point(zero_point: int, dtype: ArrayDtype) -> int:
    low, high = element(dtype).bounds if isinstance(dtype, str) or dtype.kind in "iu" else (0, 0)
    value = checked_whole("BlockedArray", "zero_point", zero_point)
    if not low <= value <= high:
        raise ArgumentError("BlockedArray", "zero_point", zero_point, f"has to be from {low} to {high} for {dtype}")
    return value
