"""Convolution from any layout to any other: windows packed into scratch, tiles by the microkernel.

A task is a block of output pixels (rows x columns of one image, of one group) and a range of output channel blocks. Its
source window is packed once into the worker's scratch, in the order [channel block][row][column][channels], with zeros
outside the image. Packing removes borders, strides between pixels and cache conflicts, and copies no more than a
window. A 1x1 problem is read in place, because its pixels are evenly spaced in every layout.

Then each tile of pixels runs the microkernel for each block of output channels. A long reduction is done in blocks of
steps, so that weights stay in the second-level cache. Tasks at the image's end are moved back to be whole, and so are
tiles at a task's end. They compute a few pixels again, with the same bits, so there is no code for tails.

Buffers: source, packed weights, bias ([groups][blocks * channels of a tile], zero-padded),
destination, residual (or the destination), activation parameters. Where integer accumulators become real numbers, the
scales of the output channels follow all biases, in the same form; then as many float32 for each channel as
`Epilogue.shifted` says. The activation's parameters are then `EpilogueArguments`.

A source of bytes or 16-bit floats is packed unchanged. The whole panel is then converted to what tiles read: signed
bytes become unsigned, bytes become 16 bits wide, or 16-bit floats become float32. Tiles reduce elements of several
channels (`Dot`).
"""

from dataclasses import replace
from typing import Any

import numpy as np

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.records import fill
from blockconv.kernels.common.activation import activation_kernel
from blockconv.kernels.common.dot import packed_as_one
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry, geometry
from blockconv.kernels.common.microkernel import finish_part, lines_ahead, part_of
from blockconv.kernels.common.operands import conv_operands
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.tile_record import TileRecord
from blockconv.kernels.conv import kernels, packing, packing_planes, pixel_blocking
from blockconv.kernels.conv.arguments import RECORDS, TilesArguments
from blockconv.kernels.conv.blocking import ConvBlocking, has_parts, is_converted
from blockconv.kernels.conv.matrix_blocking import extent
from blockconv.kernels.conv.matrix_tile import configure, is_instruction, release
from blockconv.kernels.conv.space import TapsRegion, is_pointwise, space
from blockconv.kernels.conv.tile_kernels import Tiles
from blockconv.kernels.table import Epilogue
from blockconv.runtime import OWN_TABLE, Buffer, Launch

Words = dict[str, Any]
WORD = 8  # bytes of one in a table


