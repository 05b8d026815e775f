"""What a row of the kernel table is, and what it prepares for a problem."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy.typing as npt

from blockconv.core.layout import LARGEST_BLOCK, Layout
from blockconv.core.types import Types
from blockconv.kernels.batches import Parts
from blockconv.kernels.common.activation import ActivationKind
from blockconv.kernels.common.dot import MULTIPLY_ADD, Dot
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.one_pixel import columns_layout, columns_problem, has_images_of_one_pixel
from blockconv.kernels.transposed import (
    has_h_inside_w,
    transposed_layout,
    transposed_problem,
    transposed_taps,
)
from blockconv.runtime import Op

__all__ = ["Epilogue", "Primitive", "Row", "Transform", "WeightForm", "same_layout_row"]


TRANSPOSABLE = ("conv2d", "pool2d")  # ops that are the same of a transposed image
WINDOWS = (*TRANSPOSABLE, "pool2d_indices")  # whose kernels address pixels and channels by strides and one block


class Transform(NamedTuple):
    """op(problem): from packed weights (buffer 0) to what a kernel reads (buffer 1).

    nbytes(problem): of that. seconds(problem): predicted for the op, beside moving the bytes.
    """

    op: Callable[[Any], Op]
    nbytes: Callable[[Any], int]
    seconds: Callable[[Any], float]


class WeightForm(NamedTuple):
    """How a kernel wants weights and bias.

    layout: of the weights, over (G, O/G, I/G, H, W). bias: elements a group, the end zero-padded; `sharing` groups,
    where they share a vector, count as one.
    transform: how what the kernel reads is computed from weights in this layout; None where it reads these. dot: the
    multiply-accumulate, which may want weights wider than they are given, and a source's zero point in the bias.
    order: order(problem) is the output channel of each element of the bias, -1 for none, where they lie otherwise.
    """

    layout: Layout
    bias: int
    sharing: int = 1
    transform: Transform | None = None
    dot: Dot = MULTIPLY_ADD
    order: Callable[[Any], npt.NDArray[Any]] | None = None

    def packed_bytes(self, problem: Any, itemsize: int) -> int:
        """Bytes of a problem's weights in this layout."""
        return itemsize * self.layout.size(problem.grouped_wei_shape)

    def read_bytes(self, problem: Any, itemsize: int) -> int:
        """Bytes of what the kernel reads."""
        return self.packed_bytes(problem, itemsize) if self.transform is None else self.transform.nbytes(problem)


class Epilogue(NamedTuple):
    """What a convolution does with a finished accumulator: adds a residual, and activates.

    activation: the kind of activation that the kernel is compiled for; which one, and its parameters, is a buffer.
    rounding: a `Rounding`, where integers are stored.
    shifted: whether a float32 of each output channel is added to what scales make of integers, before the residual.
    """

    activation: int = 0
    residual: bool = False
    rounding: int = 0
    shifted: bool = False

    def kind(self, types: Types) -> int:
        """The activation that a kernel is compiled for: one that bounds 8 bits is part of their bounds."""
        bounded = self.activation == ActivationKind.CLIP and types.dst.itemsize == 1
        return 0 if bounded else self.activation


@dataclass(frozen=True)
class Primitive:
    """A kernel that is prepared for one problem, as oneDNN's primitive descriptors are: nothing is worked out again.

    cost(): predicted seconds. weights: what to pack, for an op that has weights. make(): the ops, whose kernels are
    compiled then, or read from the cache. blocking: how the kernel cuts the problem, where it does.
    """

    cost: Callable[[], float]
    make: Callable[[], Sequence[Op]]
    weights: WeightForm | None = None
    blocking: Any = None

    def ops(self) -> tuple[Op, ...]:
        """What is run, made anew at each call; the options and buffers belong to the op (see its family's rows)."""
        return tuple(self.make())

    @functools.cached_property
    def seconds(self) -> float:
        """Predicted, on as many threads as it was prepared for."""
        return self.cost()

    @property
    def form(self) -> WeightForm:
        """What to pack, of a kernel that has weights."""
        assert self.weights is not None
        return self.weights


