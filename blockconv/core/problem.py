"""Problems: the sizes and parameters of an operation, frozen and validated once.

A problem that exists is valid, so no kernel checks it again. Problems are dictionary keys. Two are equal if they
compute the same, whatever their names and their spelling of the end padding.

benchdnn's descriptor strings name problems in tests, benchmarks and bug reports:

>>> p = Conv2dProblem.from_descriptor('mb1ic3ih224oc64oh112kh7sh2ph3n"conv1"')
>>> p.dst_shape, p.name
((1, 64, 112, 112), 'conv1')
>>> p.descriptor()
'mb1ic3ih224oc64kh7sh2ph3n"conv1"'

Dilation is PyTorch's in every field (1 = dense) and benchdnn's in a descriptor (0 = dense).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from blockconv.core.checks import (
    Label,
    Names,
    Natural,
    Pads,
    Pair,
    Positive,
    Shape,
    check_arrays,
    check_flag,
    checked_label,
    checked_number,
    checked_whole,
    checked_wholes,
    checked_word,
    reached_end,
    set_field,
    set_outputs,
)
from blockconv.core.descriptors import count_in, read_descriptor, write_descriptor
from blockconv.core.errors import ArgumentError
from blockconv.core.record import Record

PoolKind = Literal["max", "avg_include_padding", "avg_exclude_padding"]


class OpProblem(Record):
    """The base of problems that have an op's attributes beside the shapes of its inputs.

    The fields are checked by their types; a type that is not in `_CHECKED` is left to `check`.

    op: the op's name in errors.
    row_op: the op of the kernel table's rows for it; "" for a problem that several ops have.
    sources: the fields that hold the shapes of the op's inputs, in their order.
    """

    op: ClassVar[str]
    row_op: ClassVar[str] = ""
    sources: ClassVar[Names] = ("shape",)

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, checked in _checks(kind):
            value = getattr(self, name)
            if (made := checked(self.op, name, value)) is not value:
                set_field(self, name, made)
        self.check()

    def check(self) -> None:
        """Raise ArgumentError for a value that no such op may have, or for fields that contradict each other."""

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the first source."""
        return getattr(self, self.sources[0])

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination: the source's, unless a problem says otherwise."""
        return self.src_shape

    def of_images(self, n: int) -> Any:
        """The same problem with `n` images, the first axis."""
        images: Any = {"n": n} if hasattr(self, "n") else {self.sources[0]: (n, *self.src_shape[1:])}
        return replace(self, **images)


_CHECKED: dict[Any, Callable[[str, str, Any], Any]] = {
    int: checked_whole,
    float: checked_number,
    bool: check_flag,
    tuple[int, ...]: checked_wholes,
}


@functools.cache
def _checks(problem: Any) -> list[tuple[str, Callable[[str, str, Any], Any]]]:
    """The names of the fields that have a check by their type, and the checks."""
    hints = get_type_hints(problem, include_extras=True)
    found = [(one.name, _check_of(hints[one.name])) for one in fields(problem) if one.init]
    return [(name, check) for name, check in found if check is not None]


def _check_of(hint: Any) -> Callable[[str, str, Any], Any] | None:
    if get_origin(hint) is Literal:
        return functools.partial(checked_word, words=get_args(hint))
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    return _CHECKED.get(hint)


