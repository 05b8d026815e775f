"""The named layouts, and their names in other libraries."""

from __future__ import annotations

from typing import NamedTuple


class KnownLayout(NamedTuple):
    """A named layout of activations.

    name: the library's name, such as NCHW16.
    tag: oneDNN's tag with generic letters, such as aBcd16b.
    aliases: the names in other libraries.
    used_for: the element types or ops for which other libraries use it, in words.
    """

    name: str
    tag: str
    aliases: tuple[str, ...]
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


# A MACE image is an array [height][width][4] of pixels. Where a layout is one, its storage is those bytes;
# this is the number of leading storage axes that make the height.
IMAGE_HEIGHT_AXES = {
    "acBd4b": 2,  # channel-major: N, H | C/4, W
    "aCbd4c": 2,  # height-major: N, H/4 | C, W
    "acbD4d": 2,  # width-major: N, H | C, W/4
    "Acdb4a": 3,  # convolution filter: O/4, H, W | I
    "aBcd4b": 2,  # depthwise filter over (M=1, I, H, W): M, I/4 | H, W
    "A4a": 0,  # argument: | W/4
}
