"""Imports point strictly downward, and a module is what its place in the list says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import blockconv

PACKAGE = Path(blockconv.__file__).parent

# From the top. A module imports only from lines below its own. `frontends`, `network` and `kernels` are packages.
ORDER = [
    "__main__",
    "__init__",
    "compare_plans",
    "plan_command",
    "arguments",
    "steps",
    "cache_command",
    "doctor",
    "functional",
    "pooling",
    "frontends",
    "network",
    "annotations",
    "boundary",  # what the drop-in functions, and builders of networks, check and convert
    "packing",  # by way of a reorder, hence above array
    "array",
    "dispatch",
    "tuning",
    "kept",
    "compile_processes",
    "kernels",
    "eltwise_problem",
    "problem",
    "layout",
    "runtime",
    "emit",
    "jit",
    "codegen",
    "interop",  # what is read as an array
    "checks",
    "kernel_cache",
    "private_directory",
    "errors",
    "text",
    "_version",
]

# Debts: what families import from another family.
OWED: dict[str, set[str]] = {}


def module_of(path: Path) -> str:
    """Its name below blockconv: jit, kernels, kernels.reorder."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(name: str) -> set[str]:
    """Modules of blockconv that a module imports, wherever in it."""
    path = MODULES[name]
    package = ["blockconv", *name.split(".")][: None if path.name == "__init__.py" and name != "__init__" else -1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found.add(source)
            found |= {f"{source}.{alias.name}" for alias in node.names}
    ours = {text.removeprefix("blockconv.") for text in found if text.startswith("blockconv.")}
    return {text for text in ours if text in MODULES} - {name}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downward(name: str) -> None:
    top = name.split(".")[0]
    assert top in ORDER, f"{name} has no place in ORDER"
    for other in imported(name):
        below = other.split(".")[0]
        if below != top:
            assert ORDER.index(top) < ORDER.index(below), f"{name} imports {other}, which stands above it"


KERNELS = [name for name in MODULES if name.startswith("kernels.")]


def families() -> set[str]:
    """Modules of kernels that the table takes rows from."""
    return imported("kernels") - {"kernels.table"}


@pytest.mark.parametrize("name", KERNELS)
def test_families_of_kernels_do_not_know_each_other(name: str) -> None:
    """Nor does what they share know them, or the table that they are in."""
    others = imported(name)
    assert "kernels" not in others
    owed = {f"kernels.{family}" for family in OWED.get(name.removeprefix("kernels."), set())}
    assert not others & families() - owed


def test_the_table_takes_rows_from_families() -> None:
    assert {"kernels.direct", "kernels.reorder"} <= families() <= set(KERNELS)


def test_no_modules_import_each_other_in_a_circle() -> None:
    above: dict[str, set[str]] = {}

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' > '.join((*path, name))}"
        if name not in above:
            for other in imported(name):
                walk(other, (*path, name))
            above[name] = set(path)

    for name in MODULES:
        walk(name, ())


def test_numba_policy_stands_in_one_place() -> None:
    """Who else compiles with Numba, sets its configuration or starts its threads makes policy."""
    policy = (
        "numba.cfunc",
        "compile_extra",
        "cache=True",
        "THREADING_LAYER",
        "_launch_threads",
        "fastmath=True",
        "set_num_threads(",
        "cgroup",
    )
    for name, path in MODULES.items():
        if name not in ("jit", "codegen"):
            text = path.read_text(encoding="utf-8")
            held = [word for word in policy if word in text and not (name == "runtime" and word == "set_num_threads(")]
            assert not held or name in ("__main__", "doctor"), f"{name} holds {held}"


def test_importing_is_seen_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of imports, seen to read every form."""
    (tmp_path / "array.py").write_text("")
    forms = {
        "import blockconv.array": "array",
        "from blockconv import array": "array",
        "from blockconv.array import empty": "array",
        "def f():\n    from .array import empty": "array",
        "from . import array": "array",
    }
    for text, wanted in forms.items():
        path = tmp_path / "emit.py"
        path.write_text(text)
        monkeypatch.setitem(MODULES, "emit", path)
        assert imported("emit") == {wanted}
        with pytest.raises(AssertionError, match="emit imports array"):
            test_imports_point_downward("emit")
    deeper = tmp_path / "kernels.py"
    deeper.write_text("from ..array import empty\nfrom .reorder import ROWS")
    monkeypatch.setitem(MODULES, "kernels.direct", deeper)
    assert imported("kernels.direct") == {"array", "kernels.reorder"}


def test_the_checkers_are_the_same_before_a_commit_and_in_ci() -> None:
    root = PACKAGE.parent
    hooks = re.findall(r"(ruff|mypy)==([0-9.]+)", (root / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    extra = re.findall(r'"(ruff|mypy)==([0-9.]+)"', (root / "pyproject.toml").read_text(encoding="utf-8"))
    assert {name for name, _ in extra} == {"ruff", "mypy"}
    assert set(hooks) == set(extra)
