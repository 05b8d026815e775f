"""Translators of the ops that ONNX Runtime adds to ONNX's (com.microsoft).

Its quantizer writes some (see `quantized`). Others are fused ops in the models that it saves.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from blockconv.core import target
from blockconv.core.activation import ACTIVATIONS, FUNCTIONS
from blockconv.core.python import zipped
from blockconv.frontends.onnx.matrices import gemm, matmul, of_heads, of_rows
from blockconv.frontends.onnx.quantized import CONSTANT, dequantized, factors, qlinear_conv, stored
from blockconv.frontends.onnx.scope import OPS, Call, op
from blockconv.frontends.onnx.windows import average, conv, global_pool, pool
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Axes, Tensor

Formula = Callable[[Call], Tensor]


def _channels_first(translate: Formula, last: int = 0) -> Formula:
    """`translate`, which reads channels first, of a node that may say `channels_last`. last: its default."""

    def translated(call: Call) -> Tensor:
        if not call.attribute("channels_last", last):
            return translate(call)
        x, rank = call.x, call.x.rank
        call.inputs[0] = call.helper(ops.Transpose((0, rank - 1, *range(1, rank - 1))), x)
        return call.emit(ops.Transpose((0, *range(2, rank), 1)), translate(call))

    return translated


op("com.microsoft.QLinearConv", limits=OPS["QLinearConv"].limits)(_channels_first(qlinear_conv))
op("com.microsoft.NhwcMaxPool", limits=OPS["MaxPool"].limits)(
    _channels_first(lambda call: pool(call, "max", call.x), last=1)
)


@op("com.microsoft.QGemm", limits=f"constant B and C; {CONSTANT}")
def _qgemm(call: Call) -> Tensor:
    a, scale = factors(call, 0 if call["transB"] else 1)
    if call.has(6):
        bias = call.array(6, "bias").astype(np.float32) * scale.astype(np.float32)
        call.inputs[6] = call.constant(bias * np.float32(call.attribute("alpha", 1.0)), "bias")
    y = gemm(call, a, 3, 6)
    return y if not call.has(7) else stored(call, y, 7)


def _of_integers(*reads: int) -> Callable[[Callable[..., Tensor]], Formula]:
    """A translator of an op of integers, from its formula of floats.

    reads: the numbers of operands, each before its scale and zero point. The output's scale and zero point come last.
    """

    def of(formula: Callable[..., Tensor]) -> Formula:
        def translate(call: Call) -> Tensor:
            y = formula(call, *(dequantized(call, at) for at in reads))
            return stored(call, y, reads[-1] + 3, call.input(reads[0]).dtype)

        return translate

    return of


def _binary(kind: ops.BinaryKind) -> Formula:
    combined = _of_integers(0, 3)(lambda call, a, b: call.binary(kind, a, b))

    def translate(call: Call) -> Tensor:
        before = [_transposed(call, at) for at in (0, 3)]
        if before[0] is None or before[1] is None or before[0][1] != before[1][1]:
            return combined(call)
        # Both are channels last by transposes, which vanish where they meet those of convolutions.
        call.inputs[0], call.inputs[3] = before[0][0], before[1][0]
        return call.emit(ops.Transpose(before[0][1]), translate(call))

    return translate


def _transposed(call: Call, at: int) -> tuple[Tensor, Axes] | None:
    """(The source of the transpose that makes the operand `at`, its permutation); None if no transpose makes it."""
    node = call.maker(call.input(at).name)
    if node is None or not isinstance(node.attributes, ops.Transpose):
        return None
    return call.scope.values[node.inputs[0]], node.attributes.perm


op("com.microsoft.QLinearAdd", limits=CONSTANT)(_binary("add"))
op("com.microsoft.QLinearMul", limits=CONSTANT)(_binary("mul"))
op("com.microsoft.QLinearWhere", limits=CONSTANT)(_of_integers(1, 4)(lambda call, x, y: call.where(call.x, x, y)))
op("com.microsoft.QLinearSigmoid", limits=CONSTANT)(_of_integers(0)(lambda call, x: call.apply("sigmoid", x)))
op("com.microsoft.QLinearLeakyRelu", limits=CONSTANT)(
    _of_integers(0)(lambda call, x: call.apply(("leaky_relu", call.attribute("alpha", 0.01)), x))
)


@op("com.microsoft.QLinearConcat", limits=CONSTANT)
def _qlinear_concat(call: Call) -> Tensor:
    parts = [dequantized(call, at) for at in range(2, len(call.inputs), 3)]
    axis = call.axis(call["axis"], parts[0].rank)
    return stored(call, call.emit(ops.Concat(axis), *parts), 0)


op("com.microsoft.QLinearGlobalAveragePool", limits=f"1-D to 3-D; {CONSTANT}")(
    _channels_first(_of_integers(0)(lambda call, x: global_pool(call, "avg_exclude_padding", x)))
)
op(
    "com.microsoft.QLinearAveragePool",
    limits=f"1-D to 3-D; no window of padding alone, unless count_include_pad; {CONSTANT}",
)(_channels_first(_of_integers(0)(average)))


@op("com.microsoft.QLinearSoftmax", limits=CONSTANT)
@_of_integers(0)
def _qlinear_softmax(call: Call, x: Tensor) -> Tensor:
    return softmax(call, x, call.axis(call.attribute("axis", -1), x.rank), call.attribute("opset", 13))


def softmax(call: Call, x: Tensor, axis: int, opset: int) -> Tensor:
    """Softmax or LogSoftmax along an axis; before opset 13 over all axes from that one on."""
    log = call.kind == "LogSoftmax"
    if opset >= 13 or math.prod(x.shape[axis + 1 :]) == 1:
        return call.emit(ops.Softmax(axis, log=log), x)
    flat = call.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return call.reshape(call.emit(ops.Softmax(1, log=log), flat), x.shape)


# ---------------------------------------------------------------- what ONNX Runtime fuses


# The activations and functions of ONNX: their names here, and their attributes with the defaults.
ACTIVATIONS_OF_ONNX: dict[str, tuple[str, dict[str, float]]] = {
    known.onnx[0]: (name, known.onnx[1])
    for table in (ACTIVATIONS, FUNCTIONS)
    for name, known in table.items()
    if known.onnx
} | {
    "Clip": ("clip", {}),
    "Elu": ("elu", {"alpha": 1.0}),
    "Selu": ("elu", {"alpha": 1.67326319217681884765625, "gamma": 1.0507010221}),
}


def _activated(call: Call, y: Tensor) -> Tensor:
    """The activation that a fused node names, of its result. FusedConv lists its parameters, FusedGemm names them."""
    kind = call.attribute("activation", "")
    if not kind:
        return y
    if kind not in ACTIVATIONS_OF_ONNX:
        raise Unsupported(f"activation={kind!r}")
    name, defaults = ACTIVATIONS_OF_ONNX[kind]
    given = call["activation_params"] or [
        call.attribute(f"activation_{key}", default) for key, default in defaults.items()
    ]
    return call.apply((name, *given), y)


@op("com.microsoft.FusedConv", limits="1-D to 3-D; constant weight and bias")
def _fused_conv(call: Call) -> Tensor:
    """A convolution, plus another value, activated."""
    return _activated(call, call.plus(conv(call), 3))


op("com.microsoft.FusedGemm", limits="floats, or constant B and C")(
    lambda call: _activated(call, gemm(call, call.x, 1, 2))
)


@op("com.microsoft.Gelu", "com.microsoft.BiasGelu", "com.microsoft.FastGelu", limits="floats")
def _gelu(call: Call) -> Tensor:
    """By Erf, or by Tanh (FastGelu); of x plus a bias, if there is one."""
    return call.apply("gelu_tanh" if call.kind == "FastGelu" else "gelu", call.plus(call.floats(), 1))


@op("com.microsoft.QuickGelu", "Swish", limits="floats")
def _swish(call: Call) -> Tensor:
    """x * sigmoid(alpha * x)."""
    x, alpha = call.floats(), call.attribute("alpha", 1.702 if call.kind == "QuickGelu" else 1.0)
    if alpha == 1:
        return call.apply("silu", x)
    return call.mul(x, call.apply("sigmoid", call.mul(x, alpha), helps=True))


@op(
    "com.microsoft.SkipLayerNormalization",
    "com.microsoft.SkipSimplifiedLayerNormalization",
    limits="constant scale and biases; no statistics",
)
def _skip_layer_norm(call: Call) -> list[Tensor | None]:
    """The layer (or RMS) normalisation of a sum of two values and a bias, and the sum."""
    centred = call.kind == "SkipLayerNormalization"
    bias_at = 4 if centred else 3
    total = call.plus(call.add(call.x, call.input(1)), bias_at)
    gamma, beta = call.array(2, "gamma"), call.array(3, "beta") if centred and call.has(3) else np.zeros(())
    y = call.normalise_rows(total, total.rank - 1, gamma, beta, call.attribute("epsilon", 1e-12), centred)
    return [y, None, None, total]


@op("com.microsoft.EmbedLayerNormalization", limits="constant scale and bias; no mask index")
def _embedded(call: Call) -> list[Tensor | None]:
    """The layer normalisation of a sum of rows of tables: of words, of positions, and perhaps of segments."""
    ids = call.x
    positions = call.input(8) if call.has(8) else call.constant(np.arange(ids.shape[1])[None], "positions")
    rows = [(2, ids), (3, positions), *([(4, call.input(1))] if call.has(1) else [])]
    parts = [call.helper(ops.GatherAt("along", 0), call.input(table), of) for table, of in rows]
    total = functools.reduce(call.add, parts)
    gamma, beta = call.array(5, "gamma"), call.array(6, "beta")
    y = call.normalise_rows(total, 2, gamma, beta, call.attribute("epsilon", 1e-12))
    return [y, None, total]


@op("com.microsoft.RotaryEmbedding", limits="floats; no packed batches, no scale")
def _rotary(call: Call) -> Tensor:
    """Pairs of channels of each head turned by the angles of their positions."""
    x, positions, heads = call.x, call.input(1), call.attribute("num_heads", 0)
    half = call.input(2).shape[1]
    if x.rank not in (3, 4) or call["is_packed_batching"] or call.attribute("scale", 1.0) != 1:
        raise Unsupported(f"input={x.shape}, packed batches or a scale")
    wide = call.reshape(x, (*x.shape[:2], heads or x.shape[2] // (2 * half), -1)) if x.rank == 3 else x
    wide = call.helper(ops.Transpose((0, 2, 1, 3)), wide) if x.rank == 4 else wide
    if positions.shape == (1,):
        later = call.constant(np.arange(wide.shape[1], dtype=np.int64)[None], "positions")
        positions = call.add(call.reshape(positions, (1, 1)), later)
    channels = np.arange(2 * half)
    pairs, others = (channels // 2, channels ^ 1) if call["interleaved"] else (channels % half, np.roll(channels, half))
    signs = call.constant(np.where(channels < others, -1, 1).astype(wide.type.dtype), "signs")
    cosine, sine = (call.gathered(call.input(k), 1, pairs) for k in (2, 3))
    tables = (call.helper(ops.GatherAt("along", 0), table, positions) for table in (cosine, call.mul(sine, signs)))
    cosine, sine = (call.reshape(table, (*table.shape[:2], 1, 2 * half)) for table in tables)
    turned = call.part(wide, 3, 0, 2 * half, helps=True)
    y = call.add(call.mul(turned, cosine), call.mul(call.gathered(turned, 3, others), sine))
    rest = wide.shape[3] - 2 * half
    y = call.emit(ops.Concat(3), y, call.emit(ops.Slice(3, 2 * half, rest), wide)) if rest else y
    return call.emit(ops.Transpose((0, 2, 1, 3)), y) if x.rank == 4 else call.reshape(y, x.shape)


@op("com.microsoft.MatMulNBits", limits="floats; constant B of 4 or 8 bits, scales and zero points; no g_idx")
def _matmul_of_bits(call: Call) -> Tensor:
    """A product with weights that have a scale, and perhaps a zero point, for each block of rows in each column."""
    k, n, size = (call[name] for name in ("K", "N", "block_size"))
    bits, blocks, x = call.attribute("bits", 4), -(-k // size), call.x
    if bits not in (4, 8) or call.has(4) or call["weight_prepacked"] or not x.type.is_float:
        raise Unsupported(f"{bits} bits, {x.type}" + ", g_idx" * call.has(4))
    try:
        weight = _unpacked(call.array(1, "weight"), n, bits).reshape(n, blocks, size).astype(np.float32)
        scale = call.array(2, "scales").reshape(n, blocks, 1).astype(np.float32)
        zero: Any = np.float32(1 << (bits - 1))
        if call.has(3):
            given = call.array(3, "zero_points")
            given = _unpacked(given, n, bits)[:, :blocks] if given.dtype == np.uint8 else given
            zero = given.reshape(n, blocks, 1).astype(np.float32)
    except ValueError as error:
        raise call.error("B", call.input(1).shape, f"does not fit N={n}, K={k}, block_size={size}: {error}") from error
    whole = ((weight - zero) * scale).reshape(n, -1)[:, :k]
    call.inputs[1] = call.constant(whole.T.astype(x.type.dtype), "weight")
    return call.plus(matmul(call, x, 1), 5)


def _unpacked(packed: Any, rows: int, bits: int) -> Any:
    """Bytes as rows of numbers of `bits` bits, the low half of a byte first."""
    given = packed.reshape(rows, -1)
    return given if bits == 8 else np.stack([given & 15, given >> 4], -1).reshape(rows, -1)


@op(
    "com.microsoft.Attention",
    "com.microsoft.MultiHeadAttention",
    limits="floats; one output; constant weights and biases; masks of two or three dimensions; no past keys; as many "
    "queries as keys if unidirectional",
)
def _attention(call: Call) -> Tensor:
    """Attention of queries, keys and values, or of one input with weights side by side. A mask of 0 hides a key."""
    joined = call.kind == "Attention"
    mask_at, kinds = (3, (0, 1, 2, 3, 5)) if joined else (4, range(6))
    if call["do_rotary"] or any(call.has(k) and k not in kinds for k in range(len(call.inputs))):
        raise Unsupported("past keys and values, or rotation")
    parts = _side_by_side(call) if joined else _with_biases(call)
    q, k, v = (of_heads(call, x, "num_heads") for x in parts)
    masks = [_hidden(call, call.input(mask_at), q)] if call.has(mask_at) else []
    masks += [call.input(5)] if call.has(5) else []
    mask = functools.reduce(call.add, masks) if masks else None
    causal = bool(call["unidirectional"])
    if causal and q.shape[2] != k.shape[2]:
        raise Unsupported("unidirectional=1 with other numbers of queries and keys, whose mask ONNX does not define")
    y = call.attended(q, k, v, mask, call.attribute("scale") or None, causal, zero_rows=False)
    return of_rows(call, y)


def _side_by_side(call: Call) -> list[Tensor]:
    """Queries, keys and values: slices of a product and its bias."""
    total = call.plus(matmul(call, call.x, 1), 2)
    widths = call.attribute("qkv_hidden_sizes", ()) or (total.shape[-1] // 3,) * 3
    if len(widths) != 3 or min(widths) < 1 or sum(widths) != total.shape[-1]:
        raise call.error("qkv_hidden_sizes", widths, f"has to be three sizes whose sum is the columns of {total.shape}")
    return call.split(total, 2, widths, helps=True)


def _with_biases(call: Call) -> list[Tensor]:
    """Queries, keys and values plus their shares of the biases, which are side by side."""
    if not (call.has(1) and call.has(2)) or call.x.rank != 3:
        raise Unsupported("queries, keys and values in one input")
    parts = [call.input(i) for i in range(3)]
    if not call.has(3):
        return parts
    if any(x.rank != 3 for x in parts):
        raise Unsupported("a bias of keys of four dimensions")
    ends = np.cumsum([x.shape[2] for x in parts])[:2]
    shares = np.split(call.array(3, "bias"), ends)
    return [call.add(x, call.constant(b, "bias")) for x, b in zipped(parts, shares)]


def _hidden(call: Call, mask: Tensor, q: Tensor) -> Tensor:
    """The numbers that are added to the scores of each key. Where the mask is positive they are 0."""
    if mask.rank not in (2, 3):
        raise Unsupported(f"a mask of shape {mask.shape}")
    mask = call.reshape(mask, (mask.shape[0], 1, *(1,) * (3 - mask.rank), *mask.shape[1:]))
    hidden = call.number(call.attribute("mask_filter_value", -10000.0), q)
    return call.where(call.less(0, mask), 0, hidden)


# ---------------------------------------------------------------- what ONNX Runtime computes in blocks of channels

BLOCKED = "com.microsoft.nchwc"


def channel_block(nodes: Iterable[Any], arrays: Mapping[str, Any]) -> int:
    """The channels of a block, which a model that ONNX Runtime saved does not state.

    It is this processor's: 16 with AVX-512 and on Arm, else 8. But it is 8 if a weight has no whole blocks of 16.
    """
    weights = (arrays.get(node.input[1]) for node in nodes if (node.domain, node.op_type) == (BLOCKED, "Conv"))
    whole = all(weight is None or weight.shape[0] % 16 == 0 for weight in weights)
    return 16 if whole and (not target.is_x86() or "avx512f" in target.host_features()) else 8


for _name in ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"):
    op(f"{BLOCKED}.{_name}", limits=OPS[_name].limits)(OPS[_name].translate)


@op(f"{BLOCKED}.ReorderInput")
def _reorder_input(call: Call) -> Tensor:
    """Channels are filled up with zeros to whole blocks. The layout is the planner's business."""
    x = call.x
    if call["channels_last"]:
        x = call.helper(ops.Transpose((0, 3, 1, 2)), x)
    more = -x.shape[1] % call.scope.channel_block
    return call.emit(ops.Pad(((0, 0), (0, more), (0, 0), (0, 0)), 0.0), x) if more else x


