"""The cases of a manifest: the layers of the lists, small samples for every row of the kernel table, networks.

The name of a case says what is computed, and nothing of how: it stays when code is moved and renamed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.shape_files import read_shape_file
from blockconv.core.activation import IDENTITY, activation
from blockconv.core.eltwise_problem import BatchNormProblem, GroupNormProblem
from blockconv.core.problem import (
    Conv2dBackwardWeightsProblem,
    Conv2dProblem,
    Pool2dBackwardProblem,
    Pool2dProblem,
    ReorderProblem,
)
from blockconv.core.quantization import Quantization
from blockconv.core.types import NIBBLES
from blockconv.kernels import TABLE
from blockconv.network import ops

from . import layers, pools, reorders

__all__ = ["BATCH", "MOST_MACS", "PAIRS", "Case", "Direct", "Node", "Operand", "Plan", "Reorder", "cases", "left_out"]

SHAPES = Path(__file__).parent / "shapes"
BATCH = 2  # images of a layer of the lists: the least at which CHWN4 is not NCHW4 byte for byte
MOST_MACS = 1_000_000_000  # multiply-adds of a layer that is run; larger ones are bound and compiled, and not run
SAME = tuple((name, name) for name in layers.LAYOUTS)
CROSS = (("NCHW", "NCHW16"), ("NCHW16", "NCHW"), ("NHWC", "NCHW8"), ("NCHW8", "CHWN4"), ("CHWN4", "NHWC"))
PAIRS = (*SAME, *CROSS)
QUICK_LAYERS = ("64-64 1x1 56", "128-128 3x3 28")  # of peers.txt
QUICK_NETWORKS = ("shufflenet",)
Shape = tuple[int, ...]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Node:
    """One op of a network. inputs, parameters: their shapes.

    every: by each row of the table that takes it, and not only by the one that the dispatcher takes. macs:
    multiply-adds.
    """

    name: str
    attributes: ops.Op
    inputs: tuple[Shape, ...]
    parameters: tuple[Shape, ...] = ()
    dtype: str = "float32"
    pairs: tuple[Pair, ...] = PAIRS
    every: bool = False
    macs: int = 0


class Operand(NamedTuple):
    """A buffer of an op. side: "src" or "dst", whose layout it has; else it is dense.

    Indices that are read (int64) are the first pixel of each window.
    """

    shape: Shape
    side: str = ""
    is_written: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class Direct:
    """An op that networks do not have, by each row of the table that takes it.

    operands: in the order of its buffers, of the case's dtype unless they name theirs; the workspace follows. options:
    of `Row.make`.
    """

    name: str
    op: str
    problem: Any
    operands: tuple[Operand, ...]
    dtype: str = "float32"
    pairs: tuple[Pair, ...] = PAIRS
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Reorder:
    """A change of layout. fill: the bits of padding. stream: past the caches. every: as of `Node`."""

    name: str
    problem: ReorderProblem
    fill: int = 0
    stream: bool = False
    every: bool = False


@dataclass(frozen=True)
class Plan:
    """The plan of a network (bench/networks) for one picture."""

    name: str
    network: str


Case = Node | Direct | Reorder | Plan


def cases(quick: bool) -> Iterator[Case]:
    """All cases, or the quick ones, which are among all."""
    yield from _samples(quick)
    yield from _reorders(quick)
    yield from _layers(quick)
    yield from _pools(quick)
    for network in QUICK_NETWORKS if quick else _networks():
        yield Plan(f"plan {network}", network)


def rows_in_reach() -> set[str]:
    """The names of the rows that cases can take: a network's nodes have one type for all, so none of quantised ones.

    Nor of packed integers, which networks have not.
    """

    def is_out(types: str) -> bool:
        return "/" in types or types in NIBBLES

    return {row.name for row in TABLE if row.dtypes is None or not all(map(is_out, row.dtypes))}


def left_out(found: Iterable[Case]) -> list[str]:
    """The layers that are not run."""
    return sorted(case.name for case in found if isinstance(case, Node) and case.macs > MOST_MACS)


def _networks() -> Sequence[str]:
    from .networks import NETWORKS  # which needs onnx

    return tuple(NETWORKS)


# ---------------------------------------------------------------- the lists


def _problems(pattern: str, op: Any) -> list[Any]:
    """The problems of shape files, each once, for BATCH images, without their names."""
    found: dict[str, Any] = {}
    for path in sorted(SHAPES.glob(pattern)):
        for problem in read_shape_file(path, op, skip_unsupported=True):
            plain = dataclasses.replace(problem, n=BATCH, name="")
            found.setdefault(plain.descriptor(), plain)
    return list(found.values())


def _layers(quick: bool) -> Iterator[Node]:
    known = {p.name: dataclasses.replace(p, n=BATCH, name="") for p in read_shape_file(SHAPES / "peers.txt", "conv2d")}
    files = ("conv_*.txt", "depthwise.txt", "grouped.txt", "peers.txt")
    listed = {p.descriptor(): p for pattern in files for p in _problems(pattern, "conv2d")}
    for problem in [known[name] for name in QUICK_LAYERS] if quick else listed.values():
        yield _conv(f"conv2d {problem.descriptor()}", problem)


def _pools(quick: bool) -> Iterator[Node]:
    listed = [dataclasses.replace(p, n=BATCH, name="") for p in pools.PROBLEMS]
    if not quick:
        kinds = ("max", "avg_include_padding")
        listed += [
            dataclasses.replace(p, kind=kind) for p, kind in itertools.product(_problems("pool_*.txt", "pool2d"), kinds)
        ]
    found = {(p.kind, p.descriptor()): p for p in listed}
    for (kind, descriptor), problem in list(found.items())[: 1 if quick else None]:
        yield _pool(f"pool2d {kind} {descriptor}", problem, pairs=SAME)


def _conv(name: str, problem: Conv2dProblem, act: Any = None, residual: bool = False, **options: Any) -> Node:
    p = problem
    sides = (p.ph, p.ph_r), (p.pw, p.pw_r)
    kind = IDENTITY if act is None else activation(act)
    attributes = ops.Conv2d((p.sh, p.sw), sides, (p.dh, p.dw), p.g, kind)
    inputs = (p.src_shape, p.dst_shape) if residual else (p.src_shape,)
    return Node(name, attributes, inputs, (p.wei_shape, (p.oc,)), macs=p.macs, **options)


def _pool(name: str, problem: Pool2dProblem, **options: Any) -> Node:
    p = problem
    sides = (p.ph, p.ph_r), (p.pw, p.pw_r)
    attributes = ops.Pool2d(p.kind, (p.kh, p.kw), (p.sh, p.sw), sides, (p.dh, p.dw), p.ceil_mode, p.divisor)
    return Node(name, attributes, (p.src_shape,), **options)


# ---------------------------------------------------------------- samples


def _samples(quick: bool) -> Iterator[Node | Direct]:
    """Small problems that together reach every row of the table, in every layout, with what lists lack.

    Channels that fill no block, borders on all sides, batches, both types of float, activations, residuals.
    """
    for few, text, dtype, act, residual in _CONVOLUTIONS:
        if few or not quick:
            extra = "".join(f" {word}" for word in (act, "residual" if residual else "") if word)
            options = {"dtype": dtype, "every": True, "pairs": _pairs(PAIRS, dtype, quick)}
            problem = Conv2dProblem.from_descriptor(text)
            yield _conv(f"sample conv2d {text}{extra}", problem, act, residual, **options)
    for few, text, kind, dtype in _POOLS:
        if few or not quick:
            pairs = _pairs(SAME, dtype, quick)
            pool = Pool2dProblem.from_descriptor(text, kind)  # type: ignore[arg-type]
            yield _pool(f"sample pool2d {kind} {text}", pool, dtype=dtype, pairs=pairs, every=True)
            if kind == "max":
                operands = tuple(Operand(pool.dst_shape, "dst", True, kind) for kind in (dtype, "int64"))
                source = Operand(pool.src_shape, "src")
                yield Direct(
                    f"sample pool2d_indices {text}",
                    "pool2d_indices",
                    pool,
                    (source, *operands),
                    dtype,
                    pairs,
                )
    yield from _gradients(quick)
    for name, attributes, inputs, parameters, dtype in _OTHERS:
        yield Node(f"sample {name}", attributes, inputs, parameters, dtype, _pairs(SAME, dtype, quick), every=True)


def _gradients(quick: bool) -> Iterator[Node | Direct]:
    """Gradients of convolutions (for the input, a transposed convolution), pools and batch normalisation."""
    pairs = (*_FEW, ("NCHW4", "NCHW4"), ("CHWN4", "NHWC"))
    for few, text in _GRADIENTS:
        if few or not quick:
            p = Conv2dBackwardWeightsProblem.from_descriptor(text)
            transposed = ops.ConvTranspose2d((p.sh, p.sw), ((p.ph, p.ph_r), (p.pw, p.pw_r)), (p.dh, p.dw), p.g)
            parameters = p.wei_shape, (p.ic,)
            yield Node(
                f"sample conv_transpose2d {text}", transposed, (p.dst_shape,), parameters, pairs=pairs, every=True
            )
            made = (Operand(shape, is_written=True) for shape in (p.wei_shape, (p.oc,)))
            operands, name = (
                (Operand(p.src_shape, "src"), Operand(p.dst_shape, "dst"), *made),
                "conv2d_backward_weights",
            )
            yield Direct(f"sample {name} {text}", name, p, operands, pairs=pairs, options=(("bias", True),))
    for few, text, kind, dtype in _POOLS[:6]:
        if dtype == "float32" and (few or not quick):
            pool = Pool2dBackwardProblem(Pool2dProblem.from_descriptor(text, kind))  # type: ignore[arg-type]
            operands = Operand(pool.src_shape, "src"), Operand(pool.dst_shape, "dst", True)
            operands += (Operand(pool.src_shape, "src", dtype="int64"),) * pool.is_max
            yield Direct(f"sample pool2d_backward {kind} {text}", "pool2d_backward", pool, operands, pairs=pairs)
    x, y, each, out = Operand(_X, "src"), Operand(_X, "src", True), Operand(_BIAS), Operand(_BIAS, is_written=True)
    numbers = Operand((3,), dtype="float64")
    norms = {
        "batch_norm": (x, each, each, y, out, out, x, each, each, out, out, numbers),
        "batch_norm_backward": (x, x, *[each] * 4, y, out, out, numbers),
    }
    for name, operands in norms.items():
        yield Direct(f"sample {name} 2x20x9x11", name, BatchNormProblem(_X), operands, pairs=SAME)
    statistic, name = Operand((_X[0], 5)), "group_norm_backward"
    operands = x, x, each, statistic, statistic, y, out, out
    yield Direct(f"sample {name} 2x20x9x11", name, GroupNormProblem(_X, 5), operands, pairs=SAME)


def _pairs(pairs: tuple[Pair, ...], dtype: str, quick: bool) -> tuple[Pair, ...]:
    """All of them; of the quick cases of other types than float32 only pixels of one, all, some and many channels."""
    return _FEW if quick and dtype != "float32" else pairs


_FEW = tuple((name, name) for name in ("NCHW", "NHWC", "NCHW16", "NCHW64"))
# Whether it is one of the quick cases, benchdnn descriptor.
_GRADIENTS = (
    (True, "mb2ic20ih9iw11oc40kh3kw3ph1pw1"),
    (True, "g20mb2ic20ih9iw11oc20kh3kw3ph1pw1"),
    (True, "g8mb2ic32ih9oc32kh3ph1"),
    (True, "mb2ic3ih36oc24kh5sh2ph2"),
    (True, "g20mb2ic20ih12oc20kh3sh2ph1"),
    (False, "mb2ic32ih8oc48kh1"),
    (False, "mb1ic12ih9oc16kh3ph2dh1"),
)


# Whether it is one of the quick cases, benchdnn descriptor, dtype, activation, residual.
_CONVOLUTIONS = (
    (True, "mb2ic20ih9iw11oc40kh3kw3ph1pw1", "float32", "relu", True),
    (True, "g8mb2ic32ih9oc32kh3ph1", "float32", None, False),
    (True, "g20mb2ic20ih9iw11oc20kh3kw3ph1pw1", "float32", "hardswish", True),
    (True, "g20mb2ic20ih9iw11oc20kh3kw3ph1pw1", "float64", None, False),
    (False, "mb2ic20ih9iw11oc40kh3kw3ph1pw1", "float32", None, False),
    (False, "mb2ic20ih9iw11oc40kh3kw3ph1pw1", "float64", None, False),
    (False, "mb2ic32ih10oc48kh3sh2ph1", "float32", None, False),
    (True, "mb2ic20ih6oc24kh1", "float32", "relu", True),
    (False, "mb2ic32ih8oc48kh1", "float32", "silu", False),
    (False, "mb2ic3ih15oc24kh5sh2ph2", "float32", None, False),
    (False, "mb1ic12ih9oc16kh3ph2dh1", "float32", None, False),
    (False, "mb32ic8ih5oc16kh3ph1", "float32", None, False),
    (False, "g8mb2ic32ih9oc32kh3ph1", "float64", None, False),
    (False, "g3mb2ic18ih8oc36kh3ph1", "float32", None, False),
    (False, "g20mb2ic20ih12oc40kh3sh2ph1", "float32", None, False),
)
# Whether it is one of the quick cases, benchdnn descriptor, kind, dtype.
_POOLS = (
    (True, "mb2ic20ih11oh6kh3sh2ph1", "max", "float32"),
    (True, "mb2ic20ih9oh9kh3ph1", "max", "float32"),
    (True, "mb2ic20ih9oh9kh3ph1", "max", "float64"),
    (True, "mb2ic20ih9oh9kh3ph1", "max", "int8"),
    (True, "mb2ic20ih7oh1kh7", "avg_exclude_padding", "float32"),
    (True, "mb2ic20ih7oh1kh7", "avg_exclude_padding", "float64"),
    (True, "mb2ic20ih7oh1kh7", "max", "int8"),
    (True, "mb2ic20ih9oh9kh3ph1", "max", "float16"),
    (True, "mb2ic20ih7oh1kh7", "max", "float16"),
    (False, "mb2ic20ih7oh1kh7", "avg_exclude_padding", "float16"),
    (False, "mb2ic20ih11oh6kh3sh2ph1", "max", "float64"),
    (False, "mb2ic20ih11oh6kh3sh2ph1", "max", "int8"),
    (False, "mb2ic20ih11oh6kh3sh2ph1", "avg_exclude_padding", "float32"),
    (False, "mb2ic20ih11oh6kh3sh2ph1", "avg_exclude_padding", "float64"),
    (False, "mb2ic20ih8oh4kh2sh2", "avg_include_padding", "float32"),
    (False, "mb2ic20ih17oh4kh5sh4ph0", "max", "float32"),
    (False, "mb2ic20ih20oh4kh5sh5", "max", "float32"),
    (False, "mb2ic20ih20oh4kh5sh5", "max", "float64"),
    (False, "mb2ic20ih20oh4kh5sh5", "max", "int8"),
)
_X = (2, 20, 9, 11)
_BIAS = (20,)
_OTHERS: tuple[tuple[str, ops.Op, tuple[Shape, ...], tuple[Shape, ...], str], ...] = (
    (
        "conv2d of taps far apart",
        ops.Conv2d((1, 1), ((6, 6), (6, 6)), (6, 6), 1, IDENTITY, finite=True),
        ((BATCH, 24, 11, 13),),
        ((40, 24, 3, 3), (40,)),
        "float32",
    ),
    ("adaptive_avg_pool2d 2x20x9x11 to 4x4", ops.AdaptivePool2d((4, 4)), (_X,), (), "float32"),
    *(
        (f"activation {act} 2x20x9x11", ops.Activate(activation(act)), (_X,), (), dtype)
        for act, dtype in (("relu", "float32"), ("sigmoid", "float32"), ("gelu", "float32"), ("tanh", "float64"))
    ),
    *((f"binary {kind} 2x20x9x11", ops.Binary(kind), (_X, _X), (), "float32") for kind in ("add", "mul", "max")),
    ("binary mul 2x20x9x11 by 2x20x1x1", ops.Binary("mul"), (_X, (2, 20, 1, 1)), (), "float32"),
    ("binary add 2x20x9x11", ops.Binary("add"), (_X, _X), (), "float64"),
    ("binary sub 6x50 by 50", ops.Binary("sub"), ((6, 50), (50,)), (), "float32"),
    ("largest of 2x20x9x11 and 2x20x1x1", ops.Binary("max"), (_X, (2, 20, 1, 1)), (), "int64"),
    ("gradient of silu", ops.ActivationBackward("silu_gradient"), (_X, _X), (), "float32"),
    ("one of two where true", ops.Where(), (_X, (2, 20, 1, 1), _X), (), "bool"),
    ("float32 to int64", ops.Convert("int64"), (_X,), (), "float32"),
    ("sum so far of rows", ops.Scan(2), (_X,), (), "float32"),
    ("largest 5 of 11", ops.Top(3, 5), (_X,), (), "int64"),
    ("gather of 20 at 6", ops.GatherAt("along", 1), (_X, (6,)), (), "int64"),
    ("scatter of 20 at 6", ops.ScatterAt("tuples", 0), ((20, 9), (6, 1), (6, 9)), (), "int64"),
    ("lookup 2x20x9x11", ops.Lookup(bytes(range(255, -1, -1)), Quantization(1.0)), (_X,), (), "uint8"),
    ("affine 2x20x9x11", ops.Affine(activation("relu")), (_X,), (_BIAS, _BIAS), "float32"),
    ("concat 20 and 12 channels", ops.Concat(1), (_X, (2, 12, 9, 11)), (), "float32"),
    ("slice 7 of 20 channels from 5", ops.Slice(1, 5, 7), (_X,), (), "float32"),
    ("slice every other row", ops.Slice(2, 1, 4, 2), (_X,), (), "float32"),
    ("gather 6 of 20 channels", ops.Gather(1, (19, 0, 7, 8, 9, 7)), (_X,), (), "float32"),
    ("gather 3 columns", ops.Gather(3, (10, 0, 10)), (_X,), (), "float32"),
    ("pad 1 around", ops.Pad(((0, 0), (0, 0), (1, 1), (1, 1)), 0.5), (_X,), (), "float32"),
    ("shuffle 4 groups of 20", ops.Shuffle(4), (_X,), (), "float32"),
    ("shuffle 4 groups of 64", ops.Shuffle(4), ((2, 64, 9, 11),), (), "float32"),
    ("shuffle 4 groups of 64", ops.Shuffle(4), ((2, 64, 9, 11),), (), "float64"),
    ("softmax of channels", ops.Softmax(1), (_X,), (), "float32"),
    ("softmax 6x50", ops.Softmax(1), ((6, 50),), (), "float32"),
    ("lrn 5", ops.Lrn(5, 0.3), (_X,), (), "float32"),
    ("group norm of 4 channels", ops.GroupNorm(5), (_X,), (_BIAS, _BIAS), "float32"),
    ("instance norm of halves", ops.GroupNorm(20), (_X,), (_BIAS, _BIAS), "float16"),
    ("layer norm of channels", ops.GroupNorm(1, per_pixel=True), (_X,), (_BIAS, _BIAS), "float32"),
    ("RMS norm 6x50", ops.GroupNorm(1, centred=False), ((6, 50),), ((50,), (50,)), "float32"),
    ("layer norm 6x50", ops.GroupNorm(1), ((6, 50),), ((50,), (50,)), "float32"),
    ("resize nearest to 18x20", ops.Resize("nearest", (18, 20)), (_X,), (), "float32"),
    ("resize nearest of bytes to 18x20", ops.Resize("nearest", (18, 20)), (_X,), (), "int8"),
    ("resize linear to 14x15", ops.Resize("linear", (14, 15)), (_X,), (), "float32"),
    ("resize linear of halves to 14x15", ops.Resize("linear", (14, 15)), (_X,), (), "float16"),
    ("resize cubic to 14x15", ops.Resize("cubic", (14, 15)), (_X,), (), "float32"),
    ("resize linear of 72 channels to 14x15", ops.Resize("linear", (14, 15)), ((2, 72, 9, 11),), (), "float32"),
    ("softmax of halves of channels", ops.Softmax(1), (_X,), (), "float16"),
    ("binary add of halves", ops.Binary("add"), (_X, _X), (), "float16"),
    ("transpose 0231", ops.Transpose((0, 2, 3, 1)), (_X,), (), "float32"),
    ("transpose 3210", ops.Transpose((3, 2, 1, 0)), (_X,), (), "float32"),
    ("reduce_mean of the image", ops.ReduceMean((2, 3)), (_X,), (), "float32"),
    ("reduce_mean of 6x50", ops.ReduceMean((1,)), ((6, 50),), (), "float32"),
    ("matmul 2x6x50 by 50x40", ops.MatMul(), ((2, 6, 50), (50, 40)), (), "float32"),
    ("matmul of heads", ops.MatMul((None, (0, 1, 3, 2), None)), ((2, 3, 20, 17), (2, 3, 33, 17)), (), "float32"),
    ("attention of 3 heads", ops.Attention(0.3), ((2, 3, 20, 17), (2, 3, 17, 33), (2, 3, 33, 20)), (), "float32"),
    ("attention of halves", ops.Attention(0.3), ((3, 20, 17), (3, 17, 33), (3, 33, 20)), (), "float16"),
    ("matmul of halves", ops.MatMul(), ((2, 6, 50), (2, 50, 40)), (), "bfloat16"),
    ("lstm of 20", ops.Recurrent("lstm"), ((4, 2, 80), (2, 2, 20)), ((1, 2, 20, 64), (1, 80)), "float32"),
    ("find_quantization 2x20x9x11", ops.FindQuantization(), (_X,), (), "float32"),
)


# ---------------------------------------------------------------- reorders


def _reorders(quick: bool) -> Iterator[Reorder]:
    """Small ones by every row, of each size of element; unless quick, all pairs of layouts of a larger one."""
    small, large = (2, 20, 9, 11), reorders.SHAPES[0]
    for (src, dst), itemsize in itertools.product(reorders.PAIRS, (1, 2, 4, 8)):
        if itemsize == 4 or (src, dst) in reorders.PAIRS[: 2 if quick else 6]:
            yield _reorder(f"sample reorder {itemsize} bytes", small, src, dst, itemsize, every=True)
    yield _reorder("sample reorder of blocks that do not nest", small, "aBcd24b", "NCHW16", 4, every=True)
    for src, dst in reorders.PAIRS[4:6]:
        yield _reorder("sample reorder past the caches", large, src, dst, 4, every=True, stream=True)
        yield _reorder("sample reorder with ones as padding", small, src, dst, 4, every=True, fill=0x3F800000)
    if not quick:
        for src, dst in itertools.permutations(layers.LAYOUTS, 2):
            yield _reorder("reorder", large, src, dst, 4)


def _reorder(what: str, shape: Shape, src: str, dst: str, itemsize: int, **options: Any) -> Reorder:
    name = f"{what} {'x'.join(map(str, shape))} {src} > {dst}"
    return Reorder(name, ReorderProblem(shape, src, dst, itemsize), **options)
