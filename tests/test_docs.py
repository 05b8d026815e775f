"""README.md and the pages of docs/: their code runs, their links hold, and every public name has its place."""

from __future__ import annotations

import ast
import collections
import doctest
import functools
import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pages
import pytest

import blockconv as bc
from blockconv.__main__ import main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
EVERY = sorted({ROOT / "README.md", *ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "bench").glob("*.md")})
EXECUTED = [page for page in EVERY if pages.blocks(page.read_text(encoding="utf-8"), "python") and DOCS in page.parents]

# The code of these runs by default, that of the other pages in `merge`.
FIRST = (ROOT / "README.md", DOCS / "tutorials" / "first-convolution.md")

COMPLETE = (
    "BlockedArray",
    "Conv2d",
    "adaptive_avg_pool2d",
    "avg_pool2d",
    "compile",
    "conv1d",
    "conv2d",
    "empty",
    "explain",
    "from_torch",
    "global_avg_pool2d",
    "global_max_pool2d",
    "load_onnx",
    "max_pool2d",
    "register_layout",
    "set_num_threads",
    "set_threading",
    "to_layout",
    "weights_for",
)


@pytest.mark.parametrize("name", COMPLETE)
def test_help_is_complete_by_itself(name: str) -> None:
    subject = getattr(bc, name)
    text = inspect.getdoc(subject) or ""
    for parameter in inspect.signature(subject).parameters:
        assert re.search(rf"^(\w+, )*{parameter}(, \w+)*: ", text, re.MULTILINE), parameter
    assert "Raises " in text


@pytest.mark.parametrize("name", [*COMPLETE, "Layout"])
def test_the_examples_of_help_say_what_they_say(name: str) -> None:
    pytest.importorskip({"load_onnx": "onnx", "from_torch": "torch"}.get(name, "numpy"))
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(bc, name), name, globs={})
    assert test.examples, "no example"
    report: list[str] = []
    doctest.DocTestRunner().run(test, out=report.append)
    assert not report, "".join(report)


