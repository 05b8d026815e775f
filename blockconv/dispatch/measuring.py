"""A machine's profile, measured on it: shipped kernels, timed in turns on one thread.

Every time is the time of many tiles less the time of few, so neither a call itself nor the first tile of a task counts.
A tile's step is the slope over the length of the reduction. Its end is the time that remains at length zero.
"""

import functools
import itertools
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from blockconv._version import __version__
from blockconv.core import target
from blockconv.core.checks import Pair
from blockconv.core.layout import NCHW, NHWC, Layout
from blockconv.core.problem import Conv2dProblem, Pool2dProblem
from blockconv.core.python import zipped
from blockconv.core.types import Types
from blockconv.dispatch.quantizing import of_narrow
from blockconv.dispatch.selection import named
from blockconv.dispatch.tuning import copy_of, program_runner, runner
from blockconv.dispatch.turns import UnsteadyError, Work, against, in_turns, positive, rates
from blockconv.kernels.common.dot import Dot, dot_for, matrix_dot_for, name_of, tiles_of, tiles_of_registers
from blockconv.kernels.conv.blocking import TileShape
from blockconv.kernels.conv.matrix_tile import LINE_BYTES, LINES
from blockconv.kernels.winograd.costs import multiply_adds, transforms
from blockconv.kernels.winograd.transforms import FORMS, Form
from blockconv.machine import identity
from blockconv.machine.machine import host
from blockconv.machine.profile import LAST, SCATTERED, SCATTERED_BLOCK, MachineProfile, Rates, TileTimes, median_of

DEPTHS = 32, 128  # channels of the two reductions
# The same with streamed weights; no powers of two, at which a tile's pixels share sets of the cache.
FAR_DEPTHS = 272, 1040
BLOCKS, FAR_BLOCKS = (1, 8), (1, 3)  # of output channels
TILES, FAR_TILES = 8, 2  # of each
NARROW = TileShape(1, 2, 1)  # whose accumulators wait for each other
ITEMSIZE = 4
DEPTHS_OF_MATRICES = (4, 16), (1, 2)  # steps of 64 bytes: of two reductions, and of two short ones
_FLOATS, _BYTES = Types.all("float32"), Types.quantized("uint8", "uint8")
_SIGNED_BYTES, _BRAIN = Types.quantized("int8", "int8"), Types.converted("bfloat16", "bfloat16")


class Reduced(NamedTuple):
    """Two reductions that are compared.

    depths: steps of each.
    channels: the channels of a step.
    row: the name of a `Row`.
    blocks: two numbers of blocks of output channels; the time of the fewer is subtracted from the time of the more.
    tiles: the tiles of each block.
    """

    depths: Pair = DEPTHS
    channels: int = 1
    row: str = "conv_direct"
    blocks: Pair = BLOCKS
    tiles: int = TILES


_BY_ONE = Reduced()


def measure(runs: int = 1) -> MachineProfile:
    """This machine's profile, for the instruction set that Numba targets: the median of so many of them.

    Each takes about a minute besides the compilation of kernels. It allocates its buffers anew, because their addresses
    change a time by some percent. One whose times differ by more than `MOST_SPREAD` is discarded, and measured again;
    `record` has how many, as "discarded". Raises UnsteadyError once these are as many as `runs`.
    """
    shapes = _shapes()
    found: list[MachineProfile] = []
    discarded = 0
    while len(found) < runs:
        try:
            with against(_multiply_adds(shapes[1])):
                found.append(_profile(shapes))
        except UnsteadyError:
            discarded += 1
            if discarded == runs:
                raise
    known = median_of(found)
    return replace(known, record={**known.record, "discarded": discarded})


def _shapes() -> list[TileShape]:
    """The largest tiles of floats, by their vectors."""
    return [TileShape(1, pixels, vectors) for vectors, pixels in tiles_of_registers(target.isa(), target.isa().fma)]


