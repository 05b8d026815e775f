"""PyTorch on the CPU, which for convolution is oneDNN: in each memory format that it has.

Conv2d comes in four forms. `contiguous` and `channels_last` are what its users write; both hand
oneDNN plain weights, which it reorders at every call. `channels_last prepacked` is what its compiler
(inductor) makes of a frozen model, and its best. `blocked` keeps source and destination in oneDNN's
own blocked formats. There torch (2.13) has no way to keep the weights in the format that the blocked
kernels want. oneDNN reorders them at every call (ONEDNN_VERBOSE=1 shows it).

For integers, `onednn` is what its compiler makes of a quantized model, and `quantized` what its eager mode has, by the
engine of oneDNN too.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from blockconv.core.problem import Conv2dProblem, Pool2dProblem, ReorderProblem

from . import NUMBERS, ZERO, QuantizedLayer, Variant, end_padding, is_symmetric, output_padding, spoil

# If oneDNN is held to a lesser instruction set, only work in oneDNN counts. With plain tensors, PyTorch computes 1x1
# convolutions on one thread in MKL, which obeys no limit.
HELD = "ONEDNN_MAX_CPU_ISA" in os.environ
PLAIN_CHANNELS = 16  # oneDNN reads a dense source of fewer channels as plain NCHW, not blocked


FLOATS = ("float32", "float64", "bfloat16")
DTYPES = {
    **dict.fromkeys(("conv2d", "conv2d_backward_data", "conv2d_backward_weights", "conv_transpose2d"), FLOATS),
    **dict.fromkeys(("pool2d", "pool2d_backward", "reorder"), NUMBERS),
}


def version() -> str:
    return str(torch.__version__)


_modes = contextlib.ExitStack()


def _start(threads: int, inference: bool = True) -> None:
    # Set once for the thread: a context at each call would cost microseconds that its users do not pay.
    _modes.close()
    _modes.enter_context(torch.inference_mode() if inference else torch.no_grad())
    torch.set_num_threads(threads)


def conv2d(
    problem: Conv2dProblem, src: np.ndarray, wei: np.ndarray, bias: np.ndarray | None, threads: int
) -> Iterator[Variant]:
    ends = end_padding(problem)
    if ends is None:
        return
    _start(threads)
    x, w = _tensor(src), _tensor(wei)
    b = None if bias is None else torch.from_numpy(bias).to(x.dtype)
    p = problem
    stride, dilation, padding = (p.sh, p.sw), (p.dh, p.dw), (p.ph, p.pw)
    pad: Callable[[torch.Tensor], torch.Tensor] = lambda x: x  # noqa: E731
    if not is_symmetric(problem):  # conv2d takes one number for both sides, so its users pad first
        margins = (p.pw, ends[1], p.ph, ends[0])
        pad, padding = lambda x: F.pad(x, margins), (0, 0)

    def plain(x: torch.Tensor, w: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: F.conv2d(pad(x), w, b, stride, padding, dilation, p.g)

    x_last, w_last = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    if not HELD:
        yield _variant("contiguous", plain(x, w))
        yield _variant("channels_last", plain(x_last, w_last), x)
    if src.dtype == np.float64:
        return  # the others are oneDNN's, which has none

    packed = torch.ops.mkldnn._reorder_convolution_weight(w, padding, stride, dilation, p.g, list(pad(x).shape))

    def prepacked() -> torch.Tensor:
        return torch.ops.mkldnn._convolution_pointwise(
            pad(x_last), packed, b, padding, stride, dilation, p.g, "none", [], ""
        )

    yield _variant("channels_last prepacked", prepacked, x)
    if is_symmetric(problem) and src.dtype == np.float32:
        yield _variant("blocked", _blocked(problem, x, w, b))


def quantized_conv2d(problem: Conv2dProblem, layer: QuantizedLayer, threads: int) -> Iterator[Variant]:
    p = problem
    if not is_symmetric(p):
        return
    _start(threads)
    windows = [p.sh, p.sw], [p.ph, p.pw], [p.dh, p.dw], p.g
    plain, bias = torch.from_numpy(layer.src), torch.from_numpy(layer.real_bias)
    x = plain.contiguous(memory_format=torch.channels_last)
    w, scales, zeros = (
        torch.from_numpy(layer.wei),
        torch.from_numpy(layer.wei_scale),
        torch.zeros(p.oc, dtype=torch.int32),
    )
    ends = layer.src_scale, ZERO
    packed = torch.ops.onednn.qconv_prepack(w, scales, *ends, *windows, list(x.shape))

    def pointwise() -> torch.Tensor:
        return torch.ops.onednn.qconv2d_pointwise(
            x, *ends, packed, scales, zeros, bias, *windows, layer.dst_scale, ZERO, torch.uint8, "none", [], ""
        )

    yield _variant("onednn", pointwise, plain)
    torch.backends.quantized.engine = "onednn"
    quantized = torch._make_per_tensor_quantized_tensor(x, *ends)
    held = torch._make_per_channel_quantized_tensor(w, scales.double(), zeros.long(), 0)
    parameters = torch.ops.quantized.conv2d_prepack(held, bias, *windows)

    def eager() -> torch.Tensor:
        return torch.ops.quantized.conv2d(quantized, parameters, layer.dst_scale, ZERO)

    yield _variant("quantized", eager, plain)


def conv2d_backward_data(problem: Conv2dProblem, wei: np.ndarray, grad: np.ndarray, threads: int) -> Iterator[Variant]:
    yield from _gradients(problem, (_tensor(grad), torch.empty(problem.src_shape), _tensor(wei)), 0, threads)


def conv2d_backward_weights(
    problem: Conv2dProblem, src: np.ndarray, grad: np.ndarray, threads: int
) -> Iterator[Variant]:
    yield from _gradients(problem, (_tensor(grad), _tensor(src), torch.empty(problem.wei_shape)), 1, threads)


def _gradients(problem: Conv2dProblem, given: tuple[torch.Tensor, ...], wanted: int, threads: int) -> Iterator[Variant]:
    """given: the gradient, the source and the weights. wanted: 0 for the gradient of the source, 1 for the weights'."""
    p, mask = problem, [k == wanted for k in range(3)]
    if not is_symmetric(p):
        return
    _start(threads)
    windows = [p.sh, p.sw], [p.ph, p.pw], [p.dh, p.dw], False, [0, 0], p.g, mask
    for name, form in FORMATS.items():
        grad, src, wei = (t.to(given[0].dtype).contiguous(memory_format=form) for t in given)

        def run(grad: torch.Tensor = grad, src: torch.Tensor = src, wei: torch.Tensor = wei) -> torch.Tensor:
            found: torch.Tensor = torch.ops.aten.convolution_backward(grad, src, wei, None, *windows)[wanted]
            return found

        yield Variant(f"torch {name}", run, _fetch(run))


FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def conv_transpose2d(problem: Conv2dProblem, wei: np.ndarray, src: np.ndarray, threads: int) -> Iterator[Variant]:
    p = problem
    if not is_symmetric(p):
        return
    _start(threads)
    windows = (p.sh, p.sw), (p.ph, p.pw), output_padding(p), p.g, (p.dh, p.dw)
    for name, form in FORMATS.items():
        x, w = (_tensor(a).contiguous(memory_format=form) for a in (src, wei))
        run = functools.partial(F.conv_transpose2d, x, w, None, *windows)
        yield Variant(f"torch {name}", run, _fetch(run))


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of an array's memory."""
    if array.dtype.name == "bfloat16":  # which torch does not take of NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _variant(name: str, function: Callable[[], torch.Tensor], plain: torch.Tensor | None = None) -> Variant:
    """`plain`: the NCHW tensor that a channels_last one is made of."""
    if plain is None:
        return Variant(f"torch {name}", function, _fetch(function))
    result = functools.cache(function)  # of the first call
    return Variant(
        f"torch {name}",
        function,
        _fetch(function),
        reorder_in=lambda: plain.contiguous(memory_format=torch.channels_last),
        reorder_out=lambda: result().contiguous(),
    )


def _blocked(
    problem: Conv2dProblem, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> Callable[[], torch.Tensor]:
    """The convolution from blocked to blocked tensors."""
    p = problem
    padding, stride, dilation = [p.ph, p.pw], [p.sh, p.sw], [p.dh, p.dw]
    source = x.to_mkldnn()  # plain still
    if p.g > 1 or p.ic >= PLAIN_CHANNELS:
        # A convolution's output is blocked: this one, of the same groups, changes nothing else.
        one = torch.eye(p.ic // p.g).repeat(p.g, 1).reshape(p.ic, p.ic // p.g, 1, 1)
        source = torch.mkldnn_convolution(source, one.to_mkldnn(), None, [0, 0], [1, 1], [1, 1], p.g)
    packed = torch._C._nn.mkldnn_reorder_conv2d_weight(w.to_mkldnn(), padding, stride, dilation, p.g)
    return lambda: torch.mkldnn_convolution(source, packed, b, padding, stride, dilation, p.g)


def _fetch(function: Callable[[], torch.Tensor]) -> Callable[[], np.ndarray]:
    def fetch() -> np.ndarray:
        result = function()
        if result.layout is torch._mkldnn:
            result = result.to_dense()
        result = result.int_repr() if result.is_quantized else result
        return (result.float() if result.dtype is torch.bfloat16 else result).contiguous().numpy()

    return fetch


def _has_pool(problem: Pool2dProblem) -> bool:
    p = problem
    same_ends = (p.ph, p.pw) == (p.ph_r, p.pw_r) if p.ceil_mode else is_symmetric(problem)
    at_most_half = 2 * p.ph <= p.kh and 2 * p.pw <= p.kw
    dense = p.dh == p.dw == 1
    return same_ends and at_most_half and (p.kind == "max" or dense)


def pool2d(problem: Pool2dProblem, src: np.ndarray, threads: int) -> Iterator[Variant]:
    p = problem
    if not _has_pool(p):
        return
    _start(threads)
    kernel, stride, padding = (p.kh, p.kw), (p.sh, p.sw), (p.ph, p.pw)

    def pool(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        if p.kind == "max":
            return lambda: F.max_pool2d(x, kernel, stride, padding, (p.dh, p.dw), p.ceil_mode)
        include = p.kind == "avg_include_padding"
        return lambda: F.avg_pool2d(x, kernel, stride, padding, p.ceil_mode, include, p.divisor)

    x = torch.from_numpy(src)
    yield _variant("contiguous", pool(x))
    yield _variant("channels_last", pool(x.contiguous(memory_format=torch.channels_last)), x)


def pool2d_backward(problem: Pool2dProblem, src: np.ndarray, grad: np.ndarray, threads: int) -> Iterator[Variant]:
    p, ops = problem, torch.ops.aten
    if not _has_pool(p):
        return
    _start(threads)
    windows = [p.kh, p.kw], [p.sh, p.sw], [p.ph, p.pw]
    for name, form in FORMATS.items():
        x, y = (torch.from_numpy(a).contiguous(memory_format=form) for a in (src, grad))
        if p.kind == "max":
            more = [p.dh, p.dw], p.ceil_mode
            indices = ops.max_pool2d_with_indices(x, *windows, *more)[1]
            run = functools.partial(ops.max_pool2d_with_indices_backward, y, x, *windows, *more, indices)
        else:
            include = p.kind == "avg_include_padding"
            run = functools.partial(ops.avg_pool2d_backward, y, x, *windows, p.ceil_mode, include, p.divisor)
        yield Variant(f"torch {name}", run, _fetch(run))


def network(path: str, x: np.ndarray, threads: int) -> Iterator[Variant]:
    """A module of floats: see `halves_network`."""
    yield from halves_network(path, x, "float32", threads)


def halves_network(path: str, x: np.ndarray, dtype: str, threads: int) -> Iterator[Variant]:
    """A module of this type, of channels last: as it is, and by its compiler, which packs weights and fuses."""
    from .torch_network import module_of  # which needs onnx

    _start(threads, inference=False)  # PyTorch's compiler packs no weights in inference mode
    kind = getattr(torch, dtype)
    module = module_of(path).eval().to(kind, memory_format=torch.channels_last)
    given = torch.from_numpy(x)

    def fetch(run: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
        return run(given.to(kind)).float().numpy().ravel()

    torch._inductor.config.freezing = True
    torch._dynamo.reset()  # after some networks, the compiler takes no more of them and says nothing
    for name, run in (("eager", module), ("compiled", torch.compile(module))):
        yield Variant(f"torch {name}", functools.partial(_converted, run, given, kind), functools.partial(fetch, run))


def _converted(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """float32 from end to end."""
    return run(x.to(kind, memory_format=torch.channels_last)).float()


def reorder(problem: ReorderProblem, src: np.ndarray, threads: int) -> list[Variant]:
    """From one layout's storage to another's: a new tensor, or a copy into an existing one."""
    channels = problem.shape[1]
    blocks = sorted({_block(problem.src), _block(problem.dst)})
    if any(channels % block for block in blocks) or blocks[-1] % blocks[0]:
        return []  # a channel tail is no permutation
    _start(threads)
    given = _logical(torch.from_numpy(src), problem.src, blocks)
    storage = torch.empty(_storage_shape(problem.dst, problem.shape), dtype=given.dtype)
    into = _logical(storage, problem.dst, blocks)
    # The axes as the destination has them, outermost first: a permutation that `contiguous` makes real.
    # For NCHW to NHWC it costs what contiguous(memory_format=channels_last) does.
    permuted = given.permute(sorted(range(given.dim()), key=lambda axis: -into.stride(axis)))

    def fetch_copy() -> np.ndarray:
        spoil(storage.numpy())
        into.copy_(given)
        return storage.numpy().copy()

    def fetch_new() -> np.ndarray:
        return permuted.contiguous().reshape(storage.shape).numpy()

    return [
        Variant("torch contiguous", permuted.contiguous, fetch_new),
        Variant("torch copy_", lambda: into.copy_(given), fetch_copy),
    ]


def _block(layout: str) -> int:
    if layout == "CHWN4":
        return 4
    return 1 if layout == "NHWC" else int(layout.removeprefix("NCHW") or 1)


def _storage_shape(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    n, c, h, w = shape
    if layout == "NCHW":
        return n, c, h, w
    if layout == "NHWC":
        return n, h, w, c
    block = _block(layout)
    return (c // block, h, w, n, block) if layout == "CHWN4" else (n, c // block, h, w, block)


def _logical(storage: torch.Tensor, layout: str, blocks: list[int]) -> torch.Tensor:
    """A view of a storage as [n, channels..., h, w], the channels split at both layouts' block sizes."""
    small, large = blocks[0], blocks[-1]
    if layout == "NCHW":
        view = storage.unsqueeze(2)
    elif layout == "NHWC":
        view = storage.permute(0, 3, 1, 2).unsqueeze(2)
    elif layout == "CHWN4":
        view = storage.permute(3, 0, 4, 1, 2)
    else:
        view = storage.permute(0, 1, 4, 2, 3)
    if _block(layout) == large:
        return view.unflatten(2, (large // small, small))
    return view.unflatten(1, (-1, large // small))


def plain_copy(src: np.ndarray, threads: int) -> list[Variant]:
    """The copy that a move is measured by where there are several threads."""
    if threads == 1:
        return []
    _start(threads)
    given = torch.from_numpy(src).clone()
    into = torch.empty_like(given)

    def fetch() -> np.ndarray:
        spoil(into.numpy())
        into.copy_(given)
        return into.numpy().copy()

    return [Variant("copy (torch)", lambda: into.copy_(given), fetch, role="roof")]
