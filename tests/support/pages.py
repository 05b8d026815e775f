"""Pages of Markdown: their code, their links, their anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FENCE = re.compile(r"^(`{3,})(.*)\n((?:.*\n)*?)\1$", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]*)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [body for _, name, body in FENCE.findall(text) if name == language]


def prose(text: str) -> str:
    """A page's text without code and comments."""
    return re.sub(r"`[^`\n]*`", "``", COMMENT.sub("", FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    found: dict[str, int] = {}
    names = set()
    for heading in HEADING.findall(COMMENT.sub("", FENCE.sub("", text))):
        plain = re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).strip().replace(" ", "-")
        names.add(f"{plain}-{found[plain]}" if plain in found else plain)
        found[plain] = found.get(plain, 0) + 1
    return names


def broken_links(page: Path) -> Iterator[str]:
    """The links of a page to files and anchors that are not there; of others on the web nothing is said."""
    for target in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{target}: no such heading"


def run_blocks(page: Path) -> int:
    """Run a page's Python in order, in one namespace. A line `code  # -> value` has that value. The number of blocks.

    A page is skipped where a package that it imports is missing.
    """
    names: dict[str, Any] = {}
    found = blocks(page.read_text(encoding="utf-8"), "python")
    for package in re.findall(r"^(?:import|from) (\w+)", "".join(found), re.MULTILINE):
        pytest.importorskip(package)
    for number, block in enumerate(found):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
        for line in block.splitlines():
            expression, arrow, wanted = line.partition("  # -> ")
            if arrow:
                assert repr(eval(expression.partition(" = ")[2] or expression, names)) == wanted, line
    return len(found)
