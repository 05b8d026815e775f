"""ncnn: a net of one layer in float32 or int8, Winograd allowed, on blobs packed as its kernels want them.

It has no batch, so it takes images one by one. Its blobs come from its own allocator at each call.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import ncnn
import numpy as np

from blockconv.core.problem import Conv2dProblem, Pool2dProblem

from . import ZERO, QuantizedLayer, Variant, end_padding, pool_padding

PACKINGS = (16, 8, 4, 1)
OF_BYTES = (8, 1)
INT8 = (0x000D4B38).to_bytes(4, "little")  # what its files have before weights of int8


def version() -> str:
    return metadata.version("ncnn")


def conv2d(
    problem: Conv2dProblem, src: np.ndarray, wei: np.ndarray, bias: np.ndarray | None, threads: int
) -> list[Variant]:
    ends = end_padding(problem)
    if ends is None:
        return []
    content = b"\0\0\0\0" + wei.tobytes() + (b"" if bias is None else bias.tobytes())  # zero: plain float32
    return [_variant(_conv2d(problem, ends, wei.size, content, threads, bias is not None), src)]


def quantized_conv2d(problem: Conv2dProblem, layer: QuantizedLayer, threads: int) -> list[Variant]:
    """The same numbers as int8 without zero points; the results are -127 at the least."""
    p, ends = problem, end_padding(problem)
    if ends is None or p.g not in (1, p.ic) or (p.g > 1 and p.oc != p.ic):  # there is one scale for each group
        return []
    # Scales are reciprocal: integers of one real unit.
    scales = [1 / layer.wei_scale, np.float32(1 / layer.src_scale), np.float32(1 / layer.dst_scale)]
    padding = b"\0" * (-layer.wei.size % 4)
    weights = INT8 + layer.wei.tobytes() + padding + layer.real_bias.tobytes()
    content = weights + b"".join(np.asarray(scale, np.float32).tobytes() for scale in scales)
    net = _conv2d(p, ends, layer.wei.size, content, threads, bias=True, int8=True)
    images = (layer.src.astype(np.int16) - ZERO).astype(np.int8)
    return [_variant(net, images, OF_BYTES, ZERO)]


def pool2d(problem: Pool2dProblem, src: np.ndarray, threads: int) -> list[Variant]:
    p, ends = problem, pool_padding(problem)
    if ends is None or p.divisor or p.dh * p.dw != 1:
        return []
    values = {
        0: int(p.kind != "max"), 1: p.kw, 11: p.kh, 2: p.sw, 12: p.sh, 3: p.pw, 13: p.ph, 14: ends[1], 15: ends[0],
        5: 1, 6: int(p.kind == "avg_include_padding"),
    }  # fmt: skip
    return [_variant(_net("Pooling", values, p.src_shape, b"", threads), src)]


def _variant(net: ncnn.Net, src: np.ndarray, packings: Sequence[int] = PACKINGS, zero: int = 0) -> Variant:
    """zero: what is added to results."""
    widest = _widest_packing() if packings is PACKINGS else packings[0]
    packing = next(p for p in packings if src.shape[1] % p == 0 and p <= widest)
    plain = [ncnn.Mat(np.ascontiguousarray(image)).clone() for image in src]  # else they would point into the array
    images = [_packed(image, packing, net.opt) for image in plain]

    def run() -> list[ncnn.Mat]:
        return [_infer(net, image) for image in images]

    def fetch() -> np.ndarray:
        results = np.stack([_packed(result, 1, net.opt).numpy().copy() for result in run()])
        return results.astype(np.int16) + zero if zero else results

    if packing == 1:
        return Variant("ncnn pack1", run, fetch)
    results = functools.cache(run)  # of the first call
    return Variant(
        f"ncnn pack{packing}",
        run,
        fetch,
        reorder_in=lambda: [_packed(image, packing, net.opt) for image in plain],
        reorder_out=lambda: [_packed(result, 1, net.opt) for result in results()],
    )


def _infer(net: ncnn.Net, image: ncnn.Mat) -> ncnn.Mat:
    extractor = net.create_extractor()
    extractor.input("x", image)
    return extractor.extract("y", 1)[1]  # 1: as the layer wrote it, not unpacked


def _packed(image: ncnn.Mat, packing: int, options: ncnn.Option) -> ncnn.Mat:
    return image if image.elempack == packing else ncnn.convert_packing(image, packing, options)


def _conv2d(
    p: Conv2dProblem,
    ends: tuple[int, int],
    size: int,
    content: bytes,
    threads: int,
    bias: bool,
    int8: bool = False,
) -> ncnn.Net:
    """A convolution with so many weights, which `content` has as its files do, with what follows them."""
    values = {
        0: p.oc, 1: p.kw, 11: p.kh, 2: p.dw, 12: p.dh, 3: p.sw, 13: p.sh,
        4: p.pw, 14: p.ph, 15: ends[1], 16: ends[0], 5: int(bias), 6: size, 8: 101 if int8 else 0,
    }  # fmt: skip
    kind = "Convolution"
    if p.g > 1:
        kind, values[7] = "ConvolutionDepthWise", p.g
    return _net(kind, values, p.src_shape, content, threads)


def _net(kind: str, values: dict[int, int], shape: tuple[int, ...], weights: bytes, threads: int) -> ncnn.Net:
    """A net of one layer with these parameters."""
    layer = " ".join(f"{key}={value}" for key, value in values.items())
    _, c, h, w = shape
    # 7767517 marks the format; then the number of layers and of blobs.
    text = f"7767517\n2 2\nInput x 0 1 x 0={w} 1={h} 2={c}\n{kind} layer 1 1 x y {layer}\n"
    net = ncnn.Net()
    net.opt.num_threads = threads
    for name in dir(net.opt):
        if name.startswith(("use_fp16", "use_bf16")):
            setattr(net.opt, name, False)
    with tempfile.TemporaryDirectory() as folder:
        param, model = Path(folder, "net.param"), Path(folder, "net.bin")
        param.write_text(text)
        model.write_bytes(weights)
        if net.load_param(str(param)) or net.load_model(str(model)):
            raise RuntimeError(f"ncnn did not load the layer: {kind} {layer}")
    return net


@functools.cache
def _widest_packing() -> int:
    """How many channels its vectors hold here: what it packs the output of a wide layer to."""
    probe = Conv2dProblem(n=1, ic=16, ih=4, iw=4, oc=16, kh=1, kw=1)
    ones = np.ones(probe.wei_shape, np.float32)
    net = _conv2d(probe, (0, 0), ones.size, b"\0\0\0\0" + ones.tobytes(), 1, bias=False)
    return int(_infer(net, ncnn.Mat(np.ones((16, 4, 4), np.float32)).clone()).elempack)