class _Images(OpProblem):
    """The base of convolutions and pools: images, and a name that counts equal layers."""

    name = ""

    def __post_init__(self) -> None:
        for x in "hw":
            if getattr(self, f"p{x}_r", 0) is None:
                set_field(self, f"p{x}_r", getattr(self, f"p{x}"))
        super().__post_init__()

    @property
    def src_shape(self: Any) -> Shape:
        """The logical shape of the source, (n, ic, ih, iw)."""
        return self.n, self.ic, self.ih, self.iw

    @property
    def count(self) -> int:
        """The number of such layers in the network: 4 for a name that ends in `*4`, else 1."""
        return count_in(self.name)

    def named(self, name: str) -> Any:
        """The same problem with another label."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, name=checked_label(type(self).__name__, "name", name))
        return made


class _Pooled(_Images):
    """The base of pools: source and destination have the same channels."""

    def backward(self: Any) -> Pool2dBackwardProblem:
        """The gradient of its input."""
        return Pool2dBackwardProblem(self)

    @property
    def dst_shape(self: Any) -> Shape:
        """The logical shape of the destination, (n, ic, oh, ow)."""
        return self.n, self.ic, self.oh, self.ow


def window_fields(stride: Pair, pads: Pads, dilation: Pair, *rest: Any) -> Any:
    """The fields of a convolution's or a pool's problem from `sh` on. rest: those after `dw`."""
    (top, bottom), (left, right) = pads
    return *stride, top, left, bottom, right, *dilation, *rest


def _end_padding() -> Any:
    """A field with an end padding. None stands for the begin padding; after construction it is always an integer.

    It counts only through the output size, so problems are compared by that.
    """
    return field(default=None, compare=False)


class Conv2dProblem(_Images):
    """A 2-D convolution: `n` images of `ic` x `ih` x `iw`, `oc` filters of `kh` x `kw`, `g` groups.

    n: images, 0 or more.
    ic, oc: channels of source and destination, over all groups; at least 1.
    ih, iw: height and width of the source, in pixels; at least 1 if there are images.
    kh, kw: height and width of the window, in taps.
    sh, sw: strides, at least 1.
    ph, pw: rows of zeros at the top, columns of zeros at the left.
    ph_r, pw_r: the same at the bottom and at the right. Default: ph and pw. A negative number crops the source.
    dh, dw: dilation as in PyTorch: 1 for dense windows.
    g: groups; it divides ic and oc.
    name: a label. Comparisons ignore it.
    oh, ow: height and width of the destination. They follow from the rest.

    Raises ArgumentError, which names the field, for a bad value, and for a padded source smaller than the window.
    """

    op = row_op = "conv2d"
    n: Natural
    ic: Positive
    ih: Natural
    iw: Natural
    oc: Positive
    kh: Positive
    kw: Positive
    sh: Positive = 1
    sw: Positive = 1
    ph: Natural = 0
    pw: Natural = 0
    ph_r: int = _end_padding()
    pw_r: int = _end_padding()
    dh: Positive = 1
    dw: Positive = 1
    g: Positive = 1
    name: Label = field(default="", compare=False)
    oh: int = field(init=False)
    ow: int = field(init=False)

    def __hash__(self) -> int:
        return hash((self.ic, self.oc, self.ih, self.iw, self.kh))  # few problems have all of these in common

    def check(self) -> None:
        for channels in ("ic", "oc"):
            if getattr(self, channels) % self.g:
                raise self._error(channels, f"must be divisible by g={self.g}", "give totals over all groups")
        if self.n and not self.ih * self.iw:  # without images PyTorch asks for room for the window alone
            raise ArgumentError(self.op, "iw" if self.ih else "ih", 0, "must be at least 1")
        set_outputs(self, itemsize=4)

    def backward_weights(self) -> Conv2dBackwardWeightsProblem:
        """The gradient of its weights."""
        return Conv2dBackwardWeightsProblem(*(getattr(self, one.name) for one in fields(self) if one.init))

    @property
    def group_ic(self) -> int:
        """Channels of a group's source."""
        return self.ic // self.g

    @property
    def group_oc(self) -> int:
        """Channels of a group's destination."""
        return self.oc // self.g

    @property
    def macs(self) -> int:
        """The multiply-adds of direct convolution, including taps over the padding."""
        return self.n * self.oc * self.oh * self.ow * math.prod(self.wei_shape[1:])

    @property
    def flops(self) -> int:
        """Two for each multiply-add."""
        return 2 * self.macs

    @property
    def wei_shape(self) -> Shape:
        """The logical shape of the weights, (oc, ic/g, kh, kw)."""
        return self.oc, self.group_ic, self.kh, self.kw

    @property
    def grouped_wei_shape(self) -> tuple[int, int, int, int, int]:
        """The logical shape of the weights for packing, (g, oc/g, ic/g, kh, kw)."""
        return self.g, self.group_oc, self.group_ic, self.kh, self.kw

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination, (n, oc, oh, ow)."""
        return self.n, self.oc, self.oh, self.ow

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one input channel. Output channel i*m+j reads input channel i."""
        return self.g == self.ic

    def descriptor(self) -> str:
        """The shortest benchdnn string that `from_descriptor` reads as this problem."""
        return write_descriptor(self, {"g": (self.g, 1), "mb": (self.n, 2)}, oc=self.oc)

    @classmethod
    def from_descriptor(cls, text: str) -> Conv2dProblem:
        """Read a benchdnn string, such as `mb1ic64ih56oc64oh56kh3ph1n"res2a"`."""
        return cls(**read_descriptor("conv2d", text, {"g": 1, "mb": 2, "ic": None, "oc": None}))


