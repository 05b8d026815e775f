"""ONNX Runtime's Python interface over blockconv, for programs that change one import.

    import blockconv.onnxruntime as ort

>>> import blockconv.onnxruntime as ort
>>> from onnx import parser
>>> model = parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
... relu (float[n, 3, 4, 4] x) => (float[n, 3, 4, 4] y) { y = Relu(x) }''')
>>> session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
>>> [(one.name, one.shape, one.type) for one in session.get_inputs()]
[('x', ['n', 3, 4, 4], 'tensor(float)')]
>>> import numpy as np
>>> session.run(["y"], {"x": np.full((2, 3, 4, 4), -1, np.float32)})[0].max()
np.float32(0.0)

A session holds a `Plan` (`session.plan`), which explains and reports as usual.
"""

from typing import Any

from blockconv._version import __version__ as blockconv_version
from blockconv.core.errors import needing

with needing("blockconv.onnxruntime", "onnx"):
    from blockconv.onnxruntime.capi import onnxruntime_pybind11_state
    from blockconv.onnxruntime.errors import (
        EPFail,
        Fail,
        InvalidArgument,
        InvalidGraph,
        InvalidProtobuf,
        NoSuchFile,
        NotImplemented,
        RuntimeException,
    )
    from blockconv.onnxruntime.options import (
        ExecutionMode,
        ExecutionOrder,
        GraphOptimizationLevel,
        RunOptions,
        SessionOptions,
    )
    from blockconv.onnxruntime.session import PROVIDERS, InferenceSession, IOBinding
    from blockconv.onnxruntime.values import ModelMetadata, NodeArg, OrtValue

__all__ = [
    "EPFail",
    "ExecutionMode",
    "ExecutionOrder",
    "Fail",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "ModelMetadata",
    "NoSuchFile",
    "NodeArg",
    "NotImplemented",
    "OrtValue",
    "RunOptions",
    "RuntimeException",
    "SessionOptions",
    "blockconv_version",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_version_string",
    "has_collective_ops",
    "onnxruntime_pybind11_state",
    "preload_dlls",
    "set_default_logger_callback",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_seed",
]

__version__ = "1.20.0"  # of ONNX Runtime, whose interface this is


def get_available_providers() -> list[str]:
    """["CPUExecutionProvider"]."""
    return list(PROVIDERS)


get_all_providers = get_available_providers


def get_device() -> str:
    """Always "CPU"."""
    return "CPU"


def enable_telemetry_events() -> None:
    """Do nothing: blockconv sends nothing anywhere."""


disable_telemetry_events = enable_telemetry_events


def get_version_string() -> str:
    """The version of ONNX Runtime whose interface this is."""
    return __version__


def get_build_info() -> str:
    """The version of blockconv."""
    return f"blockconv {blockconv_version}"


def has_collective_ops() -> bool:
    """Always False: blockconv runs on one machine."""
    return False


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: Any = None) -> None:
    """Do nothing: blockconv needs none of these libraries."""


def set_default_logger_callback(callback: Any, severity: int = 2) -> None:
    """Do nothing: see `set_default_logger_severity`."""


def set_default_logger_severity(severity: int) -> None:
    """Do nothing: blockconv logs by Python's `logging`, under the name "blockconv.onnxruntime"."""


def set_default_logger_verbosity(verbosity: int) -> None:
    """Do nothing: see `set_default_logger_severity`."""


def set_seed(seed: int) -> None:
    """Do nothing: no op of blockconv is random."""


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"blockconv.onnxruntime has no {name!r}. It has {', '.join(__all__)}. "
        "For the rest of ONNX Runtime's interface, import onnxruntime."
    )
