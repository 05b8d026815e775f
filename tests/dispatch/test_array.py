"""BlockedArray: storage with a layout, on its way in, out and through files."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout_oracle import channel_major, convolution_filter, depthwise_filter, height_major, width_major
from storage_oracle import Array, Shape, logical_bits, stored

import blockconv as bc
from blockconv import ArgumentError, BlockedArray, DtypeError, Layout, LayoutError, to_layout

pytestmark = pytest.mark.filterwarnings("error::blockconv.SlowPathWarning")

SHAPE = (2, 17, 3, 5)


def example(layout: str = "NCHW16", dtype: str = "f4", **more: Any) -> BlockedArray:
    logical = logical_bits(SHAPE, np.dtype(dtype).itemsize).view(dtype)
    flat = stored(logical, Layout(layout).tag, more.get("zero_point", 0))
    return BlockedArray(flat.reshape(Layout(layout).storage_shape(SHAPE)), layout, SHAPE, **more)


def test_attributes() -> None:
    x = example()
    assert (x.shape, x.ndim, x.dtype, x.layout) == (SHAPE, 4, np.dtype("f4"), Layout("NCHW16"))
    assert x.storage.shape == (2, 2, 3, 5, 16)
    assert x.nbytes == 2 * 2 * 3 * 5 * 16 * 4
    assert x.zero_point == 0


def test_the_storage_is_taken_as_it_is() -> None:
    storage = np.zeros((2, 2, 3, 5, 16), np.float32)
    assert BlockedArray(storage, "fsv16", SHAPE).storage is storage


def test_repr_says_layout_and_shapes() -> None:
    assert repr(example()) == "BlockedArray(NCHW16, shape=(2, 17, 3, 5), dtype=float32, storage=(2, 2, 3, 5, 16))"
    assert "zero_point=-3" in repr(example(dtype="i1", zero_point=-3))
    assert "dtype=int4, storage=(128,)" in repr(bc.empty((1, 3, 4, 4), "NCHW16", "int4"))


# ---------------------------------------------------------------- to NumPy and others


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN", "HWCN", "NCHW4", "NCHW64", "CHWN4", "bsv16_fsv16"])
def test_numpy_is_the_logical_array(layout: str) -> None:
    x, logical = example(layout), logical_bits(SHAPE, 4).view("f4")
    found = x.numpy()
    assert found.shape == SHAPE
    assert np.array_equal(found.view("u4"), logical.view("u4"))
    assert np.shares_memory(found, x.storage) is not x.layout.is_blocked


def test_array_protocol() -> None:
    logical = np.arange(2 * 17 * 3 * 5, dtype="f4").reshape(SHAPE)
    blocked, plain = to_layout(logical, "NCHW16"), to_layout(logical, "NHWC")
    for x in (blocked, plain):
        assert np.array_equal(np.asarray(x), logical)
        assert np.array_equal(np.asarray(x, np.float64), logical)
        assert np.asarray(x, np.float64).dtype == np.float64
        assert np.array_equal(np.add(x, 1), logical + 1)
        assert not np.shares_memory(np.array(x, copy=True), x.storage)
    assert np.shares_memory(np.asarray(plain), plain.storage)
    assert np.shares_memory(plain.__array__(copy=False), plain.storage)
    assert not np.shares_memory(plain.__array__(copy=True), plain.storage)
    for x, dtype in ((blocked, None), (plain, np.float64)):
        with pytest.raises(ValueError, match="copy=False"):
            x.__array__(dtype, copy=False)


def test_dlpack_gives_the_storage() -> None:
    x = example("NCHW16", "i4")
    there = np.from_dlpack(x)
    assert there.shape == x.storage.shape
    assert np.shares_memory(there, x.storage)
    assert x.__dlpack_device__() == (1, 0)
    again = BlockedArray(there, "NCHW16", SHAPE)
    assert np.array_equal(again.numpy(), x.numpy())


def test_dlpack_with_torch() -> None:
    torch = pytest.importorskip("torch")
    x = example("NCHW16", "i4")
    tensor = torch.from_dlpack(x)
    assert tuple(tensor.shape) == x.storage.shape
    tensor += 1
    assert np.array_equal(x.numpy(), logical_bits(SHAPE, 4).view("i4") + 1)
    back = BlockedArray(np.from_dlpack(tensor), "NCHW16", SHAPE)
    assert np.shares_memory(back.storage, x.storage)


# ---------------------------------------------------------------- copies and files


def same(a: BlockedArray, b: BlockedArray) -> bool:
    facts = [(x.layout, x.shape, x.dtype, x.zero_point, x.storage.shape, x.storage.tobytes()) for x in (a, b)]
    return facts[0] == facts[1]


def examples() -> list[BlockedArray]:
    packed = BlockedArray.from_numpy(np.arange(-4, 4).reshape(1, 2, 2, 2), "NCHW4", dtype="int4", zero_point=2)
    found = [example(), example("NHWC", "f8"), example("NCHW4", "i1", zero_point=-3), example("CHWN4", "u2")]
    return [*found, packed, bc.to_layout(np.zeros((0, 3, 2, 2)), "NCHW8")]


@pytest.mark.parametrize("number", range(6))
def test_pickles_and_copies(number: int) -> None:
    x = examples()[number]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert same(pickle.loads(pickle.dumps(x, protocol)), x)
    assert same(copy.deepcopy(x), x)
    assert not np.shares_memory(copy.deepcopy(x).storage, x.storage) or not x.storage.size


@pytest.mark.parametrize("number", range(6))
def test_saving_and_loading(number: int, tmp_path: Path) -> None:
    x = examples()[number]
    x.save(tmp_path / "x.anything")
    assert same(BlockedArray.load(tmp_path / "x.anything"), x)
    assert [path.name for path in tmp_path.iterdir()] == ["x.anything"]


def test_a_layout_of_a_users_own_is_saved_by_its_tag(tmp_path: Path, run_python: Any) -> None:
    bc.register_layout("mine", "aBcd11b")
    x = to_layout(np.arange(9, dtype="f4").reshape(1, 9, 1, 1), "mine")
    x.save(tmp_path / "mine.npz")
    (tmp_path / "mine.pickle").write_bytes(pickle.dumps(x))
    run_python(f"""
