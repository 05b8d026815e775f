"""What several modules here run kernels with."""

from __future__ import annotations

import dataclasses

import pytest

from blockconv.core import target
from blockconv.kernels.common.dot import MATRIX_DOTS
from blockconv.kernels.conv import matrix_blocking, matrix_pixel_blocking
from blockconv.kernels.conv.matrix_tile import is_instruction


@pytest.fixture
def emulated_matrices(monkeypatch):
    """The rows of matrices as a machine without a unit for these would run them, if it took them."""
    named = {dot: MATRIX_DOTS[f"{name}, emulated"] for name, dot in MATRIX_DOTS.items() if is_instruction(dot)}
    chosen, packages = matrix_blocking.matrix_dot_for, (matrix_blocking, matrix_pixel_blocking)
    pretended = dataclasses.replace(target.isa(), amx=True)
    monkeypatch.setattr(target, "isa", lambda: pretended)
    for package in packages:
        monkeypatch.setattr(
            package, "matrix_dot_for", lambda types, isa: named.get(chosen(types, isa), chosen(types, isa))
        )
        package.blocking.cache_clear()
    yield
    for package in packages:
        package.blocking.cache_clear()
