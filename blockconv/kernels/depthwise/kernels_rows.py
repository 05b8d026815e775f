"""Depthwise convolution along the pixels of rows of a few vectors, by tiles of whole rows."""

from blockconv import jit
from blockconv.jit.arguments import held
from blockconv.kernels.depthwise.codegen import DepthwiseTileSpec, TileAxis
from blockconv.kernels.depthwise.codegen_integer_rows import integer_rows_tile
from blockconv.kernels.depthwise.codegen_rows import rows_tile
from blockconv.kernels.depthwise.columns import Columns
from blockconv.kernels.depthwise.entries import entry_run, read_entry
from blockconv.kernels.depthwise.kernels import DepthwiseArguments, edge_of, output_of


@jit.kernel
def depthwise_rows(shape: DepthwiseTileSpec, columns: Columns):
    """Tiles of `unrolled` whole rows.

    A task is a chunk of an image's rows and a group of the table's entries.
    """
    lanes, unrolled, edges, itemsize = shape.lanes, shape.unrolled, shape.edges, shape.finished.itemsize
    tile = (integer_rows_tile if shape.dot else rows_tile)(shape, columns)

    def kernel(args, first, last, scratch):
        a = held(DepthwiseArguments(args))
        s, d = a.source, a.destination
        for task in range(first, last):
            chunk, rest = task % a.chunks, task // a.chunks
            group, n = rest % a.groups, rest // a.groups
            entry_first = group * a.group_entries
            entry_last = min(a.entries, entry_first + a.group_entries)
            oh_first, oh_last = chunk * a.chunk_rows, min(a.oh, (chunk + 1) * a.chunk_rows)
            src_image, dst_image = a.src + n * s.n, a.dst + n * d.n
            for k in range(entry_first, entry_last):
                e = read_entry(a, k)
                oh_at = oh_first
                while True:  # there are rows, so that what all tiles have in common can be made before the first
                    oh = min(oh_at, a.oh - unrolled)
                    ih = oh * a.sh - a.ph
                    variant = edge_of(oh_at, unrolled, a.oh) if edges == 3 else 0
                    run = entry_run(e, variant, src_image + ih * s.row + e.src, 0)
                    cols = TileAxis(0, 0, 0, 0, 0, 0, a.tap)
                    rows = TileAxis(a.kh, ih, a.ih, a.sh, a.dh, s.row, a.tap_row)
                    out = output_of(a, e, dst_image + oh * d.row + e.dst, 0, lanes * itemsize, 0, scratch)
                    tile(run, cols, rows, out)
                    oh_at += unrolled
                    if oh_at >= oh_last:
                        break

    return kernel
