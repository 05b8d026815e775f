"""Formulas that front ends share: what ops of models become, as ops of a network."""

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, get_args

import numpy as np

from blockconv.core.activation import activation
from blockconv.core.checks import MOST_DIMENSIONS, Pair, Shape, along, of_rank
from blockconv.core.element_problem import IndexProblem
from blockconv.core.eltwise_problem import RecurrentKind
from blockconv.core.errors import NetworkError, said_by
from blockconv.core.quantization import Quantization
from blockconv.core.types import BYTES, NUMBERS, Array, FloatType
from blockconv.network.emitter import Emitter, Unsupported
from blockconv.network.ops import (
    Activate,
    Affine,
    Attention,
    Binary,
    Cast,
    Concat,
    Conv2d,
    Convert,
    Convolution,
    Dequantize,
    Gather,
    GroupNorm,
    MatMul,
    Op,
    Pad,
    PixelShuffle,
    Recurrent,
    Reduce,
    ReduceMean,
    Reshape,
    Slice,
    Transpose,
    Where,
    blocks_of_columns,
)
from blockconv.network.ops.rule import Axes, Tensor, Tensors

MOST_INDICES = 1 << 16  # of a constant gather
MOST_COPIES = 64  # along an axis, of a value that is repeated
MOST_ONES = 1 << 22  # elements of a constant by which a value is broadcast
GELU = {"none": "gelu", "tanh": "gelu_tanh"}  # by the word for the approximation
Convolved = tuple[Convolution, Tensors]  # a convolution, and its inputs after the first
PLAIN: Convolved = Conv2d(), ()
_OF_BOOLEANS = {"add": "or", "max": "or", "mul": "and", "min": "and"}
_MIRRORED = {"greater": "less", "greater_equal": "less_equal"}  # kinds with their operands the other way round


