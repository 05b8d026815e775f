"""The package's size in lines and tokens, functions that fit a screen, arguments that have names.

`python tests/test_size.py` prints the lines and tokens of each folder, and the number of shared names.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import blockconv as bc

PACKAGE = Path(bc.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef

REMEDY = "Delete as much as you add; else raise the limit in a commit of its own, which gives the reason."
LINES_OF_THE_PACKAGE = 64_862
LINES_OF_A_FUNCTION, PARAMETERS, AS_WRITTEN = 60, 8, 10

# What PyTorch's functions take, their callers may give; those that pass it on take it too. So with the options of
# quantizers and plans.
PUBLIC = {
    "conv1d", "conv2d", "conv_transpose2d", "conv2d_backward_data", "conv2d_backward_weights", "max_pool2d",
    "avg_pool2d", "max_pool2d_backward", "avg_pool2d_backward", "Conv2d.__init__", "NetworkBuilder.conv2d",
    "NetworkBuilder.conv_transpose2d",
    "quantize", "compile",
}  # fmt: skip


# Tokens of code by folder. A folder that needs more takes them from another, whose code goes: the total only falls.
BUDGET = {
    ".": 5_125, "_pyinstaller": 53, "api": 19_922, "cli": 5_707, "core": 27_080, "dispatch": 16_223, "eager": 0,
    "filters": 7_171, "frontends": 11, "frontends/onnx": 40_807, "frontends/torch": 39_937, "jit": 16_777,
    "kernels": 6_071, "kernels/axis": 1_175, "kernels/common": 33_429, "kernels/conv": 37_033,
    "kernels/depthwise": 28_041, "kernels/dynamic": 1_483, "kernels/eltwise": 4_354, "kernels/indexed": 2_250,
    "kernels/norm": 8_582, "kernels/pool": 23_049, "kernels/product": 7_240, "kernels/recurrent": 2_424,
    "kernels/reduce": 2_505, "kernels/reorder": 11_298, "kernels/resize": 4_834, "kernels/winograd": 12_880,
    "machine": 3_013, "network": 96_490, "nopython": 4_901, "onnxruntime": 5_549, "runtime": 5_530, "torch": 238,
}  # fmt: skip
TOKENS_OF_THE_PACKAGE = 481_182
# Capitalised names that three modules or more import. A reader has to learn each of them.
SHARED_NAMES = 217


@functools.cache
def functions(path: Path) -> list[tuple[str, Function]]:
    """Every function with its name, a method's with its class before it."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    owners = {child: node.name for node in nodes if isinstance(node, ast.ClassDef) for child in node.body}
    named = [node for node in nodes if isinstance(node, Function)]
    return [(f"{owners[node]}.{node.name}" if node in owners else node.name, node) for node in named]


def folder_of(path: Path) -> str:
    """Kernels and front ends are listed by family."""
    folders = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(folders[: 2 if folders[:1] in (("kernels",), ("frontends",)) else 1]) or "."


def lines_by_folder() -> Counter[str]:
    """The lines of Python files, blank ones and comments included."""
    found: Counter[str] = Counter()
    for path in FILES:
        found[folder_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    return found


CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def tokens(text: str) -> int:
    """The tokens of code without comments, docstrings, imports and `__all__`, so that packed lines gain nothing."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        first: ast.stmt | None = None
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body and ast.get_docstring(node, clean=False) is not None else None
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.Assign):
            is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            first = node if is_list or not isinstance(node, ast.Assign) else None
        if first is not None and first.end_lineno is not None:
            skipped.update(range(first.lineno, first.end_lineno + 1))
    read = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(1 for token in read if token.type in CODE and token.start[0] not in skipped)


@functools.cache
def tokens_by_folder() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in FILES:
        found[folder_of(path)] += tokens(path.read_text(encoding="utf-8"))
    return found


def shared_names() -> set[str]:
    users: dict[str, set[Path]] = defaultdict(set)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    users[alias.name].add(path)
    return {name for name, paths in users.items() if name[0].isupper() and len(paths) >= 3}


def as_text(found: Counter[str]) -> str:
    rows = [f"{lines:7,} {folder}" for folder, lines in sorted(found.items())]
    return "\n".join([*rows, f"{found.total():7,} in all"])


def test_the_package_keeps_to_its_limit() -> None:
    found = lines_by_folder()
    assert found.total() <= LINES_OF_THE_PACKAGE, f"over {LINES_OF_THE_PACKAGE:,} lines. {REMEDY}\n{as_text(found)}"


def test_each_folder_keeps_to_its_budget() -> None:
    found = tokens_by_folder()
    over = {folder: f"{count:,} of {BUDGET.get(folder, 0):,}" for folder, count in found.items()
            if count > BUDGET.get(folder, 0)}  # fmt: skip
    assert not over, f"tokens of code: {over}. {REMEDY}"
    assert found.total() <= TOKENS_OF_THE_PACKAGE, f"over {TOKENS_OF_THE_PACKAGE:,} tokens. {REMEDY}\n{as_text(found)}"


def test_no_more_names_have_to_be_learnt() -> None:
    assert len(shared_names()) <= SHARED_NAMES


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""A module."""\nimport os\n__all__ = ["x"]\nx = 1  # a number\n', 3),
        ('def f(a):\n    """Help."""\n    return (\n        a\n    )\n', 10),
        ("class A: ...\n", 4),
    ],
)
def test_tokens_are_those_of_code(text: str, count: int) -> None:
    assert tokens(text) == count


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_fit_a_screen(path: Path) -> None:
    for name, node in functions(path):
        assert node.end_lineno is not None
        # What `help` says of a public function is as long as it has to be.
        first = node.body[1].lineno if name in PUBLIC and ast.get_docstring(node) else node.lineno
        assert node.end_lineno - first < LINES_OF_A_FUNCTION, name
        given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        assert len([a for a in given if a not in ("self", "cls")]) <= PARAMETERS or name in PUBLIC, name


def test_no_exception_is_out_of_date() -> None:
    found = {name for path in FILES for name, _ in functions(path)}
    assert found >= PUBLIC


def test_the_formatter_lays_the_code_out() -> None:
    assert sum(path.read_text(encoding="utf-8").count("# fmt: skip") for path in FILES) <= AS_WRITTEN


def test_no_kernel_reads_its_arguments_by_position() -> None:
    """`load_i64` reads arrays whose length is known at run time alone, and is what named words are made of."""
    for path in (PACKAGE / "kernels").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "load_i64(args" not in text, path
        assert text.count("load_i64(") <= 4, path


if __name__ == "__main__":
    print(as_text(lines_by_folder()), as_text(tokens_by_folder()), sep="\n\n")
    print(f"\n{len(shared_names())} shared names")
