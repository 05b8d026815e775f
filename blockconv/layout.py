"""Layouts: how a logical array of a few dimensions is put into memory.

A layout permutes the dimensions and may cut some of them into blocks, which become the fastest axes of the
storage. That is all: every layout of MACE, MegEngine, OpenVINO (clDNN), oneDNN, TVM and PyTorch that this
library knows is such a permutation with blocks, and is written as oneDNN's tag of it.

    aBcd16b    dimensions a, b, c, d (N, C, H, W), outermost first; b, upper case, is cut by 16: the storage
               is [N][C/16][H][W][16c]

A dimension that its block does not divide is padded at its end. The logical shape stays what it was, and
index maps here take logical shapes; whoever writes storage keeps its padding zero.

Two layouts are equal if their tags are. Names are only ways to write a tag: the four systems' grammars are
read by one reader (`_read`), and the names that no grammar explains stand in tables.
"""

from __future__ import annotations

import math
import operator
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from blockconv.errors import LayoutError

__all__ = [
    "NATIVE",
    "Axis",
    "ConvolutionMode",
    "KnownLayout",
    "Layout",
    "convolution_mode",
    "known_layouts",
    "register_layout",
    "weights_for",
]


class KnownLayout(NamedTuple):
    """A layout of activations that the library has a name for."""

    name: str
    tag: str
    aliases: tuple[str, ...]
    used_for: str


# MACE's channel-major image and MegEngine's NHWCD4 are the same bytes. CHWN4 blocks channels, not the batch.
_KNOWN = (
    KnownLayout("NCHW", "abcd", ("nchw", "bfyx", "contiguous_format"), "any"),
    KnownLayout("NHWC", "acdb", ("nhwc", "byxf", "channels_last"), "any; oneDNN int8 and bf16"),
    KnownLayout("CHWN", "bcda", ("chwn", "fyxb"), "reorder"),
    KnownLayout("HWCN", "cdba", ("hwcn", "yxfb"), "batch-major conv"),
    KnownLayout(
        "NCHW4",
        "aBcd4b",
        ("nChw4c", "b_fs_yx_fsv4", "fsv4", "NCHW4c", "NCHWc4", "NCHW44", "NCHW44_DOT"),
        "int8 (dp4a, VNNI), f32 on ARM",
    ),
    KnownLayout("NCHW8", "aBcd8b", ("nChw8c", "b_fs_yx_fsv8", "NCHW8c", "NCHWc8", "NCHW88"), "f32 AVX2"),
    KnownLayout("NCHW16", "aBcd16b", ("nChw16c", "b_fs_yx_fsv16", "fsv16", "NCHW16c"), "f32, f16 conv"),
    KnownLayout("NCHW32", "aBcd32b", ("nChw32c", "b_fs_yx_fsv32", "fsv32", "NCHW32c", "NCHWc32"), "int8 tensor cores"),
    KnownLayout("NCHW64", "aBcd64b", ("nChw64c", "NCHW64c", "NCHWc64"), "int4 and int8 tensor cores"),
    KnownLayout("CHWN4", "Bcda4b", ("CHWNc4",), "int8, dense only"),
    KnownLayout(
        "NHCW4",
        "acBd4b",
        ("NHWCD4", "NHWCD4-dot", "NHCWc4", "channel-major image", "IN_OUT_CHANNEL"),
        "f32, f16, int8 on OpenCL images",
    ),
    KnownLayout("height-major image", "aCbd4c", ("IN_OUT_HEIGHT",), "Winograd and matmul output"),
    KnownLayout("width-major image", "acbD4d", ("IN_OUT_WIDTH",), "unused upstream today"),
    KnownLayout("bsv16_fsv16", "ABcd16a16b", ("NChw16n16c", "bs_fs_yx_bsv16_fsv16"), "big batches"),
    KnownLayout("bsv32_fsv16", "ABcd32a16b", ("NChw32n16c", "bs_fs_yx_bsv32_fsv16"), "big batches"),
    KnownLayout("bsv32_fsv32", "ABcd32a32b", ("NChw32n32c", "bs_fs_yx_bsv32_fsv32"), "big batches"),
    KnownLayout("fs_b_yx_fsv32", "Bacd32b", ("Cnhw32c",), "f16"),
    KnownLayout("argument", "A4a", ("ARGUMENT",), "bias"),
)

