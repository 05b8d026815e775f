"""Plans and convolutions on Dask arrays: lazily, over tiles, on threads, processes or machines.

    import blockconv.dask

Needs Dask (pip install 'dask[array]'). A task is one tile. Tasks are pure, so Dask may repeat or move them. A plan
goes to each worker process once, and is bound there. The processes of a machine share compiled kernels on its disk.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from blockconv.api.annotations import ActivationLike, ArrayLike, Padding, PoolPadding, Sizes
from blockconv.api.pooling import PROBLEMS
from blockconv.core.errors import ArgumentError, needing
from blockconv.core.interop import as_numpy
from blockconv.core.python import zipped
from blockconv.core.types import Array
from blockconv.network.builder import NetworkBuilder
from blockconv.network.ops import Pool2d
from blockconv.network.ops.rule import PIXELS
from blockconv.network.plan import Plan, compile
from blockconv.network.tiling import USUAL, Tiling, tiling

if TYPE_CHECKING:
    import dask.array as da

__all__ = ["avg_pool2d", "conv2d", "map_plan", "max_pool2d"]

TileSize = int | tuple[int, int] | None


def map_plan(plan: Plan, array: da.Array, tile: TileSize = None) -> Any:
    """`plan.tiled` on a Dask array: a lazy array of the whole images' results, or {output: array} for several outputs.

    plan: a plan of a network with one input (N, C, H, W).
    array: a Dask array (N, C, H, W) of the plan's dtype, with any chunks. Its chunks of images go through the plan
        together.
    tile: pixels of a tile, an int or (height, width), as in `Plan.tiling`. Default: about the size of the array's
        chunks, from 512 to 1024, or more where cuts cost much.

    A task reads its tile with the pixels around it that the network needs, so chunks of about the size of a tile suit.
    Results depend on the tile, and not on workers, threads or the order of tasks. Each task uses the plan's threads,
    but no more than its process may use: Dask's nanny sets OMP_NUM_THREADS=1.
    Raises the errors of `Plan.tiling`, and ArgumentError for a bad argument.

    >>> import dask.array as da, numpy as np, blockconv as bc, blockconv.dask
    >>> b = bc.NetworkBuilder()
    >>> b.output(b.conv2d(b.input("x", (1, 3, 64, 64)), np.ones((2, 3, 3, 3), np.float32), padding=1))
    >>> plan = bc.compile(b.build(), threads=1)
    >>> y = blockconv.dask.map_plan(plan, da.ones((1, 3, 150, 200), dtype=np.float32), tile=64)
    >>> y.shape, float(y[0, 0, 75, 0].compute())
    ((1, 2, 150, 200), 18.0)
    """
    if not isinstance(plan, Plan):
        raise ArgumentError("map_plan", "plan", plan, "has to be a Plan", "give what blockconv.compile returned")
    dask, da = _checked("map_plan", array)
    from dask.highlevelgraph import HighLevelGraph

    wanted = plan.network.inputs[0].type.dtype
    if array.dtype != wanted:
        rule, remedy = f"has to have dtype {wanted}, not {array.dtype}", f"give array.astype('{wanted}')"
        raise ArgumentError("map_plan", "array", array, rule, remedy)
    rows, columns = (min(max(USUAL, *sizes), LARGEST) for sizes in array.chunks[2:])
    how = tiling(plan.network, array.shape, tile, (rows, columns))  # and not the plan's: workers bind it, where it runs
    token = uuid.uuid4().hex
    # One key of the graph, so that a worker process gets and binds the plan once.
    held = dask.delayed(plan, name=f"plan-{token}", traverse=False)
    tiles = f"tile-{token}"
    graph = HighLevelGraph.from_collections(tiles, _tasks(tiles, how, array, held.key), [array, held])
    across = len({piece.start[1] for piece in how.pieces})
    lines = how.pieces[::across], how.pieces[:across]
    places = list(itertools.product(range(array.numblocks[0]), (0,), *(range(len(line)) for line in lines)))
    found = {}
    for k, name in enumerate(how.outputs):
        parts, layers, needs = tiles, dict(graph.layers), dict(graph.dependencies)
        if len(how.outputs) > 1:
            parts = f"output-{k}-{token}"
            layers[parts] = {(parts, *place): (operator.getitem, (tiles, *place), k) for place in places}
            needs[parts] = {tiles}
        ends = ([piece.gives[name][axis] for piece in line] for axis, line in enumerate(lines))
        sizes = (tuple(end - begin for begin, end in line) for line in ends)
        chunks = array.chunks[0], (how.outputs[name][1],), *sizes
        found[name] = da.Array(HighLevelGraph(layers, needs), parts, chunks, plan.network.tensors[name].type.dtype)
    return found if len(found) > 1 else next(iter(found.values()))


def conv2d(
    array: da.Array,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    activation: ActivationLike = None,
    tile: TileSize = None,
) -> da.Array:
    """`blockconv.conv2d` on a Dask array (N, C, H, W). `tile` is as in `map_plan`, the other arguments as there."""
    b, x = _builder("conv2d", array)
    b.output(b.conv2d(x, weight, bias, stride, padding, dilation, groups, activation=activation))
    return map_plan(compile(b.build()), array, tile)


def max_pool2d(
    array: da.Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    *,
    tile: TileSize = None,
) -> da.Array:
    """`blockconv.max_pool2d` on a Dask array (N, C, H, W); `tile` as in `map_plan`."""
    return _pooled("max_pool2d", array, tile, kernel_size, stride, padding, dilation, ceil_mode)


def avg_pool2d(
    array: da.Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    tile: TileSize = None,
) -> da.Array:
    """`blockconv.avg_pool2d` on a Dask array (N, C, H, W); `tile` as in `map_plan`."""
    windows = kernel_size, stride, padding, ceil_mode
    return _pooled("avg_pool2d", array, tile, *windows, count_include_pad, divisor_override)


def _pooled(op: str, array: da.Array, tile: TileSize, *parameters: Any) -> da.Array:
    """A pool of the parameters that the function on arrays takes, and checks."""
    b, x = _builder(op, array)
    p: Any = PROBLEMS[op]((1, *array.shape[1:]), *parameters)
    sizes = (p.kh, p.kw), (p.sh, p.sw), ((p.ph, p.ph_r), (p.pw, p.pw_r)), (p.dh, p.dw)
    b.output(b.add(Pool2d(p.kind, *sizes, p.ceil_mode, p.divisor), x))
    return map_plan(compile(b.build()), array, tile)


FROM_ARRAY = "give dask.array.from_array(array), which also reads arrays of Zarr"
LARGEST = 1024  # pixels of a tile along an axis, unless a size is requested
NOMINAL = 512  # pixels of the images that the network of one op is planned for, at most


def _builder(op: str, array: Any) -> tuple[NetworkBuilder, str]:
    """A network whose input is a tile of the array."""
    _checked(f"blockconv.dask.{op}", array)
    n, c, h, w = array.shape
    b = NetworkBuilder(op)
    return b, b.input("input", (array.chunks[0][0] if n else 1, c, min(h, NOMINAL), min(w, NOMINAL)), array.dtype)


def _checked(op: str, array: Any) -> tuple[Any, Any]:
    """Dask and its arrays. Raises ArgumentError for what is no Dask array (N, C, H, W)."""
    with needing("blockconv.dask", "dask", "'dask[array]'"):
        import dask
        import dask.array as da
    is_dask = isinstance(array, da.Array)
    if not is_dask or array.ndim != 4 or math.isnan(sum(array.shape[1:])):
        order = "(C, H, W) needs array[None], (H, W, C) array[None].transpose(0, 3, 1, 2)"
        remedy = f"{order}; array.compute_chunk_sizes() finds sizes that are unknown" if is_dask else FROM_ARRAY
        raise ArgumentError(op, "array", array, "has to be a Dask array (N, C, H, W)", remedy)
    as_numpy(array._meta, op, "array")  # refuses chunks with masks, or of other libraries
    return dask, da


def _tasks(name: str, how: Tiling, array: da.Array, plan: str) -> dict[Any, Any]:
    """The graph of all tiles of all chunks of images: by (name, images, 0, row, column), a task that runs the plan.

    Parts of chunks are tasks of their own, which run where the chunks are.
    """
    graph: dict[Any, Any] = {}
    across = len({piece.start[1] for piece in how.pieces})
    within = [
        {begin: _within(array.chunks[axis], begin, begin + how.tile[k]) for begin in {p.start[k] for p in how.pieces}}
        for k, axis in enumerate(PIXELS)
    ]
    whole = slice(None), slice(None)
    for (at, piece), g in itertools.product(enumerate(how.pieces), range(array.numblocks[0])):
        r, c = divmod(at, across)

        def part(channels: int, y: int, x: int, of: tuple[slice, slice], place: tuple[int, ...] = (g, r, c)) -> Any:
            key = f"part-{name}", *place, channels, y, x
            graph[key] = operator.getitem, (array.name, place[0], channels, y, x), (*whole, *of)
            return key

        rows, columns = within[0][piece.start[0]], within[1][piece.start[1]]
        blocks = [
            [[part(k, y, x, (of_y, of_x)) for x, of_x in columns] for y, of_y in rows]
            for k in range(array.numblocks[1])
        ]
        run = functools.partial(_run, [how.local(piece, output) for output in how.outputs])
        graph[name, g, 0, r, c] = run, plan, blocks
    return graph


def _within(sizes: tuple[int, ...], begin: int, end: int) -> list[tuple[int, slice]]:
    """The chunks along an axis that have pixels from begin to end, and which pixels of them."""
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    found = ((k, max(begin - at, 0), min(end - at, size)) for k, (at, size) in enumerate(zipped(starts, sizes)))
    return [(k, slice(first, after)) for k, first, after in found if first < after]


def _run(parts: list[tuple[slice, ...]], plan: Plan, blocks: list[list[list[Array]]]) -> Any:
    """A task: what a tile of some images gives of each output, or of the only one.

    parts: of the tile's outputs. blocks: of the tile, by channels, rows, columns.
    """
    values = plan.by_name(np.ascontiguousarray(np.block(blocks))).values()
    found = tuple(np.ascontiguousarray(value[:, :, rows, columns]) for value, (rows, columns) in zipped(values, parts))
    return found if len(found) > 1 else found[0]
