"""Rows of the kernel table, and the primitives that they prepare for a problem."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from blockconv.core.activation import ActivationKind
from blockconv.core.checks import Pair
from blockconv.core.errors import UnsupportedError
from blockconv.core.layout import LARGEST_BLOCK, Layout
from blockconv.core.record import frozen
from blockconv.core.types import Array, Types
from blockconv.kernels.batches import Parts
from blockconv.kernels.common.dot import MULTIPLY_ADD, Dot
from blockconv.kernels.common.operands import CONV
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.common.taps import TapRange, reached_problem, reached_taps
from blockconv.kernels.rewritten import (
    columns_layout,
    columns_problem,
    has_images_of_one_pixel,
    runs_down,
    transposed_layout,
    transposed_problem,
    transposed_taps,
)
from blockconv.runtime import Launch

CONVOLUTIONS = ("conv2d", "conv2d_backward_data")
TRANSPOSABLE = (*CONVOLUTIONS, "pool2d")  # ops that are the same of a transposed image
WINDOWS = (*TRANSPOSABLE, "pool2d_indices")
# Ops whose kernels address pixels and channels by strides and one block.
STRIDED = (*WINDOWS, "conv2d_backward_weights", "pool2d_backward")


class Transform(NamedTuple):
    """op(problem): from packed weights (buffer 0) to the form that a kernel reads (buffer 1).

    nbytes(problem): of that.
    seconds(problem): predicted for the op, beside moving the bytes.
    turned(problem, is_last): the op that reads row-major weights with input and output channels exchanged and taps in
        reverse order, if there is one. is_last: it reads channels_last ones.
    """

    launch: Callable[[Any], Launch]
    nbytes: Callable[[Any], int]
    seconds: Callable[[Any], float]
    turned: Callable[[Any, bool], Launch] | None = None


class WeightForm(NamedTuple):
    """How a kernel wants weights and bias.

    layout: of the weights, over (G, O/G, I/G, H, W).
    bias: elements a group, the end zero-padded; `sharing` groups, where they share a vector, count as one.
    transform: computes the form that the kernel reads from weights in this layout; None where it reads these.
    dot: the multiply-accumulate, which may want weights wider than they are given, and a source's zero point in the
        bias.
    order: order(problem) is the output channel of each element of the bias, -1 for none; None: the order of channels.
    pieces: several convolutions that compute the op, or one by some of the taps. They replace all fields but `dot`.
    kept: ranges of rows and of columns of taps. Each has a bias, which includes the source's zero point times the sum
        of these taps' weights. Empty: one bias, of all taps.
    """

    layout: Layout
    bias: int
    sharing: int = 1
    transform: Transform | None = None
    dot: Dot = MULTIPLY_ADD
    order: Callable[[Any], Array] | None = None
    pieces: tuple[TapsPiece, ...] = ()
    kept: tuple[tuple[TapRange, TapRange], ...] = ()

    def bias_elements(self, problem) -> int:
        """Elements of a problem's packed bias."""
        if self.pieces:
            return sum(-(-of.form.bias_elements(of.problem) // ALIGNED) * ALIGNED for of in self.pieces)
        if self.order is not None:
            return len(self.order(problem))
        return -(-problem.g // self.sharing) * self.bias * max(1, len(self.kept))

    def packed_bytes(self, problem, itemsize: int) -> int:
        """Bytes of a problem's weights in this layout."""
        return itemsize * self.layout.size(problem.grouped_wei_shape)

    def read_bytes(self, problem, itemsize: int) -> int:
        """Bytes of the weights that the kernel reads."""
        if self.pieces:
            return sum(-(-of.form.read_bytes(of.problem, itemsize) // ALIGNED) * ALIGNED for of in self.pieces)
        return self.packed_bytes(problem, itemsize) if self.transform is None else self.transform.nbytes(problem)


class TapsPiece(NamedTuple):
    """A convolution by some of the taps. It is one of several that compute the gradient of an input, or a convolution
    without the taps that find only padding.

    problem: a `Conv2dProblem`.
    form: of its weights.
    taps: for rows and for columns of all taps, the index of its first tap and the step to the next. None: it has no
        taps, and its weights are zero.
    turned: whether it is of a gradient. Its input channels are then the whole's output channels, and its stride is 1.
    """

    problem: Any
    form: WeightForm
    taps: tuple[Pair, Pair] | None
    turned: bool = True

    def of(self, weight: Array) -> Array:
        """Its weights among the whole's, (O, I/G, KH, KW), where it is not turned."""
        assert self.taps is not None
        (row, _), (col, _) = self.taps
        return weight[:, :, row : row + self.problem.kh, col : col + self.problem.kw]


ALIGNED = 128  # bytes, or elements; the packed weights and biases of pieces are multiples of these


class Epilogue(NamedTuple):
    """The steps after a finished accumulator of a convolution: a residual is added, then the activation.

    activation: the kind of activation that the kernel is compiled for; which one, and its parameters, is a buffer.
    rounding: a `Rounding`, where integers are stored.
    shifted: how many float32 of each output channel follow its scale: 1 is added to scaled integers, before the
        residual. With 2 these are rounded before, as if they were stored, and multiplied by the second.
    """

    activation: int = 0
    residual: bool = False
    rounding: int = 0
    shifted: int = 0

    def kind(self, types: Types, store_width: int) -> int:
        """The activation that a kernel is compiled for.

        Bounds clip 8 bits. Floats have one kernel for any activation. Planes have two: one clips after the transpose,
        the other computes activations before it. store_width: as in `Tile`.
        """
        if types.dst.is_float:
            return max(self.activation, ActivationKind.CLIP) if store_width == 1 else ActivationKind.OTHER
        bounded = self.activation == ActivationKind.CLIP and types.dst.itemsize == 1
        return 0 if bounded else self.activation


@frozen
class Primitive:
    """A kernel that is prepared for one problem, as oneDNN's primitive descriptors are: nothing is worked out again.

    cost(): predicted seconds.
    weights: the form of weights, for an op that has some.
    make(): the launches, whose kernels are compiled then, or read from the cache. For a convolution, make(epilogue)
        gives the launches with an `Epilogue`, which no decision depends on.
    blocking: how the kernel cuts the problem, where it does.
    workspace: bytes of memory that the launches need, one buffer each, after those of the operands.
    fails: whether the launches may fail. The last buffer of the workspace is then zero when they begin. One that fails
        writes there; its first word is not zero afterwards. `Op.failure` makes an error of the words.
    """

    cost: Callable[[], float]
    make: Callable[..., Sequence[Launch]]
    weights: WeightForm | None = None
    blocking: Any = None
    workspace: tuple[int, ...] = ()
    fails: bool = False

    def launches(self, *epilogue: Epilogue) -> tuple[Launch, ...]:
        """The launches, made anew at each call. Buffers belong to the op (see its family's rows).

        epilogue: one at most, of a convolution.
        """
        return tuple(self.make(*epilogue))

    @functools.cached_property
    def seconds(self) -> float:
        """Predicted, on as many threads as it was prepared for."""
        return self.cost()

    @property
    def form(self) -> WeightForm:
        """The form of the weights, for a kernel that has some."""
        assert self.weights is not None
        return self.weights


@dataclass(frozen=True, eq=False)
class Row:
    """One kernel, as tests, benchmarks, the dispatcher and `explain` see it.

    op: "reorder", "conv2d", "pool2d", ...
    make(request, **options): the `Primitive`, or the reason why the kernel does not take the request.
        It sees only types that the row is for. The options belong to the op; its family's rows document them.
    dtypes: the element types that it is for, as `str(Types)` names them; None is any.
    reference: it covers every problem, and is slow.
    whole_blocks: whether it takes blocks of images as dimensions like others, and a last block as if it were whole.
        Images that do not exist are filled afterwards.
    algorithm: "direct", by the definition, or "winograd": what users ask for by name.
    error(problem): for a kernel that does not compute by the definition, its largest error against float64 and direct
        convolution's, relative to the largest output, as measured. This kernel may also spread a NaN or infinity over
        its neighbours.
    least(request): predicted seconds that no tile goes below, on one thread: a bound that costs less than a decision.
        It sees no layouts. Infinite: the kernel takes such a problem in no layout.
    """

    name: str
    op: str
    make: Callable[..., Primitive | Reason]
    dtypes: Collection[str] | None = None
    reference: bool = False
    whole_blocks: bool = False
    algorithm: str = "direct"
    error: Callable[[Any], tuple[float, float]] | None = None
    least: Callable[[Request], float] = lambda request: 0.0

    def takes(self, types: Types) -> bool:
        """Whether the kernel is for these element types."""
        return self.dtypes is None or str(types) in self.dtypes

    def decide(self, request: Request, **options) -> Primitive | Reason:
        """The kernel for a request, or why it does not take it. Whether and how a kernel runs is decided here alone."""
        if not self.takes(request.types):
            return f"does not take {request.types}"
        if self.op in STRIDED and not (request.src.is_native and request.dst.is_native):
            other = request.dst if request.src.is_native else request.src
            return f"needs layouts with at most one block, of up to {LARGEST_BLOCK} channels, unlike {other}"
        again = self._rewritten(request, options)
        if again is None:
            return self.make(request, **options)
        inner = self.make(again.request, **options) if again.last else self.decide(again.request, **options)
        return inner if isinstance(inner, Reason) else again.primitive(inner)

    def prepare(
        self, problem, src: Layout, dst: Layout, types: Types, threads: int = 1, anchor=None, **options
    ) -> Primitive:
        """The kernel for a problem on this machine. Raises UnsupportedError if the kernel does not take it.

        anchor: as in `Request`.
        """
        return self.prepared(Request(problem, src, dst, types, threads, anchor=anchor), **options)

    def prepared(self, request: Request, **options) -> Primitive:
        """The kernel for a request. Raises UnsupportedError if the kernel does not take it."""
        found = self.decide(request, **options)
        if isinstance(found, Reason):
            raise UnsupportedError(f"{self.name} from {request.src} to {request.dst}, {request.types}: {found}")
        return found

    def rejects(self, problem, src: Layout, dst: Layout, types: Types) -> Reason | None:
        """Why the kernel does not take a problem on this machine; None if it does."""
        found = self.decide(Request(problem, src, dst, types))
        return found if isinstance(found, Reason) else None

    def _rewritten(self, request: Request, options: Mapping[str, Any]) -> Rewritten | None:
        """The request as kernels take it: without taps that find nothing but padding, images of one pixel as columns, w
        inside h, blocks of images in parts."""
        p, src, dst = request.problem, request.src, request.dst
        cuts = self.op == "conv2d" and self.algorithm == "direct" and not self.reference
        if cuts and request.types.has_finite_weights and reached_taps(p) != ((0, p.kh), (0, p.kw)):
            return Rewritten(request.changed(reached_problem, src, dst), functools.partial(_of_reached_taps, p))
        if self.op in CONVOLUTIONS and has_images_of_one_pixel(p, src, dst):
            return Rewritten(request.changed(columns_problem, columns_layout(src), columns_layout(dst)))
        if self.op in TRANSPOSABLE and runs_down(p, dst):
            turned = request.changed(transposed_problem, transposed_layout(src), transposed_layout(dst))
            return Rewritten(turned, _with_transposed_taps)
        parts = self._parts(p, src, dst)
        if parts is None:
            return None
        given = options.get("quantizations")
        fill = given[-1].zero_point if given and given[-1] else 0

        def part(whole):
            found = self._parts(whole, src, dst)
            return whole if found is None else found.problem

        back = of_parts(parts, request, fill, CONV if self.op in CONVOLUTIONS else None)
        return Rewritten(request.changed(part, parts.src, parts.dst), back, last=True)

    def _parts(self, problem, src: Layout, dst: Layout) -> Parts | None:
        """The parts that a problem over blocks of images is solved in."""
        if src.blocks[0] * dst.blocks[0] == 1:
            return None
        if self.op in WINDOWS:
            whole = self.op not in CONVOLUTIONS and src == dst and not self.reference
            return Parts.of(problem, src, dst, whole)
        if not self.whole_blocks or src != dst or not dst.is_native or problem.dst_shape[0] % dst.blocks[0] == 0:
            return None
        return Parts.of(problem, src, dst, whole=True)


def of_parts(parts: Parts, request: Request, fill: int, operands) -> Callable[[Primitive], Primitive]:
    """From a part's primitive to the whole's. fill, operands: as `Parts.launches` has them."""
    return lambda part: replace(
        part,
        cost=lambda: parts.seconds(request.machine, part.seconds, request.types),
        make=lambda *epilogue: parts.launches(part.launches(*epilogue), request.types, fill, operands),
    )


class Rewritten(NamedTuple):
    """A request in another form, and how the primitive for that form becomes the one for the first request.

    last: no other rewriting applies to it.
    """

    request: Request
    primitive: Callable[[Primitive], Primitive] = lambda primitive: primitive
    last: bool = False


def _with_transposed_taps(primitive: Primitive) -> Primitive:
    form = primitive.weights
    return primitive if form is None else replace(primitive, weights=_transposed_form(form))


def _of_reached_taps(whole, primitive: Primitive) -> Primitive:
    """The primitive of the whole problem, whose weights are those of `reached_problem`."""
    (row, _), (col, _) = reached_taps(whole)
    form = primitive.form
    piece = TapsPiece(reached_problem(whole), form, ((row, 1), (col, 1)), turned=False)
    return replace(primitive, weights=WeightForm(Layout("abcde"), 0, dot=form.dot, pieces=(piece,)))


def _transposed_form(form: WeightForm) -> WeightForm:
    pieces = tuple(
        of._replace(
            problem=transposed_problem(of.problem), form=_transposed_form(of.form), taps=of.taps and of.taps[::-1]
        )
        for of in form.pieces
    )
    kept = tuple((cols, rows) for rows, cols in form.kept)
    return form._replace(layout=transposed_taps(form.layout), pieces=pieces, kept=kept)


def same_layout_row(
    name: str,
    op: str,
    dtypes: Collection[str],
    seconds: Callable[[Request], float],
    launches: Callable[..., list[Launch]],
    why_not: Callable[[Request], Reason | None] = same_layout_why_not,
) -> Row:
    """A row of an op whose arrays are of one type, and whose destination has the layout of the source.

    seconds(request): predicted. launches(request, **options): bound.
    """

    def make(request: Request, **options) -> Primitive | Reason:
        return why_not(request) or Primitive(lambda: seconds(request), lambda: launches(request, **options))

    return Row(name, op, make, dtypes, whole_blocks=True)
