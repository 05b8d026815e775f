"""blockconv: convolution, depthwise and pooling kernels that run natively in every blocked memory layout.

>>> import numpy as np, blockconv as bc
>>> x = bc.to_layout(np.ones((1, 3, 2, 2), np.float32), "NCHW16")
>>> x
BlockedArray(NCHW16, shape=(1, 3, 2, 2), dtype=float32, storage=(1, 1, 2, 2, 16))

Importing compiles nothing: a kernel is compiled when a problem first asks for it, and kept on disk.
"""

from blockconv._version import __version__
from blockconv.api.functional import conv1d, conv2d, explain
from blockconv.api.modules import Conv2d
from blockconv.api.pooling import adaptive_avg_pool2d, avg_pool2d, global_avg_pool2d, global_max_pool2d, max_pool2d
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
from blockconv.core.layout import NATIVE, Axis, Layout, known_layouts, register_layout
from blockconv.core.layout_names import KnownLayout
from blockconv.core.layout_weights import ConvolutionMode, convolution_mode, weights_for
from blockconv.core.problem import AdaptivePool2dProblem, Conv2dProblem, Pool2dProblem, ReorderProblem
from blockconv.core.quantization import Quantization
from blockconv.dispatch.array import BlockedArray, empty, is_channels_last, to_layout
from blockconv.frontends.onnx import load_onnx
from blockconv.network.builder import NetworkBuilder
from blockconv.network.graph import Network
from blockconv.network.plan import Plan, compile
from blockconv.network.quantization.calibration import Calibration
from blockconv.network.quantization.quantize import quantize
from blockconv.runtime import get_num_threads, get_threading, set_num_threads, set_threading

__all__ = [
    "NATIVE",
    "AdaptivePool2dProblem",
    "ArgumentError",
    "Axis",
    "BlockconvError",
    "BlockedArray",
    "Calibration",
    "Conv2d",
    "Conv2dProblem",
    "ConvolutionMode",
    "DtypeError",
    "KnownLayout",
    "Layout",
    "LayoutError",
    "Network",
    "NetworkBuilder",
    "NetworkError",
    "Plan",
    "Pool2dProblem",
    "Quantization",
    "ReorderProblem",
    "SlowPathWarning",
    "UnsupportedError",
    "__version__",
    "adaptive_avg_pool2d",
    "avg_pool2d",
    "compile",
    "conv1d",
    "conv2d",
    "convolution_mode",
    "dequantize_linear",
    "empty",
    "explain",
    "get_num_threads",
    "get_threading",
    "global_avg_pool2d",
    "global_max_pool2d",
    "is_channels_last",
    "known_layouts",
    "load_onnx",
    "max_pool2d",
    "quantize",
    "quantize_linear",
    "register_layout",
    "set_num_threads",
    "set_threading",
    "to_layout",
    "weights_for",
]
