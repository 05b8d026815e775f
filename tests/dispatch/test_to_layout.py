"""`to_layout` as a user calls it: what goes in, what comes out, and what is refused with nothing written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_oracle import Array, Shape, garbage, logical_bits, places, stored

import blockconv as bc
from blockconv import ArgumentError, BlockedArray, DtypeError, Layout, LayoutError, is_channels_last, to_layout

pytestmark = pytest.mark.filterwarnings("error::blockconv.SlowPathWarning")

NATIVE = [layout.name for layout in bc.NATIVE]


def blocked(logical: Array, layout: str, tail: object = 0, **more: Any) -> BlockedArray:
    """A BlockedArray by the oracle alone."""
    flat = stored(logical, layout, tail)
    return BlockedArray(flat.reshape(Layout(layout).storage_shape(logical.shape)), layout, logical.shape, **more)


def flat(array: BlockedArray) -> Array:
    return array.storage.reshape(-1)


# ---------------------------------------------------------------- element types


@pytest.mark.parametrize("char", [*"?bBhHiIqQefdF", "<M8[s]", "<m8[ns]", "S1", "U1"])
def test_elements_of_any_type_are_moved_and_never_converted(char: str) -> None:
    dtype = np.dtype(char)
    bits = logical_bits((2, 17, 3, 5), dtype.itemsize)
    logical = bits.view(dtype) if char != "?" else (bits & 1).astype(bool)
    there = to_layout(logical, "NCHW16")
    assert there.dtype == dtype
    assert flat(there).tobytes() == stored(logical.view(f"u{dtype.itemsize}"), "NCHW16").tobytes()
    assert there.numpy().dtype == dtype
    assert there.numpy().tobytes() == logical.tobytes()


def test_not_a_number_keeps_its_payload() -> None:
    bits = np.array([0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x80000000], np.uint32)
    x = np.resize(bits, (1, 5, 2, 2)).view(np.float32)
    assert to_layout(to_layout(x, "NCHW4"), "NCHW").storage.tobytes() == x.tobytes()


@pytest.mark.parametrize("char", ["g", "G", "D", "O", "S3", "V6", "U3"])
def test_elements_of_other_sizes_are_refused(char: str) -> None:
    with pytest.raises(DtypeError, match=r"to_layout: x=.*1, 2, 4 or 8 bytes"):
        to_layout(np.zeros((1, 2, 3, 3), char), "NCHW4")


# ---------------------------------------------------------------- tails


@pytest.mark.parametrize("layout", ["NCHW4", "NCHW16", "CHWN4", "bsv16_fsv16", "height-major image"])
@pytest.mark.parametrize(("dtype", "zero_point"), [("i1", -7), ("u1", 255), ("i2", -300), ("i4", 1 << 30), ("i8", -1)])
@pytest.mark.sampled(3)
def test_padding_holds_the_zero_point(layout: str, dtype: str, zero_point: int) -> None:
    logical = logical_bits((3, 5, 3, 2), np.dtype(dtype).itemsize).view(dtype)
    there = to_layout(BlockedArray.from_numpy(logical, zero_point=zero_point), layout)
    assert there.zero_point == zero_point
    assert np.array_equal(flat(there), stored(logical, layout, zero_point))
    other = to_layout(there, "NCHW64")
    assert np.array_equal(flat(other), stored(logical, "NCHW64", zero_point))


def test_padding_holds_the_zero_point_in_the_byte_order_of_the_array() -> None:
    logical = logical_bits((1, 3, 2, 2), 2).view("i2").astype(">i2")
    there = to_layout(blocked(logical, "NCHW", zero_point=300), "NCHW4")
    assert there.dtype == np.dtype(">i2")
    assert np.array_equal(flat(there), stored(logical, "NCHW4", 300))


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(["NCHW16", "NCHW64", "CHWN4", "bsv32_fsv32"], NATIVE)))
def test_a_dirty_tail_of_the_source_goes_nowhere(src: str, dst: str) -> None:
    logical = logical_bits((3, 17, 3, 5), 4)
    dirty = blocked(logical, src, garbage(places(src, logical.shape)[1], 4))
    if src != dst:
        assert np.array_equal(flat(to_layout(dirty, dst)), stored(logical, dst))
    out = bc.empty(logical.shape, dst, np.uint32)
    out.storage.fill(0xEE)
    to_layout(dirty, dst, out=out)
    assert np.array_equal(flat(out), stored(logical, dst))


# ---------------------------------------------------------------- packed 4-bit values


def packed(logical: Array, layout: str, fill: int) -> Array:
    """Two elements a byte, the low nibble first; what an odd number of them leaves over is zero."""
    nibbles = stored(logical.astype(np.uint8) & 15, layout, fill & 15)
    nibbles = np.append(nibbles, np.zeros(nibbles.size % 2, np.uint8))
    pairs: Array = nibbles[::2] | nibbles[1::2] << 4
    return pairs


PACKED_SHAPES: list[Shape] = [(1, 1, 1, 1), (1, 3, 3, 5), (3, 17, 2, 2), (1, 16, 7, 7), (17, 15, 1, 1), (3, 33, 3, 5)]


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        *itertools.product(["NCHW", "NHWC", "NCHW4", "NCHW64"], ["NCHW", "NHWC", "NCHW4", "NCHW64"]),
        ("CHWN4", "NCHW8"),
        ("NCHW", "bsv16_fsv16"),
        ("width-major image", "CHWN"),
        ("fs_b_yx_fsv32", "NCHW"),
    ],
)
@pytest.mark.sampled(6)
def test_packed_values(src: str, dst: str, dtype: str) -> None:
    low, high = (-8, 7) if dtype == "int4" else (0, 15)
    for shape, zero_point in itertools.product(PACKED_SHAPES, (0, 5)):
        logical = np.random.default_rng(list(shape)).integers(low, high, shape, np.int8, endpoint=True)
        x = BlockedArray(packed(logical, src, zero_point), src, shape, dtype=dtype, zero_point=zero_point)
        out = bc.empty(shape, dst, dtype, zero_point)
        out.storage.fill(0x99)
        assert to_layout(x, dst, out=out) is out
        assert np.array_equal(out.storage, packed(logical, dst, zero_point))
        assert out.numpy().dtype == (np.int8 if dtype == "int4" else np.uint8)
        assert np.array_equal(out.numpy(), logical)


def test_packing_an_array() -> None:
    logical = np.arange(-8, 7, dtype=np.int64).reshape(1, 3, 1, 5)
    x = BlockedArray.from_numpy(logical, "NCHW4", dtype="int4", zero_point=-1)
    assert x.dtype == "int4"
    assert x.storage.dtype == np.uint8
    assert x.storage.shape == (10,)
    assert np.array_equal(x.storage, packed(logical, "NCHW4", -1))
    assert np.array_equal(x.numpy(), logical)
    channels_last = np.ascontiguousarray(logical.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert np.array_equal(BlockedArray.from_numpy(channels_last, dtype="int4").numpy(), logical)


def test_the_other_nibble_of_the_last_byte_is_never_read() -> None:
    x = BlockedArray(np.array([0x21, 0xF3], np.uint8), "NCHW", (1, 3, 1, 1), dtype="uint4")
    assert to_layout(x, "NCHW4").storage.tolist() == [0x21, 0x03]


# ---------------------------------------------------------------- arrays that come in

SHAPE = (3, 17, 4, 6)


def entrances() -> dict[str, Array]:
    """The same values in every shape of memory that NumPy knows."""
    x = logical_bits(SHAPE, 4).view(np.float32)
    wide = np.zeros((6, 34, 8, 12), np.float32)
    wide[::2, ::2, ::2, ::2] = x
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(SHAPE)
    unaligned[...] = x
    read_only = x.copy()
    read_only.flags.writeable = False
    last = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    return {
        "contiguous": x,
        "channels_last": last,
        "channels_last, every other image": np.repeat(last, 2, axis=0)[::2],
        "Fortran": np.asfortranarray(x),
        "strided": wide[::2, ::2, ::2, ::2],
        "backwards": np.ascontiguousarray(x[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
        "one axis backwards": np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
        "CHWN": np.ascontiguousarray(x.transpose(1, 2, 3, 0)).transpose(3, 0, 1, 2),
        "read-only": read_only,
        "unaligned": unaligned,
        "byte-swapped": x.astype(">f4"),
        "byte-swapped channels_last": last.astype(">f4"),
        "a slice of channels": np.concatenate([x, x], axis=1)[:, 17:],
    }


@pytest.mark.parametrize("name", entrances())
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16", "CHWN4", "bsv16_fsv16"])
def test_an_array_of_any_strides(name: str, layout: str) -> None:
    logical, x = entrances()["contiguous"], entrances()[name]
    before = x.tobytes()
    there = to_layout(x, layout)
    assert there.dtype == np.float32
    assert np.array_equal(flat(there).view(np.uint32), stored(logical.view(np.uint32), layout))
    assert x.tobytes() == before


def test_an_array_broadcast_from_one_number() -> None:
    x = np.broadcast_to(np.float32(3), (2, 5, 3, 3))
    assert np.array_equal(flat(to_layout(x, "NCHW4")), stored(np.full(x.shape, 3, np.float32), "NCHW4"))


def test_lists_and_subclasses_come_in() -> None:
    assert to_layout([[[[1.0]]], [[[2.0]]]], "NCHW4").storage.reshape(-1).tolist() == [1, 0, 0, 0, 2, 0, 0, 0]
    assert np.array_equal(to_layout(np.ones((2, 3)).view(np.matrix), "ba").storage, np.ones((3, 2)))


def test_dense_arrays_enter_uncopied() -> None:
    x = np.zeros(SHAPE, np.float32)
    assert np.shares_memory(BlockedArray.from_numpy(x).storage, x)
    last = np.zeros((3, 4, 6, 17), np.float32).transpose(0, 3, 1, 2)
    entered = BlockedArray.from_numpy(last)
    assert entered.layout == Layout("NHWC")
    assert np.shares_memory(entered.storage, last)
    assert np.shares_memory(entered.numpy(), last)
    assert entered.numpy().strides == last.strides


@pytest.mark.parametrize("ndim", range(1, 7))
def test_arrays_of_one_to_six_dimensions(ndim: int) -> None:
    shape = tuple(range(2, 2 + ndim))
    x = logical_bits(shape, 2)
    tag = "".join(reversed("abcdef"[:ndim]))
    assert np.array_equal(to_layout(x, tag).storage, x.transpose())
    assert np.array_equal(to_layout(x, tag).numpy(), x)


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 0)])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16", "CHWN4", "bsv16_fsv16"])
def test_arrays_of_nothing(shape: Shape, layout: str) -> None:
    there = to_layout(np.zeros(shape, np.float32), layout)
    assert there.storage.shape == Layout(layout).storage_shape(shape)
    assert there.numpy().shape == shape
    out = bc.empty(shape, layout)
    assert to_layout(np.zeros(shape, np.float32), layout, out=out) is out
    assert to_layout(there, "NCHW").shape == shape


# ---------------------------------------------------------------- big arrays: several threads, streaming stores

BIG = (2, 19, 97, 256)


@pytest.mark.isa
@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(NATIVE, 2)))
@pytest.mark.sampled(6)
def test_arrays_past_the_caches(src: str, dst: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockconv.core.target.last_level_cache", lambda: 1 << 20)
    logical = logical_bits(BIG, 4)
    out = bc.empty(BIG, dst, np.uint32)
    out.storage.fill(1)
    to_layout(blocked(logical, src, 0xEE), dst, out=out)
    assert np.array_equal(flat(out), stored(logical, dst))
    # The same into memory that is not aligned to a line.
    room = np.full(out.storage.size + 1, 7, np.uint32)
    aside = BlockedArray(room[1:].reshape(out.storage.shape), dst, BIG)
    to_layout(blocked(logical, src, 0xEE), dst, out=aside)
    assert np.array_equal(aside.storage, out.storage)
    assert room[0] == 7


# ---------------------------------------------------------------- what comes out


def test_without_out_an_array_in_the_layout_comes_back_as_it_is() -> None:
    x = to_layout(logical_bits(SHAPE, 4), "NCHW16")
    assert to_layout(x, "fsv16") is x


def test_into_a_given_output() -> None:
    logical = logical_bits(SHAPE, 4)
    out = bc.empty(SHAPE, "NCHW16", np.uint32)
    held = out.storage
    assert to_layout(logical, "NCHW16", out=out) is out
    assert out.storage is held
    assert np.array_equal(flat(out), stored(logical, "NCHW16"))
    again = bc.empty(SHAPE, "NCHW16", np.uint32)
    again.storage.fill(9)
    to_layout(out, "NCHW16", out=again)  # the same layout: a copy
    assert np.array_equal(out.storage, again.storage)


def test_the_memory_of_empty_is_aligned() -> None:
    for shape, layout, dtype in itertools.product([(1, 3, 5, 7), (2, 17, 3, 1)], NATIVE, ["f4", "i1", "int4"]):
        assert bc.empty(shape, layout, dtype).storage.ctypes.data % 128 == 0


def test_layouts_of_a_users_own() -> None:
    bc.register_layout("my rows of five", "acBd5b")
    logical = logical_bits((2, 7, 3, 4), 4)
    there = to_layout(logical, "my rows of five")
    assert there.layout.name == "my rows of five"
    assert np.array_equal(flat(there), stored(logical, "acBd5b"))
    assert np.array_equal(to_layout(there, "NHWC").numpy(), logical)


# ---------------------------------------------------------------- PyTorch's rule


def strided(shape: Shape, order: tuple[int, ...], gap: int) -> Array:
    """An array of `shape` whose memory runs in `order`, outermost first, with a gap in the innermost axis but one."""
    sizes = [shape[d] for d in order]
    sizes[-1] += gap
    array: Array = np.zeros(sizes, np.float32)[..., : shape[order[-1]]].transpose(np.argsort(order))
    return array


def is_nhwc(x: Array) -> bool:
    """Whether the axes of an array that are longer than 1 lie in the order of NHWC, and not in that of NCHW."""

    def falls(order: tuple[int, ...]) -> bool:
        strides = [x.strides[d] for d in order if x.shape[d] > 1]
        return strides == sorted(strides, reverse=True)

    return falls((0, 2, 3, 1)) and not falls((0, 1, 2, 3))


@pytest.mark.slow
def test_channels_last_is_what_torch_says_it_is() -> None:
    """But for axes of size 1, whose strides PyTorch reads too: their order is the others' if that leaves no doubt."""
    torch = pytest.importorskip("torch")
    found = {True: 0, False: 0}
    for shape in itertools.product((1, 2), (1, 2, 3), (1, 2), (1, 3)):
        for order, gap in itertools.product(itertools.permutations(range(4)), (0, 2)):
            x = strided(shape, order, gap)
            tensor = torch.from_numpy(x)
            wanted = torch._prims_common.suggest_memory_format(tensor) is torch.channels_last
            # And what its operators make of it: the strides of a pooled array say what its source was taken for.
            formats = (torch.contiguous_format, torch.channels_last)
            plain, last = (torch.empty(shape, memory_format=format).stride() for format in formats)
            if plain != last:
                assert (torch.nn.functional.max_pool2d(tensor, 1).stride() == last) is wanted
            assert is_channels_last(x) is (wanted or is_nhwc(x)), f"{shape} with strides {x.strides}"
            assert wanted or 1 in shape or not is_nhwc(x)
            found[wanted] += 1
    assert min(found.values()) > 50
    for shape in [(0, 2, 2, 2), (2, 0, 2, 2), (2, 2, 0, 2)]:
        for order in itertools.permutations(range(4)):
            x = strided(shape, order, 0)
            wanted = torch._prims_common.suggest_memory_format(torch.from_numpy(x)) is torch.channels_last
            assert is_channels_last(x) is wanted


