"""Whatever of Numba's private parts is gone or different, kernels compile by its public functions, and one warning."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
from numba.core.registry import cpu_target

from blockconv.core import target
from blockconv.jit import numba_private

USE = """
import sys, warnings
import numpy as np
{damage}
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as seen:
    import blockconv as bc
    from blockconv.runtime import launcher
    launcher.GRAIN = 1e-12
    bc.set_num_threads(2)
    x = np.arange(2 * 8 * 5 * 6, dtype=np.float32).reshape(2, 8, 5, 6)
    for layout in ("NHWC", "NCHW8"):
        array = bc.BlockedArray.from_numpy(x, "NCHW")
        assert np.array_equal(bc.to_layout(array, layout).numpy(), x)
slow = [str(one.message) for one in seen if issubclass(one.category, bc.SlowPathWarning)]
print(len(slow), *slow, bc.get_threading(), sep="|")
"""


HIDE = """
import builtins
real = builtins.__import__
def hide(module, globals=None, locals=None, fromlist=(), level=0):
    if (globals or {{}}).get("__name__") == "blockconv.jit.numba_private" and {name!r} in (fromlist or ()):
        raise ImportError("cannot import name {name!r}")
    return real(module, globals, locals, fromlist, level)
builtins.__import__ = hide
"""
CHANGE = "from blockconv.jit import numba_private\nnumba_private.{name} = None"


def imported() -> list[str]:
    """The names that `numba_private` takes of Numba's inner modules."""
    tree = ast.parse(Path(numba_private.__file__).read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = [alias.name for node in nodes if str(node.module).startswith("numba.core.") for alias in node.names]
    assert len(found) > 8
    return found


def used(run_python: Any, damage: str, path: Path, **variables: str) -> tuple[int, str, str]:
    """(warnings, the first of them, the pool) of a process that begins with `damage`, and finds no kernels on disk."""
    variables = {"BLOCKCONV_NUMBA": "", "BLOCKCONV_CACHE_DIR": str(path), **variables}
    done = run_python(USE.format(damage=damage), **variables)
    count, *told, pool = done.stdout.strip().split("|")
    return int(count), told[0] if told else "", pool


FEW = ("JITCodeLibrary", "_Library._ensure_finalized")
INNER = ("_Library._ensure_finalized", "_Codegen.create_library", "PassManager", "compile_extra")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        pytest.param(damage, name, marks=() if name in FEW else pytest.mark.slow, id=f"{way} {name}")
        for way, damage, names in (("without", HIDE, imported()), ("another", CHANGE, INNER))
        for name in names
    ],
)
@pytest.mark.sampled(2)
def test_a_private_part_that_is_gone_costs_a_warning(run_python: Any, tmp_path: Path, damage: str, name: str) -> None:
    count, told, _ = used(run_python, damage.format(name=name), tmp_path)
    assert count == 1, told
    assert "only Numba's public functions compile kernels" in told
    assert ("object is not callable" if damage == CHANGE else name) in told


def test_a_private_way_that_computes_something_else_is_not_taken(run_python: Any, tmp_path: Path) -> None:
    damage = """
from blockconv.jit import compiler, numba_private
real = numba_private.lower
def other(name, body, entry):
    def nothing(args, first, last, scratch): pass
    return real(name, nothing, entry)
numba_private.lower = other"""
    count, told, _ = used(run_python, damage, tmp_path)
    assert (count, "wrong results" in told) == (1, True)


def test_a_pool_that_numba_hides_is_threads_of_pythons(run_python: Any, tmp_path: Path) -> None:
    damage = "import llvmlite.binding as llvm\nllvm.address_of_symbol = lambda name: None"
    count, told, pool = used(run_python, damage, tmp_path)
    assert (count, "numba_parallel_for" in told, pool) == (1, True, "python")


@pytest.mark.slow
def test_the_public_way_is_taken_silently_where_it_is_asked_for(run_python: Any, tmp_path: Path) -> None:
    damage = "import atexit\natexit.register(lambda: print('blockconv.jit.numba_private' in sys.modules))"
    found = used(run_python, "", tmp_path, BLOCKCONV_NUMBA="public")
    assert found == (0, "", "python")
    done = run_python(USE.format(damage=damage), BLOCKCONV_NUMBA="public", BLOCKCONV_CACHE_DIR=str(tmp_path))
    assert done.stdout.endswith("False\n")
    # Kernels of the two ways are kept apart.
    assert used(run_python, "", tmp_path)[:2] == (0, "")
    assert len(os.listdir(tmp_path)) == 2


def test_another_word_is_refused(run_python: Any) -> None:
    done = run_python("import blockconv", status=1, BLOCKCONV_NUMBA="private")
    assert "BLOCKCONV_NUMBA='private': has to be 'public', or not set" in done.stderr


def test_features_are_those_that_numba_targets() -> None:
    """Numba keeps them to itself; they are worked out from its settings and LLVM."""
    assert set(target.feature_text().split(",")) == set(
        (cpu_target.target_context.codegen()._tm_features or "").split(",")
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"NUMBA_ENABLE_AVX": "0"},
        {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
        {"NUMBA_CPU_NAME": "generic"},
    ],
    ids=str,
)
def test_features_that_settings_of_numba_change(run_python: Any, variables: dict[str, str]) -> None:
    run_python(
        """
from numba.core.registry import cpu_target
from blockconv.core import target
wanted = cpu_target.target_context.codegen()._tm_features or ""
assert set(target.feature_text().split(",")) == set(wanted.split(",")), (target.feature_text(), wanted)
""",
        **variables,
    )
