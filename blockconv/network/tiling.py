"""Images of any size through plans of one tile size, with the whole image's results.

Tiles begin at multiples of the network's stride, so each op sees its pixels at the same phase as in the whole image.
All have one size. It leaves the same remainder as the image's size, so padding at an image's end is the same too.
A tile is an image of its own. Its pixels near a cut, which read padding in place of neighbours, are not used: another
tile computes them. Pixels at an image's border read the padding that the whole image has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.checks import Pair, Shape, axes_remedy, check_shape
from blockconv.core.errors import ArgumentError, NetworkError, UnsupportedError
from blockconv.core.progress import Progress
from blockconv.core.python import zipped
from blockconv.core.types import Array
from blockconv.dispatch.boundary import pair
from blockconv.network.graph import Network
from blockconv.network.ops.rule import PIXELS, Reach, listed
from blockconv.network.reach import reaches, windows

Known = Mapping[str, Mapping[int, Reach]]  # by value, and by the axis that counts its pixels
USUAL = 512  # pixels of a tile along an axis, unless a size is requested
LEAST_SHARE = 4  # a tile has at least this many times the pixels that its cuts cost


class Piece(NamedTuple):
    """A tile: its first pixel along each axis, and for each output the pixels (first, end) that it gives."""

    start: Pair
    gives: Mapping[str, tuple[Pair, Pair]]


class Tiling(NamedTuple):
    """How an image is cut. `Plan.tiling` makes it.

    shape: of the image, (N, C, H, W).
    tile: the size of a tile, (height, width).
    stride: tiles begin at multiples of it, (height, width).
    pieces: the tiles of one image.
    steps: pixels of the image from one output pixel to the next, by output.
    outputs: the shape of each output of the whole image.
    network: the network for one tile.
    batch: tiles that run at once.
    nbytes: memory that these tiles take, in bytes: inputs, outputs, and the values between. Packed weights
        (`Plan.weights_nbytes`) are not in it, nor is what files and Zarr take for their chunks.
    """

    shape: Shape
    tile: Pair
    stride: Pair
    pieces: tuple[Piece, ...]
    steps: Mapping[str, tuple[Fraction, Fraction]]
    outputs: Mapping[str, Shape]
    network: Network
    batch: int = 1
    nbytes: int = 0

    def __repr__(self) -> str:
        """Without the pieces: a large image has thousands."""
        return f"Tiling({self.shape}: {len(self.pieces)} x {self.tile}, {self.batch} at once, {self.nbytes} bytes)"

    @property
    def computed(self) -> float:
        """Computed pixels for each pixel of the image: 1.1 means that cuts cost a tenth."""
        return len(self.pieces) * math.prod(self.tile) / max(1, math.prod(self.shape[2:]))

    def source(self, piece: Piece) -> tuple[slice, ...]:
        """The pixels of the image that a tile reads: rows, and columns."""
        return tuple(slice(begin, begin + size) for begin, size in zipped(piece.start, self.tile))

    def local(self, piece: Piece, name: str) -> tuple[slice, ...]:
        """The pixels of a tile's output that the piece gives: rows, and columns."""
        return tuple(
            slice(int(first - start / step), int(end - start / step))
            for (first, end), start, step in zipped(piece.gives[name], piece.start, self.steps[name])
        )


