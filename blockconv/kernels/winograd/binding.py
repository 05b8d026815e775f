"""Winograd's op: the argument block, tables and kernels of a problem that is cut."""

import numpy as np

from blockconv import jit
from blockconv.core.activation import ActivationKind
from blockconv.core.problem import Conv2dProblem
from blockconv.core.target import Isa
from blockconv.core.types import Types, element
from blockconv.jit.records import fill
from blockconv.kernels.common.activation import activation_kernel
from blockconv.kernels.common.dot import MULTIPLY_ADD
from blockconv.kernels.common.gathering import is_beyond
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry
from blockconv.kernels.common.interleaved import DENSE
from blockconv.kernels.common.microkernel import TileSpec, conv_tile, lines_ahead
from blockconv.kernels.common.operands import SRC, conv_operands
from blockconv.kernels.common.packed_images import pack_image
from blockconv.kernels.common.packed_pixels import packing_of
from blockconv.kernels.common.pixel_tile import pixel_tile
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.tile_record import TileRecord
from blockconv.kernels.table import Epilogue
from blockconv.kernels.winograd import kernels
from blockconv.kernels.winograd.arguments import WinogradArgs
from blockconv.kernels.winograd.blocking import COLUMNS, ITEMSIZE, WinogradBlocking, reads_windows
from blockconv.kernels.winograd.codegen import ELEMENT, PRODUCT
from blockconv.kernels.winograd.codegen_finish import Finish
from blockconv.kernels.winograd.source import Source, winograd_source
from blockconv.kernels.winograd.weights import weight_form
from blockconv.runtime import OWN_TABLE, Buffer, Launch