def reduced_shape(shape: Shape, axes: Collection[int], keepdims: bool) -> Shape:
    """The shape after a reduction over axes, which keep size 1 or go."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keepdims or axis not in axes)


class Translation:
    """One node of a front end's model, while it becomes ops.

    emitter: where the ops go.
    name: the node's name. Names of its ops and constants begin with it.
    title: how errors call the node.
    """

    def __init__(self, emitter: Emitter, name: str, title: str) -> None:
        self.emitter, self.name, self.title = emitter, name, title
        self._made: set[str] = set()

    def error(self, argument: str, value: object, rule: str, remedy: str = "") -> NetworkError:
        """The error for an attribute or an operand that this node cannot have."""
        return NetworkError(self.title, argument, value, rule, remedy)

    def constant(self, value: Array, what: str) -> Tensor:
        """A constant of this node. what: the end of its name."""
        name = self.emitter.value_name(f"{self.name}.{what}")
        return self.emitter.constant(name, np.asarray(value))

    def emit(self, attributes: Op, *inputs: Tensor, parameters: Tensors = (), helps: bool = False) -> Tensor:
        """An op, and the value that it makes. It has this node's name unless it only helps."""
        name = f"{self.name}.{attributes.op}" if helps else self.name
        made = self.emitter.emit(attributes, *inputs, parameters=parameters, name=name, title=self.title)
        self._made.add(made.name)
        return made

    helper = functools.partialmethod(emit, helps=True)

    def number(self, value: float, like: Tensor) -> Tensor:
        """A constant number of the type of `like`."""
        return self.constant(np.asarray(value).astype(like.type.dtype), "number")

    def give(self, name: str, tensor: Tensor) -> None:
        """The model calls this value of the node `name`. A value that the node only passes on keeps its first name."""
        if tensor.name in self._made:
            self._made.discard(tensor.name)
            tensor = self.emitter.rename(tensor.name, name)
        self.emitter.values[name] = tensor

    # -- each element by itself

    def apply(self, act: Any, x: Tensor, helps: bool = False) -> Tensor:
        """An activation or a function of each element. act: its name, or (name, *parameters)."""
        return self.emit(Activate(activation(act, alone=True)), x, helps=helps)

    def _values(self, *given: Tensor | float) -> list[Tensor]:
        """The values. One may be a number, which becomes a constant of the others' type."""
        like: Any = next(x for x in given if not isinstance(x, (int, float)))
        return [self.number(x, like) if isinstance(x, (int, float)) else x for x in given]

    def binary(self, kind: str, a: Tensor | float, b: Tensor | float) -> Tensor:
        """a and b, broadcast; one may be a number. Integers wrap around. Arithmetic of booleans is logic.

        kind: a `BinaryKind`, "not_equal", "greater" or "greater_equal".
        """
        if kind == "not_equal":
            return self.inverted(self.equal(a, b))
        if kind in _MIRRORED:
            return self.binary(_MIRRORED[kind], b, a)
        values = self._values(a, b)
        known: Any = _OF_BOOLEANS.get(kind, kind) if values[0].type.name == "bool" else kind
        return self.emit(Binary(known), *values)

    add = functools.partialmethod(binary, "add")
    sub = functools.partialmethod(binary, "sub")
    mul = functools.partialmethod(binary, "mul")
    div = functools.partialmethod(binary, "div")
    less = functools.partialmethod(binary, "less")
    equal = functools.partialmethod(binary, "equal")

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """x times a number."""
        return x if factor == 1 else self.mul(x, factor)

    def where(self, condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
        """x where a condition is true, and y elsewhere, broadcast; one may be a number."""
        return self.emit(Where(), condition, *self._values(x, y))

    def inverted(self, x: Tensor) -> Tensor:
        """Booleans that are true where x is not, or the bits of integers inverted."""
        return self.binary("xor", x, self.constant(np.invert(np.zeros((), x.type.dtype)), "ones"))

    def is_nan(self, x: Tensor) -> Tensor:
        """Whether each element is a NaN."""
        return self.inverted(self.equal(x, x))

    def is_infinite(self, x: Tensor, signs: Sequence[int]) -> Tensor:
        """Whether each element is an infinity of one of these signs."""
        if len(signs) > 1:
            return self.equal(self.magnitude(x), math.inf)
        return self.equal(x, signs[0] * math.inf) if signs else self.less(x, -math.inf)  # which no number is

    def negated(self, x: Tensor) -> Tensor:
        """-x; integers wrap around."""
        return self.mul(x, -1) if x.type.is_float else self.sub(0, x)

    def magnitude(self, x: Tensor) -> Tensor:
        """|x|; the least integer stays."""
        if x.type.is_float:
            return self.apply("abs", x)
        return x if x.type.name.startswith("uint") else self.binary("max", x, self.negated(x))

    def sign(self, x: Tensor, keeps_nan: bool) -> Tensor:
        """-1, 0 or 1. The sign of a NaN is NaN, or 0."""
        zero = self.number(0, x)
        y = x if keeps_nan else zero
        if not x.type.name.startswith("uint"):
            y = self.where(self.less(x, zero), -1, y)
        return self.where(self.less(zero, x), 1, y)

    def above(self, x: Tensor, least: float) -> Tensor:
        """x where it is more than `least`, else 0."""
        return self.where(self.less(least, x), x, 0)

    def fmod(self, a: Tensor, b: Tensor) -> Tensor:
        """The remainder of a division that rounds towards 0."""
        if a.type.is_float:
            return self.binary("fmod", a, b)
        return self.sub(a, self.mul(self.div(a, b), b))

    def clipped(self, x: Tensor, low: float | Tensor | None, high: float | Tensor | None) -> Tensor:
        """x between bounds: numbers or values, not one of each; None: no bound. The upper bound counts last."""
        if not any(isinstance(bound, Tensor) for bound in (low, high)):
            bottom, top = (end if bound is None else bound for bound, end in ((low, -math.inf), (high, math.inf)))
            return self.apply(("clip", min(bottom, top), top), x)  # type: ignore[type-var]
        if isinstance(low, Tensor):
            x = self.binary("max", x, low)
        return self.binary("min", x, high) if isinstance(high, Tensor) else x

    def elu(self, x: Tensor, alpha: float, scale: float = 1.0) -> Tensor:
        """scale * (x, or alpha * (exp(x) - 1) where x is negative). The usual one is Celu, which a convolution takes
        in."""
        return self.apply("celu" if alpha == scale == 1 else ("elu", alpha, scale), x)

    def converted(self, x: Tensor, name: str) -> Tensor:
        """x as numbers of the type of this name. Beyond an integer's bounds floats become the bound, and NaN 0."""
        if name == x.type.name:
            return x
        if name == "float32" and x.type.name in ("int32", *BYTES):
            return self.emit(Dequantize(Quantization(1.0)), x)
        if {name, x.type.name} <= {*get_args(FloatType)}:
            return self.emit(Cast(name), x)  # type: ignore[arg-type]
        if not {name, x.type.name} <= {*NUMBERS}:
            raise Unsupported(f"from {x.type} to {name}")
        return self.emit(Convert(name), x)

    # -- along axes

    def reduced(self, x: Tensor, kind: Any, axes: Sequence[int], keepdims: bool) -> Tensor:
        """A reduction over axes. kind: a `ReduceKind` or "mean"; of booleans "max" or "min"."""
        if x.type.name not in NUMBERS or (x.type.name == "bool" and kind not in ("max", "min")):
            raise Unsupported(f"of {x.type}")
        own = ReduceMean(tuple(axes), keepdims) if kind == "mean" else Reduce(tuple(axes), keepdims, kind)
        return self.emit(own, x)

    def moments(self, x: Tensor, axes: Axes, keepdims: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """(the means over axes, the differences from them, the means of their squares).

        keepdims: whether the last keep the axes.
        """
        mean = self.emit(ReduceMean(axes, True), x)
        rest = self.sub(x, mean)
        return mean, rest, self.emit(ReduceMean(axes, keepdims), self.mul(rest, rest))

    def norm(self, x: Tensor, order: float, axes: Sequence[int], keepdims: bool) -> Tensor:
        """The root of this order of the sum of powers of it. 0: how many are not 0; infinity: the largest."""
        if order == 0:
            nonzero = self.binary("not_equal", x, 0)
            return self.reduced(self.converted(nonzero, x.type.name), "sum", axes, keepdims)
        size = x if order == 2 else self.apply("abs", x, helps=True)
        if math.isinf(order):
            return self.reduced(size, "max" if order > 0 else "min", axes, keepdims)
        y = self.reduced(self.power(size, order), "sum", axes, keepdims)
        return self.power(y, 1 / order)

    def log_sum_exp(self, x: Tensor, axes: Axes, keepdims: bool) -> Tensor:
        """The logarithm of the sum of the powers of e over axes. The largest number is taken out before."""
        bound = float(np.finfo(x.type.computed.dtype).max)  # so that infinity less infinity does not arise
        most = self.helper(Reduce(axes, True, "max"), x)
        most = self.apply(("clip", -bound, bound), most, helps=True)
        powers = self.apply("exp", self.helper(Binary("sub"), x, most), helps=True)
        y = self.apply("log", self.emit(Reduce(axes, keepdims, "sum"), powers))
        return self.add(y, self.reshape(most, y.shape))

    def power(self, x: Tensor, exponent: float) -> Tensor:
        """x to a power. The power 0.5 of minus infinity is NaN, as its root is."""
        if exponent not in (-1, -0.5, 0.5, 1, 2, 3):
            return self.apply(("pow", exponent), x)
        y = self.apply("sqrt", x) if abs(exponent) == 0.5 else x
        for _ in range(int(exponent) - 1):
            y = self.mul(y, x)
        return self.div(1, y) if exponent < 0 else y

    def leaky(self, x: Tensor, slope: Tensor) -> Tensor:
        """x, and slope * x where x is negative; slope broadcasts to x."""
        if np.broadcast_shapes(x.shape, slope.shape) != x.shape:
            raise self.error("slope", slope.shape, f"has to broadcast to the input's shape, {x.shape}")
        known = self.emitter.array(slope.name)
        if known is not None:
            known = np.asarray(known, x.type.dtype)
            if known.size and (known == known.flat[0]).all():
                return self.apply(("leaky_relu", float(known.flat[0])), x)
            slope = self.constant(known, "slope")
            if np.all((known <= 1) & (known != 0)):  # the larger of x and slope * x; 0 * infinity would be NaN
                return self.binary("max", x, self.helper(Binary("mul"), x, slope))
        above = self.apply("relu", x, helps=True)
        below = self.apply(("clip", -math.inf, 0.0), x, helps=True)
        return self.add(above, self.helper(Binary("mul"), below, slope))

    # -- elements that move

    def transposed(self, x: Tensor, perm: Sequence[int], helps: bool = False) -> Tensor:
        """x with its axes in this order; x itself if they are in it."""
        perm = tuple(perm)
        return x if perm == tuple(range(len(perm))) else self.emit(Transpose(perm), x, helps=helps)

    def expanded(self, x: Tensor, shape: Shape) -> Tensor:
        """x broadcast to `shape`: by copies if large, floats times ones, others with zeros. Arithmetic reads x."""
        if np.broadcast_shapes(x.shape, shape) != shape:
            raise self.error("shape", shape, f"has to be a shape that {x.shape} broadcasts to")
        same = of_rank(x.shape, len(shape))
        if same == shape:
            return self.reshape(x, shape, helps=False)
        if x.type.name not in NUMBERS or 0 in shape:
            raise Unsupported(f"shape={shape}: an expansion of {x.type} to {math.prod(shape)} elements")
        wide = self.reshape(x, same, helps=False)
        if math.prod(shape) > MOST_ONES:
            for axis, size in reversed([*enumerate(shape)]):
                wide = wide if wide.shape[axis] == size else self.gathered(wide, axis, np.zeros(size, np.int64))
            return wide
        if not x.type.is_float:
            return self.binary("or", wide, self.constant(np.zeros(shape, x.type.dtype), "zeros"))
        return self.mul(wide, self.constant(np.ones(shape, x.type.dtype), "ones"))

    def repeated(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x repeated so often along each axis."""
        if len(counts) != x.rank or min(counts, default=1) < 0:
            raise self.error("repeats", counts, f"has to hold a number of at least 0 for each axis of {x.shape}")
        if 0 in counts:
            raise Unsupported(f"repeats={tuple(counts)}: none along an axis")
        for axis, count in enumerate(counts):
            if count > MOST_COPIES:
                x = self.gathered(x, axis, np.tile(np.arange(x.shape[axis]), count))
            elif count > 1:
                x = self.emit(Concat(axis), *[x] * count)
        return x

    def gathered(self, x: Tensor, axis: int, indices: Array) -> Tensor:
        """The elements of these indices along an axis, in place of which are the axes of `indices`."""
        size = x.shape[axis]
        for k in indices.flat:
            if not -size <= k < size:
                error = IndexProblem(x.shape, indices.shape, "along", axis).outside(int(k), 0)
                raise said_by(self.title, error, NetworkError)
        if not 0 < indices.size <= MOST_INDICES:
            raise Unsupported(f"{indices.size} indices")
        made = Gather(axis, tuple(int(k) % size for k in indices.flat))
        (first, count, step), *others = made.problem(x.shape).runs[axis]
        y = self.emit(made, x) if others or not step else self.part(x, axis, first, count, step)
        return self.reshape(y, along(x.shape, axis, *indices.shape), helps=False)

    def part(self, x: Tensor, axis: int, begin: int, size: int, step: int = 1, helps: bool = False) -> Tensor:
        """A `Slice` of x; x itself if that is all of it."""
        whole = (size, step) == (x.shape[axis], 1)
        return x if whole else self.emit(Slice(axis, begin, size, step), x, helps=helps)

    def sliced(self, x: Tensor, axis: int, *ends: int | None) -> Tensor:
        """x from a start to an end with a step along an axis, which may be negative or None, as Python slices lists."""
        taken = range(x.shape[axis])[slice(*ends)]
        return self.part(x, axis, taken.start if taken else 0, len(taken), taken.step)

    def joined(self, axis: int, parts: Sequence[Tensor]) -> Tensor:
        """Parts one after the other along an axis; the part itself if it is the only one."""
        return self.helper(Concat(axis), *parts) if len(parts) > 1 else parts[0]

    def split(self, x: Tensor, axis: int, sizes: Sequence[int], helps: bool = False) -> list[Tensor]:
        """x in parts of these sizes along an axis."""
        return [self.part(x, axis, sum(sizes[:k]), size, helps=helps) for k, size in enumerate(sizes)]

    def bordered(self, x: Tensor, pads: Sequence[Pair], value: float) -> Tensor:
        """x with a value around it: axis by axis if kernels, which copy four axes, have no way to do it at once."""
        axes = [axis for axis, ends in enumerate(pads) if any(ends)]
        apart = sum(end - axis > 1 for axis, end in itertools.pairwise((*axes, len(pads))))
        whole = len(pads) == 4 or len(axes) + apart < 4
        for part in [axes] if whole else [[axis] for axis in axes]:
            x = self.emit(Pad(tuple(ends if k in part else (0, 0) for k, ends in enumerate(pads)), value), x)
        return x

    def padded(self, x: Tensor, pads: Sequence[Pair], mode: str) -> Tensor:
        """x with (before, after) of its own elements on each axis, as `numpy.pad` has the modes edge, reflect, wrap.

        Negative ends crop first.
        """
        for axis, (before, after) in enumerate(pads):
            size, more = x.shape[axis], (max(0, before), max(0, after))
            kept = np.arange(size)[max(0, -before) : size - max(0, -after)]
            short = mode == "reflect" and max(more) >= kept.size
            if size + before + after < 0 or (any(more) and (short or not kept.size)):
                raise self.error("pads", tuple(pads), f"reach beyond the {size} elements of axis {axis}")
            if not kept.size and size:
                x = self.emit(Slice(axis, 0, 0), x)
            elif before or after:
                modes: Any = {"mode": mode} if any(more) else {}
                x = self.gathered(x, axis, np.pad(kept, more, **modes))
        return x

    def blocks_moved(self, x: Tensor, size: int, by_channel: bool = True, inverse: bool = False) -> Tensor:
        """A `PixelShuffle` of the last three axes."""
        moved = PixelShuffle((size, size), by_channel, inverse)
        if x.rank == 4:
            return self.emit(moved, x)
        *lead, c, h, w = x.shape
        y = self.helper(moved, self.reshape(x, (math.prod(lead), c, h, w)))
        return self.reshape(y, (*lead, *y.shape[1:]), helps=False)

    def reshape(self, x: Tensor, shape: Shape, helps: bool = True) -> Tensor:
        """`x` in another shape, in which one -1 is inferred; `x` itself if it has that shape."""
        given = math.prod(size for size in shape if size != -1)
        if given == 0 and -1 in shape:
            raise self.error("shape", shape, "has a -1 beside a 0, so that it can be any size")
        sizes = tuple(x.elements // given if size == -1 else size for size in shape)
        if x.shape == sizes:
            return x
        if math.prod(sizes) != x.elements:
            raise self.error("shape", sizes, f"cannot hold the {x.elements} elements of {x.shape}")
        if 0 in sizes:  # which would be the input's size there
            if x.type.is_packed:
                raise Unsupported(f"an empty tensor of {x.type}")
            return self.constant(np.zeros(sizes, x.type.dtype), "empty")
        return self.emit(Reshape(shape), x, helps=helps)

    # -- norms

    def affine(self, x: Tensor, scale: Array, shift: Array) -> Tensor:
        """x times a scale plus a shift, one of each for a channel."""
        return self._scaled(Affine(), x, scale=scale, shift=shift)

    def _scaled(self, attributes: Op, x: Tensor, **factors: Array) -> Tensor:
        """An op with factors in the type that is computed with. Their names end the constants' names."""
        dtype = x.type.computed.dtype
        parameters = tuple(self.constant(value.astype(dtype), name) for name, value in factors.items())
        return self.emit(attributes, x, parameters=parameters)

    def normalise(
        self, x: Tensor, groups: int, scale: Array, bias: Array, epsilon: float, centred: bool = True
    ) -> Tensor:
        """Group normalisation, with a scale and a bias of each channel, or one for all."""
        scale, bias = (np.broadcast_to(factor, x.shape[1:2]) for factor in (scale, bias))
        return self._scaled(GroupNorm(groups, epsilon, centred=centred), x, scale=scale, bias=bias)

    def normalise_rows(
        self, x: Tensor, axis: int, scale: Array, bias: Array, epsilon: float, centred: bool = True
    ) -> Tensor:
        """Layer normalisation over all axes from `axis` on, to which scale and bias broadcast. Not centred: RMS."""
        shape = x.shape[axis:]
        try:
            factors = [np.broadcast_to(factor, shape).reshape(-1) for factor in (scale, bias)]
        except ValueError:
            rule = f"have to broadcast to {shape}, the axes from {axis} on"
            raise self.error("scale", (scale.shape, bias.shape), rule) from None
        rows = self.reshape(x, (math.prod(x.shape[:axis]), math.prod(shape)))
        return self.reshape(self.normalise(rows, 1, factors[0], factors[1], epsilon, centred), x.shape)

    # -- layers with weights

    def recurrent(
        self,
        x: Tensor,
        kind: RecurrentKind,
        reverse: tuple[bool, ...],
        weights: Sequence[Array],
        states: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """A recurrent layer: the hidden values of each step (T, D, N, H), the last ones, and an LSTM's last cells.

        x: (T, N, inputs).
        weights: of inputs (D, gates * H, inputs), of hidden values (D, gates * H, H), and the biases of both
            (D, gates * H).
        states: the first hidden values (D, N, H), and an LSTM's first cells; None: zeros.
        """
        w, r, *biases = weights
        (steps, n), (d, columns, h) = x.shape[:2], r.shape
        if 0 in (steps, h) or not x.type.is_float:
            raise Unsupported(f"input={x.shape} of {x.type}: no floats, or an empty sequence")
        weight = self.constant(w.reshape(d * columns, -1, 1, 1), "weight")
        src = self.product(x, weight, biases[0].reshape(-1))
        computed = x.type.computed.dtype
        parts = np.split(r.swapaxes(1, 2), [2 * h] if kind == "gru" else [], axis=2)
        first, *second = (blocks_of_columns(part.astype(computed)) for part in parts)
        held = tuple(self.constant(value, "recurrence") for value in (first, biases[1].astype(computed), *second))
        shape = 1, d * n, h
        zeros = self.constant(np.zeros(shape, x.type.dtype), "zeros")
        begin = [zeros if state is None else self.reshape(state, shape) for state in states]
        both = self.joined(0, begin)
        src = self.reshape(src, (steps, n, d * columns))
        y = self.helper(Recurrent(kind, reverse), src, both, parameters=held)
        lasts = [self.helper(Slice(0, 0 if backward else steps - 1, 1), y) for backward in reverse]
        lasts = [self.part(last, 1, k * n, n, helps=True) for k, last in enumerate(lasts)]
        found = [self.joined(1, lasts)]
        whole = y
        if kind == "lstm":
            whole = self.helper(Slice(0, 0, steps), y)
            found.append(self.helper(Slice(0, steps, 1), y))
        return [self.reshape(whole, (steps, d, n, h)), *(self.reshape(one, (d, n, h)) for one in found)]

    def convolve(self, attributes: Convolution, x: Tensor, others: Tensors, parameters: Tensors) -> Tensor:
        """A convolution of x, and the `others` after it, by `parameters`: the weight, and perhaps a bias."""
        return self.emit(attributes, x, *others, parameters=parameters)

    def product(self, a: Tensor, weight: Tensor, bias: Array | None = None, by: Convolved = PLAIN) -> Tensor:
        """(..., K) by a matrix as weights of shape (N, K, 1, 1), plus bias: (rows, N). It is a convolution of 1x1 over
        images of one pixel."""
        if weight.shape[1] != a.shape[-1]:
            rule = f"has {a.shape[-1]} columns, and the second matrix has {weight.shape[1]} rows"
            raise self.error("input", a.shape, rule)
        parameters: Tensors = (weight,) if bias is None else (weight, self.constant(bias, "bias"))
        attributes, others = by
        y = self.convolve(attributes, self.reshape(a, (-1, a.shape[-1], 1, 1)), others, parameters)
        return self.reshape(y, (-1, weight.shape[0]))

    def multiplied(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b, by NumPy's rules; a constant that is multiplied from the right goes to `product`."""
        if not a.shape or not b.shape:
            raise self.error("inputs", (a.shape, b.shape), "have to be vectors or matrices")
        if not a.type.is_float or max(a.rank, b.rank) > MOST_DIMENSIONS:
            raise Unsupported(f"matrices of {a.type} of shapes {a.shape} and {b.shape}")
        is_row, is_column = a.rank == 1, b.rank == 1
        left = self.reshape(a, (1, *a.shape)) if is_row else a
        right = self.reshape(b, (*b.shape, 1)) if is_column else b
        y = self.emit(MatMul(), left, right)
        *batch, rows, columns = y.shape
        return self.reshape(y, (*batch, *[rows] * (not is_row), *[columns] * (not is_column)))

    def attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float | None,
        causal: bool,
        zero_rows: bool = True,
    ) -> Tensor:
        """softmax(scale * (q @ k transposed) + mask) @ v, of (..., heads, rows, width).

        Several heads of q may share one of k and v. A mask of booleans is zeros and minus infinity.

        scale: None: one over the root of the width.
        causal, zero_rows: as in `Attention`.
        """
        least = min(x.rank for x in (q, k, v))
        if not q.type.is_float or least < 2:
            raise Unsupported(f"{q.type} of shapes {q.shape}, {k.shape} and {v.shape}")
        more = [] if mask is None else [self._added_to_scores(mask, q, k.shape[-2])]
        shape, groups = (*q.shape[:-1], v.shape[-1]), 1
        heads, shared = (x.shape[-3] if least > 2 else 1 for x in (q, k))
        if 1 < shared < heads and heads % shared == 0:
            groups = heads // shared
            q, k, v, *more = (self._in_groups(x, heads, groups) for x in (q, k, v, *more))
        last = k.rank - 1
        orders = (None, (*range(last - 1), last, last - 1), None, None)
        scale = 1 / math.sqrt(q.shape[-1] or 1) if scale is None else float(scale)
        y = self.emit(Attention(scale, causal, zero_rows, orders), q, k, v, *more)
        return y if groups == 1 else self.reshape(y, shape)

    def _in_groups(self, x: Tensor, heads: int, groups: int) -> Tensor:
        """The axis of heads as two: the keys' heads, and the `groups` heads that share one (1 for keys and values)."""
        if x.rank < 3:
            return x
        *outer, count, rows, columns = x.shape
        split = (heads // groups, groups) if count == heads else (count, 1)
        return self.reshape(x, (*outer, *split, rows, columns))

    def _added_to_scores(self, mask: Tensor, q: Tensor, columns: int) -> Tensor:
        known = self.emitter.array(mask.name)
        if known is not None:
            value = np.where(known, 0, -np.inf) if known.dtype == np.bool_ else known
            wide = np.broadcast_to(value, (*value.shape[:-1], columns)) if value.shape[-1:] == (1,) else value
            mask = self.constant(wide.astype(q.type.dtype), "mask")
        if mask.type.name == "bool":
            mask = self.where(mask, self.number(0, q), -math.inf)
        if mask.type != q.type or mask.shape[-1:] != (columns,):
            raise Unsupported(f"a mask of {mask.type} of shape {mask.shape}")
        return mask
