"""The convolutions behind the drop-in functions and `Conv2d`: arguments that are checked once, and their programs.

A kernel reads the weights packed, biases in its own order, and a block of parameters. A call of a function makes these
operands; a `Conv2d` keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from blockconv.api.arithmetic import NOTHING_QUANTIZED, Arithmetic, QuantizedOptions, Weight, as_weight
from blockconv.api.frame import Call, Computation, Derive, Frame, Result, start_of
from blockconv.core import eltwise_problem as moves
from blockconv.core.activation import Activation
from blockconv.core.activation import activation as read_activation
from blockconv.core.checks import Names, Shape, check_same, checked_groups, checked_word
from blockconv.core.errors import ArgumentError, DtypeError, raised_by
from blockconv.core.interop import as_numpy
from blockconv.core.layout import NCHW, NHWC, Layout, part_of
from blockconv.core.problem import Conv2dProblem, window_fields
from blockconv.core.python import zipped
from blockconv.core.types import Array, Types
from blockconv.dispatch import selection
from blockconv.dispatch.array import BlockedArray, is_channels_last
from blockconv.dispatch.boundary import ONE_IMAGE, PADDINGS, read_window
from blockconv.dispatch.packing import (
    PLAIN,
    Packing,
    bias_positions,
    pack_weights,
    packing,
    room_for,
    weights_as_read,
    weights_layout,
    widened,
)
from blockconv.dispatch.quantizing import check_zero_point, with_weights
from blockconv.kernels import Row, WeightForm
from blockconv.kernels.common.request import Request
from blockconv.kernels.table import Epilogue, Primitive
from blockconv.runtime import Launch, Program, address_of, get_num_threads

# The kernels of the table that each algorithm may take.
ALGORITHMS: dict[str, Callable[[Row], bool]] = {
    "auto": lambda row: True,
    "direct": lambda row: row.algorithm == "direct" and not row.reference,
    "winograd": lambda row: row.algorithm == "winograd",
    "reference": lambda row: row.reference,
}


MOST_ALIKE = 16  # channels of images whose filter may be one for all
TYPES: Mapping[str, None] = dict.fromkeys(("input", "grad", "residual"))  # for a frame: `Arithmetic` checks them


def has_one_filter(op: str, weight: Any, bias: Any, groups: Any, quantized: QuantizedOptions) -> bool:
    """Whether a convolution has no bias, and one filter and scale for each of a few channels."""
    if type(groups) is not int or not 1 < groups <= MOST_ALIKE or bias is not None:
        return False
    w = np.asarray(as_weight(weight, op))
    if w.shape[:2] != (groups, 1) or not w.size or w.item(0) != w.item(w.size // groups):
        return False  # the first taps tell, as a rule, and each call asks
    return np.size(getattr(quantized.weight_quantization, "scale", 1)) == 1 and bool((w == w[:1]).all())


class CheckedConvolution:
    """The checked arguments of a convolution, which are those of `Conv2d`.

    options: stride, padding, dilation, groups, activation, algorithm, accuracy; padding_mode, if there is one.
    op: the function's name in the texts of errors.
    """

    _op = "Conv2d"  # the name in the texts of errors
    _given = "input"  # likewise, of the array that is convolved
    _weight_axes = "(O, I/groups, KH, KW)"
    _mode: Any = "constant"  # of NumPy's paddings; files of an earlier version lack it
    _columns = 1  # that are a pixel of the image which padding extends

    def __init__(
        self, weight: Any, bias: Any, options: tuple[Any, ...], quantized: QuantizedOptions, op: str | None = None
    ) -> None:
        stride, padding, dilation, groups, activation, algorithm, accuracy, *mode = options
        self._op = op = op or self._op
        self.weight: Weight = as_weight(weight, op)
        self.bias = None if bias is None else as_numpy(bias, op, "bias", kept=True)
        self.groups, self.padding = self._check_parameters(groups), padding
        kernel = (int(self.weight.shape[2]), int(self.weight.shape[3]))
        self.stride, self._pads, self.dilation = read_window(op, kernel, stride, padding, dilation)
        extended = PADDINGS[checked_word(op, "padding_mode", mode[0], PADDINGS)] if mode else "constant"
        self._mode = extended if any(map(any, self._pads)) else "constant"
        self.activation = activation if isinstance(activation, Activation) else read_activation(activation, op)
        self.algorithm = checked_word(op, "algorithm", algorithm, ALGORITHMS)
        self.accuracy = selection.accuracy_of(op, accuracy)
        self._options = quantized
        self.arithmetic = Arithmetic(op, self.weight, self.bias, self.activation, quantized, self._given)
        self._weight_is_channels_last = not isinstance(self.weight, BlockedArray) and is_channels_last(self.weight)

    def _computation(
        self, call: Call, packed: dict[Any, Array] | None = None, src: Layout | None = None
    ) -> Computation:
        """The work of a call.

        packed: where the packed weights are kept by their form; None to pack them at each call.
        src: the layout in which the kernel reads the input; None for the input's.
        """
        x, residual, arithmetic = call.arrays[self._given], call.arrays.get("residual"), self.arithmetic
        types, problem = arithmetic.types(x.dtype), self._problem(x.shape)
        if isinstance(types.dst.array_dtype, str) and not call.is_blocked:
            rule = "only a BlockedArray holds packed 4-bit integers"
            raise DtypeError(self._op, "out_dtype", types.dst.array_dtype, rule, "give a BlockedArray as input")
        dst = call.layout or (x.layout if call.is_blocked or not self._weight_is_channels_last else NHWC)
        src, dst = src or x.layout, dst if dst.is_native else NCHW
        arithmetic.check_layouts(types, problem, src, dst)
        check_zero_point(self._op, self._given, x.zero_point, self._options.input_quantization)
        shape = problem.dst_shape if x.shape[1] else (problem.n, 0, problem.oh, problem.ow)
        if residual is not None:
            check_same(self._op, "residual", residual.shape, shape, "the output")
            arithmetic.check_residual(residual.dtype, types.dst.array_dtype)
            given = self._options.residual_quantization
            check_zero_point(self._op, "residual", residual.zero_point, given)
        found: _Prepared | None = None
        derive: Derive | None = None
        beside: dict[str, Any] | None = None
        if 0 not in (problem.n, x.shape[1]):
            packs = packed is None
            if not packs or isinstance(self.weight, BlockedArray):
                types = with_weights(types, self.weight, any(map(any, self._pads)))
            is_one = call.kind and call.kind[0] and src is dst is NHWC
            own, *where = (is_one and self._of_one_filter(problem, types)) or (self, problem, src, dst)
            found = own._prepare(*where, types, residual is not None, packs)
            derive, beside = own._derive(found, call, packed)
        added = "residual" if residual is not None else "out"
        program, how, workspace = (None, None, 0) if found is None else found[3:]
        return Computation(
            program,
            workspace,
            read=(src,) if residual is None else (src, dst),
            results=(Result(shape, dst, types.dst.array_dtype, arithmetic.dst_zero_point),),
            buffers=(self._given, "packed", "biases", "out", added, "parameters", "weights", "between")[
                : 6 if how is None else 8
            ],
            layout=None if call.is_blocked else dst,
            derived=("packed", "biases", "parameters", "weights", "between"),
            derive=derive,
            beside=beside,
        )

    def _of_one_filter(self, p: Conv2dProblem, types: Types) -> tuple[Any, ...] | None:
        """Innermost channels that share a filter as one channel of more columns, whose taps are a pixel apart.

        None if that is not predicted to be faster.
        """
        c = self.groups
        wide = replace(p, ic=1, oc=1, g=1, iw=p.iw * c, pw=p.pw * c, pw_r=p.pw_r * c, dw=p.dw * c)
        asked = (Request(problem, at, at, types) for problem, at in ((p, NHWC), (wide, NCHW)))
        found: Any = [selection.cheapest(selection.decisions(p.row_op, one)) for one in asked]
        if self.algorithm != "auto" or p.sw != 1 or found[0][1].seconds <= found[1][1].seconds:
            return None
        options = self.stride, self._pads, self.dilation, 1, self.activation, "auto", "default", self._mode
        made = CheckedConvolution(np.asarray(self.weight)[:1], None, options, self._options, self._op)
        made._columns = c
        return made, wide, NCHW, NCHW

    def _problem(self, shape: Shape) -> Conv2dProblem:
        oc, per_group, kh, kw = self.weight.shape
        self._check_channels(shape, per_group * self.groups)
        n, ic, ih, iw = shape
        fields = window_fields(self.stride, self._pads, self.dilation, self.groups)
        with raised_by(self._op):
            return Conv2dProblem(n, ic or self.groups, ih, iw, oc, kh, kw, *fields)

    # -- the program

    def _prepare(
        self, problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, residual: bool, packs: bool
    ) -> _Prepared:
        whole = problem
        if self._mode != "constant":
            problem = band(whole, src, dst, types)
        if self.algorithm == "auto":
            row: Any = selection.choose(problem.row_op, problem, src, dst, types, self.accuracy, once=packs)
        else:
            row = self._by_algorithm(Request(problem, src, dst, types, anchor=selection.anchor_of(problem)))
        row = row if whole is problem else Banded(row, whole, self._mode, self._columns)
        epilogue = self.arithmetic.epilogue(types, residual)
        plain = PLAIN if isinstance(self.weight, BlockedArray) else weights_layout(self.weight) or PLAIN
        return _prepared(row, problem, src, dst, types, get_num_threads(), epilogue, plain if packs else None)

    def _by_algorithm(self, request: Request) -> Row:
        """The cheapest kernel of the algorithm that the caller names."""
        found = selection.decisions(request.problem.row_op, request, self.accuracy)
        found = {row: one for row, one in found.items() if ALGORITHMS[self.algorithm](row)}
        best = selection.cheapest(found)
        if best is None:
            said = "; ".join(f"{row.name} {why}" for row, why in found.items())
            rule = f"no kernel of this algorithm takes the problem: {said}"
            raise ArgumentError(self._op, "algorithm", self.algorithm, rule, "give 'auto'")
        return best[0]

    # -- the operands of a kernel besides arrays

    def _derive(
        self, to: _Prepared, call: Call, packed: dict[Any, Array] | None
    ) -> tuple[Derive, dict[str, Any] | None]:
        """Makes packed weights, biases, parameters, weights, and memory that packing needs in between.

        A program that does not pack takes the first three. With `Computation.beside`, if it can be.
        """
        src, residual = call.arrays[self._given].dtype, getattr(call.arrays.get("residual"), "dtype", None)
        if packed is not None:
            lasting = self._operands(to, residual, packed)
            addresses = *map(address_of, lasting), 0, 0
            names = "packed", "biases", "parameters"
            return lambda operands, values: (addresses, lasting), dict(zipped(names, lasting))
        if self.arithmetic.is_float:
            return self._derive_floats(to, call.operands[0])
        op, given, activation, count = self._op, self._given, self.activation, self.weight.shape[0]

        def derive(operands: Any, values: QuantizedOptions | None) -> tuple[Sequence[int], Any]:
            weight, bias = as_weight(operands[0], op), operands[1]
            bias = None if bias is None else as_numpy(bias, op, "bias")
            weight = weight[:count] if isinstance(weight, np.ndarray) else weight
            arithmetic = Arithmetic(op, weight, bias, activation, values or NOTHING_QUANTIZED, given)
            arithmetic.types(src)
            assert to.packing is not None
            weight = np.ascontiguousarray(weight) if isinstance(weight, BlockedArray) else weight
            start, between, room = room_for(to.packing)
            beside = arithmetic.beside_weights(*to[:3], weight, bias, residual)
            held = *beside, widened(weights_as_read(weight)[0], to.form)
            return (start, *map(address_of, held), between), (held, room)

        return derive, None

    def _derive_floats(self, to: _Prepared, given: Array) -> tuple[Derive, dict[str, Any] | None]:
        op, how, form, wei = self._op, to.packing, to.form, to.types.wei.dtype
        assert how is not None
        zeros, parameters = self.arithmetic.beside_weights(*to[:3], given, None, None)
        positions = None if self.bias is None else bias_positions(self.bias.size, to.problem, form)
        in_place = given.dtype == wei and weights_layout(given) is not None and widened(given, form) is given
        no_bias, at = address_of(zeros), address_of(parameters)

        def derive(operands: Any, values: Any) -> tuple[Sequence[int], Any]:
            weight, bias = operands
            start, between, room = room_for(how)
            if not in_place:  # a conversion keeps the order of dense weights, and of no others
                read = weights_as_read(as_numpy(weight, op, "weight"))[0]
                weight = widened(read.astype(wei, copy=False), form)
            if positions is None:
                return (start, no_bias, at, start_of(weight), between), (room, weight, zeros)
            bias = as_numpy(bias, op, "bias")
            numbered = np.zeros(1 + bias.size, zeros.dtype)
            numbered[1:] = bias
            biases = numbered[positions]
            return (start, address_of(biases), at, start_of(weight), between), (room, weight, biases, parameters)

        beside = {"packed": how.nbytes, "between": how.between, "parameters": parameters, "biases": zeros}
        return derive, {**beside, "positions": positions} if in_place else None

    def _operands(self, to: _Prepared, residual: Any, kept: dict[Any, Array]) -> tuple[Array, Array, Array]:
        """Packed weights, biases, parameters."""
        # In the type that they are multiplied in: float32 ones are rounded for an input of 16 bits.
        weight = np.asarray(self.weight).astype(to.types.wei.dtype, copy=False)
        key = to.form, to.types, self.weight.shape[0]
        if key not in kept:
            kept[key] = pack_weights(to.problem, weight, to.form)
        return kept[key], *self.arithmetic.beside_weights(*to[:3], weight, self.bias, residual)

    # -- checks

    def _check_channels(self, shape: Shape, channels: int) -> None:
        if len(shape) != 4 or shape[1] != channels:
            rule = f"has to be (N, C, H, W) with C = {channels}, which follows from weight and groups"
            last = "where channels are the last axis, give axes='NHWC' to conv2d, and to others x.transpose(0, 3, 1, 2)"
            raise ArgumentError(self._op, self._given, shape, rule, last if shape[-1] == channels else "")

    def _out_channels(self, groups: int) -> int:
        return self.weight.shape[0]

    def _check_parameters(self, groups: Any) -> int:
        """The groups, as an int."""
        weight, bias = self.weight, self.bias
        if weight.ndim != 4:
            remedy = ONE_IMAGE if weight.ndim == 2 else ""
            raise ArgumentError(self._op, "weight", weight, f"has to be {self._weight_axes}", remedy)
        which = "output " if self._weight_axes.startswith("(O") else "input "
        number = checked_groups(self._op, "groups", groups, int(weight.shape[0]), which)
        if bias is not None:
            check_same(self._op, "bias", bias, (self._out_channels(number),))
        return number


class _Prepared(NamedTuple):
    """A problem's program, without the weights. All convolutions of the problem share it.

    packing: of the weights, which the program begins with; None if they come packed.
    """

    problem: Conv2dProblem
    types: Types
    form: WeightForm
    program: Program
    packing: Packing | None
    workspace: int


@functools.lru_cache(maxsize=1024)
def _prepared(
    row: Row | Banded,
    problem: Conv2dProblem,
    src: Layout,
    dst: Layout,
    types: Types,
    threads: int,
    epilogue: Epilogue,
    weights: Layout | None,
) -> _Prepared:
    """weights: the layout that they are given in, if the program is to pack them."""
    prepare = functools.partial(row.prepare, problem, src, dst, types, anchor=selection.anchor_of(problem))
    primitive = prepare(threads=threads)
    alone = primitive if threads == 1 else prepare(threads=1)
    form, seconds, launches, how = primitive.form, alone.seconds, primitive.launches(epilogue), None
    if weights is not None:
        # One program, so that threads are woken once. The weights' buffers come after those of the convolution, and the
        # workspace after them.
        how = packing(problem, weights, form, form.dot.itemsize or types.wei.itemsize)
        first = [launch.with_buffers({0: 6, 2: 7}) for launch in how.program.launches]
        seconds += selection.packing_seconds(alone, Request(problem, src, dst, types))
        launches = (*first, *(launch.with_buffers({6: 8}) for launch in launches))
    return _Prepared(problem, types, form, Program(launches, seconds), how, sum(primitive.workspace))


FEWEST = 32  # rows of a band: each band reads the weights, and some rows that the next one reads too
WRITTEN, WORKSPACE = (3, 4), 6  # buffers of a convolution: destination and residual; see `kernels.common.operands`


def band(p: Conv2dProblem, src: Layout, dst: Layout, types: Types) -> Conv2dProblem:
    """The problem of a band, without padding. The second-level cache holds its source, if rows are short."""
    extent, iw = (p.kh - 1) * p.dh + 1, p.iw + p.pw + p.pw_r
    fitting = Request(p, src, dst, types).machine.second_level_cache // types.src.nbytes(src.size((p.n, p.ic, 1, iw)))
    rows = p.oh if dst.blocks[0] > 1 else max(FEWEST, (fitting - extent) // p.sh)  # those write all images of a block
    ih = (-(-p.oh // -(-p.oh // rows)) - 1) * p.sh + extent
    return replace(p, ih=ih, iw=iw, ph=0, pw=0, ph_r=0, pw_r=0)


class Banded(NamedTuple):
    """A row of the table for images that are extended by their own elements, in bands: some rows of the output each.

    The elements that a band reads are copied by index to memory that caches hold. All bands have one size, and so share
    a kernel and its packed weights. The last one may compute some rows again.

    row: the one for a band.
    whole: the problem of all bands.
    mode: in `numpy.pad`, of the elements that extend images.
    columns: of the problem, that are a pixel of the image.
    """

    row: Row
    whole: Conv2dProblem
    mode: Any
    columns: int

    def prepare(
        self, problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, threads: int, **how: Any
    ) -> Primitive:
        """As `Row.prepare`. problem: a band's. A band's source is the last part of the workspace."""
        p, copies, read = self.whole, selection.named("gather", "gather_copy"), Types.all(types.src.name)
        of_band = dst if problem.oh == p.oh else part_of(dst, (0, 0, p.oh, 0))
        part = self.row.prepare(problem, src, of_band, types, threads, **how)
        first = sum(part.workspace)
        end = first + types.src.nbytes(src.size(problem.src_shape))
        rows, cols = (
            np.pad(np.arange(size).reshape(-1, c), ((before // c, after // c), (0, 0)), self.mode).ravel()
            for size, before, after, c in ((p.ih, p.ph, p.ph_r, 1), (p.iw, p.pw, p.pw_r, self.columns))
        )

        def launches(epilogue: Epilogue) -> list[Launch]:
            made = [one.with_offsets({0: (first, end)}).with_buffers({0: WORKSPACE}) for one in part.launches(epilogue)]
            found = list[Launch]()
            for row in range(0, p.oh, problem.oh):
                row = min(row, p.oh - problem.oh)
                runs = moves.runs_of(rows[row * p.sh :][: problem.ih]), moves.runs_of(cols)
                copied = moves.GatherProblem(p.src_shape, (((0, p.n, 1),), ((0, p.ic, 1),), *runs))
                for one in copies.prepare(copied, src, src, read, threads).launches():
                    found.append(one.with_offsets({1: (first, end)}).with_buffers({1: WORKSPACE}))
                at = types.dst.nbytes(dst.offset(p.dst_shape, (0, 0, row, 0))), types.dst.nbytes(dst.size(p.dst_shape))
                found += [one.with_offsets(dict.fromkeys(WRITTEN, at)) for one in made]
            return found

        return replace(part, cost=lambda: part.seconds * p.oh / problem.oh, make=launches, workspace=(end,))


def convolution_frame(
    op: str,
    kind: Callable[..., CheckedConvolution] = CheckedConvolution,
    names: Names = ("input", "residual"),
    extra: int = 0,
) -> Frame:
    """The frame of a function that packs its weights at each call. Its arrays have these names; weight and bias follow.

    extra: how many of a call's options come before the arguments of a `CheckedConvolution`.
    """

    def solve(call: Call) -> Computation:
        first, options = call.options[:extra], call.options[extra:]
        quantized = call.values or NOTHING_QUANTIZED
        return kind(*first, *call.operands, options, quantized, op)._computation(call)

    optional, operands = ("residual", "bias"), ("weight", "bias")
    return Frame(op, names, solve, (), optional, TYPES, takes_one=True, operands=operands)
