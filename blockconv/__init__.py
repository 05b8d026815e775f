"""blockconv: convolution, depthwise and pooling kernels that run natively in every blocked memory layout.

>>> import numpy as np, blockconv as bc
>>> x = bc.to_layout(np.ones((1, 3, 2, 2), np.float32), "NCHW16")
>>> x
BlockedArray(NCHW16, shape=(1, 3, 2, 2), dtype=float32, storage=(1, 1, 2, 2, 16))

An import compiles nothing. The first problem that needs a kernel compiles it, and keeps it on disk.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from blockconv._version import __version__
from blockconv.api.functional import conv1d, conv2d, explain
from blockconv.api.gradients import conv2d_backward_data, conv2d_backward_weights, conv_transpose2d
from blockconv.api.modules import Conv2d
from blockconv.api.norms import (
    batch_norm,
    batch_norm_backward,
    group_norm,
    group_norm_backward,
    layer_norm,
    layer_norm_backward,
)
from blockconv.api.pooling import (
    adaptive_avg_pool2d,
    adaptive_avg_pool2d_backward,
    avg_pool2d,
    avg_pool2d_backward,
    global_avg_pool2d,
    global_max_pool2d,
    max_pool2d,
    max_pool2d_backward,
)
from blockconv.api.quantization import dequantize_linear, quantize_linear
from blockconv.core.errors import (
    ArgumentError,
    BlockconvError,
    DtypeError,
    LayoutError,
    NetworkError,
    SlowPathWarning,
    UnsupportedError,
)
from blockconv.core.heavy_work import on_own_stack
from blockconv.core.interop import gradients_from
from blockconv.core.layout import NATIVE, Axis, Layout, known_layouts, register_layout
from blockconv.core.layout_names import KnownLayout
from blockconv.core.layout_weights import ConvolutionMode, convolution_mode, weights_for
from blockconv.core.problem import (
    AdaptivePool2dProblem,
    Conv2dBackwardDataProblem,
    Conv2dBackwardWeightsProblem,
    Conv2dProblem,
    Pool2dBackwardProblem,
    Pool2dProblem,
    ReorderProblem,
)
from blockconv.core.quantization import Quantization
from blockconv.dispatch.array import BlockedArray, empty, is_channels_last, to_layout
from blockconv.nopython import extend_numba
from blockconv.runtime import get_num_threads, get_threading, set_num_threads, set_threading

if TYPE_CHECKING:
    from blockconv.frontends.onnx import load_onnx
    from blockconv.frontends.torch import from_torch
    from blockconv.network.builder import NetworkBuilder
    from blockconv.network.graph import Network
    from blockconv.network.plan import Plan, compile
    from blockconv.network.planning.planner import LayoutProblem
    from blockconv.network.quantization.calibration import Calibration
    from blockconv.network.quantization.quantize import quantize
    from blockconv.network.reporting.data import PlanData
    from blockconv.nopython.handle import native

__all__ = [
    "NATIVE",
    "AdaptivePool2dProblem",
    "ArgumentError",
    "Axis",
    "BlockconvError",
    "BlockedArray",
    "Calibration",
    "Conv2d",
    "Conv2dBackwardDataProblem",
    "Conv2dBackwardWeightsProblem",
    "Conv2dProblem",
    "ConvolutionMode",
    "DtypeError",
    "KnownLayout",
    "Layout",
    "LayoutError",
    "LayoutProblem",
    "Network",
    "NetworkBuilder",
    "NetworkError",
    "Plan",
    "PlanData",
    "Pool2dBackwardProblem",
    "Pool2dProblem",
    "Quantization",
    "ReorderProblem",
    "SlowPathWarning",
    "UnsupportedError",
    "__version__",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool2d_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "batch_norm",
    "batch_norm_backward",
    "compile",
    "conv1d",
    "conv2d",
    "conv2d_backward_data",
    "conv2d_backward_weights",
    "conv_transpose2d",
    "convolution_mode",
    "dequantize_linear",
    "empty",
    "explain",
    "from_torch",
    "get_num_threads",
    "get_threading",
    "global_avg_pool2d",
    "global_max_pool2d",
    "group_norm",
    "group_norm_backward",
    "is_channels_last",
    "known_layouts",
    "layer_norm",
    "layer_norm_backward",
    "load_onnx",
    "max_pool2d",
    "max_pool2d_backward",
    "native",
    "quantize",
    "quantize_linear",
    "register_layout",
    "set_num_threads",
    "set_threading",
    "to_layout",
    "weights_for",
]

# Imported at their first use: a process that only calls operations starts without them.
_NETWORKS = {
    "Calibration": "network.quantization.calibration",
    "LayoutProblem": "network.planning.planner",
    "Network": "network.graph",
    "NetworkBuilder": "network.builder",
    "Plan": "network.plan",
    "PlanData": "network.reporting.data",
    "compile": "network.plan",
    "from_torch": "frontends.torch",
    "load_onnx": "frontends.onnx",
    "native": "nopython.handle",
    "quantize": "network.quantization.quantize",
}

# Remedies for names that PyTorch has: for an x of (N, C, H, W), a weight, and windows of size k.
_INSTEAD = {
    "adaptive_avg_pool1d": "adaptive_avg_pool2d(x[:, :, None], (1, size))[:, :, 0]",
    "adaptive_max_pool2d": "max_pool2d(x, (H // OH, W // OW)) where OH and OW divide H and W",
    "avg_pool1d": "avg_pool2d(x[:, :, None], (1, k))[:, :, 0]",
    "conv3d": "torch.nn.functional.conv3d, or a network by load_onnx or from_torch",
    "conv_transpose1d": "conv_transpose2d(x[:, :, None], weight[:, :, None])[:, :, 0]",
    "conv_transpose3d": "torch.nn.functional.conv_transpose3d, or a network by load_onnx or from_torch",
    "interpolate": "Resize in a network, by load_onnx or NetworkBuilder.add",
    "linear": "conv2d(x[:, :, None, None], weight[:, :, None, None], bias)[:, :, 0, 0]",
    "lp_pool2d": "avg_pool2d(abs(x) ** p, k, divisor_override=1) ** (1 / p)",
    "max_pool1d": "max_pool2d(x[:, :, None], (1, k))[:, :, 0]",
    "pad": "the argument padding for zeros, or numpy.pad",
    "relu": 'conv2d(x, weight, activation="relu")',
    "softmax": "Softmax in a network, by load_onnx or NetworkBuilder.add",
    "unfold": "numpy.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(2, 3))",
}


def _functional() -> ModuleType:
    """Functions that have gradients, where there is torch."""
    from blockconv.torch import functional

    return functional


gradients_from(_functional)
extend_numba()

if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name):
        if name == "torch":
            return importlib.import_module("blockconv.torch")
        if name in _NETWORKS:
            module = on_own_stack(lambda: importlib.import_module(f"blockconv.{_NETWORKS[name]}"))
            globals()[name] = found = getattr(module, name)
            return found
        text = f"module 'blockconv' has no attribute {name!r}"
        raise AttributeError(
            f"{text}: use {_INSTEAD[name]}" if name in _INSTEAD else text, name=name, obj=sys.modules[__name__]
        )

    def __dir__():
        return sorted({*globals(), *__all__})
