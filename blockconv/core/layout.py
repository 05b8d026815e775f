"""Layouts: how a logical array of a few dimensions is put into memory.

A layout permutes the dimensions and may cut some of them into blocks, which become the fastest axes of the
storage. That is all: every layout of MACE, MegEngine, OpenVINO (clDNN), oneDNN, TVM and PyTorch that this
library knows is such a permutation with blocks, and is written as oneDNN's tag of it.

    aBcd16b    dimensions a, b, c, d (N, C, H, W), outermost first; b, upper case, is cut by 16: the storage
               is [N][C/16][H][W][16c]

A dimension that its block does not divide is padded at its end. The logical shape stays what it was, and
index maps here take logical shapes; whoever writes storage keeps its padding zero.

Two layouts are equal if their tags are. Names are only ways to write a tag: the four systems' grammars are
read by one reader (`read_name`), and the names that no grammar explains stand in tables.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from blockconv.core.errors import LayoutError
from blockconv.core.layout_grammar import LETTERS, read_name, refused_name
from blockconv.core.layout_names import IMAGE_HEIGHT_AXES, KNOWN, WEIGHT_NAMES, KnownLayout

__all__ = [
    "NATIVE",
    "Axis",
    "Layout",
    "known_layouts",
    "part_of_batch",
    "register_layout",
    "row_major",
]


class Axis(NamedTuple):
    """An axis of the storage: moving one along it moves `step` along `dim`, and `stride` in the storage.

    dim: the logical dimension, counted from 0.
    step: in elements of that dimension.
    size: how long the axis is.
    stride: in elements of the storage.
    """

    dim: int
    step: int
    size: int
    stride: int


@dataclass(frozen=True, init=False, repr=False, eq=False, slots=True)
class Layout:
    """A permutation of dimensions with blocks: `Layout("NCHW16")`, in any name of it, or a Layout itself.

    tag: oneDNN's name with generic letters; two layouts are equal if their tags are, and are then one object.
    outer: the dimensions in the order of the storage, outermost first.
    inner: the blocks that follow them, as (dimension, size).
    blocks: for each dimension the product of its blocks, 1 if it has none.
    logical: the outer axes in logical order, to transpose a storage without blocks by.
    is_native: whether kernels run in it: four dimensions in any order, and at most one block, of up to 64 channels; or
        images outermost and a block of up to 64 of them before that. Others are reordered at the call.

    Logical order is (N, C, H, W), (O, I, H, W), (G, O, I, H, W). Raises LayoutError if the name is no layout, naming
    the part that is not.

    A shape is always logical, and its sizes may be zero; offsets, sizes and strides count elements. The index
    maps raise LayoutError for a wrong number of dimensions, a negative size and an index out of bounds.

    >>> import blockconv as bc
    >>> layout = bc.Layout("nChw16c")
    >>> layout, layout.tag
    (Layout('NCHW16'), 'aBcd16b')
    >>> layout.offset((1, 30, 56, 56), (0, 17, 0, 1))
    50193
    """

    tag: str
    outer: tuple[int, ...]
    inner: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    logical: tuple[int, ...]
    is_native: bool
    images: int

    def __new__(cls, name: str | Layout) -> Layout:
        if isinstance(name, Layout):
            return name
        if not isinstance(name, str):
            raise refused_name(name, f"must be the name of a layout or a Layout, not {type(name).__name__}")
        return _named(name)

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.tag,)  # by tag: a registered name may be unknown where this is read

    def __repr__(self) -> str:
        return f"Layout({self.name!r})"

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The library's name (NCHW16), or the one that was registered, or else the tag."""
        return _name_of.get(self.tag, self.tag)

    @property
    def ndim(self) -> int:
        """The number of logical dimensions."""
        return len(self.outer)

    @property
    def is_blocked(self) -> bool:
        """Whether some dimension is cut into blocks; else the layout only permutes."""
        return bool(self.inner)

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The logical shape with every dimension rounded up to its blocks."""
        return _padded(self, self._shape("padded_shape", shape))

    def storage_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the dense storage: outer axes, then blocks; (N, C/16, H, W, 16) for NCHW16."""
        return tuple(axis.size for axis in _axes(self, self._shape("storage_shape", shape)))

    def size(self, shape: Sequence[int]) -> int:
        """The number of elements in the storage, padding included."""
        return math.prod(_padded(self, self._shape("size", shape)))

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of the dense storage, one for each axis of storage_shape."""
        return tuple(axis.stride for axis in _axes(self, self._shape("strides", shape)))

    def axes(self, shape: Sequence[int]) -> tuple[Axis, ...]:
        """The axes of the storage, outermost first. All index maps follow from them."""
        return _axes(self, self._shape("axes", shape))

    def offset(self, shape: Sequence[int], index: Sequence[int]) -> int:
        """Where the element at a logical index lies in the storage."""
        shape = self._shape("offset", shape)
        index = _within("offset", "index", index, shape)
        return sum(index[dim] // step % size * stride for dim, step, size, stride in _axes(self, shape))

    def index(self, shape: Sequence[int], offset: int) -> tuple[int, ...] | None:
        """The logical index of the element that lies at an offset of the storage; None if that is padding."""
        shape = self._shape("index", shape)
        axes, size = _axes(self, shape), math.prod(_padded(self, shape))
        (offset,) = _integers("index", "offset", (offset,))
        if not 0 <= offset < size:
            raise LayoutError("Layout.index", "offset", offset, f"must be 0 or more and less than {size}")
        index = _logical(self, axes, [offset // axis.stride % axis.size for axis in axes])
        return index if all(map(operator.lt, index, shape)) else None

    def forward_index(self, index: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
        """The index into an array of storage_shape of the element at a logical index (a TVM verb)."""
        shape = self._shape("forward_index", shape)
        index = _within("forward_index", "index", index, shape)
        return tuple(index[dim] // step % size for dim, step, size, _ in _axes(self, shape))

    def backward_index(self, storage_index: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
        """The logical index of a place in an array of storage_shape (a TVM verb).

        A place in the padding gives the index that it would have: outside `shape`, inside `padded_shape`.
        """
        axes = _axes(self, self._shape("backward_index", shape))
        bounds = tuple(axis.size for axis in axes)
        return _logical(self, axes, _within("backward_index", "storage_index", storage_index, bounds))

    def image_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """The (height, width), in pixels of four elements, of the MACE image that this storage is.

        Over (N, C, H, W): NHCW4, height-major image, width-major image; over weights: Acdb4a and, depthwise,
        aBcd4b with M=1; over (W,): argument. Raises LayoutError for any other layout.
        """
        shape = self._shape("image_shape", shape)
        leading = IMAGE_HEIGHT_AXES.get(self.tag)
        if leading is None:
            remedy = f"these are: {', '.join(str(Layout(tag)) for tag in IMAGE_HEIGHT_AXES)}"
            raise LayoutError("Layout.image_shape", "layout", self.name, "is no MACE image", remedy)
        if self.tag == "aBcd4b" and shape[0] != 1:
            rule = "a depthwise filter (M, I, H, W) is an image for M=1 only"
            raise LayoutError("Layout.image_shape", "shape", shape, rule)
        sizes = self.storage_shape(shape)[:-1]
        return math.prod(sizes[:leading]), math.prod(sizes[leading:])

    def _shape(self, op: str, shape: Sequence[int]) -> tuple[int, ...]:
        sizes = _integers(op, "shape", shape)
        if not sizes and self.ndim == 1:  # a scalar: see `row_major`
            return (1,)
        if len(sizes) != self.ndim:
            rule = f"{self.name} is of {self.ndim} dimensions, not {len(sizes)}"
            raise LayoutError(f"Layout.{op}", "shape", shape, rule)
        if any(size < 0 for size in sizes):
            raise LayoutError(f"Layout.{op}", "shape", shape, "a size must be zero or more")
        return sizes


def _integers(op: str, argument: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise LayoutError(f"Layout.{op}", argument, values, "must be integers") from None


def _within(op: str, argument: str, values: Iterable[int], bounds: tuple[int, ...]) -> tuple[int, ...]:
    index = _integers(op, argument, values)
    if len(index) != len(bounds) or not all(0 <= i < bound for i, bound in zip(index, bounds, strict=True)):
        raise LayoutError(f"Layout.{op}", argument, values, f"must be zero or more and inside {bounds}")
    return index


def _padded(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    padded = tuple(-(-size // block) * block for size, block in zip(shape, layout.blocks, strict=True))
    return (layout.images, *padded[1:]) if layout.images else padded


@lru_cache(maxsize=256)
def part_of_batch(layout: Layout, images: int) -> Layout:
    """The layout of some images of an array of so many: they lie as they do there. (It has no name that is read.)"""
    part = object.__new__(Layout)
    for attribute in Layout.__slots__:
        object.__setattr__(part, attribute, getattr(layout, attribute))
    object.__setattr__(part, "images", images)
    object.__setattr__(part, "tag", f"{layout.tag} of {images} images")
    return part


@lru_cache(maxsize=1024)
def _axes(layout: Layout, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    padded = _padded(layout, shape)
    steps = list(layout.blocks)  # what one further along a dimension's next axis is worth in that dimension
    sizes = [(dim, steps[dim], padded[dim] // steps[dim]) for dim in layout.outer]
    for dim, size in layout.inner:
        steps[dim] //= size
        sizes.append((dim, steps[dim], size))
    axes, stride = [], 1
    for dim, step, size in reversed(sizes):
        axes.append(Axis(dim, step, size, stride))
        stride *= size
    return tuple(reversed(axes))


def _logical(layout: Layout, axes: tuple[Axis, ...], storage_index: Iterable[int]) -> tuple[int, ...]:
    index = [0] * layout.ndim
    for axis, i in zip(axes, storage_index, strict=True):
        index[axis.dim] += i * axis.step
    return tuple(index)


def _is_native(outer: tuple[int, ...], inner: tuple[tuple[int, int], ...]) -> bool:
    """Whether kernels run in it: see `Layout`."""
    if outer[0] == 0 and inner and inner[0][0] == 0 and inner[0][1] <= LARGEST_BLOCK:
        inner = inner[1:]
    return len(outer) == 4 and (not inner or (len(inner) == 1 and inner[0][0] == 1 and inner[0][1] <= LARGEST_BLOCK))


@lru_cache(maxsize=4096)  # a name that once was read keeps its meaning: see register_layout
def _named(name: str) -> Layout:
    outer, inner = read_name(_tag_of.get(name, name))
    blocks = [1] * len(outer)
    for dim, size in inner:
        blocks[dim] *= size
    tag = "".join(LETTERS[dim].upper() if blocks[dim] > 1 else LETTERS[dim] for dim in outer)
    tag += "".join(f"{size}{LETTERS[dim]}" for dim, size in inner)
    layout = object.__new__(Layout)
    logical = tuple(sorted(range(len(outer)), key=outer.__getitem__))
    values = {
        "tag": tag,
        "outer": outer,
        "inner": inner,
        "blocks": tuple(blocks),
        "logical": logical,
        "is_native": _is_native(outer, inner),
        "images": 0,
    }
    for attribute, value in values.items():
        object.__setattr__(layout, attribute, value)
    return _made.setdefault(tag, layout)


LARGEST_BLOCK = 64  # channels, or images, of a layout that kernels run in
_lock = threading.Lock()
_made: dict[str, Layout] = {}
_name_of = {row.tag: row.name for row in KNOWN}
_tag_of = {name: row.tag for row in KNOWN for name in (row.name, *row.aliases)} | WEIGHT_NAMES

NATIVE = tuple(map(Layout, ("NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW16", "NCHW32", "NCHW64", "CHWN4")))
"""The layouts that a planner and the harness take by default; see `Layout.is_native` for all that kernels run in."""


def read_layout(op: str, argument: str, layout: Layout | str, asked: object = None) -> Layout:
    """The Layout that an argument of `op` stands for; LayoutError, naming both, if it is none.

    asked: what the argument is, where `layout` is a part of it.
    """
    try:
        return Layout(layout)
    except LayoutError as error:
        value = layout if asked is None else asked
        raise LayoutError(op, argument, value, error.rule, error.remedy) from None


@functools.cache
def row_major(ndim: int) -> Layout:
    """The layout of C-contiguous arrays: NCHW where there are four dimensions.

    A scalar lies as an array of one element does.
    """
    return Layout(LETTERS[: max(1, ndim)])


def known_layouts() -> tuple[KnownLayout, ...]:
    """The layouts of activations that the library names, with their tags, other names and uses."""
    return KNOWN


def register_layout(name: str, tag: str | Layout) -> Layout:
    """Give a layout a name of the user's own, which Layout reads from then on, in this process.

    name: any text that names no other layout.
    tag: a `Layout`, or a name or tag in any notation that `Layout` reads.

    Doing it again is fine. Raises LayoutError if `tag` is no layout, or if `name` is already another one's.

    >>> import blockconv as bc
    >>> bc.register_layout("my tiles", "aBCd4b4c").storage_shape((1, 6, 6, 4))
    (1, 2, 2, 4, 4, 4)
    """
    layout = read_layout("register_layout", "tag", tag)
    if not isinstance(name, str) or not name:
        raise LayoutError("register_layout", "name", name, "must be a string that is not empty")
    with _lock:
        try:
            known = Layout(name)
        except LayoutError:
            _tag_of[name] = layout.tag
            _name_of.setdefault(layout.tag, name)
            return layout
    if known != layout:
        rule = f"already names {known.tag}, and cannot name {layout.tag}"
        raise LayoutError("register_layout", "name", name, rule, "take another name")
    return layout
