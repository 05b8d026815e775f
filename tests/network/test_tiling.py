"""Images tile by tile: the results of whole images, on exact integers, for any network that has a receptive field."""

from __future__ import annotations

import pickle
import tracemalloc
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_cases import cases
from small_networks import u_net, whole_numbers

import blockconv as bc
from blockconv.network import ops
from blockconv.network.graph import frozen
from blockconv.network.tiling import tiling


def layer(b: bc.NetworkBuilder, x: str, channels: int, draw: Any, rng: np.random.Generator) -> tuple[str, int]:
    """One op that reads neighbours, or changes the number of pixels."""
    kind = draw(st.sampled_from(["conv", "transposed", "max", "avg", "up", "pad", "depthwise", "same", "blocks"]))
    k, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    reach = (k - 1) * dilation
    pads = tuple((draw(st.integers(0, reach)), draw(st.integers(0, reach))) for _ in range(2))
    if kind in ("conv", "depthwise"):
        groups = channels if kind == "depthwise" else 1
        made = channels if groups > 1 else draw(st.sampled_from([2, 3, 5]))
        weight = whole_numbers(rng, made, channels // groups, k, k)
        return b.conv2d(x, weight, stride=stride, padding=pads, dilation=dilation, groups=groups), made
    if kind == "transposed":
        weight = whole_numbers(rng, channels, 2, k, k)
        return b.conv_transpose2d(x, weight, stride=stride, padding=pads, dilation=dilation), 2
    if kind == "max":
        return b.add(ops.Pool2d("max", (k, k), (stride, stride), ((k // 2, k // 2),) * 2), x), channels
    if kind == "avg":  # sums: averages of whole numbers are not exact
        attributes = ops.Pool2d("avg_include_padding", (k, k), (stride, stride), ((k // 2, 0),) * 2, divisor=1)
        return b.add(attributes, x), channels
    if kind == "up":
        mode, scale = draw(
            st.sampled_from([("nearest", 2.0), ("linear", 2.0), ("nearest", 3.0), ("cubic", 2.0), ("linear", 0.5)])
        )
        coordinates = draw(st.sampled_from(["half_pixel", "asymmetric"]))
        attributes = ops.Resize(mode, scale=(scale, scale), coordinates=coordinates, antialias=scale < 1)
        return b.add(attributes, x), channels
    if kind == "pad":
        return b.add(ops.Pad(((0, 0), (0, 0), *pads), 3.0), x), channels
    if kind == "blocks":  # of pixels to channels, or back
        block, by_channel, inverse = (
            (draw(st.integers(1, 3)), draw(st.integers(1, 2))),
            draw(st.booleans()),
            draw(st.booleans()),
        )
        size = block[0] * block[1]
        made = channels * size if inverse else channels
        if not inverse:
            x = b.conv2d(x, whole_numbers(rng, channels * size, channels, 1, 1))
        try:
            return b.add(ops.PixelShuffle(block, by_channel, inverse), x), made
        except bc.ArgumentError:  # of an odd size
            return x, channels
    return b.binary("add", x, b.conv2d(x, whole_numbers(rng, channels, channels, 3, 3), padding=1)), channels


@st.composite
def networks(draw: Any) -> bc.Network:
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    b, channels = bc.NetworkBuilder("random"), 2
    x = b.input("x", (1, 2, 96, 96))
    for _ in range(draw(st.integers(1, 4))):
        x, channels = layer(b, x, channels, draw, rng)
    b.output(x)
    return b.build()


def check_tiles(network: bc.Network, x: Any, tile: tuple[int, int]) -> None:
    try:
        how = tiling(network, x.shape, tile)
    except bc.ArgumentError:
        return
    (wanted,) = network.with_input_shapes(x.shape).evaluate(x).values()
    (name,) = network.outputs
    assert how.outputs[name] == wanted.shape
    written = np.zeros(wanted.shape[2:], int)
    for piece in how.pieces:
        (found,) = how.network.evaluate(x[(slice(None), slice(None), *how.source(piece))]).values()
        where = tuple(slice(*ends) for ends in piece.gives[name])
        np.testing.assert_array_equal(found[(slice(None), slice(None), *how.local(piece, name))],
                                      wanted[(slice(None), slice(None), *where)])  # fmt: skip
        written[where] += 1
    assert (written == 1).all(), "each pixel once"


@settings(max_examples=cases(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(networks(), st.integers(70, 140), st.integers(70, 140), st.integers(40, 90), st.integers(40, 90))
def test_tiles_are_those_of_the_whole_image(network: bc.Network, h: int, w: int, th: int, tw: int) -> None:
    """By `evaluate`, which is exact here: what the cuts are is all that is asked."""
    check_tiles(network, whole_numbers(np.random.default_rng(h * w), 1, 2, h, w), (th, tw))


@pytest.mark.parametrize(
    ("mode", "scale", "antialias"),
    [("cubic", 2.0, False), ("cubic", 0.5, False), ("linear", 0.25, True), ("cubic", 0.5, True)],
)
def test_tiles_hold_all_taps_of_what_is_resampled(mode: Any, scale: float, antialias: bool) -> None:
    b = bc.NetworkBuilder()
    x = b.input("x", (1, 2, 96, 96))
    b.output(b.add(ops.Resize(mode, scale=(scale, scale), antialias=antialias), x))
    network, values = b.build(), whole_numbers(np.random.default_rng(0), 1, 2, 96, 96)
    for tile in range(16, 64, 4):
        check_tiles(network, values, (tile, tile))


@pytest.mark.slow
@settings(max_examples=cases(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(networks(), st.booleans(), st.tuples(st.integers(70, 140), st.integers(70, 140)), st.integers(40, 90))
def test_plans_of_random_networks_have_the_whole_images_results(
    network: bc.Network, int8: bool, size: tuple[int, int], tile: int
) -> None:
    """Bit for bit if all is quantized, as transposed convolutions are not. Else within rounding: sums of four layers
    are too large to be exact."""
    rng = np.random.default_rng(tile)
    x = whole_numbers(rng, 1, 2, *size)
    exact = int8 and not any(isinstance(node.attributes, ops.ConvTranspose2d) for node in network.nodes)
    if int8:
        x = rng.standard_normal(x.shape).astype(np.float32)
        network = bc.quantize(network, [rng.standard_normal((1, 2, 96, 96)).astype(np.float32)])
    plan = bc.compile(network, threads=1, accuracy="strict")
    try:
        found = plan.tiled(x, tile)
    except bc.ArgumentError:
        return
    wanted = plan(x)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0 if exact else 1e-6 * np.abs(wanted).max(initial=0))


@pytest.mark.nightly
def test_an_image_of_more_than_two_billion_pixels(tmp_path: Any) -> None:
    """A sparse file, with a few pixels set, each of which one pixel of the result finds."""
    b, side = bc.NetworkBuilder("large"), 47_000
    y = b.conv2d(b.input("x", (1, 1, 1024, 1024)), np.ones((1, 1, 3, 3), np.float32), stride=4, padding=1)
    b.output(b.max_pool2d(y, 4))
    plan = bc.compile(b.build(), threads=1)
    image = np.memmap(tmp_path / "x", np.float32, "w+", shape=(1, 1, side, side))
    assert image.size > 2**31
    places = np.random.default_rng(0).integers(0, side // 16, (40, 2))
    for value, (y, x) in enumerate(places, 1):
        image[0, 0, 16 * y + 4, 16 * x + 8] = value
    found = plan.tiled(image, 4096)
    wanted = np.zeros((side // 16, side // 16), np.float32)
    np.maximum.at(wanted, tuple(places.T), np.arange(1, 41, dtype=np.float32))
    np.testing.assert_array_equal(found[0, 0], wanted)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("shape", "tile"), [((2, 3, 200, 132), 48), ((1, 3, 70, 90), (40, 64)), ((1, 3, 64, 64), None)]
)
def test_a_plan_gives_the_whole_images_results(shape: tuple[int, ...], tile: Any, batch: int) -> None:
    plan = bc.compile(u_net(np.random.default_rng(0)), threads=1, accuracy="strict")
    x = whole_numbers(np.random.default_rng(1), *shape)
    found, wanted = plan.tiled(x, tile, batch=batch), plan(x)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_files_are_read_and_written_by_tiles(tmp_path: Any) -> None:
    plan = bc.compile(u_net(np.random.default_rng(0)), threads=1, accuracy="strict")
    x = whole_numbers(np.random.default_rng(1), 1, 3, 120, 160)
    image = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, x.shape)
    image[:] = x
    how = plan.tiling(x.shape, 64)
    out = {name: np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, shape)
           for name, shape in how.outputs.items()}  # fmt: skip
    assert plan.tiled(image, 64, out=out).keys() == out.keys()
    for name, wanted in plan(x).items():
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), wanted)


def test_zarr_is_read_and_written_by_tiles(tmp_path: Any) -> None:
    zarr = pytest.importorskip("zarr")
    plan = bc.compile(u_net(np.random.default_rng(0)), threads=1, accuracy="strict")
    x = whole_numbers(np.random.default_rng(1), 1, 3, 120, 160)
    image = zarr.open(str(tmp_path / "x.zarr"), mode="w", shape=x.shape, chunks=(1, 2, 50, 70), dtype="float32")
    image[:] = x
    out = {name: zarr.open(str(tmp_path / name), mode="w", shape=shape, chunks=(1, 1, 32, 48), dtype="float32")
           for name, shape in plan.tiling(x.shape, 64).outputs.items()}  # fmt: skip
    assert plan.tiled(image, 64, out=out).keys() == out.keys()
    for name, wanted in plan(x).items():
        np.testing.assert_array_equal(zarr.open(str(tmp_path / name), mode="r")[:], wanted)


@pytest.mark.parametrize("batch", [1, 2])
def test_memory_is_what_the_tiling_says(tmp_path: Any, batch: int) -> None:
    """A tile's, whatever the image's size."""
    plan = bc.compile(u_net(np.random.default_rng(0)), threads=1)
    peaks = []
    for size in (400, 1000):
        image = np.memmap(tmp_path / f"{size}", np.float32, "w+", shape=(1, 3, size, size))
        how = plan.tiling(image.shape, 128, batch)
        out = {name: np.memmap(tmp_path / f"{name}{size}", np.float32, "w+", shape=shape)
               for name, shape in how.outputs.items()}  # fmt: skip
        plan.tiled(image, 128, out=out, batch=batch)
        plan._arenas.idle.clear()
        tracemalloc.start()
        plan.tiled(image, 128, out=out, batch=batch)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        objects = 100_000 + 1000 * len(how.pieces)  # Python's, some of them for each tile
        assert 0.8 * how.nbytes < peaks[-1] < how.nbytes + objects
    assert abs(peaks[1] - peaks[0]) < 0.1 * peaks[0]


def res_net(rng: np.random.Generator) -> bc.Network:
    """A strided stem and a pool, residual blocks of which one has a stride, and one with dilation."""
    b = bc.NetworkBuilder("r")
    x = b.conv2d(b.input("x", (1, 3, 64, 64)), whole_numbers(rng, 4, 3, 7, 7, low=-1, high=2), stride=2, padding=3)
    x = b.max_pool2d(x, 3, 2, 1)
    for stride, dilation in ((1, 1), (2, 1), (1, 2)):
        y = b.conv2d(x, whole_numbers(rng, 4, 4, 3, 3, low=-1, high=2), stride=stride, padding=1, activation="relu")
        short = b.conv2d(x, whole_numbers(rng, 4, 4, 1, 1, low=-1, high=2), stride=stride) if stride > 1 else x
        weight = whole_numbers(rng, 4, 4, 3, 3, low=0, high=2)
        x = b.conv2d(y, weight, padding=dilation, dilation=dilation, residual=short)
    b.output(x)
    return b.build()


def atrous(rng: np.random.Generator) -> bc.Network:
    """Convolutions of dilation 1, 2, 4 and a strided one, joined at full resolution."""
    b = bc.NetworkBuilder("a")
    x = b.input("x", (1, 3, 64, 64))
    found = [b.conv2d(x, whole_numbers(rng, 2, 3, 3, 3), padding=d, dilation=d) for d in (1, 2, 4)]
    down = b.conv2d(b.concat(*found), whole_numbers(rng, 3, 6, 4, 4, low=-1, high=2), stride=2, padding=1)
    found.append(b.add(ops.Resize("nearest", scale=(2.0, 2.0)), down))
    b.output(b.concat(*found))
    return b.build()


@pytest.mark.parametrize("build", [u_net, res_net, atrous])
def test_tiles_of_no_given_size_share_the_image(build: Any) -> None:
    """Cuts cost what a tile's neighbours need; no last tile does most of its neighbour's work again."""
    network = build(np.random.default_rng(0))
    lost = max(max(field.size) for field in network.receptive_field().values()) + 2 * 32
    for size in range(64, 3000, 62):
        how = tiling(network, (1, 3, size, 1024), None)
        per_tile = min(lost / size, 1) if len(how.pieces) == 1 else 1.3 * lost / how.tile[0]
        assert len({piece.start[0] for piece in how.pieces}) * how.tile[0] / size < 1 + per_tile + 0.02
        assert how.tile[0] <= max(512, 4 * lost) + 64


def least_tile(network: bc.Network, shape: tuple[int, ...]) -> int:
    """The smallest tile that is taken: little more than what cuts cost."""
    for size in range(1, 400):
        try:
            tiling(network, shape, size)
        except bc.ArgumentError:
            continue
        return size
    raise AssertionError("none is taken")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 3, 330, 262), (1, 3, 222, 318)])
@pytest.mark.parametrize("build", [u_net, res_net, atrous])
@pytest.mark.sampled(6)
def test_tiles_from_the_smallest_on_give_the_whole_images_results(build: Any, shape: tuple[int, ...]) -> None:
    network = build(np.random.default_rng(0))
    plan = bc.compile(network, threads=1, accuracy="strict")
    x = whole_numbers(np.random.default_rng(1), *shape)
    wanted, least = plan.by_name(x), least_tile(network, shape)
    assert len(plan.tiling(shape, least).pieces) > 20
    for tile in (least, least + 17, (least, least + 60), 400):
        found = plan.tiled(x, tile)
        for name, result in (found if isinstance(found, dict) else {network.outputs[0]: found}).items():
            np.testing.assert_array_equal(result, wanted[name])


@pytest.mark.slow
@pytest.mark.parametrize("build", [u_net, res_net, atrous])
def test_floats_do_not_depend_on_who_computes_tiles_and_little_on_tiles(build: Any) -> None:
    rng = np.random.default_rng(3)
    plan = bc.compile(build(rng), threads=1)
    other = bc.compile(build(np.random.default_rng(3)), threads=2)
    x = rng.standard_normal((1, 3, 246, 190)).astype(np.float32)
    found, wanted = plan.tiled(x, 120), plan.by_name(x)
    again = other.tiled(x, 120, batch=2)
    for name, result in wanted.items():
        one, two = ((f[name] if isinstance(f, dict) else f) for f in (found, again))
        assert one.tobytes() == two.tobytes()
        np.testing.assert_allclose(one, result, atol=1e-5 * np.abs(result).max())


@pytest.mark.slow
def test_int8_is_the_whole_image_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    b = bc.NetworkBuilder("q")
    y = b.conv2d(
        b.input("x", (1, 3, 64, 64)), rng.normal(size=(16, 3, 3, 3)).astype("f4"), padding=1, activation="relu"
    )
    b.output(b.conv2d(b.max_pool2d(y, 3, 2, 1), rng.normal(size=(8, 16, 3, 3)).astype("f4"), padding=1))
    network = bc.quantize(b.build(), [rng.normal(size=(1, 3, 64, 64)).astype(np.float32) for _ in range(2)])
    plan = bc.compile(network, "NHWC", threads=1)
    x = rng.normal(size=(1, 3, 150, 101)).astype(np.float32)
    np.testing.assert_array_equal(plan.tiled(x, 40), plan(x))


def test_a_value_that_is_read_twice_is_read_by_both_windows() -> None:
    """A convolution whose source is its residual too, as fusion writes `x + conv(x)`."""
    rng, b = np.random.default_rng(0), bc.NetworkBuilder("twice")
    x = b.input("x", (1, 4, 64, 64))
    b.output(b.binary("add", x, b.conv2d(x, whole_numbers(rng, 4, 4, 5, 3), padding=(2, 1))))
    plan = bc.compile(b.build(), threads=1)
    assert len(plan.network.nodes) == 1
    assert [*plan.network.receptive_field().values()] == [((5, 3), (1, 1), (-2, -1))]
    image = whole_numbers(rng, 1, 4, 150, 90)
    np.testing.assert_array_equal(plan.tiled(image, 40), plan(image))


def test_the_receptive_field_of_a_known_network() -> None:
    b = bc.NetworkBuilder("r")
    y = b.conv2d(b.input("x", (1, 3, 64, 64)), np.ones((4, 3, 7, 7), np.float32), stride=2, padding=3)
    y = b.conv2d(b.max_pool2d(y, 3, 2, 1), np.ones((4, 4, 3, 5), np.float32), padding=(1, 2))
    b.output(y)
    field = b.build().receptive_field()[y]
    assert field == ((7 + 2 * 2 + 4 * 2, 7 + 2 * 2 + 4 * 4), (Fraction(4), Fraction(4)), (-3 - 2 - 4, -3 - 2 - 8))


WHOLE: dict[str, Any] = {
    "a global pool": lambda b, x: b.global_avg_pool2d(x),
    "an adaptive pool": lambda b, x: b.adaptive_avg_pool2d(x, 2),
    "softmax over rows": lambda b, x: b.add(ops.Softmax(2), x),
    "a mean over pixels": lambda b, x: b.add(ops.ReduceMean((2, 3)), x),
    "a constant image": lambda b, x: b.binary("add", x, b.constant(np.ones((64, 64), np.float32))),
    "a gate of the whole image": lambda b, x: b.binary("mul", x, b.global_avg_pool2d(x)),
    "corners that are aligned": lambda b, x: b.add(ops.Resize("linear", (128, 128), coordinates="align_corners"), x),
    "a size of its own": lambda b, x: b.add(ops.Resize("nearest", (128, 128)), x),
    "a reshape": lambda b, x: b.add(ops.Reshape((1, 3, -1)), x),
    "exchanged axes": lambda b, x: b.add(ops.Transpose((0, 1, 3, 2)), x),
}


@pytest.mark.parametrize("add", WHOLE.values(), ids=WHOLE)
def test_what_needs_the_whole_image_is_refused_by_name(add: Any) -> None:
    b = bc.NetworkBuilder("w")
    x = b.input("x", (1, 3, 64, 64))
    b.output(add(b, x))
    node = b.build().nodes[0]
    with pytest.raises(bc.UnsupportedError, match=node.name):
        tiling(b.build(), (1, 3, 200, 200), 64)


class ReadOnly(NamedTuple):
    """What counts of a Zarr array whose store is open for reading."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read_only: bool = True


def test_bad_arguments_are_refused_and_nothing_is_written() -> None:
    plan = bc.compile(u_net(np.random.default_rng(0)), threads=1)
    x = np.zeros((1, 3, 100, 100), np.float32)
    out = {name: np.full(shape, 7, np.float32) for name, shape in plan.tiling(x.shape).outputs.items()}
    for bad in (
        {"tile": 8},
        {"tile": 0},
        {"tile": (64,)},
        {"batch": 0},
        {"out": x},
        {"out": dict(list(out.items())[:1])},
        {"out": dict.fromkeys(out, 5)},
        {"out": {name: frozen(array) for name, array in out.items()}},
        {"out": {name: ReadOnly(array.shape, array.dtype) for name, array in out.items()}},
    ):
        with pytest.raises(bc.ArgumentError):
            plan.tiled(x, **{"out": out, "tile": 64} | bad)
    assert len(repr(plan.tiling((1, 3, 10_000, 10_000)))) < 120  # without thousands of pieces
    for shape in (None, 5, (1, 3, float("nan"), 100), (1.0, 3, 100, 100)):
        with pytest.raises(bc.ArgumentError, match=r"tiled: shape=.* has to be a shape"):
            plan.tiling(shape)
    for shape in ((1, 3, 10**9, 10**9), (1, 3, 10**30, 100)):
        with pytest.raises(bc.ArgumentError, match=r"tiled: shape=.*; give smaller sizes"):
            plan.tiling(shape)
    with pytest.raises(bc.ArgumentError, match=r"tiled: shape=\(1, 3, nan, 100\): has to be a shape"):
        plan.tiled(SimpleNamespace(shape=(1, 3, float("nan"), 100), dtype=x.dtype), 64, out=out)  # as Dask has it
    with pytest.raises(bc.ArgumentError, match="masked array"):
        plan.tiled(np.ma.masked_less(x, 1), 64, out=out)
    alone = r"shape=.*; give dask.*\(image\)\[None\]$"
    says = ("image=.*not float64; give dask", alone, r"shape=.*\(N, 3, H, W\)$", "image=.*like one")
    for image, words in zip((x.astype(np.float64), x[0], x[:, :2], x.tolist()), says, strict=True):
        with pytest.raises(bc.ArgumentError, match=words):
            plan.tiled(image, 64, out=out)
    assert all((array == 7).all() for array in out.values())


def test_a_tile_that_a_node_does_not_take_is_too_small() -> None:
    builder = bc.NetworkBuilder()
    builder.output(builder.max_pool2d(builder.input("x", (1, 3, 64, 64)), 2))
    with pytest.raises(bc.ArgumentError, match=r"tiled: tile=1: is too small for this network: node 'pool2d_0'"):
        bc.compile(builder.build()).tiling((1, 3, 101, 101), tile=1)


@settings(max_examples=cases(60), deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 8), st.integers(1, 50), st.booleans())
def test_who_is_too_small_is_named(kernel: int, dilation: int, pad: int, tile: int, turned: bool) -> None:
    """The tile, wherever the image is taken; or the image."""
    size, shape = (1, kernel) if turned else (kernel, 1), (1, 1, 40, 40)
    b = bc.NetworkBuilder()
    attributes = ops.Pool2d("max", size, (2, 2), ((min(pad, kernel // 2),) * 2,) * 2, dilation=(dilation, dilation))
    b.output(b.add(attributes, b.input("x", (1, 1, 64, 64))))
    network = b.build()
    try:
        network.with_input_shapes(shape)
    except bc.NetworkError:
        return
    found = None
    try:
        assert max(tiling(network, shape, tile).tile) <= 40
    except bc.ArgumentError as error:
        found = error
    if found is not None:
        assert (found.op, found.argument) == ("tiled", "tile")
        assert found.value in (tile, tile + 1)  # which is of the image's parity
        assert found.rule.startswith("is too small for this network")


BLOCKS = {  # in ONNX, from (N, 12, H, W)
    "DepthToSpace": "y = DepthToSpace<blocksize = 2>(x)",
    "DepthToSpace by channels": 'y = DepthToSpace<blocksize = 2, mode = "CRD">(x)',
    "SpaceToDepth": "y = SpaceToDepth<blocksize = 2>(x)",
    "written as reshapes": """
        s = Shape(x)  n = Slice(s, zero, one)  h = Slice(s, two, three)  w = Slice(s, three, four)
        split = Concat<axis = 0>(n, three, two, two, h, w)  a = Reshape(x, split)
        b = Transpose<perm = [0, 1, 4, 2, 5, 3]>(a)
        h2 = Mul(h, two)  w2 = Mul(w, two)  joined = Concat<axis = 0>(n, three, h2, w2)  y = Reshape(b, joined)
    """,
    "written with channels last": """
        s = Shape(x)  n = Slice(s, zero, one)  h = Slice(s, two, three)  w = Slice(s, three, four)
        split = Concat<axis = 0>(n, two, two, three, h, w)  a = Reshape(x, split)
        b = Transpose<perm = [0, 3, 4, 1, 5, 2]>(a)
        h2 = Mul(h, two)  w2 = Mul(w, two)  joined = Concat<axis = 0>(n, three, h2, w2)  y = Reshape(b, joined)
    """,
    "written with one axis for images and channels": """
        s = Shape(x)  n = Slice(s, zero, one)  h = Slice(s, two, three)  w = Slice(s, three, four)
        n3 = Mul(n, three)  split = Concat<axis = 0>(n3, two, two, h, w)  a = Reshape(x, split)
        b = Transpose<perm = [0, 3, 1, 4, 2]>(a)
        h2 = Mul(h, two)  w2 = Mul(w, two)  joined = Concat<axis = 0>(n, three, h2, w2)  y = Reshape(b, joined)
    """,
    "pixels to channels, written as reshapes": """
        s = Shape(x)  n = Slice(s, zero, one)  h = Slice(s, two, three)  w = Slice(s, three, four)
        h2 = Div(h, two)  w2 = Div(w, two)
        split = Concat<axis = 0>(n, twelve, h2, two, w2, two)  a = Reshape(x, split)
        b = Transpose<perm = [0, 1, 3, 5, 2, 4]>(a)
        joined = Concat<axis = 0>(n, minus, h2, w2)  y = Reshape(b, joined)
    """,
}


@pytest.mark.parametrize("body", BLOCKS.values(), ids=BLOCKS)
def test_blocks_of_pixels_and_channels_are_tiled(body: str, tmp_path: Any) -> None:
    """As super-resolution ends. A saved plan takes any size too."""
    parser = pytest.importorskip("onnx.parser")
    named = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "twelve": 12, "minus": -1}
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 3, H, W] i, float[12, 3, 3, 3] f) => (float[N, C, A, B] o)
        <{", ".join(f"int64[1] {name} = {{{value}}}" for name, value in named.items())}>
        {{ x = Conv<pads = [1, 1, 1, 1]>(i, f) {body} o = MaxPool<kernel_shape = [3, 3]>(y) }}"""
    model = parser.parse_model(text)
    rng = np.random.default_rng(0)
    model.graph.initializer.append(
        pytest.importorskip("onnx.numpy_helper").from_array(whole_numbers(rng, 12, 3, 3, 3), "f")
    )
    network = bc.load_onnx(model, input_shapes={"i": (1, 3, 64, 64)})
    plan = bc.compile(network, threads=1, accuracy="strict")
    plan.save(tmp_path / "plan")
    for one in (plan, bc.Plan.load(tmp_path / "plan")):
        assert sum(isinstance(node.attributes, ops.PixelShuffle) for node in one.network.nodes) == 1
        for size in ((150, 98), (76, 64)):
            image = whole_numbers(rng, 1, 3, *size)
            (wanted,) = network.with_input_shapes(image.shape).evaluate(image).values()
            np.testing.assert_array_equal(one.tiled(image, 40), wanted)


def test_tiles_are_not_written_into_the_image_that_later_ones_read() -> None:
    b = bc.NetworkBuilder("blur")
    b.output(b.conv2d(b.input("x", (1, 1, 40, 40)), np.ones((1, 1, 3, 3), np.float32), padding=1))
    plan, both = bc.compile(b.build(), threads=1), np.ones((1, 2, 90, 90), np.float32)
    image = both[:, :1]
    for out in (image, image[...], image[:, :, ::-1]):
        with pytest.raises(bc.ArgumentError, match=r"out=.*must not overlap the image"):
            plan.tiled(image, 40, out=out)
    assert (both == 1).all()
    plan.tiled(image, 40, out=both[:, 1:])
    assert both[0, 1, 45, 45] == 9


def test_the_cuts_can_be_pickled() -> None:
    how = tiling(u_net(np.random.default_rng(0)), (1, 3, 200, 132), 48)
    copied = pickle.loads(pickle.dumps(how))
    assert copied.pieces == how.pieces
    assert copied.computed == how.computed > 1


def test_shapes_that_depend_on_data_are_refused() -> None:
    parser = pytest.importorskip("onnx.parser")
    pytest.importorskip("onnxruntime")
    body = "g (float[1, 3, 64, 64] x) => (float[1, 3, 64, 64] y, int64[4, n] z) { y = Relu(x)  z = NonZero(y) }"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {body}')
    with pytest.raises(bc.UnsupportedError, match="NonZero"):
        tiling(bc.load_onnx(model), (1, 3, 200, 200), 64)
