"""The predicted time of a Winograd convolution."""

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.kernels.common.dot import name_of
from blockconv.kernels.common.gathering import waiting_seconds
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.request import Request
from blockconv.kernels.winograd.blocking import ITEMSIZE, WinogradBlocking, blocking
from blockconv.kernels.winograd.transforms import Form
from blockconv.machine.machine import Machine

_CALL = 30  # what a call of the microkernel takes beyond its multiply-adds and stores, in multiply-adds
_BEGIN = 4000  # cycles until three stages have what they work with, whatever the problem
_EDGE = 0.35  # more for a source over the image's edge
# The share of the shorter time that is not hidden: of the products, or of loading weights from beyond the second-level
# cache. Both need the fill buffers of the first-level cache, so one hides only a part of the other.
_SEEN = 0.25


def cost(request: Request, at: WinogradBlocking) -> float:
    """Seconds: of the products or their weights' way to the core, and of transforms or pixels in and out."""
    p, dst, types, m = request.problem, request.dst, request.types, request.machine
    wei_bytes = at.wei_bytes(p)
    stays = wei_bytes // at.sets <= m.second_level_cache // 2
    again = m.move_seconds(wei_bytes, 0)
    # In a network of integers, the other layers' weights fit the last cache, but these do not stay there. 512 channels
    # of 7x7 take 740 µs for their 19 MB, and 200 µs for the products. Weights that do not fit the last cache, beside
    # the rest, have left it when they are read again.
    is_far = at.form.exact or 2 * wei_bytes > m.profile.caches["L3"]
    first = wei_bytes / m.profile.reads["memory"] if is_far else again
    streamed = first + (0 if stays else at.tile_blocks - 1) * again
    rates = m.profile.by(name_of(at.dot))
    each = rates.each if at.form.exact else m.fma_seconds(at.lanes, ITEMSIZE)
    products = multiply_adds(m, p, at) * each
    multiply = max(products, streamed) + (0.0 if stays else _SEEN * min(products, streamed))
    read, written = request.src_bytes, request.dst_bytes
    # Transforms are timed in the second-level cache: they do not hide loads from beyond it.
    beyond = max(0.0, m.move_seconds(read, written) - (read + written) / m.profile.copies["L2"])
    form, (source, destination) = (at.form.m, at.form.stride), transforms(p, dst, at)
    source *= m.transform_seconds(form, *_loaded(request.source, at.src_lanes, at))[0]
    stored = m.transform_seconds(form, *_loaded(request.destination, at.lanes, at))[1]
    if types.is_requantized:
        stored += at.form.m**2 * rates.tile
    destination *= stored
    begin, waiting = m.launch_seconds() + _BEGIN * m.cycle_seconds(), waiting_seconds(request)
    return begin + (multiply + source + destination + beyond + waiting) / request.threads


def weight_seconds(form: Form, machine: Machine, problem: Conv2dProblem) -> float:
    """Seconds to transform the weights: a vector of output channels takes as long as a vector of a source's tile.

    Floats are transposed first, as planes are, and transformed in float64: twice as many vectors.
    """
    p, m, exact = problem, form.m, form.exact
    at, seconds = blocking(machine, p, Layout("NHWC"), m, 1, exact), machine.transform_seconds
    each = seconds((m, p.sh), 0, False)[0] if exact else 2 * seconds((m, p.sh), 1, False)[0]
    return at.elements(p.ic) * at.ocbs * at.width / at.lanes * each


def multiply_adds(machine: Machine, problem: Conv2dProblem, at: WinogradBlocking) -> float:
    """The cost of the products, in multiply-adds of vectors. Blocks of the destination's padding alone have none."""
    p, positions, ocbs = problem, at.form.positions, -(-problem.group_oc // at.width)
    tiles = at.tile_blocks * at.block_tiles
    if at.shared:
        spread = machine.spread_seconds("winograd", at.lanes, ITEMSIZE) / machine.fma_seconds(at.lanes, ITEMSIZE)
        return positions * tiles * -(-p.ic // at.lanes) * p.group_ic * spread
    # Fewer than eight accumulators wait for each other.
    held, vectors = at.tile_pixels * (at.tile_channels if at.images else at.vectors), at.block_vectors
    parts = at.width // at.tile_channels
    calls = positions * p.g * ocbs * at.tile_blocks * -(-at.block_tiles // at.tile_pixels) * parts
    products = positions * tiles * at.elements(p.ic) * ocbs * vectors * max(1.0, 8 / held)
    return products + calls * (_CALL + 2 * at.tile_pixels * vectors / parts)


def transforms(problem: Conv2dProblem, dst: Layout, at: WinogradBlocking) -> tuple[float, float]:
    """Vectors of a tile's channels that are transformed, of source and destination."""
    p, lanes = problem, 1 if at.images else at.lanes
    source = -(-p.ic // at.src_channels) * (1 + _EDGE * at.edge)
    destination = -(-dst.padded_shape(p.dst_shape)[1] // lanes)
    tiles = at.tile_blocks * at.block_tiles
    return tiles * source, tiles * destination


def _loaded(strides: Geometry, lanes: int, at: WinogradBlocking) -> tuple[int, bool]:
    """(contiguous elements of a vector, 0 for all; whether there are others between a pixel's and the next one's).

    lanes: of the vector. Contiguous channels are scaled to a vector of floats, which has fewer lanes.
    """
    width, _ = at.contiguous(strides, lanes)
    together = width if width in (1, lanes) else max(2, width * at.lanes // lanes)
    return (together if width < lanes else 0), strides.col > (strides.n if at.images else strides.channel) * lanes
