"""What several modules here run kernels with."""

from __future__ import annotations

import dataclasses

import pytest
from emulated import EMULATED, EmulatedUnit

from blockconv.core import target
from blockconv.kernels.conv import matrix_blocking, matrix_pixel_blocking, matrix_pixel_tile, matrix_tile


@pytest.fixture
def emulated_matrices(monkeypatch):
    """The rows of matrices as a machine without a unit for these would run them, if it took them."""
    chosen, packages = matrix_blocking.matrix_dot_for, (matrix_blocking, matrix_pixel_blocking)
    pretended = dataclasses.replace(target.isa(), amx=True)
    monkeypatch.setattr(target, "isa", lambda: pretended)
    for module in (matrix_tile, matrix_pixel_tile):
        monkeypatch.setattr(module, "Unit", EmulatedUnit)
    for package in packages:
        monkeypatch.setattr(package, "matrix_dot_for", lambda types: EMULATED[chosen(types)])
        package.blocking.cache_clear()
    yield
    for package in packages:
        package.blocking.cache_clear()
