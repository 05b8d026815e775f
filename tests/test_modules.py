"""Imports point strictly downward, in the library and in the harness, and a module is what its package says."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the top. A module imports only from lines below its own; a package's __init__ belongs to its package.
ORDER = [
    "bench",
    "blockconv.__main__",
    "blockconv.cli",
    "blockconv._pyinstaller",
    "blockconv",
    "blockconv.dask",
    "blockconv.dask_image",
    "blockconv.signal",
    "blockconv.ndimage",
    "blockconv.onnxruntime",
    "blockconv.nopython",
    "blockconv.eager",
    "blockconv.torch",
    "blockconv.frontends",
    "blockconv.api",
    "blockconv.filters",
    "blockconv.network.quantization",
    "blockconv.network.plan",
    "blockconv.network.reporting",
    "blockconv.network.instance",
    "blockconv.network.schedule",
    "blockconv.network.planning",
    "blockconv.network.passes",
    "blockconv.network",
    "blockconv.dispatch",
    "blockconv.kernels",
    "blockconv.kernels.conv",
    "blockconv.kernels.winograd",
    "blockconv.kernels.depthwise",
    "blockconv.kernels.pool",
    "blockconv.kernels.reorder",
    "blockconv.kernels.eltwise",
    "blockconv.kernels.axis",
    "blockconv.kernels.norm",
    "blockconv.kernels.resize",
    "blockconv.kernels.reduce",
    "blockconv.kernels.indexed",
    "blockconv.kernels.product",
    "blockconv.kernels.recurrent",
    "blockconv.kernels.dynamic",
    "blockconv.kernels.backward_data",
    "blockconv.kernels.table",
    "blockconv.kernels.batches",
    "blockconv.kernels.rewritten",
    "blockconv.kernels.common",
    "blockconv.machine",
    "blockconv.runtime",
    "blockconv.jit",
    "blockconv.core",
    "blockconv._version",
]
SHARED = tuple(
    f"blockconv.kernels{part}" for part in ("", ".backward_data", ".table", ".batches", ".rewritten", ".common")
)
FAMILIES = [package for package in ORDER if package.startswith("blockconv.kernels") and package not in SHARED]


def module_of(path: Path, root: Path = ROOT) -> str:
    """blockconv, blockconv.core.layout, bench.timing, ..."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for top in ("blockconv", "bench") for path in sorted((ROOT / top).rglob("*.py"))}


def place(name: str) -> int:
    """The line of ORDER that a module belongs to: the longest that it is, or lies in."""
    lines = [line for line in ORDER if name == line or (name.startswith(line + ".") and line != "blockconv")]
    assert lines, f"{name} has no place in ORDER"
    return ORDER.index(max(lines, key=len))


