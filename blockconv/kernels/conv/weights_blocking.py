"""How the gradient of a convolution's weights is cut: the tile, the channels of a task, chunks of pixels, splits."""

from collections.abc import Callable

from blockconv.core.checks import Pair
from blockconv.core.python import bounded_cache
from blockconv.core.record import frozen
from blockconv.kernels.common.dot import MULTIPLY_ADD, Dot, dot_for, name_of, tiles_of
from blockconv.kernels.common.request import Reason, Request, are_far

WORKSPACE = 64 << 20  # bytes that the sums of all splits take at the most
TASKS = 16  # that there are, where there is work enough: splits do not depend on the threads
SPLIT_FLOPS = 8e6  # of a split, at the least
CHUNK_STEPS = 512  # pixels of a chunk, at the most
LINES = 768  # sums of a task, by vectors of a block of output channels
PANEL = 64 << 10  # bytes of a packed panel, likewise
MOST_WINDOW = 1 << 26  # bytes


@frozen
class WeightsBlocking:
    """A tile: `lines` sums by `vectors` vectors of `lanes` output channels; and how a problem is made of them.

    together: groups that share a vector of output channels.
    packed_ic, packed_oc: channels of a packed pixel of the input, of the gradient.
    wide: vectors of output channels whose windows are packed side by side: so much of a pixel is contiguous.
    taps: columns of taps of a tile that takes neighbouring pixels together; 0 where it takes one.
    pixels: that it takes.
    tap_rows: rows of taps of a tile.
    cb: input channels of a task, of each group.
    row_lines: that a row of taps has, or a single tap where `tap_cols` taps of a row are apart.
    images, rows, cols: of the output, in a chunk.
    groups: sets of groups that are packed together.
    icbs, ocbs: blocks of input channels, and of output channels, of such a set.
    line, block_bytes: bytes of the sums of a line, and of a block of output channels.
    task_ocbs, oc_tasks: blocks of output channels of a task, at most, and how many tasks share them.
    splits: shares of the chunks.
    row_reach, col_reach, row_unit, col_unit, row_step, col_step: as in `WeightsArguments`.
    dot: the multiply-accumulate; it takes neighbouring pixels of a row of the output at once.
    """

    lines: int
    vectors: int
    lanes: int
    cb: int
    row_lines: int
    tap_cols: int
    images: int
    rows: int
    cols: int
    groups: int
    icbs: int
    ocbs: int
    line: int
    block_bytes: int
    task_ocbs: int
    oc_tasks: int
    splits: int
    row_reach: int
    col_reach: int
    row_unit: int
    col_unit: int
    row_step: int
    col_step: int
    together: int = 1
    wide: int = 1
    packed_ic: int = 1
    packed_oc: int = 1
    tap_rows: int = 1
    dot: Dot = MULTIPLY_ADD
    taps: int = 0
    pixels: int = 1

    @property
    def packed_groups(self) -> int:
        """Groups that are packed together."""
        return self.together * self.wide

    @property
    def tasks(self) -> int:
        return self.splits * self.groups * self.icbs * self.oc_tasks

    @property
    def task_sums(self) -> int:
        """Bytes of the sums of a task."""
        return self.task_ocbs * (self.block_bytes + self.line)

    @property
    def width(self) -> int:
        return self.vectors * self.lanes

    @property
    def tiles(self) -> int:
        return -(-self.row_lines // self.lines)

    @property
    def steps(self) -> int:
        """Steps of the reduction of a chunk."""
        return self.images * self.rows * -(-self.cols // self.dot.channels)

    def columns(self, cols: int) -> int:
        """Columns of a window for so many of the output."""
        return (cols - 1) * self.col_unit + self.col_reach

    @property
    def window(self) -> Pair:
        """Rows and columns of a chunk's window of an image, with the columns of single pixels."""
        singles = self.col_reach if self.dot.channels > 1 else 0
        return (self.rows - 1) * self.row_unit + self.row_reach, self.columns(self.cols) + singles

    def chunks(self, problem: object) -> tuple[int, int, int]:
        """How many chunks there are along the images, an image's rows, and its columns."""
        p = problem
        sizes = ((p.n, self.images), (p.oh, self.rows), (p.ow, self.cols))  # type: ignore[attr-defined]
        images, rows, cols = (-(-size // part) for size, part in sizes)
        return images, rows, cols


@bounded_cache
def weights_blocking(request: Request) -> WeightsBlocking | Reason:
    """The blocking of a problem on a machine, or why there is none. Nothing of it depends on the threads."""
    p, types, m = request.problem, request.types, request.machine
    itemsize, ic, oc = types.acc.itemsize, p.group_ic, p.group_oc
    lanes = request.lanes
    together = _groups_together(request, lanes)
    most = max(1, min(ic, LINES // (p.kh * p.kw)))
    cb = -(-ic // -(-ic // most))
    # A row of one pixel has no pairs.
    dot = dot_for(types, m.isa) if together == 1 and p.ow > 1 else MULTIPLY_ADD
    taps = _taps(request, together, lanes) if dot == MULTIPLY_ADD else 0
    by_column = taps == p.kw or (taps == 0 and (p.kw == 1 or p.dw == 1))
    row_lines, tap_cols = (p.kw * cb, 1) if by_column else (cb, p.kw)
    lines, vectors = _columns(request, cb, taps) if taps else _tile(request, dot, row_lines, oc)
    width = vectors * lanes
    wide = _wide(request, together, lanes) if taps and cb == ic and oc * together == lanes else 1
    while True:
        chunk = _chunk(request, cb * together * wide, width * wide, itemsize)
        if chunk is not None or cb == 1 or together * wide > 1:
            break
        cb = -(-cb // 2)
        row_lines = p.kw * cb if by_column else cb
        lines = _columns(request, cb, taps)[0] if taps else min(lines, row_lines)
    if chunk is None:
        return "needs more memory for a window, with the pixels between its taps, than fits"
    images, rows, cols = chunk
    ocbs = -(-oc * together * wide // width)
    block = p.kh * tap_cols * -(-row_lines // lines) * lines * width * itemsize
    chunks = -(-p.n // images) * -(-p.oh // rows) * -(-p.ow // cols)
    groups, icbs = -(-p.g // (together * wide)), -(-ic // cb)
    oc_tasks, others = -(-ocbs // max(1, min(ocbs, m.second_level_cache // 4 // block))), groups * icbs
    if chunks == 1 and 2 * oc_tasks * others < TASKS:
        oc_tasks = _balanced(oc_tasks, range(oc_tasks, oc_tasks + 2), ocbs, others)
    task_ocbs, tasks = -(-ocbs // oc_tasks), oc_tasks * others
    return WeightsBlocking(
        lines=lines,
        vectors=vectors,
        lanes=lanes,
        cb=cb,
        row_lines=row_lines,
        tap_cols=tap_cols,
        images=images,
        rows=rows,
        cols=cols,
        groups=groups,
        icbs=icbs,
        ocbs=ocbs,
        line=width * itemsize,
        block_bytes=block,
        task_ocbs=task_ocbs,
        oc_tasks=oc_tasks,
        splits=_splits(request, chunks, tasks, task_ocbs * (block + width * itemsize)),
        together=together,
        dot=dot,
        **_packed(request, cb, width, together, wide),
        taps=taps,
        **_rows_and_pixels(request, lines, taps > 0 and tap_cols == 1 and lines == row_lines, cols),
        **_axis("row", p.kh, p.sh, p.dh, rows),
        **_axis("col", p.kw, p.sw, p.dw, cols),
    )


def _splits(request: Request, chunks: int, tasks: int, task_sums: int) -> int:
    """Shares of the chunks, for so many tasks of all others. task_sums: bytes of the sums of a task."""
    p, cache = request.problem, request.machine.second_level_cache
    wanted = min(-(-TASKS // tasks), max(1, int(p.flops / SPLIT_FLOPS)), chunks)
    if 16 * tasks * task_sums <= cache:
        # Sums are few: so many shares that what one reads stays in the cache for its next task.
        read = request.itemsize * p.n * (p.ic * p.ih * p.iw + p.oc * p.oh * p.ow)
        wanted = max(wanted, min(chunks, 2 * read // cache))
    most, near = max(1, min(chunks, WORKSPACE // (tasks * task_sums))), max(1, wanted // 3)
    return min(most, _balanced(wanted, range(max(1, wanted - near), min(most, wanted + near) + 1), chunks, tasks))


def _balanced(wanted: int, counts: range, units: int, others: int) -> int:
    """The count of shares of so many units that leaves two and four threads least to wait for; `wanted` if it is equal.

    others: tasks for each share. It is the same for any number of threads.
    """

    def busiest(count: int) -> float:
        return sum(-(-count * others // threads) * threads for threads in (2, 4)) * -(-units // count)

    return min(counts, key=lambda count: (busiest(count), abs(count - wanted)), default=wanted)


WIDE = 4  # vectors of output channels that are packed together
WIDEST = 4  # vectors that the input channels of groups that share one may fill


def _groups_together(request: Request, lanes: int) -> int:
    """Groups that share a vector of output channels, where each alone would fill half a vector or less."""
    p = request.problem
    ic, oc = p.group_ic, p.group_oc
    count = lanes // oc
    fits = 2 * oc <= lanes and ic * count <= WIDEST * lanes and p.kh * p.kw * ic <= LINES
    return count if p.g > 1 and fits else 1


SPARE = 3  # registers of a tile of columns that hold neither sums nor the gradient


def _sums(request: Request) -> int:
    """The most sums of a tile of columns: four pixels of the gradient have registers too."""
    return request.machine.isa.tile_registers - SPARE - 4


def _taps(request: Request, together: int, lanes: int) -> int:
    """Columns of taps of a tile of columns; 0 where it has no use, or blocks of several vectors are better."""
    p = request.problem
    if together == 1 and (p.kw == 1 or p.group_oc > lanes):
        return 0
    return p.kw if p.kw <= _sums(request) else 1


def _wide(request: Request, together: int, lanes: int) -> int:
    """Vectors that are packed together: where pixels are far apart, more of each is read at once."""
    of = request.source, request.destination
    contiguous = max(at.length if at.channel == request.itemsize else 1 for at in of)
    return max(1, min(WIDE, contiguous // lanes, -(-request.problem.g // together)))


def _rows_and_pixels(request: Request, lines: int, is_row: bool, cols: int) -> dict[str, int]:
    """How many rows of taps, and neighbouring pixels, a tile of columns takes. is_row: its lines are a row of taps."""
    kh = request.problem.kh
    rows = kh if is_row and kh * lines <= _sums(request) else 1
    most = min(request.machine.isa.tile_registers - SPARE - rows * lines, cols)
    return {"tap_rows": rows, "pixels": next(count for count in (4, 2, 1) if count <= max(1, most))}


def _packed(request: Request, cb: int, width: int, together: int, wide: int) -> dict[str, int]:
    """The words of packed pixels. Where one holds all channels there are, they are copied as they are."""
    p = request.problem
    packed_oc = min(width * wide, p.oc) if wide > 1 else width
    return {"wide": wide, "packed_ic": cb * min(together * wide, p.g), "packed_oc": packed_oc}


def _columns(request: Request, cb: int, taps: int) -> Pair:
    """(lines, vectors) of a tile of columns: some channels at all taps of a row, or at one."""
    tiles = -(-cb // (_sums(request) // taps))
    return -(-cb // tiles) * taps, 1


def _tile(request: Request, dot: Dot, row_lines: int, oc: int) -> Pair:
    """(lines, vectors) of the tile of least predicted time."""
    m = request.machine
    rates, lanes = m.profile.by(name_of(dot)), request.lanes
    best: tuple[float, int, int] | None = None
    for vectors, most in tiles_of(dot, m.isa):
        tiles = -(-row_lines // most)
        lines = -(-row_lines // tiles)
        step = rates.step(lines, vectors, is_far=are_far(m, CHUNK_STEPS, vectors))
        seconds = float(f"{-(-oc // (vectors * lanes)) * tiles * step:.6e}")
        if best is None or (seconds, -lines * vectors) < best[:2]:
            best = seconds, -lines * vectors, vectors
    assert best is not None
    return -best[1] // best[2], best[2]


def _axis(name: str, taps: int, stride: int, dilation: int, size: int) -> dict[str, int]:
    """The words step, unit and reach of an axis. step: from a packed pixel of the input to the next. unit, reach:
    packed pixels from an output pixel to the next, and that one needs. size: output pixels of a chunk.
    """
    step, unit, reach = 1, stride, (taps - 1) * dilation + 1
    if taps == 1:
        step, unit, reach = stride, 1, 1
    elif size == 1:
        step, unit, reach = dilation, 1, taps
    return {f"{name}_step": step, f"{name}_unit": unit, f"{name}_reach": reach}


def _chunk(request: Request, cb: int, width: int, itemsize: int) -> tuple[int, int, int] | None:
    """(images, rows, columns) of a chunk; at most one of these is cut. None if a window is too large."""
    p, room = request.problem, request.machine.second_level_cache // 4
    most = max(1, min(CHUNK_STEPS, PANEL // (width * itemsize)))

    def fits(images: int, rows: int, cols: int, room: int) -> bool:
        _, row_unit, row_reach = _axis("row", p.kh, p.sh, p.dh, rows).values()
        _, col_unit, col_reach = _axis("col", p.kw, p.sw, p.dw, cols).values()
        window = ((rows - 1) * row_unit + row_reach) * ((cols - 1) * col_unit + col_reach)
        return images * rows * cols <= most and images * window * cb * itemsize <= room

    def largest(size: int, fit: Callable[[int], bool]) -> int:
        """The largest of even shares of a size that fits."""
        parts = next((k for k in range(1, size + 1) if fit(-(-size // k))), size)
        # Two threads get the same number of parts, if it is even.
        parts += 1 if 1 < parts < size and parts % 2 and size % (parts + 1) == 0 else 0
        return -(-size // parts)

    cols = largest(p.ow, lambda cols: fits(1, 1, cols, room))
    rows = largest(p.oh, lambda rows: fits(1, rows, cols, room)) if cols == p.ow else 1
    images = largest(max(1, p.n), lambda images: fits(images, rows, cols, room)) if rows == p.oh else 1
    return (images, rows, cols) if fits(1, 1, cols, MOST_WINDOW) else None
