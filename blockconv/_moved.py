"""Modules that have moved: importing them by their old names works, and warns where they are now."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "install", "moved_name"]

# Old name: new name, both below blockconv.
MOVED = {
    "annotations": "api.annotations",
    "arguments": "cli.arguments",
    "array": "dispatch.array",
    "boundary": "dispatch.boundary",
    "checks": "core.checks",
    "codegen": "jit.compiler",
    "compile_processes": "jit.compile_processes",
    "eltwise_problem": "core.eltwise_problem",
    "emit": "jit.ir",
    "errors": "core.errors",
    "functional": "api.functional",
    "interop": "core.interop",
    "kept": "jit.kept",
    "kernel_cache": "jit.kernel_cache",
    "layout": "core.layout",
    "packing": "dispatch.packing",
    "pooling": "api.pooling",
    "problem": "core.problem",
    "text": "core.text",
    "tuning": "dispatch.tuning",
    "network.candidates": "network.planning.candidates",
    "network.elimination": "network.planning.elimination",
    "network.explain": "network.reporting.explain",
    "network.fusion": "network.passes.fuse",
    "network.planned": "network.planning.planned",
    "network.planner": "network.planning.planner",
    "network.profile": "network.reporting.profile",
    "network.report": "network.reporting.page",
    "network.rewrite": "network.passes.rewrite",
    "network.simplify": "network.passes.simplify",
}

# Of modules that are packages now: names that have gone elsewhere.
_NAMES = {
    "blockconv.jit": {
        "Isa": "core.target",
        "isa": "core.target",
        "default_threads": "core.target",
        "parallel_for": "runtime.threading_layer",
        "threading_layer": "runtime.threading_layer",
    },
    "blockconv.dispatch": {
        "candidates": "dispatch.selection",
        "choose": "dispatch.selection",
        "explain": "dispatch.selection",
    },
}


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} has moved: import {new}", DeprecationWarning, stacklevel=3)


class _MovedModule(Loader):
    def __init__(self, new: str) -> None:
        self.new = f"blockconv.{new}"

    def exec_module(self, module: ModuleType) -> None:
        _warn(module.__name__, self.new)
        sys.modules[module.__name__] = importlib.import_module(self.new)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = MOVED.get(fullname.removeprefix("blockconv.")) if fullname.startswith("blockconv.") else None
        return importlib.util.spec_from_loader(fullname, _MovedModule(new)) if new else None


def install() -> None:
    """Have old names found, once; the finder comes last, so that no module of today is hidden by it."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def moved_name(module: str, name: str) -> Any:
    """What `name` of `module`, a package's `__getattr__`, is now."""
    if module == "blockconv" and name in MOVED:
        return importlib.import_module(f"blockconv.{name}")
    new = _NAMES.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{name} from blockconv.{new}")
    return getattr(importlib.import_module(f"blockconv.{new}"), name)
