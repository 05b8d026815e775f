"""All of ONNX Runtime's interface, which its users import from this module too."""

from blockconv.onnxruntime import *  # noqa: F403
from blockconv.onnxruntime import __all__ as __all__
