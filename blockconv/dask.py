"""Plans and convolutions on Dask arrays: lazily, over tiles, on threads, processes or machines.

    import blockconv.dask

Needs Dask: pip install 'blockconv[dask]'. A task is one tile. Tasks are pure, so Dask may repeat or move them. A plan
goes to each worker process once, and is bound there. The processes of a machine share compiled kernels on its disk.
"""

from __future__ import annotations

import itertools
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import ActivationLike, ArrayLike, Padding, Sizes
from blockconv.core.errors import ArgumentError, UnsupportedError
from blockconv.network.builder import NetworkBuilder
from blockconv.network.plan import Plan, compile
from blockconv.network.tiling import Piece, Tiling, tiling

if TYPE_CHECKING:
    import dask.array as da

__all__ = ["avg_pool2d", "conv2d", "map_plan", "max_pool2d"]

Array = npt.NDArray[Any]
TileSize = int | tuple[int, int] | None


def map_plan(plan: Plan, array: da.Array, tile: TileSize = None) -> Any:
    """`plan.tiled` on a Dask array: a lazy array of the whole images' results, or {output: array} for several outputs.

    plan: a plan of a network with one input (N, C, H, W).
    array: a Dask array (N, C, H, W) of the plan's dtype, with any chunks. Its chunks of images go through the plan
        together.
    tile: pixels of a tile, an int or (height, width), as in `Plan.tiling`. Default: about 512, or more where cuts cost
        much.

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
    dask, da = _checked("map_plan", array)
    wanted = plan.network.inputs[0].type.dtype
    if array.dtype != wanted:
        raise ArgumentError("map_plan", "array", str(array.dtype), f"has to have dtype {wanted}")
    how = tiling(plan.network, array.shape, tile)  # and not the plan's: workers bind it, where it runs
    # One key of the graph, so that a worker process gets and binds the plan once.
    held = dask.delayed(plan, name=f"plan-{uuid.uuid4().hex}", traverse=False)
    ends = np.cumsum((0, *array.chunks[0])).tolist()
    images = [slice(*pair) for pair in itertools.pairwise(ends)]
    run = dask.delayed(_run, pure=False, nout=len(how.outputs))
    found: dict[str, list[Any]] = {name: [] for name in how.outputs}
    for some in images:
        for piece in how.pieces:
            rows, columns = how.source(piece)
            source = array[some, :, rows, columns].rechunk(-1).to_delayed().item()
            made = run(held, source, [how.local(piece, name) for name in how.outputs])
            for name, value in zip(how.outputs, made, strict=True):
                dtype = plan.network.tensors[name].type.dtype
                found[name].append(da.from_delayed(value, _shape(how, piece, name, some), dtype))
    arrays = {name: _assembled(da, parts, len(images), how) for name, parts in found.items()}
    return arrays if len(arrays) > 1 else next(iter(arrays.values()))


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
    """`blockconv.conv2d` on a Dask array: the arguments are the same, and `tile` as in `map_plan`."""
    b, x = _builder("conv2d", array)
    b.output(b.conv2d(x, weight, bias, stride, padding, dilation, groups, activation=activation))
    return map_plan(compile(b.build()), array, tile)


def max_pool2d(
    array: da.Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    *,
    tile: TileSize = None,
) -> da.Array:
    """`blockconv.max_pool2d` on a Dask array; `tile` as in `map_plan`."""
    b, x = _builder("max_pool2d", array)
    b.output(b.max_pool2d(x, kernel_size, stride, padding, ceil_mode))
    return map_plan(compile(b.build()), array, tile)


def avg_pool2d(
    array: da.Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    *,
    tile: TileSize = None,
) -> da.Array:
    """`blockconv.avg_pool2d` on a Dask array; `tile` as in `map_plan`."""
    b, x = _builder("avg_pool2d", array)
    b.output(b.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad))
    return map_plan(compile(b.build()), array, tile)


NOMINAL = 512  # pixels of the images that the network of one op is planned for, at most


def _builder(op: str, array: Any) -> tuple[NetworkBuilder, str]:
    """A network whose input is a tile of the array."""
    _checked(f"blockconv.dask.{op}", array)
    n, c, h, w = array.shape
    b = NetworkBuilder(op)
    return b, b.input("input", (array.chunks[0][0] if n else 1, c, min(h, NOMINAL), min(w, NOMINAL)), array.dtype)


def _checked(op: str, array: Any) -> tuple[Any, Any]:
    """Dask and its arrays. Raises ArgumentError for what is no Dask array (N, C, H, W)."""
    try:
        import dask
        import dask.array as da
    except ModuleNotFoundError:
        raise UnsupportedError("blockconv.dask: needs Dask: pip install 'blockconv[dask]'") from None
    if not isinstance(array, da.Array) or array.ndim != 4:
        raise ArgumentError(op, "array", array, "has to be a Dask array (N, C, H, W)")
    return dask, da


def _run(plan: Plan, source: Array, parts: list[tuple[slice, slice]]) -> tuple[Array, ...]:
    """A task: what a tile of some images gives of each output."""
    values = plan.by_name(np.ascontiguousarray(source)).values()
    return tuple(
        np.ascontiguousarray(value[:, :, rows, columns]) for value, (rows, columns) in zip(values, parts, strict=True)
    )


def _shape(how: Tiling, piece: Piece, name: str, some: slice) -> tuple[int, ...]:
    (top, bottom), (left, right) = piece.gives[name]
    return some.stop - some.start, how.outputs[name][1], bottom - top, right - left


def _assembled(da: Any, parts: list[Any], groups: int, how: Tiling) -> Any:
    """The array of all parts, in the order of images, rows and columns."""
    columns = len({piece.start[1] for piece in how.pieces})
    rows = len(how.pieces) // columns
    grid = [
        [[[parts[(g * rows + r) * columns + c] for c in range(columns)] for r in range(rows)]] for g in range(groups)
    ]
    return da.block(grid)