@given(
    st.tuples(*[st.integers(1, 3)] * 4),
    st.permutations(range(4)),
    st.integers(0, 2),
    st.tuples(*[st.sampled_from([0, 1, 2, 3, 7, 12, 36, 1 << 20])] * 4),
)
def test_an_axis_of_size_1_has_any_stride(shape: Shape, order: list[int], gap: int, strides: Shape) -> None:
    torch = pytest.importorskip("torch")
    x = strided(shape, tuple(order), gap)
    given = [4 * any_ if size == 1 else known for size, any_, known in zip(shape, strides, x.strides, strict=True)]
    same = np.lib.stride_tricks.as_strided(x, shape, given)
    tensor = torch.from_numpy(x).as_strided(shape, [stride // 4 for stride in given])
    suggested = torch._prims_common.suggest_memory_format(tensor) is torch.channels_last
    assert is_channels_last(same) is (suggested or is_nhwc(same))
    dense, nhwc = tensor.is_contiguous(), tensor.is_contiguous(memory_format=torch.channels_last)
    if dense != nhwc:  # and PyTorch's other rule, which no such stride misleads, says which
        assert is_channels_last(same) is nhwc
        assert np.shares_memory(bc.BlockedArray.from_numpy(same).storage, x)


def test_an_image_of_rows_of_pixels() -> None:
    rgb = np.random.default_rng(0).integers(0, 255, (9, 7, 3)).astype(np.uint8)
    wanted = np.ascontiguousarray(rgb.transpose(2, 0, 1))[None]
    for x, options in (
        (rgb[None].transpose(0, 3, 1, 2), {}),
        (rgb[None], {"axes": "NHWC"}),
        (rgb[None], {"axes": "acdb"}),
    ):
        found = to_layout(x, "NHWC", **options)
        assert found.layout == Layout("NHWC")
        assert np.shares_memory(found.storage, rgb)
        assert np.array_equal(found.numpy(), wanted)
        assert np.array_equal(to_layout(x, "NCHW16", **options).numpy(), wanted)
    assert is_channels_last(bc.max_pool2d(rgb[None].transpose(0, 3, 1, 2), 2))
    assert to_layout(rgb.transpose(1, 0, 2), "abc", axes="bac").numpy().tobytes() == rgb.tobytes()
    for axes in ("NCHW16", "abc", "NHWX", 3):
        with pytest.raises(LayoutError, match=r"to_layout: axes="):
            to_layout(rgb[None], "NHWC", axes=axes)
    with pytest.raises(ArgumentError, match=r"to_layout: axes='NHWC': is for arrays"):
        to_layout(to_layout(wanted, "NCHW"), "NHWC", axes="NHWC")


def test_channels_last_of_what_torch_cannot_hold() -> None:
    assert not is_channels_last(np.zeros((2, 3, 4)))
    assert not is_channels_last(np.zeros((2, 3, 4, 5))[:, :, ::-1])
    assert not is_channels_last(np.broadcast_to(np.zeros((2, 1, 4, 5)), (2, 3, 4, 5)))
    with pytest.raises(ArgumentError, match=r"^is_channels_last: array='NHWC': has to be a NumPy array or a torch"):
        is_channels_last("NHWC")  # type: ignore[arg-type]


# ---------------------------------------------------------------- errors: argument, value, rule; nothing written

X = np.ones((2, 5, 3, 4), np.float32)


def out_of(layout: str = "NCHW4", shape: Shape = X.shape, dtype: Any = np.float32, **more: Any) -> BlockedArray:
    out = bc.empty(shape, layout, dtype, **more)
    out.storage.fill(7)
    return out


def read_only() -> BlockedArray:
    out = out_of()
    out.storage.flags.writeable = False
    return out


def overlapping() -> tuple[BlockedArray, str, BlockedArray]:
    room = np.full(X.size + 3 * 24 + 100, 7, np.float32)
    x = BlockedArray(room[: X.size].reshape(X.shape), "NCHW", X.shape)
    return x, "NCHW4", BlockedArray(room[100 : 100 + 2 * 2 * 3 * 4 * 4].reshape(2, 2, 3, 4, 4), "NCHW4", X.shape)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str, str]] = {
    "no layout": (lambda: (X, "NCHW4c16", None), LayoutError, "layout", "'NCHW4c16'"),
    "no name": (lambda: (X, 16, None), LayoutError, "layout", "not int"),
    "wrong rank": (lambda: (X[0], "NCHW4", None), LayoutError, "layout", "4 dimensions, and the array has 3"),
    "a number": (lambda: (np.float32(3), "NCHW4", None), ArgumentError, "x", "1 to 6 dimensions"),
    "objects": (lambda: (X.astype(object), "NCHW4", None), DtypeError, "x", "1, 2, 4 or 8 bytes"),
    "out of another layout": (lambda: (X, "NCHW4", out_of("NCHW8")), LayoutError, "out", "has to be in NCHW4"),
    "out of another shape": (
        lambda: (X, "NCHW4", out_of(shape=(2, 6, 3, 4))),
        ArgumentError,
        "out",
        "(2, 5, 3, 4)",
    ),
    "out of another dtype": (lambda: (X, "NCHW4", out_of(dtype=np.int32)), DtypeError, "out", "float32"),
    "out of packed values": (lambda: (X, "NCHW4", out_of(dtype="int4")), DtypeError, "out", "float32"),
    "out of another zero point": (
        lambda: (BlockedArray.from_numpy(X.astype("i1")), "NCHW4", out_of(dtype="i1", zero_point=3)),
        ArgumentError,
        "out",
        "zero point, 0",
    ),
    "out that is an ndarray": (lambda: (X, "NCHW4", np.zeros((2, 2, 3, 4, 4))), ArgumentError, "out", "BlockedArray"),
    "out that cannot be written": (lambda: (X, "NCHW4", read_only()), ArgumentError, "out", "writeable"),
    "out that overlaps": (overlapping, ArgumentError, "out", "overlap"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named_and_nothing_is_written(case: str) -> None:
    make, kind, argument, text = WRONG[case]
    x, layout, out = make()
    before = None if not isinstance(out, BlockedArray) else out.storage.tobytes()
    with pytest.raises(kind) as caught:
        to_layout(x, layout, out=out)
    assert isinstance(caught.value, ArgumentError)
    assert caught.value.argument == argument
    assert text in str(caught.value)
    assert f"{argument}=" in str(caught.value)
    if before is not None:
        assert out.storage.tobytes() == before


def test_an_output_that_only_touches_the_source_is_fine() -> None:
    room = np.zeros(X.size + 2 * 2 * 3 * 4 * 4, np.float32)
    x = BlockedArray(room[: X.size].reshape(X.shape), "NCHW", X.shape)
    x.storage[...] = X
    out = BlockedArray(room[X.size :].reshape(2, 2, 3, 4, 4), "NCHW4", X.shape)
    assert np.array_equal(flat(to_layout(x, "NCHW4", out=out)), stored(X, "NCHW4"))