def tiling(network: Network, shape: Shape, tile: Any = None, usual: Pair = (USUAL, USUAL)) -> Tiling:
    """How an image of this shape is cut for a network with one input of four dimensions.

    tile: pixels of a tile, an int or (height, width); the next larger size that suits the network is taken. Default: a
    size whose cuts cost little.

    Raises UnsupportedError, which names the node, for a network whose pixels need the whole image. Raises ArgumentError
    for a tile that is too small.
    """
    if len(network.inputs) != 1 or network.inputs[0].rank != 4:
        said = f"a tiled network has one input (N, C, H, W), not {listed(network.inputs)}"
        raise UnsupportedError(f"{network.name}: {said}")
    (given,) = network.inputs
    if len(shape) != 4 or shape[1] != given.shape[1]:
        rule = f"has to be (N, {given.shape[1]}, H, W)"
        remedy = axes_remedy(shape, given.shape, "dask.array.from_array(image)")
        raise ArgumentError("tiled", "shape", tuple(shape), rule, remedy)
    check_shape("tiled", "shape", shape)
    if network.rest is not None:
        kinds = ", ".join(network.rest.kinds)
        raise UnsupportedError(f"{network.name}: shapes after {kinds} depend on the image's values")
    known = reaches(network, given.name)
    missing = [output for output in network.outputs if sorted(known.get(output, ())) != list(PIXELS)]
    if missing:
        raise UnsupportedError(f"{network.name}: outputs {missing} have no pixels along the axes {PIXELS}")
    # Pixels of the image by which a tile can move so that each value moves by whole pixels.
    along = [[reach[sorted(reach)[k]] for reach in known.values()] for k in range(2)]
    strides = [math.lcm(*(reach.step.numerator for reach in each)) for each in along]
    if np.shape(tile) == (1,):
        raise ArgumentError("tiled", "tile", tile, "has to be an int, or (height, width)")
    asked = (None, None) if tile is None else pair("tiled", "tile", tile)
    sizes = []
    for k, axis in enumerate(PIXELS):
        least = asked[k] or _shared(shape[axis], strides[k], usual[k], along[k])
        # The least size from this one on that has the image's remainder by the stride.
        sizes.append(min(shape[axis], least + (shape[axis] - least) % strides[k]))
    # Sizes grow by the steps from one to the other, so an image need not be larger than this to see how.
    larger = [min(shape[axis], size + 2 * stride) for axis, size, stride in zipped(PIXELS, sizes, strides)]
    try:
        small, image = (network.with_input_shapes((1, shape[1], *size)) for size in (sizes, larger))
    except NetworkError as error:
        network.with_input_shapes((1, *shape[1:]))  # raises, if no tile is at fault
        rule = f"is too small for this network: {str(error).removesuffix(f'; {error.remedy}')}"
        raise ArgumentError("tiled", "tile", tile, rule, "give a larger one, or none") from error
    _check_like(image, small, known)
    steps = {output: (known[output][2].step, known[output][3].step) for output in network.outputs}
    outputs = {}
    for output in network.outputs:
        more = ((shape[axis] - larger[k]) / steps[output][k] for k, axis in enumerate(PIXELS))
        height, width = (size + int(by) for size, by in zipped(image.shape(output)[2:], more))
        outputs[output] = shape[0], image.shape(output)[1], height, width
    ends = [{output: found[axis] for output, found in outputs.items()} for axis in PIXELS]
    cuts = [_cuts(shape[axis], ends[k], small, known, strides[k], k) for k, axis in enumerate(PIXELS)]
    pieces = tuple(
        Piece((top, left), {output: (rows[output], columns[output]) for output in network.outputs})
        for top, rows in zipped(*cuts[0])
        for left, columns in zipped(*cuts[1])
    )
    return Tiling(tuple(shape), (sizes[0], sizes[1]), (strides[0], strides[1]), pieces, steps, outputs, small)


def _shared(size: int, stride: int, usual: int, along: Sequence[Reach]) -> int:
    """The tile size that divides the image into equal tiles, as many as `usual` makes: little is computed twice.

    along: the reaches of all values along the axis.
    """
    lost = max(math.ceil(reach.high - reach.low) for reach in along) + 2 * stride
    count = max(1, math.ceil((size - lost) / (max(usual, LEAST_SHARE * lost) - lost)))
    return math.ceil((size - lost) / count) + lost


def _check_like(image: Network, small: Network, known: Known) -> None:
    """Raise UnsupportedError if a tile's network differs from the whole image's in more than the number of pixels."""
    for node, same in zipped(image.nodes, small.nodes):
        if node.output not in known:
            continue
        if windows(image, node, known) != windows(small, same, known):
            rule = "depends on the size of the whole image, by a scale or padding, so that tiles give other results"
            raise UnsupportedError(f"{node}: {rule}; give an image of another size")
        for k, axis in enumerate(sorted(known[node.output])):
            less = image.inputs[0].shape[PIXELS[k]] - small.inputs[0].shape[PIXELS[k]]
            if image.shape(node.output)[axis] - small.shape(same.output)[axis] != less / known[node.output][axis].step:
                rule = "gives a size that is not the image's divided by the stride"
                raise UnsupportedError(f"{node}: {rule}; give an image of another size")


def _valid(small: Network, known: Known, k: int) -> dict[str, Pair]:
    """Pixels (first, end) of each value of a tile along an axis that read no pixel beyond a cut on either side."""
    name = small.inputs[0].name
    found = {name: (0, small.inputs[0].shape[PIXELS[k]])}
    for node in small.nodes:
        for source, given in windows(small, node, known):
            axis = sorted(given)[k]
            (begin, end), (_, window) = found[source], given[axis]
            first = math.ceil((begin - window.low) / window.step)
            after = math.floor((end - 1 - window.high) / window.step) + 1
            size = small.shape(node.output)[axis]
            low, high = found.get(node.output, (0, size))
            found[node.output] = max(low, first, 0), min(high, after, size)
    return found


