"""The exceptions of `blockconv.onnxruntime`, where ONNX Runtime has its own."""

from blockconv.onnxruntime.errors import *  # noqa: F403
from blockconv.onnxruntime.errors import __all__ as __all__
