"""Old names of modules and of what was in them are found, and say where they have gone."""

from __future__ import annotations

from typing import Any

import pytest

import blockconv as bc
from blockconv._moved import _NAMES, MOVED

CHECK = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import blockconv.{old}
    from {package} import {last} as again
module = importlib.import_module("blockconv.{new}")
assert again is module is sys.modules["blockconv.{old}"]
assert module.__spec__.name == module.__name__ == "blockconv.{new}"
told = [str(w.message) for w in caught if w.category is DeprecationWarning]
assert told == ["blockconv.{old} has moved: import blockconv.{new}"], told
assert caught[0].filename == "<string>", caught[0].filename
"""


def test_modules_are_found_by_their_old_names(run_python: Any) -> None:
    """In a process of their own, where nobody has imported them yet."""
    checks = []
    for old, new in MOVED.items():
        package, _, last = f"blockconv.{old}".rpartition(".")
        checks.append(CHECK.format(old=old, new=new, package=package, last=last))
    run_python("import importlib, sys, warnings\n" + "".join(checks))


@pytest.mark.parametrize(("package", "name"), [(package, name) for package, names in _NAMES.items() for name in names])
def test_a_name_is_found_in_its_old_package(package: str, name: str) -> None:
    old = {"blockconv.jit": bc.jit, "blockconv.dispatch": bc.dispatch}[package]
    with pytest.warns(DeprecationWarning, match=f"{package}.{name} has moved"):
        assert getattr(old, name).__name__.lower() == name.lower()


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import blockconv.nothing  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(AttributeError, match="'blockconv' has no attribute 'nothing'"):
        _ = bc.nothing