@functools.cache
def imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imported(name: str) -> set[str]:
    """Modules that a module imports, wherever in it."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in imports(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # What is imported from a package is a module of it, or a name that the package's own file has.
            modules = {f"{source}.{alias.name}" for alias in node.names}
            found |= modules & set(MODULES) or {source}
    return found & set(MODULES) - {name}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downward(name: str) -> None:
    for other in imported(name):
        here, there = place(name), place(other)
        if here != there:
            assert here < there, f"{name} imports {other}, which stands above it"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("blockconv.kernels.")])
def test_families_of_kernels_do_not_know_each_other(name: str) -> None:
    """Nor does what they share know them, or the table that they are in."""
    own = ORDER[place(name)]
    for other in imported(name):
        theirs = ORDER[place(other)]
        assert theirs == own or theirs not in (*FAMILIES, "blockconv.kernels"), f"{name} imports {other}"


def test_the_table_takes_rows_from_every_family() -> None:
    assert {ORDER[place(name)] for name in imported("blockconv.kernels")} == {
        *FAMILIES,
        "blockconv.kernels.backward_data",
        "blockconv.kernels.table",
    }


def test_every_family_has_the_same_rooms() -> None:
    for family in FAMILIES:
        rooms = {path.stem for path in MODULES[family].parent.glob("*.py")}
        assert {"rows", "kernels"} <= rooms, family


def test_no_modules_import_each_other_in_a_circle() -> None:
    above: dict[str, set[str]] = {}

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' > '.join((*path, name))}"
        if name not in above:
            for other in imported(name):
                follow(other, (*path, name))
            above[name] = set(path)

    for name in MODULES:
        follow(name, ())


def reached(name: str) -> set[str]:
    """Modules that a module imports, and all that these import."""
    found: set[str] = set()
    wanted = [name]
    while wanted:
        new = imported(wanted.pop()) - found
        found |= new
        wanted += new
    return found


@pytest.mark.parametrize("name", ["blockconv.network.graph", "blockconv.network.ops", "blockconv.network.emitter"])
def test_the_graph_knows_no_kernels_and_no_llvm(name: str) -> None:
    """What an op is, infers, computes and asks of the planner needs none of them."""
    modules = reached(name)
    assert all(module.startswith(("blockconv.core", "blockconv.network.")) for module in modules), modules
    for module in modules:
        text = MODULES[module].read_text(encoding="utf-8")
        assert not re.search(r"^ *(import|from) (llvmlite|numba)\b", text, re.MULTILINE), module


def test_numba_policy_stands_in_few_places() -> None:
    """Who else compiles with Numba, sets its configuration or starts its threads makes policy."""
    policy = {
        "numba_ir": ("jit.translate",),
        "numba_parallel_for": ("runtime.threading_layer",),
        "cache=True": (),
        "THREADING_LAYER": ("core.target", "runtime.threading_layer", "runtime.pools", "cli", "cli.doctor"),
        "get_num_threads()  # which starts": ("runtime.threading_layer",),
        "fastmath=True": (),
        "cgroup": ("core.target",),
    }
    for word, places in policy.items():
        holders = {name for name, path in MODULES.items() if word in path.read_text(encoding="utf-8")}
        assert {name for name in holders if name.startswith("blockconv")} <= {f"blockconv.{p}" for p in places}, word


# Whoever reads the machine of this process decides for no other. Code generation compiles for it, requests name it
# where their caller names none, and calls on arrays, plans and measurements are made on it.
BELOW_REQUESTS = ("blockconv.core", "blockconv.jit", "blockconv.machine", "blockconv.runtime")
GENERATORS = (
    "codegen",
    "halves",
    "microkernel",
    "requantize",
    "vectors",
    "packing",
    "finish_rows",
)
BOUNDARIES = {
    "blockconv.api.functional", "blockconv.dispatch.array", "blockconv.dispatch.measuring",
    "blockconv.filters.codegen", "blockconv.filters.passes", "blockconv.dispatch.packing",
    "blockconv.dispatch.quantizing",
    "blockconv.frontends.onnx.contributed",
    "blockconv.kernels.common.request", "blockconv.network.planning.planned", "blockconv.network.reporting.data",
    "blockconv.network.reporting.page", "blockconv.onnxruntime.session", "blockconv.cli.doctor", "blockconv.cli.pack",
}  # fmt: skip


def reads_this_machine(text: str) -> bool:
    """Whether a module imports more of `core.target` than the class `Isa`, or the machine of this process."""
    given = {
        (node.module, alias.name) for node in imports(text) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    whole = {("blockconv.core", "target"), ("blockconv.machine.machine", "host"), ("blockconv.machine", "machine")}
    return bool(given & whole) or any(module == "blockconv.core.target" and name != "Isa" for module, name in given)


def test_the_machine_is_handed_down() -> None:
    """A decision takes the machine of its request."""
    found = {name for name, path in MODULES.items() if reads_this_machine(path.read_text(encoding="utf-8"))}
    own = {name for name in found if name.startswith((*BELOW_REQUESTS, "bench"))}
    kernels = {name for name in found - own - BOUNDARIES if name.startswith("blockconv.kernels.")}
    assert not {name for name in kernels if not name.rpartition(".")[2].startswith(GENERATORS)}
    assert found - own - kernels == BOUNDARIES


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("from blockconv.core import target", True),
        ("def f():\n    from blockconv.core.target import isa", True),
        ("from blockconv.machine.machine import Machine, host", True),
        ("from blockconv.core.target import Isa\nfrom blockconv.machine.machine import Machine", False),
    ],
)
def test_readers_of_this_machine_are_seen(text: str, wanted: bool) -> None:
    assert reads_this_machine(text) == wanted


# What may change without notice is everything of these packages but this. Their manuals import it: Numba's on extending
# it (`infer_getattr` takes nothing but an AttributeTemplate), llvmlite's on IR and the binding.
PUBLIC = {
    "numba",
    "numba.extending",
    "numba.core.cgutils",
    "numba.core.typing.templates.AttributeTemplate",
    "llvmlite",
    "llvmlite.binding",
    "llvmlite.ir",
}


def is_private(name: str) -> bool:
    """Whether this is no public name, nor a name in a public module or class."""
    package, *parts = name.split(".")
    if any(part.startswith("_") and not part.endswith("__") for part in parts):
        return True
    below = "core", "np", "misc", "parfors", "cpython", "typed"  # Numba's folders, which are no names of `numba` itself
    tops = PUBLIC - {"numba"} if package == "numba" and parts[:1] and parts[0] in below else PUBLIC
    return not any(name == top or name.startswith(top + ".") for top in tops)


def private_parts(path: Path) -> set[str]:
    """Private names of Numba and llvmlite that a file imports, or reads of what it imports."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text))) if re.search("numba|llvmlite", text) else []
    found: set[str] = set()
    local: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            local |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names if alias.asname}
            local |= {top: top for alias in node.names if (top := alias.name.partition(".")[0]) and not alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            local |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", chain := ast.unparse(node)):
            first, _, rest = chain.partition(".")
            found |= {f"{local[first]}.{rest}"} if first in local else set()
    return {name for name in found if name.partition(".")[0] in ("numba", "llvmlite") and is_private(name)}


def addresses_of_temporaries(path: Path) -> list[str]:
    """Calls that take the address of memory that nothing holds: it is free before a kernel writes to it."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    asked = [call.args[0] for call in calls if ast.unparse(call.func).endswith("address_of") and call.args]
    return [ast.unparse(x) for x in asked if isinstance(x, ast.Call) and ast.unparse(x.func) != "memory_of"]


def test_whoever_takes_an_address_holds_the_memory(tmp_path: Path) -> None:
    assert not {name: found for name, path in MODULES.items() if (found := addresses_of_temporaries(path))}
    (tmp_path / "module.py").write_text("run((address_of(weight), runtime.address_of(aligned_empty(n))))")
    assert addresses_of_temporaries(tmp_path / "module.py") == ["aligned_empty(n)"]


def test_one_module_uses_what_is_private_to_numba() -> None:
    holders = {name: found for name, path in MODULES.items() if (found := private_parts(path))}
    assert set(holders) == {"blockconv.jit.translate"}, holders


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("from numba.core.codegen import JITCPUCodegen", "numba.core.codegen.JITCPUCodegen"),
        ("from numba.core import codegen", "numba.core.codegen"),
        ("import numba.core.registry", "numba.core.registry"),
        ("import numba\nnumba.core.registry.cpu_target", "numba.core.registry.cpu_target"),
        ("def f():\n    from numba.np.ufunc import parallel", "numba.np.ufunc.parallel"),
        ("import llvmlite.binding as llvm\nllvm.ffi._lib", "llvmlite.binding.ffi._lib"),
        ("from numba import types, config\nfrom numba.core import cgutils\ntypes.int64; cgutils.for_range", None),
    ],
)
def test_private_parts_are_seen_wherever_they_stand(tmp_path: Path, text: str, wanted: str | None) -> None:
    (tmp_path / "module.py").write_text(text)
    assert (wanted in private_parts(tmp_path / "module.py")) if wanted else not private_parts(tmp_path / "module.py")


def test_importing_is_seen_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of imports, seen to read every form."""
    forms = {
        "import blockconv.dispatch.array": "blockconv.dispatch.array",
        "from blockconv.dispatch import array": "blockconv.dispatch.array",
        "from blockconv.dispatch.array import empty": "blockconv.dispatch.array",
        "def f():\n    from ..dispatch.array import empty": "blockconv.dispatch.array",
        "from ..dispatch import array": "blockconv.dispatch.array",
    }
    path = tmp_path / "ir.py"
    monkeypatch.setitem(MODULES, "blockconv.jit.ir", path)
    for text, wanted in forms.items():
        path.write_text(text)
        assert imported("blockconv.jit.ir") == {wanted}
        with pytest.raises(AssertionError, match=r"ir imports blockconv\.dispatch\.array"):
            test_imports_point_downward("blockconv.jit.ir")
    path.write_text("from blockconv.core import target\nfrom . import cache")
    assert imported("blockconv.jit.ir") == {"blockconv.core.target", "blockconv.jit.cache"}


def test_the_checkers_are_the_same_before_a_commit_and_in_ci() -> None:
    hooks = re.findall(r"(ruff|mypy)==([0-9.]+)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    extra = re.findall(r'"(ruff|mypy)==([0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {name for name, _ in extra} == {"ruff", "mypy"}
    assert set(hooks) == set(extra)


# ---------------------------------------------------------------- the walks of docs/architecture.md


def walks() -> list[list[str]]:
    """The modules of each table of steps."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\| \d+ \| .*\n)+", text, re.MULTILINE)
    return [
        ["blockconv." + name for name in re.findall(r"^\| \d+ \| `([\w.]+)`", table, re.MULTILINE)] for table in tables
    ]


def below(name: str) -> set[str]:
    """The modules that a module imports, and those that these import."""
    found, left = set(), [name]
    while left:
        new = imported(left.pop()) - found
        found |= new
        left += new
    return found


@pytest.mark.parametrize("number", range(2))
def test_each_step_of_a_walk_is_further_down(number: int) -> None:
    steps = walks()[number]
    assert len(walks()) == 2
    assert 3 <= len(steps) <= 6
    for step, following in itertools.pairwise(steps):
        assert place(step) < place(following) or following in below(step), f"{following} is not below {step}"
    assert set(steps) <= set(MODULES)
