"""Depthwise convolution along the pixels of rows of a few vectors, by tiles of whole rows."""

from blockconv import jit
from blockconv.kernels.common.tile import Output
from blockconv.kernels.depthwise.codegen import DepthwiseTileSpec, TileAxis
from blockconv.kernels.depthwise.codegen_integer_rows import integer_rows_tile
from blockconv.kernels.depthwise.codegen_rows import rows_tile
from blockconv.kernels.depthwise.columns import Columns
from blockconv.kernels.depthwise.entries import entry_run, read_entry
from blockconv.kernels.depthwise.kernels import DepthwiseArguments, edge_of

COLUMNS = len(Columns._fields)


@jit.kernel
def depthwise_rows(*spec):
    """Tiles of `unrolled` whole rows.

    spec: a `DepthwiseTileSpec`, then `Columns`.

    A task is a chunk of an image's rows and a group of the table's entries.
    """
    shape, columns = DepthwiseTileSpec(*spec[:-COLUMNS]), Columns(*spec[-COLUMNS:])
    lanes, unrolled, edges, itemsize = shape.lanes, shape.unrolled, shape.edges, shape.finished.itemsize
    tile = (integer_rows_tile if shape.dot else rows_tile)(shape, columns)

    def kernel(args, first, last, scratch):
        a = DepthwiseArguments(args)
        oh_count, kh, ih_count, sh, dh = a.oh, a.kh, a.ih, a.sh, a.dh
        src_row, dst_row, tap, tap_row = a.src_row, a.dst_row, a.tap, a.tap_row
        residual, activation, dst_block, ph = a.residual - a.dst, a.activation, lanes * itemsize, a.ph
        for task in range(first, last):
            chunk, rest = task % a.chunks, task // a.chunks
            group, n = rest % a.groups, rest // a.groups
            entry_first = group * a.group_entries
            entry_last = min(a.entries, entry_first + a.group_entries)
            oh_first, oh_last = chunk * a.chunk_rows, min(oh_count, (chunk + 1) * a.chunk_rows)
            src_image, dst_image = a.src + n * a.src_n, a.dst + n * a.dst_n
            for k in range(entry_first, entry_last):
                e = read_entry(a, k)
                oh_at = oh_first
                while True:  # there are rows, so that what all tiles have in common can be made before the first
                    oh = min(oh_at, oh_count - unrolled)
                    ih = oh * sh - ph
                    variant = edge_of(oh_at, unrolled, oh_count) if edges == 3 else 0
                    run = entry_run(e, variant, src_image + ih * src_row + e.src, 0)
                    cols, rows = TileAxis(0, 0, 0, 0, 0, 0, tap), TileAxis(kh, ih, ih_count, sh, dh, src_row, tap_row)
                    out = Output(
                        dst=dst_image + oh * dst_row + e.dst,
                        dst_row=dst_row,
                        dst_pixel=0,
                        dst_block=dst_block,
                        residual=residual,
                        valid=e.valid,
                        written=0,
                        activation=activation,
                        scratch=scratch,
                    )
                    tile(run, cols, rows, out)
                    oh_at += unrolled
                    if oh_at >= oh_last:
                        break

    return kernel