# Weights' names that no grammar reads. A 1 stands for a dimension of one, which a tag names all the same.
_WEIGHT_NAMES = {
    "C11HW": "abcde",
    "C11RS": "abcde",
    "C11RSc4": "Abcde4a",
    "C11RSc8": "Abcde8a",
    "C1RSc4": "Abcde4a",
    "CONV2D_FILTER": "Acdb4a",
    "DW_CONV2D_FILTER": "aBcd4b",
}

# Weights by library and activation: dense over (O, I, H, W), grouped and depthwise over (G, O, I, H, W), but
# MACE's depthwise over (M, I, H, W). A key may be a mode: NCHW44 is NCHW4 with other weights. Those of
# oneDNN's NCHW serve a first layer of few channels that writes NCHW16; those of its NHWC are int8. MegEngine
# pads the channels of each group by themselves.
_WEIGHTS: dict[str, dict[str, tuple[str, str, str]]] = {
    "megengine": {
        "NCHW": ("oihw", "goihw", "C11HW"),
        "NHWC": ("ohwi", "gohwi", ""),
        "NCHW4": ("oIhw4i", "goIhw4i", "Goihw4g"),
        "NCHW8": ("oIhw8i", "goIhw8i", ""),
        "NCHW32": ("oIhw32i", "goIhw32i", ""),
        "NCHW64": ("oIhw64i", "goIhw64i", ""),
        "NCHW44": ("OIhw4i4o", "gOIhw4i4o", "Goihw4g"),
        "NCHW88": ("OIhw8i8o", "gOIhw8i8o", "Goihw8g"),
        "NCHW44_DOT": ("OIhw4o4i", "gOIhw4o4i", ""),
        "CHWN4": ("Ihwo4i", "gIhwo4i", ""),
        "NHWCD4": ("Ohwi4o", "gOhwi4o", "Goihw4g"),
        "NHWCD4-dot": ("OhwI4o4i", "gOhwI4o4i", ""),  # int8; MegEngine calls this mode NHWCD4 too
    },
    "mace": {"NHCW4": ("Ohwi4o", "", "oIhw4i")},
    "onednn": {
        "NCHW": ("Ohwi16o", "", ""),
        "NHWC": ("OIhw4i16o4i", "gOIhw4i16o4i", "Goihw16g"),
        "NCHW8": ("OIhw8i8o", "gOIhw8i8o", ""),
        "NCHW16": ("OIhw16i16o", "gOIhw16i16o", "Goihw16g"),
    },
    "openvino": {
        "NCHW16": ("os_is_yx_isv16_osv16", "g_os_is_yx_isv16_osv16", "gs_oiyx_gsv16"),
        "bsv16_fsv16": ("is_os_yx_isv16_osv16", "", ""),
    },
}

# A MACE image is an array [height][width][4] of pixels. Where a layout is one, its storage is those bytes;
# this is the number of leading storage axes that make the height.
_IMAGE_HEIGHT_AXES = {
    "acBd4b": 2,  # channel-major: N, H | C/4, W
    "aCbd4c": 2,  # height-major: N, H/4 | C, W
    "acbD4d": 2,  # width-major: N, H | C, W/4
    "Acdb4a": 3,  # convolution filter: O/4, H, W | I
    "aBcd4b": 2,  # depthwise filter over (M=1, I, H, W): M, I/4 | H, W
    "A4a": 0,  # argument: | W/4
}