@op(f"{BLOCKED}.ReorderOutput")
def _reorder_output(call: Call) -> Tensor:
    x, channels = call.x, call.attribute("channels", 0)
    if not 0 < channels <= x.shape[1]:
        raise call.error("channels", channels, f"has to be one of 1 to {x.shape[1]}, the input's channels")
    x = call.part(x, 1, 0, channels, helps=True)
    return call.emit(ops.Transpose((0, 2, 3, 1)), x) if call["channels_last"] else x


@op(f"{BLOCKED}.Conv", limits="constant weight and bias")
def _blocked_conv(call: Call) -> Tensor:
    """A FusedConv whose weight is in blocks of output channels, and of input channels, if there are as many."""
    block, weight = call.scope.channel_block, call.array(1, "weight")
    if weight.ndim != 4 or weight.shape[0] % block or (weight.shape[1] > block and weight.shape[1] % block):
        raise call.error("weight", weight, f"has to have four dimensions and whole blocks of {block} channels")
    o, i, *taps = weight.shape
    inner = 1 if i < block else block
    blocks = weight.reshape(o // block, i // inner, *taps, inner, block)
    call.inputs[1] = call.constant(blocks.transpose(0, 5, 1, 4, 2, 3).reshape(weight.shape), "weight")
    return _fused_conv(call)


@op(f"{BLOCKED}.Upsample")
def _upsample(call: Call) -> Tensor:
    n, c, *scale = call.attribute("scales", (1, 1, 1, 1))
    if (n, c) != (1, 1) or len(scale) != 2 or min(scale) < 1:
        raise call.error("scales", (n, c, *scale), "have to be 1, 1, and whole numbers for H and W")
    mode = call.attribute("mode", "nearest")
    coordinates = call.attribute("coordinate_transformation_mode", "asymmetric")
    return call.emit(ops.Resize(mode, None, (float(scale[0]), float(scale[1])), coordinates, "floor"), call.x)