def _profile(shapes: list[TileShape]) -> MachineProfile:
    """shapes: the tiles that are timed."""
    isa = target.isa()
    times = {shape: _whole_tile_times(shape) for shape in (*shapes, NARROW)}
    dots = {dot_for(types, isa): types for types in (_SIGNED_BYTES, _BYTES, of_narrow(_BYTES, isa), _BRAIN)}
    record = {**identity.describe(), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "system": platform.platform()}
    # A source tree that is not installed has no metadata.
    record |= {"blockconv": __version__} | {package: version(package) for package in ("numba", "llvmlite", "numpy")}
    fma = Rates(tuple(times.values())).each
    return MachineProfile(
        name=identity.slug(record["cpu"]),
        cpu=target.target_cpu(),
        isa=isa.name,
        vector_bytes=isa.vector_bytes,
        registers=isa.registers,
        halves=isa.halves,
        caches=_caches(),
        ways=target.first_level_ways(),
        line=target.cache_line(),
        tiles=tuple(times.values()),
        stores=_stores(shapes[1], times[shapes[1]]),
        packs=_steady_packs(fma),
        spread={
            "direct": positive("a spread", _spread, lambda found: [found]),
            "winograd": max(fma, _winograd_spread()),
        },
        depthwise=positive("depthwise", _depthwise, lambda found: [product for product, _ in found.values()]),
        transforms=_all_transforms(fma),
        copies=_bandwidths(_copy),
        reads=_bandwidths(_read),
        launch=positive("a launch", _launch, lambda found: [found]),
        record=record,
        dots={name_of(dot): _dot_times(types, dot) for dot, types in dots.items() if name_of(dot)} | _matrix_times(),
    )


# ---------------------------------------------------------------- tiles


