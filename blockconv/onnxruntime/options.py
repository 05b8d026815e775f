"""The options of sessions and runs."""

from __future__ import annotations

import enum
import logging
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from blockconv.core.errors import ignoring
from blockconv.core.python import zipped
from blockconv.onnxruntime import errors
from blockconv.onnxruntime.values import OrtValue

# Options that sessions read, and options that change nothing here.
_USED = ("intra_op_num_threads", "dimensions", "denotations", "log_severity_level", "initializers", "external")
_log = logging.getLogger("blockconv.onnxruntime")


class GraphOptimizationLevel(enum.IntEnum):
    """How far ONNX Runtime rewrites a graph. blockconv always fuses."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(enum.IntEnum):
    """Whether ONNX Runtime runs independent nodes at once. blockconv runs one after the other."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(enum.IntEnum):
    """The order of ONNX Runtime's nodes. blockconv has one order."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


_TAKEN: dict[type, Any] = {bool: numbers.Real | np.bool_ | None, int: numbers.Integral | np.bool_, str: str | bytes}


@dataclass(slots=True)
class _Options:
    """Options that take values of the types of their defaults, as ONNX Runtime's do."""

    entries: dict[str, str] = field(default_factory=dict, repr=False, init=False)

    def _add(self, key: str, value: str) -> None:
        """Keep an entry. It has no other effect."""
        self.entries[key] = value

    def _get(self, key: str) -> str:
        """The value of an entry. Raises RuntimeError for a key without one."""
        if key not in self.entries:
            raise RuntimeError(f"{type(self).__name__} does not have configuration with key: {key}")
        return self.entries[key]

    def __setattr__(self: Any, name: str, value: Any) -> None:
        default = {one.name: one.default for one in fields(self)}.get(name)
        kind = type(default)
        if not isinstance(value, _TAKEN.get(kind, kind if isinstance(default, enum.Enum) else object)):
            raise TypeError(f"{type(self).__name__}: {name}={value!r}: has to be of type {kind.__name__}")
        object.__setattr__(self, name, kind(value) if kind in (bool, int) else value)


@dataclass(slots=True)  # a misspelt option is an AttributeError
class SessionOptions(_Options):
    """Options of a session, by ONNX Runtime's names.

    intra_op_num_threads: the most threads of a run. 0 or less means `blockconv.get_num_threads`.

    `add_free_dimension_override_by_name` and its twin by denotation fix symbolic dimensions. `add_initializer` and
    `add_external_initializers` replace values of the model. All other options are accepted and have no effect. A
    session logs options that differ from their defaults ("blockconv.onnxruntime", INFO).
    """

    intra_op_num_threads: int = 0
    inter_op_num_threads: int = 0
    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    enable_profiling: bool = False
    execution_mode: Any = ExecutionMode.ORT_SEQUENTIAL
    execution_order: Any = ExecutionOrder.DEFAULT
    graph_optimization_level: Any = GraphOptimizationLevel.ORT_ENABLE_ALL
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    optimized_model_filepath: str = ""
    profile_file_prefix: str = "onnxruntime_profile_"
    use_deterministic_compute: bool = False
    use_per_session_threads: bool = True
    dimensions: dict[str, int] = field(default_factory=dict, repr=False, init=False)
    denotations: dict[str, int] = field(default_factory=dict, repr=False, init=False)
    initializers: dict[str, Any] = field(default_factory=dict, repr=False, init=False)
    external: set[str] = field(default_factory=set, repr=False, init=False)  # of these, what a model has to have

    def add_initializer(self, name: str, value: OrtValue) -> None:
        """Give an initializer another value, of its shape and type. A model without it ignores the value."""
        if not isinstance(value, OrtValue):
            raise TypeError(
                f"add_initializer: value of {name!r} is a {type(value).__name__}, and has to be an OrtValue"
            )
        if name in self.initializers:
            raise RuntimeError(f"An OrtValue for the initializer {name!r} has been added already")
        self.initializers[name] = value.numpy()

    def add_external_initializers(self, names: Sequence[str], values: Sequence[OrtValue]) -> None:
        """Give initializers values, whose own ones, in other files, are not read. The model has to have them."""
        for name, value in zipped(names, values):
            self.add_initializer(name, value)
            self.external.add(name)

    def register_custom_ops_library(self, path: str) -> None:
        """Raise NotImplemented: blockconv runs no libraries of custom ops."""
        rule = "blockconv runs no libraries of custom ops; run this model with onnxruntime"
        raise errors.NotImplemented(f"register_custom_ops_library({path!r}): {rule}")

    def add_provider(self, name: str, options: Mapping[str, str] | None = None) -> None:
        """Accept CPUExecutionProvider. Raises RuntimeError for others."""
        if name != "CPUExecutionProvider":
            raise RuntimeError(f"Unknown Provider Type: {name}")

    def has_providers(self) -> bool:
        """Always False: sessions have one provider, whatever the options say."""
        return False

    add_session_config_entry, get_session_config_entry = _Options._add, _Options._get

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Give a symbolic dimension a size."""
        self.dimensions[name] = operator.index(size)

    def add_free_dimension_override_by_denotation(self, denotation: str, size: int) -> None:
        """Give all dimensions with a denotation a size."""
        self.denotations[denotation] = operator.index(size)

    def log_unused(self) -> None:
        """Log the options that were set and have no effect."""
        default, used = SessionOptions(), _USED
        options = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in used}
        unused = [f"{name}={value!r}" for name, value in options.items() if value != getattr(default, name)]
        if unused:
            with ignoring():
                _log.info("these options have no effect in blockconv: %s", ", ".join(unused))


@dataclass(slots=True)
class RunOptions(_Options):
    """Options of a run, by ONNX Runtime's names.

    terminate: runs with these options fail. A run that has begun goes on. The other options have no effect.
    """

    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    only_execute_path_to_fetches: bool = False
    terminate: bool = False

    add_run_config_entry, get_run_config_entry = _Options._add, _Options._get
