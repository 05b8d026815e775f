"""What users' programs hold on to: public names, signatures, and files of an earlier version.

`compatibility/public.txt` has a line for each public name. After a change, deprecate the old name, or say in
CHANGELOG.md what changed. Then write the lines anew:

    python tests/test_compatibility.py

It refuses as long as CHANGELOG.md does not name what changed.

The other files there were written by 0.2.0 before its release. `wanted.npz` has the results that they gave.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc

HERE = Path(__file__).parent / "compatibility"
SNAPSHOT = HERE / "public.txt"
CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
# The documented modules, each with the package that it needs.
MODULES = {
    "blockconv": "numpy",
    "blockconv.network.ops": "numpy",
    "blockconv.dask": "dask",
    "blockconv.ndimage": "numpy",
    "blockconv.signal": "numpy",
    "blockconv.onnxruntime": "onnx",
    "blockconv.torch": "torch",
    "blockconv.torch.functional": "torch",
}


# ---------------------------------------------------------------- names


def signature(function: Any) -> str:
    """Parameters and defaults. Annotations are left out, since their text names private aliases."""
    given = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in given.parameters.values()]
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(plain)))


def members(kind: type) -> Iterator[str]:
    """The constructor, fields and attributes of a class that blockconv defines."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("blockconv")]
    attributes: dict[str, Any] = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    if {"__init__", "__new__"} & set(attributes) and not issubclass(kind, enum.Enum):
        yield signature(kind)
    fields = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for name in sorted({*attributes, *fields}):
        function = getattr(attributes.get(name), "__func__", attributes.get(name))
        is_public = not name.startswith("_") or name in ("__call__", "__array__")
        if is_public:
            yield f".{name}{signature(function) if inspect.isfunction(function) else ''}"


def described(module: str) -> list[str]:
    """The lines of a module. Of a network's ops, the constructors: their methods serve planners."""
    loaded = importlib.import_module(module)
    found = []
    public = [name for name, thing in vars(loaded).items() if name[0] != "_" and not inspect.ismodule(thing)]
    for name in getattr(loaded, "__all__", public):
        thing = getattr(loaded, name)
        if isinstance(thing, type):
            ends = [*members(thing)] or [""]
            found += [f"{module}.{name}{end}" for end in (ends[:1] if module.endswith(".ops") else ends)]
        else:
            found.append(f"{module}.{name}{signature(thing) if inspect.isfunction(thing) else ''}")
    return sorted(found)


def snapshot() -> dict[str, list[str]]:
    parts = SNAPSHOT.read_text(encoding="utf-8").strip().split("\n\n") if SNAPSHOT.exists() else []
    return {title.strip("[]"): lines for title, *lines in map(str.splitlines, parts)}


def changed(before: list[str], after: list[str]) -> list[str]:
    """The names of lines that were added, taken away or changed, as the changelog writes them."""
    return sorted({line.partition("(")[0].rpartition(".")[2] for line in {*before} ^ {*after}})


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_those_of_the_snapshot(module: str) -> None:
    pytest.importorskip(MODULES[module])
    before, after = snapshot()[module], described(module)
    assert after == before, f"{changed(before, after)} changed: see the first lines of {Path(__file__).name}"


def write(changelog: str) -> list[str]:
    """Write the snapshot, unless the changelog lacks names, which are returned."""
    before, after = snapshot(), {module: described(module) for module in MODULES}
    names = {name for module in MODULES for name in changed(before.get(module, []), after[module])} if before else ()
    lacking = sorted(name for name in names if not re.search(rf"\b{name}\b", changelog))
    if not lacking:
        text = "\n\n".join("\n".join([f"[{module}]", *lines]) for module, lines in after.items())
        SNAPSHOT.write_text(text + "\n", encoding="utf-8")
    return lacking


# ---------------------------------------------------------------- files


def image(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.linspace(-2, 2, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def of_plan(path: Path) -> Any:
    return bc.Plan.load(path)(image((1, 3, 16, 16)))


def of_pickle(path: Path) -> Any:
    held = pickle.loads(path.read_bytes())
    if isinstance(held, bc.BlockedArray):
        return held.numpy()
    if isinstance(held, bc.Network):
        (found,) = held.evaluate(image((1, 3, 16, 16))).values()
        return found
    if isinstance(held, bc.Plan):
        return held(image((1, 3, 16, 16)))
    x = image((1, 6, 9, 9))
    return held((x * 60).astype(np.int8) if held.weight.dtype == np.int8 else x)


def of_module(path: Path) -> Any:
    torch = pytest.importorskip("torch")
    model = torch.load(path, weights_only=False)
    assert type(model[0]) is bc.torch.Conv2d
    with torch.no_grad():
        return model(torch.from_numpy(image((1, 6, 9, 9)))).numpy()


FILES = {".plan": of_plan, ".pickle": of_pickle, ".pt": of_module}


def named(path: Path) -> Any:
    """A plan's kernels take long to compile."""
    return pytest.param(path.name, marks=[pytest.mark.slow] if "plan" in path.name else [])


@pytest.mark.parametrize("name", [named(path) for path in sorted(HERE.iterdir()) if path.suffix in FILES])
def test_files_of_an_earlier_version(name: str) -> None:
    with np.load(HERE / "wanted.npz") as wanted:
        found = FILES[Path(name).suffix](HERE / name)
        near = 2e-6 * np.abs(wanted[name]).max() if found.dtype == np.float32 else 0
        np.testing.assert_allclose(found, wanted[name], rtol=0, atol=near)


if __name__ == "__main__":
    if missing := write(CHANGELOG.read_text(encoding="utf-8")):
        sys.exit(f"{CHANGELOG.name} does not name {', '.join(missing)}")
