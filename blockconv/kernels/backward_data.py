"""The gradient of a convolution's input, which is `conv_transpose2d`: convolutions of the output's gradient.

A pixel of the input is reached by every `stride`-th tap. So the pixels with the same remainder are a convolution of
stride 1 with these taps in reverse order, and with input and output channels exchanged. Its results are `stride` pixels
apart in memory. Only addresses differ from the forward op, so every forward kernel is a row here. Packing reads the
weights in another order (`WeightForm.pieces`), and no array is copied.

Pixels that no tap reaches are a convolution of padding alone, which writes the bias.

Where the pixels of a row are contiguous (NCHW), every second one would be stored by itself. There the convolutions
write planes of their own, in a workspace, and a last op interleaves these. As many images at a time as fit 16 MiB, or
one, are computed so.

Buffers: as the forward op's, and the workspace.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from blockconv.core.checks import Pair
from blockconv.core.layout import Layout, part_of
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import FLOATS, HALVES, Types
from blockconv.kernels.batches import Parts
from blockconv.kernels.common.geometry import geometry
from blockconv.kernels.common.interleaved_planes import InterleaveArgs, InterleavedPlanes, interleave_rows
from blockconv.kernels.common.operands import ACT, BIA, CONV, DST, SRC, WEI
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.rewritten import exchanged_problem
from blockconv.kernels.table import ALIGNED, Epilogue, Primitive, Row, TapsPiece, WeightForm, of_parts
from blockconv.runtime import OWN_TABLE, Buffer, Launch


class _Reached(NamedTuple):
    """Pixels of an axis of the input with the same remainder, and the convolution along this axis that computes them.

    first: the first such pixel.
    size: how many there are.
    tap, step, taps: the first tap in reverse order, the step to the next, and how many taps there are. Pixels whose
        convolution would read padding alone have no taps.
    dilation: in pixels of the output.
    cut: pixels of the output before the first that is read.
    begin: padding before it.
    """

    first: int
    size: int
    tap: int
    step: int
    taps: int
    dilation: int
    cut: int
    begin: int

    @property
    def end(self) -> int:
        """Past the last pixel of the cut output that the last pixel reads, were there no end."""
        return self.size - 1 - self.begin + (self.taps - 1) * self.dilation + 1


def _reached(problem: Conv2dProblem, x: str) -> list[_Reached]:
    """The pixels of an axis of the input, "h" or "w", by their remainder."""
    size, out, taps, stride, begin, dilation = (getattr(problem, name + x) for name in ("i", "o", "k", "s", "p", "d"))
    common = math.gcd(stride, dilation)
    found = []
    for rest, first in sorted(((first + begin) % stride, first) for first in range(min(stride, size))):
        # Pixel i is reached by tap k from output (i + begin - k * dilation) / stride.
        before = (first + begin) // stride
        count = -(-(size - first) // stride)
        mine = [k for k in range(taps) if (k * dilation - rest) % stride == 0]
        if not mine:
            found.append(_Reached(first, count, 0, 0, 0, 1, 0, 0))
            continue
        each = dilation // common if len(mine) > 1 else 1
        start = before - (mine[-1] * dilation - rest) // stride  # the output that the first pixel's first tap reads
        cut = max(0, start)
        if cut >= out:
            mine = []
        step = -(stride // common) if len(mine) > 1 else 1
        found.append(_Reached(first, count, mine[-1] if mine else 0, step, len(mine), each, cut, max(0, -start)))
    return found


class _Part(NamedTuple):
    """Pixels that the same taps reach: a forward request, the first elements of its arrays, and the taps.

    planes: the rows and columns that planes of the workspace are of, where the part is written there.
    """

    request: Request
    src: int
    dst: int
    taps: tuple[Pair, Pair] | None
    planes: tuple[_Reached, _Reached] | None = None


def _parts(request: Request, interleaves: bool) -> list[_Part]:
    """interleaves: whether rows with columns of several remainders are written to the workspace."""
    p, found = request.problem, []
    every = _Reached(0, p.iw, 0, 0, 0, 1, 0, 0)
    columns = _reached(p, "w")
    for h in _reached(p, "h"):
        for w in columns if h.taps else [every]:  # whole rows where no tap reaches any pixel
            part = _part(request, h, w)
            if interleaves and h.taps:
                of = part.request.of(part.request.problem, part.request.src, _NCHW)
                part = part._replace(request=of, dst=0, planes=(h, w))
            found.append(part)
    return found


def _has_planes(request: Request) -> bool:
    """Whether the pixels of a row of the destination are contiguous, and computed in several parts."""
    d = request.destination
    return request.problem.sw > 1 and d.length == 1 and d.col == request.types.dst.itemsize


def _part(request: Request, h: _Reached, w: _Reached) -> _Part:
    """The pixels that are both in these rows and in these columns."""
    p, src, start = request.problem, request.src, 0
    steps = 1, 1, p.sh, p.sw if h.taps else 1
    dst = request.dst if steps == (1,) * 4 else part_of(request.dst, (0, 0, p.ih, p.iw), steps)
    first = request.dst.offset(p.dst_shape, (0, 0, h.first, w.first))
    if not h.taps or not w.taps:
        inner = Conv2dProblem(p.n, 1, 1, 1, p.ic, 1, 1, ph=h.size, pw=w.size, ph_r=-1, pw_r=-1)
        return _Part(request.of(inner, src, dst), 0, first, None)
    if h.cut or w.cut:
        src = part_of(src, (0, 0, p.oh, p.ow))
        start = request.src.offset(p.src_shape, (0, 0, h.cut, w.cut))
    inner = Conv2dProblem(
        n=p.n,
        ic=p.oc,
        ih=p.oh - h.cut,
        iw=p.ow - w.cut,
        oc=p.ic,
        kh=h.taps,
        kw=w.taps,
        ph=h.begin,
        pw=w.begin,
        ph_r=h.end - (p.oh - h.cut),
        pw_r=w.end - (p.ow - w.cut),
        dh=h.dilation,
        dw=w.dilation,
        g=p.g,
    )
    return _Part(request.of(inner, src, dst), start, first, ((h.tap, h.step), (w.tap, w.step)))


_NO_EPILOGUE = Epilogue()
_NCHW = Layout("abcd")  # of planes
_WORKSPACE = ACT.index + 1  # the number of its buffer
WORKSPACE = 16 << 20  # bytes of planes that are not interleaved yet


def backward_data_row(of: Row, fills: Row) -> Row:
    """The row that computes a gradient by the kernel of a forward row.

    fills: the forward row that convolves padding, where no tap reaches a pixel.
    """

    def make(request: Request) -> Primitive | Reason:
        made, interleaves = [], _has_planes(request)
        if interleaves and (images := _images_at_once(request)) < request.problem.n:
            parts = Parts.by(request.problem, request.src, request.dst, images)
            inner = make(request.of(parts.problem, parts.src, parts.dst))
            return inner if isinstance(inner, Reason) else of_parts(parts, request, 0, CONV)(inner)
        for part in _parts(request, interleaves):
            found = (fills if part.taps is None else of).make(part.request)
            if isinstance(found, Reason):
                return found
            made.append((part, found))
        pieces = tuple(TapsPiece(part.request.problem, each.form, part.taps) for part, each in made)
        dot = next((each.form.dot for part, each in made if part.taps is not None), made[0][1].form.dot)
        form = WeightForm(Layout("abcde"), 0, dot=dot, pieces=pieces)
        size = request.types.dst.itemsize * math.prod(request.problem.dst_shape) if interleaves else 0
        moved = request.machine.move_seconds(size, size) / request.threads
        return Primitive(
            cost=lambda: moved + sum(each.seconds for _, each in made),
            make=lambda epilogue=_NO_EPILOGUE: _placed(request, form, made, epilogue),
            weights=form,
            workspace=(_plane_offsets(request, [part for part, _ in made])[-1],) if interleaves else (),
        )

    error = of.error
    return Row(
        name=of.name.replace("conv_", "conv_backward_data_", 1),
        op="conv2d_backward_data",
        make=make,
        dtypes=_TYPES.intersection(of.dtypes or ()),
        reference=of.reference,
        algorithm=of.algorithm,
        error=None if error is None else lambda problem: error(exchanged_problem(problem)),
    )


def _images_at_once(request: Request) -> int:
    """The most images that divide all of them and whose planes fit the workspace; or one."""
    n, *sizes = request.problem.dst_shape
    most = max(1, WORKSPACE // (request.types.dst.itemsize * math.prod(sizes)))
    return next(images for images in range(min(n, most), 0, -1) if n % images == 0)


_TYPES = frozenset(str(types) for types in (*map(Types.all, FLOATS), *HALVES))


def _plane_offsets(request: Request, parts: list[_Part]) -> list[int]:
    """Where the planes of each part begin in the workspace, and its end, in bytes."""
    sizes = [
        0 if part.planes is None else request.types.dst.nbytes(_NCHW.size(part.request.problem.dst_shape))
        for part in parts
    ]
    return list(itertools.accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))


def _placed(
    request: Request, form: WeightForm, made: list[tuple[_Part, Primitive]], epilogue: Epilogue
) -> list[Launch]:
    """The ops of all parts, each on its part of the arrays. epilogue: without a residual."""
    assert not epilogue.residual
    p, types = request.problem, request.types
    src_end, dst_end = (
        type.nbytes(layout.size(shape))
        for type, layout, shape in ((types.src, request.src, p.src_shape), (types.dst, request.dst, p.dst_shape))
    )
    weight = form.dot.itemsize or types.wei.itemsize
    ends = form.read_bytes(p, weight), types.acc.itemsize * form.bias_elements(p)
    planes = _plane_offsets(request, [part for part, _ in made])
    found, wei, bia = [], 0, 0
    for (part, primitive), at in zip(made, planes, strict=False):
        dst = part.dst * types.dst.itemsize, dst_end
        moved = {
            SRC.index: (part.src * types.src.itemsize, src_end),
            WEI.index: (wei, ends[0]),
            BIA.index: (bia * types.acc.itemsize, ends[1]),
            DST.index: dst if part.planes is None else (at, planes[-1]),
        }
        launches = [launch.with_offsets(moved) for launch in primitive.launches(epilogue)]
        found += [launch.with_buffers({DST.index: _WORKSPACE}) for launch in launches] if part.planes else launches
        inner = part.request.problem
        wei += -(-primitive.form.read_bytes(inner, weight) // ALIGNED) * ALIGNED
        bia += -(-primitive.form.bias_elements(inner) // ALIGNED) * ALIGNED
    if planes[-1]:
        found.append(_interleaving(request, [part for part, _ in made], planes))
    return found


# ---------------------------------------------------------------- planes of the workspace


def _interleaving(request: Request, parts: list[_Part], begins: list[int]) -> Launch:
    p, itemsize, d = request.problem, request.types.dst.itemsize, request.destination
    table = np.zeros((min(p.sh, p.ih), min(p.sw, p.iw), len(InterleavedPlanes.fields)), np.int64)
    for part, at in zip(parts, begins, strict=False):
        if part.planes is None:
            continue
        h, w = part.planes
        strides = geometry(_NCHW, part.request.problem.dst_shape, itemsize)
        table[h.first, w.first] = InterleavedPlanes(
            at=at, n=strides.n, channel=strides.block, row=strides.row, first=w.first, size=w.size
        )
    planes = p.n * p.ic
    parts_of_plane = max(1, min(p.ih // p.sh, 4 * request.threads // max(1, planes)))
    args = InterleaveArgs(
        src=Buffer(_WORKSPACE),
        dst=DST,
        planes=OWN_TABLE,
        channels=p.ic,
        parts=parts_of_plane,
        rows=p.ih,
        n=d.n,
        channel=d.block,
        row=d.row,
        sh=p.sh,
        sw=p.sw,
        begins=table.shape[0],
        columns=table.shape[1],
    )
    tasks, lanes = planes * parts_of_plane, request.machine.isa.vector_bytes // itemsize
    return Launch(interleave_rows(itemsize, lanes), args, tasks, max(1, tasks // 64), 0, table.reshape(-1))
