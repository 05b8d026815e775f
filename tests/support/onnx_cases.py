"""The cases of the ONNX backend suite, made once for a folder of kernels, since making them takes 15 s."""

from __future__ import annotations

import functools
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

__all__ = ["Case", "exported_cases", "node_cases"]


class Case(NamedTuple):
    """A model with inputs, in the order of those of its graph that are no initializers, and what it has to give."""

    model: Any
    inputs: list[Any]
    outputs: list[Any]
    rtol: float
    atol: float


@functools.cache
def node_cases() -> dict[str, Case]:
    """One op a case. Made in memory; older releases of onnx keep them in files instead."""
    from onnx.backend.test.loader import DATA_DIR, load_model_tests

    if (Path(DATA_DIR) / "node").exists():
        return dict(_stored("node"))
    kept = Path(os.environ["BLOCKCONV_CACHE_DIR"], f"onnx-{onnx.__version__}-numpy-{np.__version__}.pickle")
    if kept.exists():
        return dict(pickle.loads(kept.read_bytes()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = load_model_tests(kind="node")
    made = {test.name: Case(test.model, *map(_arrays, test.data_sets[0]), test.rtol, test.atol) for test in tests}
    own = kept.with_suffix(f".{os.getpid()}")
    own.write_bytes(pickle.dumps(made))
    own.replace(kept)  # at once, as other processes may read it
    return made


def _arrays(values: Any) -> list[Any]:
    """Those of types that NumPy does not have come as ONNX keeps them."""
    return [numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x for x in values]


@functools.cache
def exported_cases() -> dict[str, Case]:
    """Exported from PyTorch, single ops and small models; and graphs of a few nodes."""
    return {
        name: case for folder in ("pytorch-converted", "pytorch-operator", "simple") for name, case in _stored(folder)
    }


def _stored(folder: str) -> Iterator[tuple[str, Case]]:
    from onnx.backend.test.loader import DATA_DIR

    for path in sorted((Path(DATA_DIR) / folder).glob("*/model.onnx")):
        model = onnx.load(path)
        sides = [
            [_read(path.parent / "test_data_set_0" / f"{kind}_{i}.pb") for i in range(count)]
            for kind, count in (("input", _fed(model)), ("output", len(model.graph.output)))
        ]
        yield path.parent.name, Case(model, *sides, 1e-3, 1e-7)


def _fed(model: Any) -> int:
    weights = {tensor.name for tensor in model.graph.initializer}
    return sum(value.name not in weights for value in model.graph.input)


def _read(path: Path) -> Any:
    """An array; None for what is no tensor (a sequence, an optional)."""
    try:
        return np.asarray(numpy_helper.to_array(onnx.load_tensor(str(path))))
    except Exception:
        return None
