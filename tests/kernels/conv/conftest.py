"""What several modules here run kernels with."""

from __future__ import annotations

import dataclasses
import types

import pytest

from blockconv.core import target
from blockconv.kernels.common.dot import MATRIX_DOTS
from blockconv.kernels.conv import matrix_blocking, rows
from blockconv.kernels.conv.matrix_tile import is_instruction


@pytest.fixture
def emulated_matrices(monkeypatch):
    """The row `conv_matrix` as a machine without a unit for matrices would run it, if it took it."""
    named = {dot: MATRIX_DOTS[f"{name}, emulated"] for name, dot in MATRIX_DOTS.items() if is_instruction(dot)}
    chosen = matrix_blocking.matrix_dot_for
    monkeypatch.setattr(matrix_blocking, "matrix_dot_for", lambda types: named.get(chosen(types), chosen(types)))
    pretended = dataclasses.replace(target.isa(), amx=True)
    monkeypatch.setattr(rows, "target", types.SimpleNamespace(**{**vars(target), "isa": lambda: pretended}))
    matrix_blocking.blocking.cache_clear()
    yield
    matrix_blocking.blocking.cache_clear()