class Conv2dBackwardDataProblem(Conv2dProblem):
    """The gradient of the input of a convolution, and `conv_transpose2d`: its source is that convolution's output.

    The fields are those of the convolution, a `Conv2dProblem`. `src_shape` is (n, oc, oh, ow), `dst_shape` is
    (n, ic, ih, iw).
    """

    row_op = "conv2d_backward_data"

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the source, (n, oc, oh, ow)."""
        return super().dst_shape

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination, (n, ic, ih, iw)."""
        return super().src_shape


def transposed_problem(n: int, wei: Shape, sizes: Sequence[int], groups: int, *window: Any) -> Conv2dProblem:
    """A transposed convolution by a weight (I, O / groups, KH, KW), whose result has these height and width.

    window: stride, pads and dilation, those of the convolution whose gradient it is.
    """
    (ic, per_group, kh, kw), (ih, iw) = wei, sizes
    return Conv2dBackwardDataProblem(n, per_group * groups, ih, iw, ic, kh, kw, *window_fields(*window, groups))


class Conv2dBackwardWeightsProblem(Conv2dProblem):
    """The gradient of the weights of a convolution, from its input and the gradient of its output.

    The fields are those of the convolution, a `Conv2dProblem`. The result is dense, of the weights' shape.
    """

    row_op = "conv2d_backward_weights"


class Pool2dProblem(_Pooled):
    """A 2-D pooling of `n` images of `ic` x `ih` x `iw` by windows of `kh` x `kw`.

    kind: "max", "avg_include_padding" or "avg_exclude_padding".
    ceil_mode: round output sizes up, as in PyTorch.
    divisor: the divisor of averages. Default: the number of elements in the window.

    The other fields are those of `Conv2dProblem`. Padding may be more than half a window; only the drop-in functions
    forbid that.
    Raises ArgumentError, which names the field, for a bad value.
    """

    op = row_op = "pool2d"
    kind: PoolKind
    n: Natural
    ic: Positive
    ih: Positive
    iw: Positive
    kh: Positive
    kw: Positive
    sh: Positive = 1
    sw: Positive = 1
    ph: Natural = 0
    pw: Natural = 0
    ph_r: int = _end_padding()
    pw_r: int = _end_padding()
    dh: Positive = 1
    dw: Positive = 1
    ceil_mode: bool = field(default=False, compare=False)
    divisor: int | None = None
    name: Label = field(default="", compare=False)
    oh: int = field(init=False)
    ow: int = field(init=False)
    # The effect of ph_r, pw_r and ceil_mode besides the output size: end padding inside the windows, where it counts in
    # a window's number of elements. Windows that ceil_mode lets hang over the padded input are clipped to it there.
    _ends: Pair | None = field(init=False, repr=False)

    def check(self) -> None:
        if self.divisor is not None:
            set_field(self, "divisor", checked_whole(self.op, "divisor", self.divisor))
            if self.kind == "max":
                raise self._error("divisor", "is for averages", "leave it out")
            if self.divisor == 0:
                raise self._error("divisor", "must not be zero")
        set_outputs(self, 1, self.ceil_mode)
        is_counted = self.kind == "avg_include_padding" and self.divisor is None
        ends = min(self.ph_r, reached_end(self, "h")), min(self.pw_r, reached_end(self, "w"))
        set_field(self, "_ends", ends if is_counted else None)

    def descriptor(self) -> str:
        """The shortest benchdnn string of these windows.

        The grammar has no word for `kind`, `divisor` and `ceil_mode`. `from_descriptor` with the same kind gives an
        equal problem, except with a divisor, or if `ceil_mode` clips windows of `avg_include_padding`. (Then it counts
        the whole window.)
        """
        return write_descriptor(self, {"mb": (self.n, 2)})

    @classmethod
    def from_descriptor(cls, text: str, kind: PoolKind = "max") -> Pool2dProblem:
        """Read a benchdnn string, such as `mb1ic64ih112oh56kh3sh2`, which does not hold the kind."""
        return cls(kind, **read_descriptor("pool2d", text, {"mb": 2, "ic": None}))