def bind_tiles(
    request: Request, blocking: ConvBlocking, epilogue: Epilogue, region: TapsRegion | None = None
) -> list[Launch]:
    """The op. The residual has the destination's memory order. region: the pixels that it computes, if not all."""
    bound = _Binding(request, blocking, region)
    read, written = (0, 0) if region is None else (region.read(bound.src), region.written(bound.dst))
    operands = conv_operands(epilogue.residual)
    offsets, parts, biases = bound.offsets(), bound.parts(), bound.bias_offsets()
    words = (
        bound.geometries() | bound.reduction(len(offsets)) | bound.window() | bound.tasks() | bound.kernels(epilogue)
    )
    record = {name: words.pop(name) for name in TileRecord.fields if name in words}
    args = fill(
        TilesArguments,
        operands,
        bound.at,
        blocking,
        record=TileRecord.with_zeros(activation=operands.activation, **record),
        src=Buffer(operands.src.index, read),
        dst=Buffer(operands.dst.index, written),
        residual=Buffer(operands.residual.index, written),
        offsets=OWN_TABLE,
        padded_oc=request.padded_oc,
        parts=WORD * len(offsets),
        parts_step=WORD * (len(parts) // (bound.groups * blocking.ocbs)),
        biases=WORD * (len(offsets) + len(parts)) if biases else 0,
        **words,
    )
    at = bound.at
    tasks = at.images * bound.groups * args.row_tasks * args.col_tasks * blocking.splits
    table = np.array([*offsets, *parts, *biases], np.int64)
    return [Launch(kernels.conv_tiles(), args, tasks, 1, blocking.scratch + RECORDS, table)]


def _in_bytes(strides: Geometry) -> Geometry:
    """A geometry of 4-bit elements with its strides in bytes, except the stride of a channel in its block."""
    return strides._replace(n=strides.n // 2, block=strides.block // 2, row=strides.row // 2, col=strides.col // 2)


def _in_units(src: Geometry, unit: int) -> Geometry:
    """The geometry of a source with `unit` neighbouring channels as one."""
    length = src.length if src.length == NO_BLOCK else src.length // unit
    return src._replace(length=length, channel=unit * src.channel)


class _Binding:
    """The words of a convolution's arguments. Where groups share a vector, as many of them as do are one."""

    def __init__(self, request: Request, blocking: ConvBlocking, region: TapsRegion | None) -> None:
        problem, src, dst, types = request.problem, request.src, request.dst, request.types
        self.blocking, self.types, self.dot, self.isa = blocking, types, blocking.dot, request.machine.isa
        self.at = space(request, blocking.line > 0) if region is None else region.space(problem)
        self.src_each = 2 if types.src.is_packed else 1  # channels of the source that are moved as one, a packed pair
        self.dst_shift = int(types.dst.is_packed)
        shared, self.is_shared = blocking.shared, not blocking.shared.dense
        # Where groups share a vector, four bytes are a channel, and all is as it is of floats.
        unit = packed_as_one(types, self.dot) if self.is_shared else 1
        self.p = replace(problem, ic=problem.ic // unit)
        # Bytes of a channel: in a window and of a weight; in the source and while windows are packed; in the
        # destination.
        self.itemsize, self.src_itemsize = unit * (self.dot.itemsize or types.src.itemsize), unit * types.src.itemsize
        self.dst_itemsize = types.dst.itemsize
        strides = geometry(src, problem.src_shape, types.src.itemsize)
        self.src = _in_units(strides, unit)
        if types.src.is_packed:  # its pairs are channels
            self.src = _in_bytes(strides)._replace(length=strides.length // 2)
        self.dst = geometry(dst, problem.dst_shape, self.dst_itemsize)
        self.groups = -(-problem.g // shared.groups)
        self.ic, self.oc = (shared.groups * (channels // problem.g) for channels in (self.p.ic, self.p.oc))
        groups_of = self.oc if self.groups > 1 else 0
        self.has_parts = has_parts(self.dst, blocking.store_width, blocking.width, groups_of)
        # A window's planes of channel blocks: one plane where the blocks of a pixel are contiguous.
        step = blocking.cb if blocking.has_panels_of_planes else max(blocking.cb, blocking.step)
        self.ic_blocks = 1 if self.is_shared else -(-self.ic // step) * (step // blocking.cb)
        self.pixel = shared.pitch * types.acc.itemsize if self.is_shared else blocking.cb * self.itemsize
        self.phase = blocking.window_cols * self.pixel
        self.row = blocking.phases * self.phase
        self.plane = blocking.window_rows * self.row
        if blocking.in_place:
            self.row, self.pixel = (self.src.along(axis) for axis in self.at.axes[1:])
        # A stride of one tap only is taken out when the window is packed.
        self.window_sh, self.row_step = (1, self.at.sh) if self.at.kh == 1 else (self.at.sh, 1)
        # Packing also takes out the stride of columns that are loaded as vectors: it packs phase by phase.
        is_taken_out = self.at.kw == 1 or blocking.pixel_lanes > 0
        self.window_sw, self.col_step = (1, self.at.sw) if is_taken_out else (self.at.sw, 1)

    def channel_offsets(self) -> list[int]:
        """From a window's first pixel to the first channel of each step, at each level of these, in bytes."""
        depth, plane, itemsize, cb = self.at.depth, self.plane, self.itemsize, self.blocking.cb
        firsts = [0] if self.is_shared else range(0, self.ic, self.blocking.step)
        if self.blocking.in_place:
            block, channel, length = self.src.block, self.src.channel, self.src.length
            return [c // length * block + c % length * channel for c in firsts for _ in range(depth)]
        return [(c // cb * depth + level) * plane + c % cb * itemsize for c in firsts for level in range(depth)]

    def offsets(self) -> list[int]:
        """From a pixel's source to what each step of its reduction reads, in bytes."""
        at, cols = self.at, range(0, self.at.kw, self.blocking.shared.taps)
        taps = [h * at.dh * self.row + self.column_offset(w * at.dw) for h in range(at.kh) for w in cols]
        return [channel + tap for channel in self.channel_offsets() for tap in taps]

    def column_offset(self, column: int) -> int:
        """Bytes from a pixel's source to the one so many columns further."""
        if not self.blocking.pixel_lanes:
            return column * self.pixel
        further, phase = divmod(column, self.at.sw)
        return phase * self.phase + further * self.pixel

    def parts(self) -> list[int]:
        """From each tile's first channel to what its stores write, in bytes; none where the distances are even."""
        width, stored = self.blocking.width, self.blocking.store_width
        if not self.has_parts:
            return []
        firsts = [group * self.oc + ocb * width for group in range(self.groups) for ocb in range(self.blocking.ocbs)]
        offsets = [self.dst.offset(c + k) - self.dst.offset(c) for c in firsts for k in range(0, width, stored)]
        return [offset >> self.dst_shift for offset in offsets]

    def bias_offsets(self) -> list[int]:
        """Bytes from the biases to the biases of each range of taps that tiles reduce: for rows, then for columns.

        Floats have one bias for all ranges: their padding is zero.
        """
        kept = self.blocking.kept
        if kept is None or self.types.acc.is_float:
            return []
        found = []
        for ranges, taps, step in ((kept.rows, self.at.kh, len(kept.cols)), (kept.cols, self.at.kw, 1)):
            table = [0] * (taps + 1) ** 2
            for k, (low, high) in enumerate(ranges):
                table[low * (taps + 1) + high] = k * step * self.bias_bytes
            found += table
        return found

    @property
    def bias_bytes(self) -> int:
        """Bytes of the biases of all output channels."""
        return self.groups * self.blocking.ocbs * self.blocking.width * self.types.acc.itemsize

    def geometries(self) -> Words:
        """The strides of source and destination along the space's axes; levels are one more axis of the source."""
        p, at, stored = self.p, self.at, self.blocking.store_width
        image, row, col = at.axes
        by_h = image == "h"  # an image is then a row of the destination, and the taps along h are levels
        strides = self.src, _in_bytes(self.dst) if self.dst_shift else self.dst
        src, dst = (g._replace(n=g.along(image), row=g.along(row), col=g.along(col)) for g in strides)
        channels = stored or (self.blocking.pixel_lanes and self.blocking.pixels) or self.blocking.lanes
        block, width = (count * self.dst_itemsize >> self.dst_shift for count in (channels, self.blocking.width))
        scattered = {"dst_row": self.blocking.pixels * width, "dst_pixel": width, "dst_block": block}
        stores = {"dst_row": dst.row, "dst_pixel": dst.col, "dst_block": dst.block if dst.length <= stored else block}
        return (stores if stored else scattered) | {
            "source": src._replace(n=0) if by_h else src,
            "destination": dst,
            "depth_step": p.dh if by_h else 1,
            "depth_size": p.ih if by_h else NO_BLOCK,
            "depth_bytes": self.src.row if by_h else 0,
            "image_step": p.sh if by_h else 0,
            "image_start": -p.ph if by_h else 0,
        }

    def reduction(self, steps: int) -> Words:
        """Steps and weights: `steps` in all, of whole blocks of channels and of the remainder."""
        blocking, shared = self.blocking, self.blocking.shared
        row_steps = -(-self.at.kw // shared.taps)
        tail = blocking.step if self.is_shared else (self.ic - 1) % blocking.step + 1
        is_whole = self.dot.is_matrix or -(-tail // self.dot.channels) * self.dot.channels == blocking.step
        full = steps if is_whole else steps - steps // -(-self.ic // blocking.step)
        depth, width = steps * shared.taps * blocking.step, blocking.width
        if self.is_shared:
            depth, width = shared.group_ic * self.p.kh * self.p.kw, self.oc
        wei_block = depth * width * (self.types.acc.itemsize if self.is_shared else self.itemsize)
        k_blocks, kept = blocking.k_blocks, blocking.kept
        k_steps = full // k_blocks
        if kept is not None and k_blocks > 1:  # of whole runs
            k_steps = max(1, k_steps // (self.at.kh * row_steps)) * self.at.kh * row_steps
            k_blocks = max(1, full // k_steps)
        # Windows are not prefetched: the tiles lose what packing gains. (Measured on 256 channels of 56x56, where
        # packing takes 8 %.)
        return {
            "ic": -(-self.p.ic // self.src_each),
            "oc": self.p.oc,
            "group_ic": -(-self.ic // self.src_each),
            "group_oc": self.oc,
            "full_steps": full,
            "tail_steps": steps - full,
            "k_blocks": k_blocks,
            "k_steps": k_steps,
            "tap_rows": 0 if kept is None else self.at.kh,
            "tap_cols": 0 if kept is None or kept.cols == ((0, self.at.kw),) else self.at.kw,
            "tap_row_steps": row_steps,
            "step_bytes": wei_block // (steps * max(1, shared.group_ic)),
            "tap_row": self.at.dh,
            "tap_col": self.at.dw,
            "tail_channels": -(-tail // self.dot.channels),
            "wei_block": wei_block,
            "wei_blocks": -(-self.oc // blocking.width),
            "prefetch_lines": lines_ahead(wei_block, self.passes, steps),
            # No processor prefetches blocks of channels that are far from each other.
            "ahead": blocking.in_place and 1 < self.src.length < NO_BLOCK,
        }

    @property
    def passes(self) -> int:
        """How often a task reads a block of weights: once a tile; for each so many blocks of pixels of one."""
        blocking = self.blocking
        return blocking.tiles * (-(-blocking.pixels // blocking.lines) if blocking.blocks else 1)

    def window(self) -> Words:
        panel_bytes = self.ic_blocks * self.at.depth * self.plane
        shrunk = self.src_each * self.itemsize // self.src_itemsize  # how much less a panel is as it is packed
        return {
            "ic_blocks": self.ic_blocks,
            "row_step": self.row_step,
            "col_step": self.col_step,
            "window_row": self.row,
            "src_row": self.window_sh * self.row,
            "packed_row": self.row // shrunk,
            "packed_block": self.plane // shrunk,
            "packed_at": 0 if self.unpacks_pixels else panel_bytes - panel_bytes // shrunk,
            "line_bytes": self.p.sh * self.src.row,
            "panel_bytes": panel_bytes,
            "src_pixel": self.window_sw * self.pixel,
        }

    def tasks(self) -> Words:
        blocking, acc_itemsize = self.blocking, self.types.acc.itemsize
        tile_bytes = blocking.lines * blocking.width * acc_itemsize
        return {
            "groups": self.groups,
            "row_tasks": -(-self.at.oh // blocking.task_rows),
            "col_tasks": -(-self.at.ow // blocking.task_cols),
            "sums_at": blocking.scratch - (3 + blocking.tiles) * tile_bytes,
            "tiles_at": blocking.scratch - 3 * tile_bytes,
            "tile_rows": blocking.rows,
            "tile_pixels": blocking.pixels,
            "tile_bytes": tile_bytes,
            "tile_width": blocking.width,
            "dst_shift": self.dst_shift,
            "acc_itemsize": acc_itemsize,
            "scales_at": self.bias_bytes * (len(blocking.kept.ranges) if blocking.kept else 1),
        }

    def kernels(self, epilogue: Epilogue) -> Words:
        """The kernels that compute a tile, pack a window, and so on."""
        blocking, spec = self.blocking, self.tiles.spec(epilogue)
        scatters = blocking.store_width == 0 or self.p.g > 1
        scattered = (self.dst_itemsize, 1) if self.dst_shift else (self.dst_itemsize,)
        scatter: Any = kernels.scatter_tile
        if blocking.pixel_lanes and not blocking.dot.is_matrix:
            scatter = kernels.scatter_pixels
        by_unit = is_instruction(self.dot)
        return {
            "tile": self.tiles.kernel(spec).address,
            "part": finish_part(part_of(spec.finished)).address if self.lacks_channels else 0,
            "activate": activation_kernel(epilogue.activation, spec.finished.code()),
            "enter": configure(*self.tiles.register_sizes()).address if by_unit else 0,
            "leave": release().address if by_unit else 0,
            "pack": self.packer().address,
            "convert": self.converter(),
            "scatter": scatter(*scattered).address if scatters else 0,
            "scatters": blocking.store_width == 0,
        }

    @property
    def lacks_channels(self) -> bool:
        """Whether another kernel has to store some tiles, which lack channels."""
        blocking = self.blocking
        if blocking.pixel_lanes or blocking.dot.is_matrix or blocking.store_width == 0:
            return False
        return blocking.ocbs * blocking.width * self.groups != self.p.oc

    @property
    def tiles(self) -> Tiles:
        """The kernels of tiles."""
        return Tiles(self.isa, self.types, self.blocking, self.at.depth * self.plane, self.has_parts)

    def packer(self) -> jit.Kernel:
        """The kernel that packs a window."""
        blocking = self.blocking
        cb, itemsize = blocking.cb // self.src_each, self.src_itemsize
        if self.unpacks_pixels:
            return packing.unpack_pixels(cb, *self.converting)
        if self.dot.is_matrix and blocking.pixel_lanes:
            return packing.pack_interleaved(packed_as_one(self.types, self.dot), self.isa.vector_bytes)
        is_odd = self.types.acc.is_float and self.ic % self.dot.channels > 0
        if (is_odd and not blocking.interleaved) or (self.dot.is_matrix and self.packs_units):
            return self.unit_packer()
        if self.blocking.interleaved:
            return packing.pack_interleaved(cb)
        cuts_blocks = self.p.g > 1 and self.src.length < NO_BLOCK and self.ic % cb > 0
        if self.is_shared:
            filled = () if self.types.acc.is_float else (1,)
            return packing.pack_pixels(self.ic, cb, self.pixel // self.itemsize, blocking.lanes, itemsize, *filled)
        if cuts_blocks:
            return packing.pack_cut_window(cb, itemsize)
        if self.blocking.pixel_lanes:
            return self.plane_packer()
        if self.blocking.has_panels_of_planes:
            return packing_planes.pack_planes(self.blocking.pixels * itemsize)
        return packing.pack_window(cb, itemsize)

    @property
    def packs_units(self) -> bool:
        """Whether a pixel's channels are brought together from several blocks, or ends of floats are made zeros."""
        cb, unit = self.blocking.cb, packed_as_one(self.types, self.dot)
        if self.blocking.interleaved:
            return cb > unit
        ends = self.types.acc.is_float and -self.ic % cb >= unit
        return ends or extent(cb // self.src_each, self.src) < cb // self.src_each

    def unit_packer(self) -> jit.Kernel:
        """The kernel that packs a window of units of four bytes, from several of the source's blocks."""
        unit, is_float = packed_as_one(self.types, self.dot), self.types.acc.is_float
        at_once = 0 if self.blocking.interleaved else extent(self.blocking.cb, self.src) // unit
        return packing.pack_units(self.blocking.cb // unit, at_once, unit, is_float)

    def plane_packer(self) -> jit.Kernel:
        """The kernel that packs a window for tiles that load vectors of pixels."""
        blocking, itemsize = self.blocking, self.src_itemsize
        lanes = self.isa.vector_bytes // itemsize
        if channels := pixel_blocking.packed_channels(self.src, self.at, self.itemsize, lanes, self.p.group_ic):
            touching = self.src.along(self.at.axes[2]) == channels * itemsize
            return packing_planes.pack_across(channels, touching, blocking.phases, self.at.sw, lanes, itemsize)
        if is_pointwise(self.p):
            return packing_planes.pack_planes(blocking.pixel_lanes * itemsize)
        if blocking.line:
            return packing_planes.pack_flat(self.p.sw, lanes, itemsize)
        return packing_planes.pack_phases(blocking.phases, self.at.sw, lanes, itemsize)

    @property
    def converting(self) -> tuple[ElementType, int, int, int]:
        """The compile-time parameters of `convert_window`."""
        src, itemsize, size = self.types.src, self.dot.itemsize, self.isa.vector_bytes
        if not src.is_packed:
            return src, itemsize, 0, size // itemsize * 2 if src.is_half else size
        return src, itemsize, self.dot.is_unsigned, size // 2

    @property
    def unpacks_pixels(self) -> bool:
        """Whether windows are whole lines of pixels, which are unpacked as they are read."""
        at, chunk = self.at, self.blocking.cb // self.src_each
        if not self.types.src.is_packed or chunk % (self.isa.vector_bytes // 2):
            return False
        return is_pointwise(self.p) and at.axes[0] != "h" and self.src.along(at.axes[2]) == chunk

    def converter(self) -> int:
        """The address of the kernel that converts a packed window; 0 where there is nothing to convert."""
        if self.blocking.in_place or self.unpacks_pixels or not is_converted(self.types, self.dot):
            return 0
        return packing.convert_window(*self.converting).address
