"""The named layouts, their names in other libraries, and the four notations that other names are read by.

The notations are oneDNN's, OpenVINO's, TVM's and MegEngine's. A name becomes an order of dimensions and blocks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from blockconv.core.checks import Axes, Names, Pair
from blockconv.core.errors import LayoutError
from blockconv.core.python import zipped


class KnownLayout(NamedTuple):
    """A named layout of activations.

    name: the library's name, such as NCHW16.
    tag: oneDNN's tag with generic letters, such as aBcd16b.
    aliases: the names in other libraries.
    used_for: the element types or ops for which other libraries use it, in words.
    """

    name: str
    tag: str
    aliases: Names
    used_for: str


# MACE's channel-major image and MegEngine's NHWCD4 are the same bytes. CHWN4 blocks channels, not the batch.
KNOWN = (
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
WEIGHT_NAMES = {
    "C11HW": "abcde",
    "C11RS": "abcde",
    "C11RSc4": "Abcde4a",
    "C11RSc8": "Abcde8a",
    "C1RSc4": "Abcde4a",
    "CONV2D_FILTER": "Acdb4a",
    "DW_CONV2D_FILTER": "aBcd4b",
}


# A MACE image is an array [height][width][4] of pixels. These layouts store the bytes of one. The number counts the
# leading storage axes that are its height.
IMAGE_HEIGHT_AXES = {
    "acBd4b": 2,  # channel-major: N, H | C/4, W
    "aCbd4c": 2,  # height-major: N, H/4 | C, W
    "acbD4d": 2,  # width-major: N, H | C, W/4
    "Acdb4a": 3,  # convolution filter: O/4, H, W | I
    "aBcd4b": 2,  # depthwise filter over (M=1, I, H, W): M, I/4 | H, W
    "A4a": 0,  # argument: | W/4
}


# ---------------------------------------------------------------- notations

LETTERS = "abcdefghijkl"  # of dimensions, in logical order

# The sets of letters that name dimensions, each in logical order. No two hold the same letters.
_DOMAINS = (
    *(LETTERS[:ndim] for ndim in range(1, len(LETTERS) + 1)),  # oneDNN's generic tags
    *(channels + space for channels in ("nc", "oi", "goi") for space in ("", "w", "hw", "dhw")),  # and others
    *(channels + space for channels in ("bf", "oi", "goi") for space in ("yx", "zyx")),  # OpenVINO
    *("bf", "bfwzyx", "x"),
    *("kcrs", "gkcrs"),  # MegEngine's weights: K output and C input channels, R by S taps
)


_REJECTED = (
    (r"swizzled_by_\w+", "reorders elements inside its blocks, so it is no permutation with blocks"),
    (r"__a[a-z][0-9]+", "aligns a dimension that it does not block"),
    (r"image_2d_\w+", "is an OpenCL image with its own index formula"),
    (r"winograd_\w+", "holds transformed values, not elements"),
)


_REMEDY = "use the notation of oneDNN, OpenVINO, TVM or MegEngine, a name of known_layouts(), or register_layout"


_Blocks = list[tuple[int, str]]  # of size and letter, outermost first


def refused_name(name: object, rule: str) -> LayoutError:
    plain = re.sub(r"[_ -]", "", str(name)).lower()
    likely = next((known.name for known in KNOWN if known.name.lower() == plain), None)
    return LayoutError("Layout", "name", name, rule, f"give {likely!r}" if likely else _REMEDY)


def read_name(name: str) -> tuple[Axes, tuple[Pair, ...]]:
    """Read a name by the four systems' grammars into Layout's `outer` and `inner`."""
    for pattern, why in _REJECTED:
        if found := re.search(pattern, name):
            raise refused_name(name, f"{found[0]!r} {why}")
    split = _split_openvino if "_" in name or _SLICE_VECTOR.fullmatch(name) else _split_compact
    outer, inner = split(name)  # whatever the system, outer letters are in upper case if blocked
    letters = outer.lower()
    domain = _domain(name, letters)
    for size, letter in inner:
        if letter not in letters:
            raise refused_name(name, f"the block '{size}{letter}' has a letter that is not among {letters!r}")
        if size < 2:
            raise refused_name(name, f"the block '{size}{letter}' must have a size of at least 2")
    for letter, expected in zipped(outer, _mark(letters, inner)):
        if letter.isupper() and expected.islower():
            raise refused_name(name, f"{letter!r} is marked as blocked (C, fs), but has no block")
        if letter.islower() and expected.isupper():
            raise refused_name(name, f"{letter!r} has a block, but is not marked as blocked (C, fs)")
    return tuple(map(domain.index, letters)), tuple((domain.index(letter), size) for size, letter in inner)


def _domain(name: str, letters: str) -> str:
    for letter in letters:
        if letters.count(letter) > 1:
            raise refused_name(name, f"the letter {letter!r} occurs twice")
        if not any(letter in domain for domain in _DOMAINS):
            raise refused_name(name, f"the letter {letter!r} names no dimension")
    wider = [domain for domain in _DOMAINS if set(letters) <= set(domain)]
    if not wider:
        raise refused_name(name, f"the letters {letters!r} belong to different notations")
    domain = min(wider, key=len)
    if missing := [letter for letter in domain if letter not in letters]:
        raise refused_name(name, f"the letter {missing[0]!r} of {domain!r} is missing")
    return domain


_NUMBER_FIRST = re.compile(r"([A-Za-z]*)((?:[0-9]+[a-z])*)")


_CHANNELS = re.compile(r"NCHW([0-9]+)")  # this library's own names


_LETTER_FIRST = re.compile(r"([A-Z]+)((?:[a-z][0-9]+)+)")


def _split_compact(name: str) -> tuple[str, _Blocks]:
    """Split oneDNN's nChw16c, TVM's NCHW16c, MegEngine's NCHWc16, our NCHW16 into outer letters and blocks."""
    if found := _CHANNELS.fullmatch(name):
        return "nChw", [(int(found[1]), "c")]
    if found := _LETTER_FIRST.fullmatch(name):
        blocks = [(int(size), letter) for letter, size in re.findall(r"([a-z])([0-9]+)", found[2])]
    elif (found := _NUMBER_FIRST.match(name)) and found[1]:
        if rest := name[found.end() :]:
            what = "is no block, which is a number and a lower-case letter, such as '16c'"
            raise refused_name(name, f"{rest!r} {'follows a block, but is none' if found[2] else what}")
        blocks = [(int(size), letter) for size, letter in re.findall(r"([0-9]+)([a-z])", found[2])]
    else:
        raise refused_name(name, f"{name!r} does not begin with the letter of a dimension")
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
            raise refused_name(name, f"{token!r} is neither dimensions (yx) nor a slice (fs) nor its vector (fsv16)")
        elif blocks:
            raise refused_name(name, f"{token!r} follows a slice vector, but is none")
        else:
            outer += token[0].upper() if token.endswith("s") else token
    return outer or _mark("bfyx", blocks), blocks  # fsv16 is short for b_fs_yx_fsv16


def _mark(letters: str, blocks: _Blocks) -> str:
    blocked = {letter for _, letter in blocks}
    return "".join(letter.upper() if letter in blocked else letter for letter in letters)