class AdaptivePool2dProblem(_Pooled):
    """PyTorch's adaptive average pooling of `n` images of `ic` x `ih` x `iw` to `oh` x `ow`.

    n, ic, oh, ow: images, channels, height and width of the destination; 0 or more.
    ih, iw: height and width of the source, in pixels; at least 1.

    The window of output row o begins at row floor(o * ih / oh) and ends before row ceil((o + 1) * ih / oh). Columns
    likewise. Windows may overlap, and their sizes may differ.
    Raises ArgumentError, which names the field, for a bad value.
    """

    op, row_op = "adaptive_avg_pool2d", "pool2d"
    n: Natural
    ic: Natural
    ih: Positive
    iw: Positive
    oh: Natural
    ow: Natural

    def check(self) -> None:
        check_arrays(self, itemsize=4)


@dataclass(frozen=True)
class Pool2dBackwardProblem:
    """The gradient of the input of a pool: its source is the gradient of that pool's output.

    pool: the pool, a `Pool2dProblem` or an `AdaptivePool2dProblem`.
    """

    row_op: ClassVar[str] = "pool2d_backward"
    pool: Pool2dProblem | AdaptivePool2dProblem

    def __post_init__(self) -> None:
        if not isinstance(self.pool, (Pool2dProblem, AdaptivePool2dProblem)):
            raise ArgumentError(self.row_op, "pool", self.pool, "has to be a Pool2dProblem, or an adaptive one")

    @property
    def n(self) -> int:
        """Images."""
        return self.pool.n

    @property
    def ic(self) -> int:
        """Channels."""
        return self.pool.ic

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the source, (n, ic, oh, ow)."""
        return self.pool.dst_shape

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination, (n, ic, ih, iw)."""
        return self.pool.src_shape

    @property
    def is_max(self) -> bool:
        """Whether the pool takes maxima, and indices say where they were."""
        return isinstance(self.pool, Pool2dProblem) and self.pool.kind == "max"

    @property
    def taps(self) -> int:
        """Elements of a window, about."""
        p = self.pool
        return p.kh * p.kw if isinstance(p, Pool2dProblem) else -(-p.ih // p.oh) * -(-p.iw // p.ow)


class ReorderProblem(OpProblem):
    """A change of layout of an array.

    shape: the logical shape, with sizes of 0 or more.
    src, dst: the names of the layouts.
    itemsize: the bytes of an element.

    Raises ArgumentError, which names the field, for a bad value.
    """

    op, row_op = "to_layout", "reorder"
    shape: Shape
    src: str
    dst: str
    itemsize: Positive

    def check(self) -> None:
        for argument in ("src", "dst"):
            if not isinstance(getattr(self, argument), str) or not getattr(self, argument):
                raise self._error(argument, "must be the name of a layout")

    @property
    def elements(self) -> int:
        """The number of logical elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes read and written, without the padding of blocks."""
        return 2 * self.elements * self.itemsize
