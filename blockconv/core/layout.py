"""Layouts: the memory order of a logical array.

A layout permutes the dimensions, and may split some of them into blocks, which become the innermost axes of the
storage. Every layout of MACE, MegEngine, OpenVINO (clDNN), oneDNN, TVM and PyTorch that this library knows is such a
permutation with blocks, and has oneDNN's tag:

    aBcd16b    dimensions a, b, c, d (N, C, H, W), outermost first; b, in upper case, has blocks of 16: the storage
               is [N][C/16][H][W][16c]

A dimension that its block does not divide is padded at its end. The logical shape does not change. All index maps take
logical shapes. The code that writes a storage also writes its padding.

Two layouts with the same tag are equal. A name is a spelling of a tag: `read_name` reads the grammars of the four
systems, and tables hold the names without a grammar.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockconv.core.checks import Axes, Pair, Shape
from blockconv.core.errors import LayoutError
from blockconv.core.layout_names import (
    IMAGE_HEIGHT_AXES,
    KNOWN,
    LETTERS,
    WEIGHT_NAMES,
    KnownLayout,
    read_name,
    refused_name,
)
from blockconv.core.python import bounded_cache, zipped


class Axis(NamedTuple):
    """An axis of the storage. One step along it is `step` along `dim`, and `stride` in the storage.

    dim: the logical dimension, counted from 0.
    step: in elements of that dimension.
    size: the length of the axis.
    stride: in elements of the storage.
    """

    dim: int
    step: int
    size: int
    stride: int


@dataclass(frozen=True, init=False, repr=False, eq=False, slots=True)
class Layout:
    """A permutation of dimensions with blocks, such as `Layout("NCHW16")`.

    name: a name or tag of the layout in any notation, or a Layout.

    It has these attributes:

    tag: oneDNN's tag with generic letters. Layouts with the same tag are one object.
    outer: the dimensions in storage order, outermost first.
    inner: the blocks after them, as pairs (dimension, size).
    blocks: for each dimension the product of its blocks, or 1.
    logical: the permutation that transposes a storage without blocks to logical order.
    is_native: whether kernels run in it: four dimensions in any order, and at most one block, of up to 64 channels. If
        images are outermost, a block of up to 64 of them may precede it. Other layouts are reordered at each call.

    Logical order is (N, C, H, W), (O, I, H, W) or (G, O, I, H, W). Shapes are logical, and sizes may be zero. Offsets,
    sizes and strides count elements. The constructor raises LayoutError for an unknown name, and shows the part that it
    cannot read. The index maps raise LayoutError for a wrong number of dimensions, a negative size, or an index out of
    bounds.

    >>> import blockconv as bc
    >>> layout = bc.Layout("nChw16c")
    >>> layout, layout.tag
    (Layout('NCHW16'), 'aBcd16b')
    >>> layout.offset((1, 30, 56, 56), (0, 17, 0, 1))
    50193
    """

    tag: str
    outer: Axes
    inner: tuple[tuple[int, int], ...]
    blocks: Shape
    logical: Axes
    is_native: bool
    whole: Shape
    steps: Axes

    def __new__(cls, name: str | Layout) -> Layout:
        if isinstance(name, Layout):
            return name
        if not isinstance(name, str):
            raise refused_name(name, f"must be a Layout or its name, not {type(name).__name__}")
        return _named(name)

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.tag,)  # by tag: a registered name may be unknown where this is read

    def __repr__(self) -> str:
        return f"Layout({self.name!r})"

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The library's name (NCHW16), else the registered name, else the tag."""
        return _name_of.get(self.tag, self.tag)

    @property
    def ndim(self) -> int:
        """The number of logical dimensions."""
        return len(self.outer)

    @property
    def is_blocked(self) -> bool:
        """Whether a dimension has blocks; else the layout only permutes."""
        return bool(self.inner)

    def padded_shape(self, shape: Sequence[int]) -> Shape:
        """The logical shape with every dimension rounded up to a multiple of its block."""
        return _padded(self, self._shape("padded_shape", shape))

    def storage_shape(self, shape: Sequence[int]) -> Shape:
        """The shape of the dense storage: outer axes, then blocks; (N, C/16, H, W, 16) for NCHW16."""
        return tuple(axis.size for axis in _axes(self, self._shape("storage_shape", shape)))

    def size(self, shape: Sequence[int]) -> int:
        """The number of elements in the storage, padding included."""
        return math.prod(_padded(self, self._shape("size", shape)))

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of the dense storage in elements, one for each axis of storage_shape."""
        return tuple(axis.stride for axis in _axes(self, self._shape("strides", shape)))

    def axes(self, shape: Sequence[int]) -> tuple[Axis, ...]:
        """The axes of the storage, outermost first. All index maps follow from them."""
        return _axes(self, self._shape("axes", shape))

    def offset(self, shape: Sequence[int], index: Sequence[int]) -> int:
        """The offset in the storage of the element at a logical index."""
        shape = self._shape("offset", shape)
        index = _within("offset", "index", index, shape)
        return sum(index[dim] // step % size * stride for dim, step, size, stride in _axes(self, shape))

    def index(self, shape: Sequence[int], offset: int) -> tuple[int, ...] | None:
        """The logical index of the element at an offset of the storage; None for padding."""
        shape = self._shape("index", shape)
        axes, size = _axes(self, shape), math.prod(_padded(self, shape))
        (offset,) = _integers("index", "offset", (offset,))
        if not 0 <= offset < size:
            raise LayoutError("Layout.index", "offset", offset, f"must be 0 or more and less than {size}")
        index = _logical(self, axes, [offset // axis.stride % axis.size for axis in axes])
        return index if all(map(operator.lt, index, shape)) else None

    def forward_index(self, index: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
        """The index in an array of storage_shape of the element at a logical index (TVM's name)."""
        shape = self._shape("forward_index", shape)
        index = _within("forward_index", "index", index, shape)
        return tuple(index[dim] // step % size for dim, step, size, _ in _axes(self, shape))

    def backward_index(self, storage_index: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
        """The logical index of an element of an array of storage_shape (TVM's name).

        An element of the padding has an index outside `shape` and inside `padded_shape`.
        """
        axes = _axes(self, self._shape("backward_index", shape))
        bounds = tuple(axis.size for axis in axes)
        return _logical(self, axes, _within("backward_index", "storage_index", storage_index, bounds))

    def image_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """(height, width) of the storage as MACE's image, in pixels of four elements.

        Images are: for (N, C, H, W) NHCW4, "height-major image" and "width-major image"; for weights Acdb4a, and aBcd4b
        for depthwise weights with M=1; for (W,) "argument". Raises LayoutError for other layouts.
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

    def _shape(self, op: str, shape: Sequence[int]) -> Shape:
        sizes = _integers(op, "shape", shape)
        if not sizes and self.ndim == 1:  # a scalar: see `row_major`
            return (1,)
        if len(sizes) != self.ndim:
            rule = f"must have {self.ndim} dimensions for {self.name}, not {len(sizes)}"
            raise LayoutError(f"Layout.{op}", "shape", shape, rule)
        if sizes and min(sizes) < 0:
            raise LayoutError(f"Layout.{op}", "shape", shape, "must hold sizes of at least 0")
        return sizes


def _integers(op: str, argument: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise LayoutError(f"Layout.{op}", argument, values, "must hold integers") from None


def _within(op: str, argument: str, values: Iterable[int], bounds: tuple[int, ...]) -> tuple[int, ...]:
    index = _integers(op, argument, values)
    if len(index) != len(bounds) or not all(0 <= i < bound for i, bound in zipped(index, bounds)):
        raise LayoutError(
            f"Layout.{op}", argument, values, f"must hold {len(bounds)} numbers of at least 0, and less than {bounds}"
        )
    return index


@bounded_cache
def _padded(layout: Layout, shape: Shape) -> Shape:
    padded = tuple(-(-size // block) * block for size, block in zipped(shape, layout.blocks))
    return tuple(map(max, padded, layout.whole)) if layout.whole else padded


@bounded_cache
def part_of(layout: Layout, whole: Shape, steps: Axes = ()) -> Layout:
    """The layout of a part of an array: its elements keep their addresses. (It has no name that is read.)

    whole: the array's size along each dimension; 0 where the part has all of it. steps: elements of the array from one
    of the part to the next along each dimension. Default: 1.
    """
    part = object.__new__(Layout)
    for attribute in Layout.__slots__:
        object.__setattr__(part, attribute, getattr(layout, attribute))
    sizes, apart = (layout.whole or (0,) * layout.ndim, layout.steps or (1,) * layout.ndim)
    object.__setattr__(part, "whole", tuple(map(max, sizes, whole)))
    object.__setattr__(part, "steps", tuple(map(operator.mul, apart, steps)) if steps else layout.steps)
    object.__setattr__(part, "tag", f"{layout.tag} of {whole} by {steps}")
    return part


@bounded_cache
def _axes(layout: Layout, shape: Shape) -> tuple[Axis, ...]:
    padded = _padded(layout, shape)
    steps = list(layout.blocks)  # what one further along a dimension's next axis is worth in that dimension
    sizes = [(dim, steps[dim], padded[dim] // steps[dim]) for dim in layout.outer]
    for dim, size in layout.inner:
        steps[dim] //= size
        sizes.append((dim, steps[dim], size))
    axes, stride = [], 1
    for dim, step, size in reversed(sizes):
        axes.append(Axis(dim, step, size, stride * layout.steps[dim] if layout.steps else stride))
        stride *= size
    return tuple(reversed(axes))


def _logical(layout: Layout, axes: tuple[Axis, ...], storage_index: Iterable[int]) -> tuple[int, ...]:
    index = [0] * layout.ndim
    for axis, i in zipped(axes, storage_index):
        index[axis.dim] += i * axis.step
    return tuple(index)


def _is_native(outer: Axes, inner: tuple[Pair, ...]) -> bool:
    """Whether kernels run in it: see `Layout`."""
    if outer[0] == 0 and inner and inner[0][0] == 0 and inner[0][1] <= LARGEST_BLOCK:
        inner = inner[1:]
    return len(outer) == 4 and (not inner or (len(inner) == 1 and inner[0][0] == 1 and inner[0][1] <= LARGEST_BLOCK))


@bounded_cache  # a name that once was read keeps its meaning: see register_layout
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
        "whole": (),
        "steps": (),
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
"""The eight layouts that kernels are tuned for. `Layout.is_native` tells all layouts with kernels."""
NCHW, NHWC = NATIVE[:2]


def read_layout(op: str, argument: str, layout: Layout | str, asked: object = None) -> Layout:
    """The Layout of an argument of `op`. Raises LayoutError, which names both, for an unknown name.

    asked: the argument's value, if `layout` is a part of it.
    """
    try:
        return Layout(layout)
    except LayoutError as error:
        value = layout if asked is None else asked
        raise LayoutError(op, argument, value, error.rule, error.remedy) from None


@functools.cache
def row_major(ndim: int) -> Layout:
    """The layout of C-contiguous arrays: NCHW for four dimensions.

    A scalar has the layout of an array of one element.
    """
    return Layout(LETTERS[: max(1, ndim)])


def known_layouts() -> tuple[KnownLayout, ...]:
    """The named layouts of activations, with their tags, aliases and uses."""
    return KNOWN


def register_layout(name: str, tag: str | Layout) -> Layout:
    """Give a layout a new name, which Layout then reads in this process.

    name: a text that names no other layout.
    tag: a `Layout`, or a name or tag in any notation that `Layout` reads.

    To register a name twice is no error. Raises LayoutError if `tag` is no layout, or if `name` has another layout.

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
            _tag_of[name], known = layout.tag, layout
        if known != layout:
            rule = f"already names {known.tag}, and cannot name {layout.tag}"
            raise LayoutError("register_layout", "name", name, rule, "take another name")
        _name_of.setdefault(layout.tag, name)
    return layout