# ---------------------------------------------------------------- all pages


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code of pages runs in an empty folder. Its threads and sizes change nothing for the next page."""
    monkeypatch.chdir(tmp_path)
    yield
    bc.set_num_threads(None)
    if "torch" in sys.modules:
        sys.modules["torch"].compiler.reset()  # PyTorch makes a size symbolic if it changes


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=named(page), marks=() if page in FIRST else pytest.mark.slow)
        for page in (ROOT / "README.md", *EXECUTED)
    ],
)
def test_the_code_of_a_page_gives_what_it_says(page: Path, elsewhere: None) -> None:
    assert pages.run_blocks(page)


def test_a_wrong_value_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1 + 1  # -> 2\n```\n```python\nx + 1  # -> 4\n```\n")
    with pytest.raises(AssertionError, match=r"x \+ 1"):
        pages.run_blocks(page)


@pytest.mark.parametrize("page", EVERY, ids=named)
def test_the_links_of_a_page_hold(page: Path) -> None:
    assert not [*pages.broken_links(page)]


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `thing`, twice\n## Again\n## Again\n```sh\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#one-thing-twice) [c](other.md#again-1) [d](https://example.org)\n"
        "[![e](e.svg)](f.md) [g](other.md#again-2) [h](#none) `[i](code.md)`\n"
        "```text\n[j](code.md)\n```\n[k](other.md#no-heading)\n"
    )
    found = [link.partition(":")[0] for link in pages.broken_links(page)]
    assert found == ["e.svg", "f.md", "other.md#again-2", "#none", "other.md#no-heading"]


@pytest.mark.parametrize("page", EVERY, ids=named)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    lines = [line for block in pages.blocks(page.read_text(encoding="utf-8"), "sh") for line in block.splitlines()]
    calls = [shlex.split(call, comments=True) for line in lines for call in line.split("&&")]
    for words in calls:
        words = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if words and words[0].rpartition("/")[2] == "blockconv":
            with pytest.raises(SystemExit, match="0"):
                main([*words[1:], "--help"])


def test_readme_is_short_and_has_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 10_000
    assert [line.rpartition("&& ")[2] for block in pages.blocks(text, "sh") for line in block.splitlines()] == [
        ".venv/bin/blockconv run --report plan.html",
        ".venv/bin/python -m pytest -n auto",
    ]


def test_the_figures_are_those_that_layouts_give() -> None:
    figures = of_docs("figures")
    assert {path for path, _ in figures.figures()} == {*figures.FOLDER.iterdir()}
    for path, text in figures.figures():
        assert path.read_text(encoding="utf-8") == text, f"run `python docs/figures.py`: {path.name} differs"
    order = figures.cells(bc.Layout("NCHW4"), (1, 6, 1, 2))
    assert [index and index[1::2] for index in order] == [
        *((0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)),
        *((4, 0), (5, 0), None, None, (4, 1), (5, 1), None, None),
    ]


# ---------------------------------------------------------------- the pages of the reference

PAGES = {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md")}
ENTRY = re.compile(r"^\.\. (?:auto(?:function|class|exception)|py:data):: (?:blockconv\.)?(\w+)(?![\w.])", re.MULTILINE)


def misplaced(pages: dict[str, str]) -> dict[str, list[str]]:
    """The public names that are not on exactly one page, and the names on pages that are not public."""
    places = collections.defaultdict(list)
    for page, text in pages.items():
        for name in ENTRY.findall(text):
            places[name].append(page)
    return {name: places[name] for name in {*bc.__all__, *places} if len(places[name]) != 1 or name not in bc.__all__}


def test_every_public_name_is_on_exactly_one_page() -> None:
    found = misplaced(PAGES)
    assert not found, f"{found}: write `.. autofunction:: blockconv.NAME` on one page of docs/reference for each name"


@pytest.mark.parametrize("name", bc.__all__)
def test_a_missing_name_is_seen_and_one_that_stands_twice(name: str) -> None:
    others = misplaced(PAGES)  # which are another test's
    (page,) = (page for page, text in PAGES.items() if name in ENTRY.findall(text))
    (line,) = (found[0] for found in ENTRY.finditer(PAGES[page]) if found[1] == name)
    assert misplaced({**PAGES, page: re.sub(rf"{re.escape(line)}\b", ".. ", PAGES[page])}) == {**others, name: []}
    assert misplaced({**PAGES, "more.md": line}) == {**others, name: [page, "more.md"]}
    unknown = {**PAGES, "more.md": ".. autofunction:: blockconv.unknown"}
    assert misplaced(unknown) == {**others, "unknown": ["more.md"]}


def listed_by(path: str) -> list[str]:
    """`__all__` of a module of the package, whose import may need a package that is missing."""
    if path in ("ndimage.py", "signal.py"):  # which import scipy later
        return list(importlib.import_module(f"blockconv.{path.removesuffix('.py')}").__all__)
    body = ast.parse((ROOT / "blockconv" / path).read_text(encoding="utf-8")).body
    (names,) = (
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return list(ast.literal_eval(names))


@pytest.mark.parametrize(
    ("path", "page", "entry"),
    [
        ("torch/__init__.py", "torch.md", ":: blockconv.torch.{}"),
        ("frontends/torch/functional.py", "torch.md", ":: blockconv.torch.functional.{}"),
        ("dask.py", "dask.md", ":: blockconv.dask.{}"),
        ("ndimage.py", "ndimage.md", "`{}`"),
        ("signal.py", "ndimage.md", "`{}`"),
        ("onnxruntime/__init__.py", "onnxruntime.md", ":: blockconv.onnxruntime.{}|`{}`"),
    ],
)
def test_every_name_of_a_public_module_is_on_its_page(path: str, page: str, entry: str) -> None:
    names = listed_by(path)
    assert names
    assert not [name for name in names if not re.search(rf"({entry.format(name, name)})(?!\w)", PAGES[page])]


def test_the_summary_names_everything_public() -> None:
    named = re.findall(r"{py:(?:func|class|data)}`(\w+)`", PAGES["index.md"])
    assert sorted(named) == sorted(bc.__all__)


def test_the_native_layouts_are_those_that_the_page_lists() -> None:
    (listed,) = re.findall(r"in this order: ([A-Z0-9, \n]+)\.", PAGES["layouts.md"])
    assert re.findall(r"\w+", listed) == [str(layout) for layout in bc.NATIVE]


def test_every_command_is_on_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert "run" in commands
    assert re.findall(r"^```{command} (\w+) --help", PAGES["commands.md"], re.MULTILINE) == commands


def test_every_environment_variable_is_on_its_page() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "blockconv").rglob("*.py")]
    named = set(re.findall(r"\b(?:BLOCKCONV|NUMBA)_[A-Z_]+\b", "".join(sources)))
    assert "BLOCKCONV_CACHE_DIR" in named
    assert not {name for name in named if f"`{name}`" not in PAGES["environment.md"]}


# ---------------------------------------------------------------- docstrings as pages show them


def of_docs(name: str) -> ModuleType:
    """A module of docs/."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    return of_docs("docstrings")


def public_members() -> dict[str, object]:
    """Public classes and functions, and the public methods and properties of these classes."""
    found = {name: getattr(bc, name) for name in bc.__all__}
    found = {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)}
    for owner, value in [*found.items()]:
        if inspect.isclass(value):
            own = {name: member for name, member in vars(value).items() if not name.startswith("_")}
            described = {name for name, member in own.items() if callable(member) or hasattr(member, "__get__")}
            fields = {*getattr(value, "__slots__", ()), *getattr(value, "_fields", ())}
            found |= {f"{owner}.{name}": own[name] for name in described - fields}
    return found