# The sets of letters that name dimensions, each in logical order. No two hold the same letters.
_DOMAINS = (
    *("abcdef"[:ndim] for ndim in range(1, 7)),  # oneDNN's generic tags
    *(channels + space for channels in ("nc", "oi", "goi") for space in ("", "w", "hw", "dhw")),  # and others
    *(channels + space for channels in ("bf", "oi", "goi") for space in ("yx", "zyx")),  # OpenVINO
    *("bf", "bfwzyx", "x"),
    *("kcrs", "gkcrs"),  # MegEngine's weights: K output and C input channels, R by S taps
)

_REJECTED = (
    (r"swizzled_by_\w+", "reorders elements inside its blocks, which no permutation with blocks does"),
    (r"__a[a-z][0-9]+", "aligns a dimension that it does not block"),
    (r"image_2d_\w+", "is an OpenCL image with its own index formula"),
    (r"winograd_\w+", "holds transformed values, not elements"),
)

_REMEDY = "write it as oneDNN, OpenVINO, TVM or MegEngine do, or as known_layouts() does"

_Blocks = list[tuple[int, str]]  # of size and letter, outermost first
_Row = TypeVar("_Row")


def _bad(name: object, rule: str) -> LayoutError:
    return LayoutError("Layout", "name", name, rule, _REMEDY)


