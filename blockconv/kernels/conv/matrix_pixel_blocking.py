"""The blocking of convolution by matrices whose columns are pixels: the channels of a step, the tile, the panels.

For planes, whose neighbouring pixels are packed as neighbours, all of a task's at once: each plane's in one go.
"""

from dataclasses import replace

from blockconv.core.checks import Pair
from blockconv.core.python import bounded_cache
from blockconv.jit.records import fill
from blockconv.kernels.common.dot import Dot, matrix_dot_for, packed_as_one
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.conv import matrix_blocking
from blockconv.kernels.conv.blocking import ConvBlocking, ConvTile, TileShape, divided
from blockconv.kernels.conv.matrix_blocking import SHAPES, UNITS
from blockconv.kernels.conv.matrix_tile import COLUMNS, LINES
from blockconv.kernels.conv.space import Space, space


def why_not(request: Request) -> Reason | None:
    """Why no columns of matrices can be made of the pixels of a row."""
    at, types = space(request), request.types
    sides = (request.src, request.source, types.src), (request.dst, request.destination, types.dst)
    for layout, strides, type in sides:
        if strides.length != 1 or strides.along(at.axes[2]) != type.itemsize:
            return f"needs contiguous neighbours along {at.axes[2]}, unlike {layout}"
    if at.kw > 1 and at.sw > 1:
        return "needs stride 1 along the row, so that the pixels of each tap are contiguous"
    return None


@bounded_cache
def blocking(request: Request) -> ConvBlocking:
    """The blocking of a problem. A tile has all columns of its task; blocks that are reduced together have one size."""
    p, types = request.problem, request.types
    at, dot = space(request), matrix_dot_for(types)
    unit = packed_as_one(types, dot)
    units = -(-p.group_ic // unit)
    steps = -(-units // UNITS)
    each = -(-units // steps)
    vectors, blocks = _registers(request, at, unit * each, dot)
    inner = fill(
        ConvTile,
        TileShape(1, min(at.ow, blocks * COLUMNS), vectors * LINES),
        lanes=1,
        cb=unit,
        step=unit * each,
        store_width=1,
        in_place=False,
        dot=dot,
        interleaved=True,
    )
    found = divided(request, inner)
    rows, cols = at.window(found.task_rows, found.task_cols)
    cols = -(-cols // COLUMNS) * COLUMNS  # whole cache lines, and blocks
    windows = steps * each * unit * types.src.itemsize * at.depth * rows * cols
    found = replace(
        found,
        pixels=found.task_cols,
        panel=found.task_cols,
        window_rows=rows,
        window_cols=cols,
        pixel_lanes=COLUMNS,
        blocks=min(blocks, -(-found.task_cols // COLUMNS)),
    )
    return replace(found, scratch=windows + 256 + 3 * found.lines * found.width * types.acc.itemsize)


def _registers(request: Request, at: Space, step: int, dot: Dot) -> Pair:
    """(blocks of output channels, of pixels) that are reduced together, of least predicted time by the profile."""
    found, oc = [], request.problem.group_oc
    for vectors, most in SHAPES:
        blocks = min(most, -(-at.ow // COLUMNS))
        seconds = -(-oc // (vectors * LINES)) * _seconds(request, at.ow, vectors, blocks, step, dot)
        found.append((float(f"{seconds:.6e}"), abs(vectors - 2), -blocks, (vectors, blocks)))
    return min(found)[-1]


def tile_seconds(request: Request, found: ConvBlocking) -> float:
    """Predicted seconds of a tile."""
    return _seconds(request, found.pixels, found.width // LINES, found.blocks, found.step, found.dot)


def _seconds(request: Request, pixels: int, vectors: int, blocks: int, step: int, dot: Dot) -> float:
    """Seconds of a row of so many pixels, as for tiles whose lines are pixels, with as many blocks."""
    shape = TileShape(1, blocks * COLUMNS, vectors)
    count = -(-pixels // (blocks * COLUMNS))
    return count * matrix_blocking.shape_seconds(request, shape, step, 1, dot)
