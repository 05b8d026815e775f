"""Calls from native code: from functions that Numba compiles, from C, and from cffi."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from blockconv.runtime.threading_layer import load_tbb

Filters = Callable[[], Mapping[str, Callable[..., Any]]]
waiting: list[Filters] = []  # until somebody imports Numba


def teach(filters: Filters) -> None:
    """Teach Numba some filters, now or as soon as somebody imports it."""
    waiting.append(filters)
    if "blockconv.nopython.overloads" in sys.modules:
        importlib.import_module("blockconv.nopython.overloads").learn_filters()
        importlib.import_module("blockconv.jit.translate").learn_overloads()


def extend_numba() -> None:
    """Teach Numba this library's functions, now or when somebody imports it: blockconv itself imports it late."""
    if "numba" in sys.modules:
        importlib.import_module("blockconv.nopython.overloads")
        load_tbb()  # Numba's parallel loops may come before our first call, and do not find pip's
    else:
        sys.meta_path.insert(0, _AfterNumba())


class _AfterNumba(MetaPathFinder):
    """Finds Numba as Python does, and extends it once its module has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "numba":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_extend(module: ModuleType) -> None:
                run(module)
                extend_numba()

            spec.loader.exec_module = run_and_extend  # type: ignore[method-assign]
        return spec