def test_whatever_is_public_has_a_docstring_that_pages_can_show(docstrings: ModuleType) -> None:
    members = public_members()
    assert {"Plan.load", "BlockedArray.ndim", "Network.readers", "Layout.offset", "conv2d"} <= {*members}
    said: list[str] = []
    for name, member in members.items():
        text = inspect.getdoc(member)
        assert text, f"{name} has no docstring"
        docstrings.to_rst(text, name.partition(".")[0], lambda problem, name=name: said.append(f"{name}: {problem}"))
    assert not said


def test_arguments_and_names_are_read(docstrings: ModuleType) -> None:
    said: list[str] = []
    text = """`Plan` and BlockedArray, for max|x| * 2.
Raises DtypeError.

stride, dilation: an int, or
    a pair, as `Plan.load` and `save` have it.
out_: ``x = 1``

>>> a * b
"""
    wanted = r""":py:obj:`Plan <blockconv.Plan>` and :py:obj:`BlockedArray <blockconv.BlockedArray>`, for max\|x\| \* 2.

Raises :py:obj:`DtypeError <blockconv.DtypeError>`.

``stride``, ``dilation``
    an int, or a pair, as :py:obj:`Plan.load <blockconv.Plan.load>` and :py:obj:`save <blockconv.Plan.save>` have it.
``out_``
    ``x = 1``

>>> a * b
"""
    assert docstrings.to_rst(text, "Plan", said.append) == wanted
    assert not said
    docstrings.to_rst("x: one.\nwhat is this?", "", said.append)
    assert said == ["neither begins an argument nor is indented, as the rest of one is: 'what is this?'"]


def test_signatures_are_those_of_the_sources(docstrings: ModuleType) -> None:
    arguments, result = docstrings.signature(bc.conv2d)
    assert arguments.startswith("(input: Array, weight: ArrayLike, bias: ArrayLike | None = None, stride: Sizes = 1")
    assert result == "Array"
    assert docstrings.signature(bc.NetworkBuilder.input)[0].endswith("dtype: Any = numpy.float32)")
    assert docstrings.signature(bc.NetworkBuilder.output) == ("(*values: str)", None)


# ---------------------------------------------------------------- records and names inside the package


def shared_classes() -> set[str]:
    """Classes that three or more modules of other folders import; not problems, the ops of networks and errors."""
    package = Path(bc.__file__).parent
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    homes = collections.defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.endswith("Problem"):
                homes[node.name].append(path)
    users = collections.defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                for home in homes[alias.name]:
                    module = ".".join(home.relative_to(package.parent).with_suffix("").parts)
                    if home.parent != path.parent and f"{module}.".startswith(f"{node.module}."):
                        users[alias.name, home].add(path)
    own = package / "network" / "ops", package / "core" / "errors.py"
    return {
        name for (name, home), paths in users.items() if len(paths) >= 3 and home not in own and home.parent not in own
    }


@pytest.mark.slow
def test_the_architecture_lists_the_nouns() -> None:
    """Each with a line. A class that joins or leaves the list is a noun more to learn, or one less."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## Nouns")
    listed = re.findall(r"^- `(\w+)`: ", section.partition("\n## ")[0], re.MULTILINE)
    assert listed == sorted(listed)
    assert {*listed} == shared_classes()


@functools.cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """Every class of the package, and where it is."""
    return [
        (f"{path}:{node.lineno}", node)
        for path in sorted(Path(bc.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]


def fields_of(node: ast.ClassDef) -> set[str]:
    return {own.target.id for own in node.body if isinstance(own, ast.AnnAssign) and isinstance(own.target, ast.Name)}


def inside_lines(text: str, fields: set[str]) -> list[str]:
    """The descriptions of fields that follow another one, or a sentence, on its line."""
    said = re.finditer(r"(?<=[.;:] )(\w+)((, \w+)*)(\([^)]*\))?: ", text)
    return [match[0] for match in said if match[1] in fields]


def test_the_fields_of_a_record_are_described_one_a_line() -> None:
    text = "A pixel. at: its address.\nsize, step: bytes, and from one to the next. fill: 0."
    assert inside_lines(text, {"at", "size", "step", "fill"}) == ["at: ", "fill: "]
    found = {
        place: said
        for place, node in classes()
        if (said := inside_lines(ast.get_docstring(node) or "", fields_of(node)))
    }
    assert not found


def test_a_class_has_a_name_of_its_own() -> None:
    places = collections.defaultdict(list)
    for place, node in classes():
        if not node.name.startswith("_"):
            places[node.name].append(place)
    # Public names of PyTorch's, the op of a network, a node that a front end reads or a call of a function, and
    # what each runner of foreign nodes has.
    shared = {"Conv2d", "ConvTranspose2d", "Call", "Session"}
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in shared}
