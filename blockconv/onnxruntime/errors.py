"""The exceptions of ONNX Runtime, by its names and with its numbers."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "EPFail",
    "Fail",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "NoSuchFile",
    "NotImplemented",
    "RuntimeException",
]


class Fail(Exception):  # noqa: N818 - these are ONNX Runtime's names
    """A failure that no other class names, and the base class of the others."""

    status: ClassVar[tuple[int, str]] = 1, "FAIL"

    def __init__(self, text: str) -> None:
        number, name = self.status
        super().__init__(f"[ONNXRuntimeError] : {number} : {name} : {text}")


class InvalidArgument(Fail):
    """An input or output of a wrong name, type or shape."""

    status = 2, "INVALID_ARGUMENT"


class NoSuchFile(Fail):
    """The model's file does not exist."""

    status = 3, "NO_SUCHFILE"


class RuntimeException(Fail):
    """A node failed while it ran."""

    status = 6, "RUNTIME_EXCEPTION"


class InvalidProtobuf(Fail):
    """The model is no ONNX file."""

    status = 7, "INVALID_PROTOBUF"


class NotImplemented(Fail):
    """The model needs something that neither blockconv nor an installed ONNX Runtime has."""

    status = 9, "NOT_IMPLEMENTED"


class InvalidGraph(Fail):
    """The model is broken."""

    status = 10, "INVALID_GRAPH"


class EPFail(Fail):
    """An execution provider failed. blockconv never raises it."""

    status = 11, "EP_FAIL"