def _multiply_adds(shape: TileShape) -> Work:
    """Work that a core's clock alone decides the time of: source, weights and destination fit its first-level cache."""
    problem = Conv2dProblem(1, DEPTHS[1] // 2, 1, TILES * shape.pixels, shape.vectors * _lanes(), 1, 1)
    return _convolution(problem, NHWC, NHWC, shape)


def _dot_times(types: Types, dot: Dot) -> tuple[TileTimes, ...]:
    """The times of tiles by a dot product, which store the type that they read."""
    shapes = [TileShape(1, pixels, vectors) for vectors, pixels in tiles_of(dot, target.isa())]
    reduced = Reduced(channels=dot.channels)
    return tuple(_whole_tile_times(shape, types, reduced) for shape in (*shapes, NARROW))


def _matrix_times() -> dict[str, tuple[TileTimes, ...]]:
    """The times of tiles that a matrix unit multiplies, if the machine has one; a step is all that the unit takes.

    While it multiplies, the vectors of the tile before are stored. Only tiles of one step show the time of the stores.
    """
    layout, times = f"NCHW{_lanes()}", {}
    shapes = TileShape(1, 2 * LINES, 2), TileShape(1, LINES, 1)
    for types in (_BYTES, _BRAIN) if target.isa().amx else ():
        channels, name = LINE_BYTES // types.src.itemsize, name_of(matrix_dot_for(types))
        steps, one = (Reduced(depths, channels, "conv_matrix") for depths in DEPTHS_OF_MATRICES)
        short = _tile_times(shapes[0], layout, types, one)
        times[name] = tuple(_tile_times(shape, layout, types, steps) for shape in shapes)
        times[f"{name}, one step"] = (short._replace(step=0.0, tile=short.tile + short.step),)
    return times


def _whole_tile_times(shape: TileShape, types: Types = _FLOATS, reduced: Reduced = _BY_ONE) -> TileTimes:
    """The times of a tile whose channels are stored whole. If its accumulators wait, its end may come out as zero."""
    name, layout = f"a tile of {shape.pixels}x{shape.vectors} vectors", f"NCHW{_lanes()}"
    far = reduced._replace(depths=FAR_DEPTHS, blocks=FAR_BLOCKS, tiles=FAR_TILES)
    near = positive(
        name,
        lambda: _tile_times(shape, layout, types, reduced),
        lambda at: (at.step, at.step if shape == NARROW else at.tile),
    )
    streamed = positive(name, lambda: _tile_times(shape, layout, types, far), lambda at: (at.step,))
    return near._replace(far=max(near.step, streamed.step))


def _tile_times(shape: TileShape, dst: str, types: Types = _FLOATS, reduced: Reduced = _BY_ONE) -> TileTimes:
    """The times of a tile whose destination has this layout."""
    lanes, runs = _lanes(), {}
    for depth in reduced.depths:
        for blocks in reduced.blocks:
            oc = blocks * shape.vectors * lanes
            problem = Conv2dProblem(1, depth * reduced.channels, 1, reduced.tiles * shape.pixels, oc, 1, 1)
            runs[depth, blocks] = _convolution(problem, NHWC, Layout(dst), shape, reduced.row, types)
    found = in_turns(runs)
    few, many = reduced.blocks
    more = reduced.tiles * (many - few)
    shallow, deep = ((found[depth, many] - found[depth, few]) / more for depth in reduced.depths)
    step = (deep - shallow) / (reduced.depths[1] - reduced.depths[0])
    return TileTimes(shape.pixels, shape.vectors, step, max(0.0, shallow - reduced.depths[0] * step))


def _lanes() -> int:
    """Floats of a vector."""
    return target.isa().vector_bytes // ITEMSIZE


def _blocking(row: str, problem: Conv2dProblem, src: Layout, dst: Layout) -> Any:
    """How a row blocks a problem."""
    return named("conv2d", row).prepare(problem, src, dst, _FLOATS).blocking


def _convolution(
    problem: Conv2dProblem,
    src: Layout,
    dst: Layout,
    shape: TileShape | None = None,
    row: str = "conv_direct",
    types: Types = _FLOATS,
) -> Work:
    given: dict[str, Any] = {"tile": shape} if shape else {}
    found = named("conv2d", row).prepare(problem, src, dst, types, **given)
    return runner(found, problem, src, dst, ITEMSIZE)


def _spread() -> float:
    """Seconds of a multiply-add of groups that share a vector: the slope over rows of a kernel."""
    lanes, of, rows, cols = _lanes(), _lanes() // 2, 8, 56
    lay, (few, many) = Layout(f"NCHW{lanes}"), (1, 3)
    kernels = {kh: Conv2dProblem(1, lanes, rows + kh - 1, cols + 2, lanes, kh, 3, g=lanes // of) for kh in (few, many)}
    found = in_turns({kh: _convolution(p, lay, lay, row="conv_grouped") for kh, p in kernels.items()})
    tile = _blocking("conv_grouped", kernels[few], lay, lay)
    outputs = -(-rows // tile.rows) * tile.rows * -(-cols // tile.pixels) * tile.pixels
    return (found[many] - found[few]) / float(outputs * of * 3 * (many - few))


def _stores(shape: TileShape, whole: TileTimes) -> dict[str, float]:
    """Seconds of a vector beyond one stored whole, by the channels stored together; see `MachineProfile.stores`."""
    lanes, vectors = _lanes(), shape.pixels * shape.vectors
    layouts = {"rows": "NHWC", "1": "NCHW", str(SCATTERED): f"NCHW{SCATTERED_BLOCK}"}
    layouts |= {str(part): f"NCHW{part}" for part in (2, 4, 8) if part < lanes}
    found = {name: _tile_times(shape, layout) for name, layout in layouts.items()}
    stored = {name: max(0.0, (at.tile - whole.tile) / vectors) for name, at in found.items()}
    return stored | {"partial": _partial()}


def _partial() -> float:
    """The extra seconds of a vector with three quarters of its channels, over one that is stored whole."""
    lanes, tiles, groups, runs = _lanes(), 32, 8, {}
    pixels = next(shape.pixels for shape in _shapes() if shape.vectors == 1)
    for oc in (lanes * 3 // 4, lanes):
        problem = Conv2dProblem(1, groups * 8, 1, tiles * pixels, groups * oc, 1, 1, g=groups)
        runs[oc] = _convolution(problem, NHWC, NHWC, TileShape(1, pixels, 1))
    part, whole = in_turns(runs).values()
    return max(0.0, (part - whole) / (groups * tiles * pixels))


def _winograd_spread() -> float:
    """The same of Winograd's products: the slope over the channels of a group, which change nothing else."""
    lanes, size, form = _lanes(), 24, FORMS[1]
    lay, row = Layout(f"NCHW{lanes}"), f"conv_winograd_f{form.m}"
    groups = {of: Conv2dProblem(1, 8 * lanes, size, size, 8 * lanes, 3, 3, ph=1, pw=1, g=8 * lanes // of)
              for of in (lanes // 2, lanes)}  # fmt: skip
    found = in_turns({of: _convolution(p, lay, lay, row=row) for of, p in groups.items()})
    at = _blocking(row, groups[lanes], lay, lay)
    products = form.positions * at.tile_blocks * at.block_tiles * 8 * (lanes - lanes // 2)
    return (found[lanes] - found[lanes // 2]) / float(products)


# Sources whose windows are packed: (layout, groups, channels of a group), by their names in `MachineProfile.packs`.
_PACKED = {
    "1": ("NCHW", 1, 16),
    "2": ("NHWC", 1, 2),
    "3": ("NHWC", 1, 3),
    "4": ("NCHW4", 1, 16),
    "8": ("NCHW8", 1, 16),
    "16": ("NCHW16", 1, 16),
    "2 apart": ("NHWC", 8, 2),
    "3 apart": ("NHWC", 8, 3),
    "4 apart": ("NHWC", 8, 4),
    "8 apart": ("NHWC", 4, 8),
    "16 apart": ("NHWC", 4, 16),
    "4 cut": ("NCHW4", 8, 3),
    "8 cut": ("NCHW8", 8, 6),
    "16 cut": ("NCHW16", 8, 12),
}
_WINDOWS = (8, 112), (64, 14), (4, 14)  # (rows, columns) of outputs: many pixels in few rows, in many, and few pixels


def _steady_packs(fma: float) -> dict[str, float]:
    """`_packs`, once a task and a row come out as more than the least that they may."""
    return positive("to pack a window", lambda: _packs(fma), lambda found: [found["task"] - fma, found["row"] - fma])


def _packs(fma: float) -> dict[str, float]:
    """Seconds to pack windows: see `MachineProfile.packs`. fma: seconds of a multiply-add.

    Two blocks of output channels read one window. So the time beside the tiles is twice the time with one block, less
    the time with two. It is a sum of times for a call, a task, a row of a window and each pixel, none less than a
    multiply-add. A task or a row comes out as so little only if a neighbour disturbed the machine.
    """
    pixels = next(shape.pixels for shape in _shapes() if shape.vectors == 2)
    shape, dst = TileShape(1, min(pixels, 14), 2), Layout(f"NCHW{_lanes()}")
    sums: list[list[float]] = []
    taken: list[float] = []
    for k, (layout, groups, channels) in enumerate(_PACKED.values()):
        src, runs = Layout(layout), {}
        for rows, cols in _WINDOWS:
            for blocks in (1, 2):
                oc = groups * blocks * shape.vectors * _lanes()
                problem = Conv2dProblem(1, groups * channels, rows + 1, cols, oc, 2, 1, g=groups)
                runs[rows, blocks] = _convolution(problem, src, dst, shape)
            parts = groups * -(-channels // _blocking("conv_direct", problem, src, dst).cb)
            lines = parts * (rows + 1)
            sums.append([1, groups, lines, *(lines * cols * (k == other) for other in range(len(_PACKED)))])
        found = in_turns(runs)
        taken += [2 * found[rows, 1] - found[rows, 2] for rows, _ in _WINDOWS]
    each = [max(fma, seconds) for seconds in rates(sums, taken)[1:]]
    return dict(zipped(("task", "row", *_PACKED), each))


def _depthwise() -> dict[str, list[float]]:
    """Seconds of a multiply-add and of a vector of outputs; see `MachineProfile.depthwise`. By two sizes of kernels."""
    found, size = {}, 28
    for name, (layout, stride) in {
        "channels": (f"NCHW{_lanes()}", 1),
        "pixels": ("NCHW", 1),
        "pixels apart": ("NCHW", 2),
    }.items():
        lay, channels, runs, counts = Layout(layout), 4 * _lanes(), {}, []
        for k in (3, 5):
            sizes = channels, stride * size, stride * size, channels, k, k
            problem = Conv2dProblem(1, *sizes, sh=stride, sw=stride, ph=k // 2, pw=k // 2, g=channels)
            runs[k] = _convolution(problem, lay, lay, row="conv_depthwise")
            at = _blocking("conv_depthwise", problem, lay, lay)
            products = at.flops(problem) / (2 * at.lanes)
            counts.append((products, products / k**2))
        found[name] = rates(counts, list(in_turns(runs).values()))
    return found


def _all_transforms(fma: float) -> dict[str, tuple[float, float]]:
    """Seconds of Winograd's transforms, as `MachineProfile.transforms` names them. fma: seconds of a multiply-add."""
    found, parts = {}, [width for width in (2, 4, 8) if width < _lanes()]
    for form in FORMS:
        name = f"{form.m}x{form.m} stride {form.stride}"
        layouts = {name: f"NCHW{_lanes()}", f"{name} in rows": "NHWC"}
        layouts |= {f"{name} of {width}": f"NCHW{width}" for width in parts} | {f"{name} of 1": "NCHW"}
        for kind, layout in layouts.items():
            found[kind] = positive(kind, functools.partial(_transforms, form, layout, fma), iter)
    return found


def _transforms(form: Form, layout: str, fma: float) -> tuple[float, float]:
    """Seconds of a vector's, of source and destination: of two problems, one with few channels there, one here.

    fma: seconds of a multiply-add, which the products are made of.
    """
    lanes, size = _lanes(), 24
    lay, row = Layout(layout), named("conv2d", f"conv_winograd_f{form.m}")
    runs, counts, products = {}, [], []
    for ic, oc in ((8 * lanes, lanes), (lanes, 8 * lanes)):
        ih, s = size * form.stride, form.stride
        problem = Conv2dProblem(1, ic, ih, ih, oc, 3, 3, sh=s, sw=s, ph=1, pw=1)
        found = row.prepare(problem, lay, lay, _FLOATS)
        runs[ic] = runner(found, problem, lay, lay, ITEMSIZE)
        counts.append(transforms(problem, lay, found.blocking))
        products.append(multiply_adds(host(), problem, found.blocking) * fma)
    taken = np.array(list(in_turns(runs).values())) - np.array(products)
    source, destination = np.linalg.solve(np.array(counts), taken)
    return max(0.0, float(source)), max(0.0, float(destination))


# ---------------------------------------------------------------- memory and launches


def _caches() -> dict[str, int]:
    return {"L1": target.first_level_cache(), "L2": target.second_level_cache(), "L3": target.last_level_cache()}


def _bandwidths(run: Callable[[int], Work]) -> dict[str, float]:
    """Bytes a second of what moves so many, that stay within three quarters of a cache, and that do not stay in any.

    No more from a cache than from the one before it, which it passes: what was measured so differs by noise.
    """
    levels = _caches()
    sizes = {
        "L2": levels["L2"] * 3 // 4,
        "L3": max(min(levels["L3"], LAST) // 4, 2 * levels["L2"]),
        "memory": 4 * levels["L3"],
    }
    found = in_turns({name: run(size) for name, size in sizes.items()})
    passed = itertools.accumulate((size / found[name] for name, size in sizes.items()), min)
    return dict(zipped(sizes, passed))


def _copy(size: int) -> Work:
    """A copy that reads and writes so many bytes together."""
    elements = size // 2 // ITEMSIZE
    return program_runner(copy_of(elements).launches(), [elements * ITEMSIZE] * 2)


def _read(size: int) -> Work:
    """The greatest of each of some planes, of so many bytes together."""
    planes, rows = 16, 64
    columns = size // (planes * rows * ITEMSIZE)
    problem = Pool2dProblem("max", 1, planes, rows, columns, rows, columns)
    found = named("pool2d", "pool_windows").prepare(problem, NCHW, NCHW, _FLOATS)
    return runner(found, problem, NCHW, NCHW, ITEMSIZE)


def _launch() -> float:
    """Seconds of an op with next to nothing to do, in a program of many."""
    few, many = 1, 33
    (op,) = copy_of(16).launches()
    found = in_turns({count: program_runner([op] * count, (64, 64)) for count in (few, many)})
    return (found[many] - found[few]) / (many - few)
