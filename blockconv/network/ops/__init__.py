"""The ops of a network: what each one is, as a frozen record, and the shape that it gives.

This is the whole vocabulary: front ends translate into it, fusion rewrites within it, and the planner finds a
kernel for each. A record says nothing of the sizes of its inputs, so that a network can be asked for
other ones; `problem` joins the two where kernels need it. Shapes are logical, (N, C, H, W) where there are
four dimensions. `infer` of each record raises ArgumentError for inputs that it cannot take.

An op that a kernel can end with an activation has it as a field; it is the identity unless fusion set it. What integers
of 8 bits stand for is said by the records that need it (`quantized`); others take integers as they are.
"""

from blockconv.core.problem import PoolKind
from blockconv.network.ops.axes import Lrn, ReduceMean, Resize, Softmax
from blockconv.network.ops.base import Attributes, Shape, Solved
from blockconv.network.ops.dynamic import DynamicConv2d, DynamicQuantize, FindQuantization
from blockconv.network.ops.elementwise import Activate, Affine, Binary, BinaryKind, Cast
from blockconv.network.ops.moves import Concat, Pad, Reshape, Shuffle, Slice, Transpose
from blockconv.network.ops.quantized import Dequantize, Quantize, Quantized, QuantizedConv2d, Requantize
from blockconv.network.ops.windows import AdaptivePool2d, Conv2d, Convolution, Pool2d

__all__ = [
    "Activate",
    "AdaptivePool2d",
    "Affine",
    "Attributes",
    "Binary",
    "BinaryKind",
    "Cast",
    "Concat",
    "Conv2d",
    "Convolution",
    "Dequantize",
    "DynamicConv2d",
    "DynamicQuantize",
    "FindQuantization",
    "Lrn",
    "Pad",
    "Pool2d",
    "PoolKind",
    "Quantize",
    "Quantized",
    "QuantizedConv2d",
    "ReduceMean",
    "Requantize",
    "Reshape",
    "Resize",
    "Shape",
    "Shuffle",
    "Slice",
    "Softmax",
    "Solved",
    "Transpose",
]