import pathlib, pickle, blockconv as bc
here = pathlib.Path({str(tmp_path)!r})
for x in (bc.BlockedArray.load(here / "mine.npz"), pickle.loads((here / "mine.pickle").read_bytes())):
    assert x.layout.tag == "aBcd11b" and x.numpy().reshape(-1).tolist() == list(range(9)), x
""")


def not_ours() -> dict[str, bytes]:
    array, arrays, text = io.BytesIO(), io.BytesIO(), b"hello"
    np.save(array, np.zeros(3))
    np.savez(arrays, x=np.zeros(3))
    return {"array": array.getvalue(), "arrays": arrays.getvalue(), "text": text, "empty": b"", "cut": b"PK\x03\x04ab"}


@pytest.mark.parametrize("name", not_ours())
def test_loading_what_is_not_ours(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(not_ours()[name])
    with pytest.raises(ArgumentError, match=r"BlockedArray\.load: path=.*file.*is no file of BlockedArray\.save"):
        BlockedArray.load(path)


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BlockedArray.load(tmp_path / "nothing")


def test_loading_a_storage_that_does_not_fit_its_layout(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        np.savez(file, storage=np.zeros(3), tag="aBcd4b", shape=np.array([1, 2, 2, 2]), dtype="float64", zero_point=0)
    with pytest.raises(ArgumentError, match=r"no file of BlockedArray\.save.*storage"):
        BlockedArray.load(path)


@pytest.mark.parametrize("zero_point", [float("inf"), float("nan"), 1.5, 2**40, None, "0", [0, 0]])
def test_loading_a_zero_point_that_is_none(zero_point: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    arrays = {"storage": np.zeros((1, 1, 2, 2, 4), np.uint8), "shape": np.array([1, 2, 2, 2]), "dtype": "uint8"}
    np.savez(path, tag="aBcd4b", zero_point=zero_point, **arrays)
    with pytest.raises(ArgumentError, match=r"zero_point|no file of"):
        BlockedArray.load(path)
    np.savez(path, tag="aBcd4b", zero_point=3, **arrays)
    assert BlockedArray.load(path).zero_point == 3


def test_loading_a_zip_that_is_encrypted_or_packed_by_what_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "file"
    example().save(path)
    whole = path.read_bytes()
    entry = whole.index(b"PK\x01\x02")
    for offset, value in ((8, 1), (10, 99), (10, 12)):
        data = bytearray(whole)
        data[entry + offset] = value
        path.write_bytes(bytes(data))
        with pytest.raises(ArgumentError, match="no file of"):
            BlockedArray.load(path)


def test_a_masked_array_is_no_storage() -> None:
    masked = np.ma.masked_array(np.zeros((1, 3, 4, 4), np.float32))
    for call in (
        lambda: BlockedArray(masked, "NCHW", (1, 3, 4, 4)),
        lambda: BlockedArray.from_numpy(masked),
        lambda: to_layout(masked, "NCHW16"),
    ):
        with pytest.raises(ArgumentError, match="mask"):
            call()


# ---------------------------------------------------------------- MACE's images

IMAGES = {
    "NHCW4": (channel_major, [(1, 1, 1, 1), (2, 5, 3, 7), (3, 8, 2, 1)]),
    "NHWCD4": (channel_major, [(1, 3, 2, 2)]),
    "IN_OUT_HEIGHT": (height_major, [(1, 1, 1, 1), (2, 5, 3, 7), (3, 2, 9, 4)]),
    "IN_OUT_WIDTH": (width_major, [(1, 1, 1, 1), (2, 5, 3, 7), (3, 2, 4, 9)]),
    "CONV2D_FILTER": (convolution_filter, [(1, 1, 1, 1), (9, 5, 3, 2), (4, 3, 1, 1)]),
    "DW_CONV2D_FILTER": (depthwise_filter, [(1, 1, 1, 1), (1, 9, 3, 2), (1, 4, 1, 1)]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "shape"), [(name, shape) for name, (_, shapes) in IMAGES.items() for shape in shapes]
)
def test_images_hold_what_maces_formulas_say(layout: str, shape: Shape) -> None:
    logical = logical_bits(shape, 4)
    x = to_layout(logical, layout)
    image = x.image()
    height, width, four = image.shape
    assert four == 4
    assert np.shares_memory(image, x.storage)
    pixels = dict(IMAGES[layout][0](*shape))
    assert len(pixels) == image.size
    for j, i, k in itertools.product(range(height), range(width), range(4)):
        index = pixels[(j * width + i) * 4 + k]
        there = all(n < size for n, size in zip(index, shape, strict=True))
        assert image[j, i, k] == (logical[index] if there else 0)


def test_the_image_of_an_argument() -> None:
    bias = np.arange(1, 7, dtype=np.float32)
    assert to_layout(bias, "ARGUMENT").image().tolist() == [[[1, 2, 3, 4], [5, 6, 0, 0]]]


def test_writing_to_an_image_writes_to_the_array() -> None:
    x = to_layout(np.zeros((1, 4, 2, 2), np.float32), "NHWCD4")
    x.image()[1, 0] = [1, 2, 3, 4]
    assert x.numpy()[0, :, 1, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("layout", ["NCHW", "NCHW16", "CHWN4"])
def test_what_is_no_image(layout: str) -> None:
    with pytest.raises(LayoutError, match="is no MACE image"):
        example(layout).image()


def test_packed_values_are_no_image() -> None:
    with pytest.raises(DtypeError, match="two values to a byte"):
        bc.empty((1, 4, 2, 2), "NHWCD4", "int4").image()


# ---------------------------------------------------------------- errors

GOOD = np.zeros((2, 2, 3, 5, 16), np.float32)


def cut(array: Array) -> Array:
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    return wide[..., ::2]


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[ArgumentError], str, str]] = {
    "no array": (([1.0], "NCHW16", SHAPE), {}, ArgumentError, "storage", "has to be a NumPy array"),
    "no layout": ((GOOD, "NCHW16x", SHAPE), {}, LayoutError, "layout", "'16x' has a letter"),
    "no shape": ((GOOD, "NCHW16", 7), {}, ArgumentError, "shape", "sequence of ints"),
    "a fraction of a shape": ((GOOD, "NCHW16", (2, 17, 3, 5.0)), {}, ArgumentError, "shape", "ints"),
    "a negative shape": ((GOOD, "NCHW16", (2, 17, -3, 5)), {}, ArgumentError, "shape", "of at least 0"),
    "another rank": ((GOOD, "NCHW16", (2, 17, 15)), {}, LayoutError, "layout", "has 4 dimensions, and the shape has 3"),
    "another storage": ((GOOD[0], "NCHW16", SHAPE), {}, LayoutError, "storage", "(2, 2, 3, 5, 16)"),
    "a flat storage": ((GOOD.reshape(-1), "NCHW16", SHAPE), {}, LayoutError, "storage", "(2, 2, 3, 5, 16)"),
    "a logical storage": ((np.zeros(SHAPE), "NCHW16", SHAPE), {}, LayoutError, "storage", "(2, 2, 3, 5, 16)"),
    "not contiguous": ((cut(GOOD), "NCHW16", SHAPE), {}, LayoutError, "storage", "has to be C-contiguous"),
    "Fortran": ((np.asfortranarray(GOOD), "NCHW16", SHAPE), {}, LayoutError, "storage", "has to be C-contiguous"),
    "objects": ((GOOD.astype(object), "NCHW16", SHAPE), {}, DtypeError, "storage", "1, 2, 4 or 8 bytes"),
    "16 bytes": ((GOOD.astype("D"), "NCHW16", SHAPE), {}, DtypeError, "storage", "1, 2, 4 or 8 bytes"),
    "another dtype": ((GOOD, "NCHW16", SHAPE), {"dtype": "f8"}, DtypeError, "storage", "have dtype float64"),
    "no dtype": ((GOOD, "NCHW16", SHAPE), {"dtype": "float12"}, DtypeError, "dtype", "a dtype of NumPy"),
    "a list of dtypes": ((GOOD, "NCHW16", SHAPE), {"dtype": ["f4"]}, DtypeError, "dtype", "a dtype of NumPy"),
    "packed floats": ((GOOD, "NCHW16", SHAPE), {"dtype": "int4"}, DtypeError, "storage", "have dtype uint8"),
    "packed, not flat": ((GOOD.view("u1"), "NCHW16", SHAPE), {"dtype": "int4"}, LayoutError, "storage", "(480,)"),
    "zero point of floats": ((GOOD, "NCHW16", SHAPE), {"zero_point": 1}, ArgumentError, "zero_point", "from 0 to 0"),
    "zero point of bytes": (
        (GOOD.astype("i1"), "NCHW16", SHAPE),
        {"zero_point": 128},
        ArgumentError,
        "zero_point",
        "from -128 to 127",
    ),
    "zero point of nibbles": (
        (np.zeros(480, "u1"), "NCHW16", SHAPE),
        {"zero_point": 8, "dtype": "int4"},
        ArgumentError,
        "zero_point",
        "from -8 to 7",
    ),
    "a fraction of a zero point": (
        (GOOD.astype("i1"), "NCHW16", SHAPE),
        {"zero_point": 0.5},
        ArgumentError,
        "zero_point",
        "must be a whole number",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_storage_that_does_not_fit(case: str) -> None:
    arguments, named, kind, argument, text = WRONG[case]
    with pytest.raises(kind) as caught:
        BlockedArray(*arguments, **named)
    assert caught.value.argument == argument
    assert f"{argument}=" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("array", "named", "text"),
    [
        (np.zeros(SHAPE), {"dtype": "int4"}, "array=.*int4 holds integers from -8 to 7"),
        (np.full(SHAPE, 8), {"dtype": "int4"}, "array=.*int4 holds integers from -8 to 7"),
        (np.full(SHAPE, -1), {"dtype": "uint4"}, "array=.*uint4 holds integers from 0 to 15"),
        (np.zeros(SHAPE), {"dtype": "float32"}, "dtype='float32': has to be one of int4, uint4"),
        (np.zeros(SHAPE, object), {}, "array=.*1, 2, 4 or 8 bytes"),
        (np.zeros((1,) * 7), {}, "array=.*1 to 6 dimensions"),
        (np.zeros(SHAPE, "i1"), {"zero_point": 300}, "zero_point=300: has to be from -128 to 127"),
    ],
)
def test_arrays_that_cannot_enter(array: Array, named: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        BlockedArray.from_numpy(array, **named)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((1, 2), "NCHW"), "layout='NCHW': has 4 dimensions, and the shape has 2"),
        (((1, 2, 3, 4), "NCHW", "float12"), "empty: dtype='float12'"),
        (((1, 2, 3, 4), "NCHW", "D"), "empty: dtype="),
        (((1, 2, 3, 4), "NCHW", "f4", 2), "zero_point=2"),
    ],
)
def test_what_empty_refuses(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        bc.empty(*arguments)


def test_errors_survive_pickling() -> None:
    with pytest.raises(LayoutError) as caught:
        BlockedArray(GOOD[0], "NCHW16", SHAPE)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.argument) == (LayoutError, str(caught.value), "storage")


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "x.npz"
    with pytest.raises(FileNotFoundError) as caught:
        example().save(path)
    assert caught.value.filename == str(path.resolve())