@dataclass(frozen=True)
class Row:
    """One kernel, as tests, benchmarks, the dispatcher and `explain` see it.

    op: "reorder", "conv2d", "pool2d", ... dtypes: the element types that it is for, as `str(Types)` names them; None is
    any.
    why_not(problem, src, dst, types): None if the kernel solves the problem of these types from and to these layouts,
    else a sentence; asked of types that it takes.
    make(problem, src, dst, types, threads, **options): the `Primitive`; options belong to the op, and stand in its
    family's rows.
    reference: covers everything, and is slow.
    whole_blocks: where images are in blocks, it takes these as dimensions like others, and a last one as if it were
    whole; what that has no image for is filled afterwards.
    algorithm: "direct", by the definition, or "winograd": what users ask for by name.
    error(problem): for a kernel that does not compute by the definition, its largest error against float64,
    relative to the largest output, as measured; it may also spread a NaN or infinity over its neighbours.
    """

    name: str
    op: str
    make: Callable[..., Primitive]
    why_not: Callable[[Any, Layout, Layout, Types], str | None] = lambda problem, src, dst, types: None
    dtypes: frozenset[str] | None = None
    reference: bool = False
    whole_blocks: bool = False
    algorithm: str = "direct"
    error: Callable[[Any], float] | None = None

    def rejects(self, problem: Any, src: Layout, dst: Layout, types: Types) -> str | None:
        """None if the kernel solves the problem from and to these layouts, else why it does not, in a sentence."""
        if not self.takes(types):
            return f"is not for {types}"
        for layout in (src, dst):
            if self.op in WINDOWS and not layout.is_native:
                return f"is for layouts with at most one block, of up to {LARGEST_BLOCK} channels, not for {layout}"
        if self.op == "conv2d" and has_images_of_one_pixel(problem, src, dst):
            return self.rejects(columns_problem(problem), columns_layout(src), columns_layout(dst), types)
        if self.op in TRANSPOSABLE and has_h_inside_w(dst):
            return self.rejects(transposed_problem(problem), transposed_layout(src), transposed_layout(dst), types)
        parts = self._parts(problem, src, dst)
        if parts is not None:
            problem, src, dst = parts.problem, parts.src, parts.dst
        return self.why_not(problem, src, dst, types)

    def _parts(self, problem: Any, src: Layout, dst: Layout) -> Parts | None:
        """What the kernel is asked instead, where images are in blocks."""
        if src.blocks[0] * dst.blocks[0] == 1:
            return None
        if self.op in WINDOWS:
            return Parts.of(problem, src, dst, whole=self.op != "conv2d" and src == dst and not self.reference)
        if not self.whole_blocks or src != dst or not dst.is_native or problem.dst_shape[0] % dst.blocks[0] == 0:
            return None
        return Parts.of(problem, src, dst, whole=True)

    def takes(self, types: Types) -> bool:
        """Whether the kernel is for these element types."""
        return self.dtypes is None or str(types) in self.dtypes

    def prepare(
        self, problem: Any, src: Layout, dst: Layout, types: Types, threads: int = 1, **options: Any
    ) -> Primitive:
        """The kernel for a problem that it takes."""
        if self.op == "conv2d" and has_images_of_one_pixel(problem, src, dst):
            asked = columns_problem(problem), columns_layout(src), columns_layout(dst)
            return self.prepare(*asked, types, threads, **options)
        if self.op in TRANSPOSABLE and has_h_inside_w(dst):
            asked = transposed_problem(problem), transposed_layout(src), transposed_layout(dst)
            primitive = self.prepare(*asked, types, threads, **options)
            form = primitive.weights
            form = None if form is None else form._replace(layout=transposed_taps(form.layout))
            return replace(primitive, weights=form)
        parts = self._parts(problem, src, dst)
        if parts is None:
            return self.make(problem, src, dst, types, threads, **options)
        primitive = self.make(parts.problem, parts.src, parts.dst, types, threads, **options)
        given = options.get("quantizations")
        fill = given[-1].zero_point if given and given[-1] else 0
        return replace(
            primitive,
            cost=lambda: parts.seconds(primitive.seconds, types),
            make=lambda: parts.ops(primitive.ops(), self.op, types, fill),
        )


def same_layout_row(
    name: str,
    op: str,
    dtypes: Iterable[str],
    seconds: Callable[..., float],
    ops: Callable[..., list[Op]],
    why_not: Callable[[Any, Layout, Layout, Types], str | None] = same_layout_why_not,
) -> Row:
    """A row of an op whose arrays are of one type, and whose destination lies as the source does.

    seconds(problem, layout, element, threads): predicted. ops(problem, layout, element, threads, **options).
    """

    def make(problem: Any, src: Layout, dst: Layout, types: Types, threads: int, **options: Any) -> Primitive:
        asked = problem, dst, types.src, threads
        return Primitive(lambda: seconds(*asked), lambda: ops(*asked, **options))

    return Row(name, op, make, why_not, frozenset(dtypes), whole_blocks=True)