def _read(name: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Read a name by the four systems' grammars into Layout's `outer` and `inner`."""
    for pattern, why in _REJECTED:
        if found := re.search(pattern, name):
            raise _bad(name, f"{found[0]!r} {why}")
    split = _split_openvino if "_" in name or _SLICE_VECTOR.fullmatch(name) else _split_compact
    outer, inner = split(name)  # whatever the system, outer letters are in upper case if blocked
    letters = outer.lower()
    domain = _domain(name, letters)
    for size, letter in inner:
        if letter not in letters:
            raise _bad(name, f"the block '{size}{letter}' is of a letter that is not among {letters!r}")
        if size < 2:
            raise _bad(name, f"the block '{size}{letter}' must be of 2 or more")
    for letter, expected in zip(outer, _mark(letters, inner), strict=True):
        if letter.isupper() and expected.islower():
            raise _bad(name, f"{letter!r} is marked as blocked (C, fs), but has no block")
        if letter.islower() and expected.isupper():
            raise _bad(name, f"{letter!r} has a block, but is not marked as blocked (C, fs)")
    return tuple(map(domain.index, letters)), tuple((domain.index(letter), size) for size, letter in inner)


def _domain(name: str, letters: str) -> str:
    for letter in letters:
        if letters.count(letter) > 1:
            raise _bad(name, f"the letter {letter!r} stands twice")
        if not any(letter in domain for domain in _DOMAINS):
            raise _bad(name, f"the letter {letter!r} names no dimension")
    wider = [domain for domain in _DOMAINS if set(letters) <= set(domain)]
    if not wider:
        raise _bad(name, f"the letters {letters!r} name no one set of dimensions")
    domain = min(wider, key=len)
    if missing := [letter for letter in domain if letter not in letters]:
        raise _bad(name, f"the letter {missing[0]!r} of {domain!r} is missing")
    return domain


_NUMBER_FIRST = re.compile(r"([A-Za-z]*)((?:[0-9]+[a-z])*)")
_LETTER_FIRST = re.compile(r"([A-Z]+)((?:[a-z][0-9]+)+)")


def _split_compact(name: str) -> tuple[str, _Blocks]:
    """Split oneDNN's nChw16c, TVM's NCHW16c, MegEngine's NCHWc16 into outer letters and blocks."""
    if found := _LETTER_FIRST.fullmatch(name):
        blocks = [(int(size), letter) for letter, size in re.findall(r"([a-z])([0-9]+)", found[2])]
    elif (found := _NUMBER_FIRST.match(name)) and found[1]:
        if rest := name[found.end() :]:
            what = "is no block, which is a number and a lower-case letter, such as '16c'"
            raise _bad(name, f"{rest!r} {'stands after a block, but is none' if found[2] else what}")
        blocks = [(int(size), letter) for size, letter in re.findall(r"([0-9]+)([a-z])", found[2])]
    else:
        raise _bad(name, f"{name!r} does not begin with the letter of a dimension")
    outer = found[1]
    if outer.isupper():  # TVM and MegEngine write every outer letter so; oneDNN does only if all are blocked
        outer = _mark(outer.lower(), blocks)
    return outer, blocks


_SLICE_VECTOR = re.compile(r"([bfgoiwzyx])s[av]([0-9]+)")
_SLICES = re.compile(r"[bfgoiwzyx]s|[bfgoiwzyx]+")


def _split_openvino(name: str) -> tuple[str, _Blocks]:
    """Split OpenVINO's b_fs_yx_fsv16 into outer letters and blocks."""
    outer, blocks = "", []
    for token in name.split("_"):
        if found := _SLICE_VECTOR.fullmatch(token):
            blocks.append((int(found[2]), found[1]))
        elif not _SLICES.fullmatch(token):
            raise _bad(name, f"{token!r} is neither dimensions (yx) nor a slice (fs) nor its vector (fsv16)")
        elif blocks:
            raise _bad(name, f"{token!r} stands after a slice vector, but is none")
        else:
            outer += token[0].upper() if token.endswith("s") else token
    return outer or _mark("bfyx", blocks), blocks  # fsv16 is short for b_fs_yx_fsv16


def _mark(letters: str, blocks: _Blocks) -> str:
    blocked = {letter for _, letter in blocks}
    return "".join(letter.upper() if letter in blocked else letter for letter in letters)


class Axis(NamedTuple):
    """An axis of the storage: moving one along it moves `step` along `dim`, and `stride` in the storage."""

    dim: int
    step: int
    size: int
    stride: int


@dataclass(frozen=True, init=False, repr=False, eq=False, slots=True)
class Layout:
    """A permutation of dimensions with blocks: `Layout("NCHW16")`, in any name of it, or a Layout itself.

    `outer` holds the dimensions in the order of the storage, outermost first; `inner` the blocks that follow
    them, as (dimension, size); `blocks`, for each dimension, the product of its blocks, 1 if it has none; `logical`
    the outer axes in logical order, to transpose a storage without blocks by.
    There is one Layout for each `tag`, oneDNN's name with generic letters. Logical order is (N, C, H, W),
    (O, I, H, W), (G, O, I, H, W). Raises LayoutError if the name is no layout, naming the part that is not.

    A shape is always logical, and its sizes may be zero; offsets, sizes and strides count elements. The index
    maps raise LayoutError for a wrong number of dimensions, a negative size and an index out of bounds.
    """

    tag: str
    outer: tuple[int, ...]
    inner: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    logical: tuple[int, ...]

    def __new__(cls, name: str | Layout) -> Layout:
        if isinstance(name, Layout):
            return name
        if not isinstance(name, str):
            raise _bad(name, f"must be the name of a layout or a Layout, not {type(name).__name__}")
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
        leading = _IMAGE_HEIGHT_AXES.get(self.tag)
        if leading is None:
            remedy = f"these are: {', '.join(str(Layout(tag)) for tag in _IMAGE_HEIGHT_AXES)}"
            raise LayoutError("Layout.image_shape", "layout", self.name, "is no MACE image", remedy)
        if self.tag == "aBcd4b" and shape[0] != 1:
            rule = "a depthwise filter (M, I, H, W) is an image for M=1 only"
            raise LayoutError("Layout.image_shape", "shape", shape, rule)
        sizes = self.storage_shape(shape)[:-1]
        return math.prod(sizes[:leading]), math.prod(sizes[leading:])

    def _shape(self, op: str, shape: Sequence[int]) -> tuple[int, ...]:
        sizes = _integers(op, "shape", shape)
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
    return tuple(-(-size // block) * block for size, block in zip(shape, layout.blocks, strict=True))


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


@lru_cache(maxsize=4096)  # a name that once was read keeps its meaning: see register_layout
def _named(name: str) -> Layout:
    outer, inner = _read(_tag_of.get(name, name))
    blocks = [1] * len(outer)
    for dim, size in inner:
        blocks[dim] *= size
    letters = "abcdef"
    tag = "".join(letters[dim].upper() if blocks[dim] > 1 else letters[dim] for dim in outer)
    tag += "".join(f"{size}{letters[dim]}" for dim, size in inner)
    layout = object.__new__(Layout)
    logical = tuple(sorted(range(len(outer)), key=outer.__getitem__))
    values = {"tag": tag, "outer": outer, "inner": inner, "blocks": tuple(blocks), "logical": logical}
    for attribute, value in values.items():
        object.__setattr__(layout, attribute, value)
    return _made.setdefault(tag, layout)


_lock = threading.Lock()
_made: dict[str, Layout] = {}
_name_of = {row.tag: row.name for row in _KNOWN}
_tag_of = {name: row.tag for row in _KNOWN for name in (row.name, *row.aliases)} | _WEIGHT_NAMES

NATIVE = tuple(map(Layout, ("NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW16", "NCHW32", "NCHW64", "CHWN4")))
"""The layouts that kernels run in; any other is reordered at the call."""


def known_layouts() -> tuple[KnownLayout, ...]:
    """The layouts of activations that the library names, with their tags, other names and uses."""
    return _KNOWN


def register_layout(name: str, tag: str | Layout) -> Layout:
    """Give a layout a name of the user's own, which Layout reads from then on, in this process.

    Doing it again is fine. Raises LayoutError if `tag` is no layout, or if `name` is already another one's.
    """
    layout = Layout(tag)
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


class ConvolutionMode(NamedTuple):
    """A convolution format of MegEngine: the layouts of activations and weights, None for no such weights."""

    activation: Layout
    dense: Layout
    grouped: Layout | None
    depthwise: Layout | None


_MODES = {
    library: {
        mode: ConvolutionMode(Layout(mode), Layout(dense), *(Layout(name) if name else None for name in rest))
        for mode, (dense, *rest) in modes.items()
    }
    for library, modes in _WEIGHTS.items()
}


def convolution_mode(name: str) -> ConvolutionMode:
    """MegEngine's convolution mode of that name. NCHW44 and NCHW44_DOT are NCHW4 with other weights."""
    return _row("convolution_mode", "name", name, _MODES["megengine"], "is no convolution mode of MegEngine")


def weights_for(activation: str | Layout, kind: str = "dense", library: str = "megengine") -> Layout:
    """The layout in which a library wants the weights that meet activations of a layout.

    `kind` is dense, over (O, I, H, W), grouped or depthwise, over (G, O, I, H, W), but MACE's depthwise over
    (M, I, H, W); `library` is megengine, mace, onednn or openvino. `activation` is a layout in any of its
    names, or a convolution mode of MegEngine, such as NCHW44. Raises LayoutError if it has no such weights.
    """
    op = "weights_for"
    layout = Layout(activation)
    modes = _row(op, "library", library, _MODES, "is no library with weights of its own")
    kinds = {name: column for column, name in enumerate(ConvolutionMode._fields) if name != "activation"}
    column = _row(op, "kind", kind, kinds, "is no kind of weights")
    if activation in modes:
        mode = activation
    else:  # another name of a mode's layout; of several modes, the plain one stands first
        mode = next((mode for mode, row in modes.items() if row.activation == layout), layout.name)
    weights = {mode: wanted for mode, row in modes.items() if (wanted := row[column])}
    return _row(op, "activation", mode, weights, f"{library} has no {kind} weights for it")


def _row(op: str, argument: str, key: object, table: Mapping[str, _Row], rule: str) -> _Row:
    if isinstance(key, str) and key in table:
        return table[key]
    raise LayoutError(op, argument, key, rule, f"take one of {', '.join(table)}")