def winograd_op(request: Request, at: WinogradBlocking, epilogue: Epilogue) -> Launch:
    """The op. The residual has the destination's memory order."""
    p, types, s, d = request.problem, request.types, request.source, request.destination
    padded, ic, oc = request.padded_oc, p.group_ic, p.group_oc
    offsets, src_bytes, finish = _offsets(p, at), request.src_bytes, _finish(request, at, epilogue)
    lanes = s._replace(length=NO_BLOCK, channel=types.src.itemsize) if at.images else s
    # One kernel stores the tiles of all forms.
    stored = finish._replace(form=at.form._replace(m=2, stride=1))
    args = fill(
        WinogradArgs,
        conv_operands(epilogue.residual, activation_kernel(epilogue.activation, finish.tile(1, 1).code())),
        p,
        at,
        at.form,
        at.scratch,
        offsets=OWN_TABLE,
        pack_kernel=_pack_kernel(request, at, lanes).address,
        source_kernel=_source_kernel(request, at).address,
        multiply_kernel=_multiply_kernel(p, at, request.machine.isa).address,
        finish_kernel=kernels.winograd_finish(finish).address,
        store_kernel=kernels.winograd_store(stored).address,
        tile_kernel=0 if at.shared else _tile_kernel(at, request.machine.isa).address,
        tile_images=at.images or 1,
        last_image=p.n - (at.images or 1),
        oc_padded=padded,
        set_ic=at.set_groups * ic,
        set_oc=at.set_groups * oc,
        set_vectors=-(-at.set_groups * ic // at.src_channels),
        group_oc=padded if p.g == 1 else oc,
        group_steps=-(-ic // at.ic_block),
        wei_position=at.wei_position(p),
        wei_ocb=at.wei_ocb(p),
        src_strides=s,
        lane_strides=lanes,
        dst_strides=d,
        dst_block=d.block if d.length <= at.lanes else at.lanes * types.dst.itemsize,
        scales=ITEMSIZE * weight_form(request, at).bias,
        vector=at.src_lanes * at.itemsize,
        products_record=_products_record(p, at),
        window_rows=at.window.rows,
        window_cols=at.window.cols,
        window_leading=at.window.leading,
        prefetch_rows=at.form.side if is_beyond(request.machine, src_bytes) else 0,
        src_end=Buffer(SRC.index, src_bytes),
        dst_parts=8 * len(offsets),
    )
    tasks = at.sets * at.tile_blocks * at.splits
    table = np.array([*offsets, *_parts(d, at, padded)], np.int64)
    return Launch(kernels.winograd(), args, tasks, 1, at.scratch_bytes, table)


def _products_record(problem: Conv2dProblem, at: WinogradBlocking) -> TileRecord:
    """The words that all calls of the microkernel share."""
    ic = problem.group_ic
    steps = -(-ic // at.ic_block)
    tail = at.elements(ic - (steps - 1) * at.ic_block)
    has_tail = tail < at.elements(at.ic_block)
    vector, tile = at.src_lanes * at.itemsize, at.scratch.products_tile
    return TileRecord.with_zeros(
        runs=1,
        rows=1,
        ahead=1,
        run_steps=steps - has_tail,
        full_steps=steps - has_tail,
        tail_steps=has_tail,
        tail_channels=tail,
        prefetch_lines=_prefetch_lines(problem, at),
        tiles=-(-at.block_tiles // at.tile_pixels),
        src_pixel=vector,
        src_next=at.tile_pixels * vector,
        src_last=(at.block_tiles - at.tile_pixels) * vector,
        dst_pixel=tile,
        dst_next=at.tile_pixels * tile,
        dst_last=(at.block_tiles - at.tile_pixels) * tile,
        dst_block=at.scratch.products_channel if at.images else at.out_lanes * ITEMSIZE,
        valid=at.tile_channels,
        written=at.tile_channels,
    )


def _source_kernel(request: Request, at: WinogradBlocking) -> jit.Kernel:
    """The kernel of the first stage."""
    fma, in_place = request.machine.isa.fma and not at.form.exact, not reads_windows(request.source, at)
    return winograd_source(Source(at.form, at.src_lanes, at.transform_lanes, fma, in_place, type=request.types.src))


def _pack_kernel(request: Request, at: WinogradBlocking, lanes: Geometry) -> jit.Kernel:
    """The packer of windows. lanes: the source's strides. No more pixels of planes are transposed than a row has."""
    bits = Types.bits(request.itemsize).src
    how = packing_of(lanes, bits, bits, at.src_lanes, 1)
    columns = min(COLUMNS, at.src_lanes, 1 << request.problem.iw.bit_length() >> 1) if how.contiguous > 1 else 0
    return pack_image(how._replace(columns=columns))


def _finish(request: Request, at: WinogradBlocking, epilogue: Epilogue) -> Finish:
    """How pixels are finished."""
    types, dst = request.types, request.types.dst
    store_width, has_parts = at.contiguous(request.destination, at.lanes)
    # Which of the types of bytes it is, is a matter of bounds, which are arguments.
    stored = element("uint8") if dst.itemsize == 1 else dst
    return fill(
        Finish,
        at,
        fma=request.machine.isa.fma and not at.form.exact,
        store_width=store_width,
        act=epilogue.kind(types, store_width),
        has_parts=has_parts,
        dst=stored.code if types.is_requantized or dst.is_half else 0,
        rounding=epilogue.rounding if dst.itemsize == 1 else 0,
        shifted=epilogue.shifted,
        period=at.images > 0,
    )


def _offsets(problem: Conv2dProblem, at: WinogradBlocking) -> list[int]:
    """Bytes from a tile's transformed source to what each reduction step reads, for each group of a set."""
    ic = problem.group_ic
    channels = [group * ic + c for group in range(at.set_groups) for c in range(0, ic, at.ic_block)]
    vector, together = at.src_lanes * at.itemsize, at.src_channels
    return [c // together * at.block_tiles * vector + c % together * at.itemsize for c in channels]


def _parts(dst: Geometry, at: WinogradBlocking, channels: int) -> list[int]:
    """Bytes from the first channel of each vector to its parts; nothing where these are evenly far apart."""
    width, has_parts = at.contiguous(dst, at.lanes)
    vectors = range(0, channels if has_parts else 0, at.lanes)
    return [dst.offset(c + k) - dst.offset(c) for c in vectors for k in range(0, at.lanes, width)]


def _multiply_kernel(problem: Conv2dProblem, at: WinogradBlocking, isa: Isa) -> jit.Kernel:
    """The kernel of the products."""
    if not at.shared:
        return kernels.winograd_multiply()
    lanes, channels = at.lanes, problem.group_ic
    # A broadcast load costs less than a permutation.
    part = channels if 2 * channels == lanes and isa.halves else lanes
    return kernels.winograd_multiply_shared(lanes, part, isa.fma, channels)


def _tile_kernel(at: WinogradBlocking, isa: Isa) -> jit.Kernel:
    """The microkernel: a tile's pixels are Winograd's tiles, `vector` bytes apart.

    Its reductions are short: the lines that the next one begins with are prefetched by every turn. Blocks of channels
    are apart; all tiles of a block are contiguous.
    """
    fma, out_lanes = isa.fma and not at.form.exact, at.out_lanes
    if at.images:
        tile = 1, at.tile_channels, at.tile_pixels, at.lanes, at.ic_block, at.lanes, ActivationKind.NONE, DENSE
        apart = at.block_tiles * at.lanes * ITEMSIZE
        return pixel_tile(TileSpec(ELEMENT.code, fma, *tile, src_channel=apart, wei_width=at.width))
    numbers = 1, at.tile_pixels, at.vectors, out_lanes, at.elements(at.ic_block), out_lanes, ActivationKind.NONE, DENSE
    element, dot = (PRODUCT, at.dot.number) if at.form.exact else (ELEMENT, MULTIPLY_ADD.number)
    return conv_tile(TileSpec(element.code, fma, *numbers, dot=dot, burst=1))


def _prefetch_lines(problem: Conv2dProblem, at: WinogradBlocking) -> int:
    """Cache lines of weights that a reduction step prefetches; 0 where so few tiles use a block that there is no time.

    (In a network weights come from memory: a tenth of the time of 128 channels of 28x28.)
    """
    if at.block_tiles * max(1, at.images) < 8:
        return 0
    ic = problem.group_ic
    block = at.elements(ic) * at.width * ITEMSIZE
    calls = at.width // at.tile_channels * -(-at.block_tiles // at.tile_pixels)
    return lines_ahead(block, calls, -(-ic // at.ic_block))