def _cuts(
    size: int,
    ends: Mapping[str, int],
    small: Network,
    known: Known,
    stride: int,
    k: int,
) -> tuple[list[int], list[dict[str, Pair]]]:
    """(the first pixel of each tile along one axis, the pixels (first, end) of each output that it gives).

    Tiles go from the begin of the image, each as far from the last one as its valid pixels allow.
    size: of the image. ends: of its outputs.
    """
    tile, valid = small.inputs[0].shape[PIXELS[k]], _valid(small, known, k)
    steps = {name: known[name][PIXELS[k]].step for name in ends}
    starts, gives = [0], []
    done = dict.fromkeys(ends, 0)
    while True:
        start, last = starts[-1], starts[-1] == size - tile
        until = {
            name: ends[name] if last else max(done[name], int(start / steps[name]) + valid[name][1]) for name in done
        }
        gives.append({name: (done[name], until[name]) for name in done})
        done = until
        if last:
            return starts, gives
        # A tile that begins at `next` gives valid pixels from next / step + valid[0] on.
        next = min(math.floor(steps[name] * (done[name] - valid[name][0])) for name in done)
        next = min(next // stride * stride, size - tile)
        if next <= start:
            lost = max(math.ceil(steps[name] * (valid[name][0] + 1)) for name in done) + tile
            lost -= min(math.floor(steps[name] * valid[name][1]) for name in done)
            rule = f"is too small for this network, which needs more than {lost + stride} pixels"
            raise ArgumentError("tiled", "tile", tile, rule, "give a larger one, or none")
        starts.append(next)


def run_tiled(
    run: Callable[[Array], Mapping[str, Array]], how: Tiling, image: Any, out: Mapping[str, Any] | None
) -> Any:
    """Run a plan on the tiles of an image. Returns `out`, or new arrays: by output, or the only one.

    run: from (batch, C, *tile) to the outputs by name. out: None, or arrays to write, by output.
    """
    tensors, names, batch = how.network.tensors, how.network.outputs, how.batch
    results = out or {name: np.empty(how.outputs[name], tensors[name].type.dtype) for name in names}
    every = [(n, piece) for n in range(how.shape[0]) for piece in how.pieces]
    source = np.zeros((batch, how.shape[1], *how.tile), how.network.inputs[0].type.dtype)
    with Progress("computing tiles", len(every)) as shown:
        for at in range(0, len(every), batch):
            group = every[at : at + batch]
            for slot, (n, piece) in enumerate(group):
                rows, columns = how.source(piece)
                source[slot] = image[n, :, rows, columns]
            values = run(source)
            for slot, (n, piece) in enumerate(group):
                for name in names:
                    (top, bottom), (left, right) = piece.gives[name]
                    rows, columns = how.local(piece, name)
                    results[name][n, :, top:bottom, left:right] = values[name][slot, :, rows, columns]
            del values  # before the next tile's are made
            shown.tick(at + len(group))
    return results if len(names) > 1 else results[names[0]]


def checked_out(how: Tiling, out: Any, image: Any) -> dict[str, Any] | None:
    """`out` by output. Raises ArgumentError for an array of another shape or type, or one that overlaps the image."""
    if out is None:
        return None
    names = how.network.outputs
    given = dict(out) if isinstance(out, Mapping) else {names[0]: out}
    if set(given) != set(names):
        raise ArgumentError("tiled", "out", list(given), f"has to be a dict with the outputs {', '.join(names)}")
    for name, array in given.items():
        wanted = how.outputs[name], how.network.tensors[name].type.dtype
        try:
            found = tuple(array.shape), np.dtype(array.dtype)
        except (AttributeError, TypeError):
            found = (), np.dtype(object)
        fixed = not array.flags.writeable if isinstance(array, np.ndarray) else getattr(array, "read_only", False)
        if found != wanted or fixed:
            rule = f"has to be a writable array, {wanted[1]} {wanted[0]}, for output {name!r}"
            raise ArgumentError("tiled", "out", array, rule)
        arrays = isinstance(array, np.ndarray) and isinstance(image, np.ndarray)
        if array is image or (arrays and np.shares_memory(array, image)):  # tiles read pixels around their own
            raise ArgumentError("tiled", "out", array, "must not overlap the image", "give another array")
    return given
