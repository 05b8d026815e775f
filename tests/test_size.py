"""The package's size in lines, functions that fit a screen, arguments that have names.

`python tests/test_size.py` prints the lines of each folder.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

import blockconv as bc

PACKAGE = Path(bc.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Who adds more than is left raises the limit in a commit of its own, which gives the reason.
LINES_OF_THE_PACKAGE = 69_818
LINES_OF_A_FUNCTION, PARAMETERS, AS_WRITTEN = 60, 8, 10

# What PyTorch's functions take, their callers may give; those that pass it on take it too. So with the options of
# quantizers and plans.
PUBLIC = {
    "conv1d", "conv2d", "conv_transpose2d", "conv2d_backward_data", "conv2d_backward_weights", "max_pool2d",
    "avg_pool2d", "max_pool2d_backward", "avg_pool2d_backward", "Conv2d.__init__", "NetworkBuilder.conv2d",
    "NetworkBuilder.conv_transpose2d",
    "quantize", "compile",
}  # fmt: skip


@functools.cache
def functions(path: Path) -> list[tuple[str, Function]]:
    """Every function with its name, a method's with its class before it."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    owners = {child: node.name for node in nodes if isinstance(node, ast.ClassDef) for child in node.body}
    named = [node for node in nodes if isinstance(node, Function)]
    return [(f"{owners[node]}.{node.name}" if node in owners else node.name, node) for node in named]


def lines_by_folder() -> Counter[str]:
    """The lines of Python files, blank ones and comments included; kernels are listed by family."""
    found: Counter[str] = Counter()
    for path in FILES:
        folders = path.relative_to(PACKAGE).parts[:-1]
        depth = 2 if folders[:1] in (("kernels",), ("frontends",)) else 1
        found["/".join(folders[:depth]) or "."] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def as_text(found: Counter[str]) -> str:
    rows = [f"{lines:7,} {folder}" for folder, lines in sorted(found.items())]
    return "\n".join([*rows, f"{found.total():7,} in all, of {LINES_OF_THE_PACKAGE:,}"])


def test_the_package_keeps_to_its_limit() -> None:
    found = lines_by_folder()
    assert found.total() <= LINES_OF_THE_PACKAGE, as_text(found)


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
    print(as_text(lines_by_folder()))
