"""Docstrings and signatures as Sphinx is to show them.

The docstrings of blockconv are written to be read in a terminal. They consist of blocks with empty lines between:
paragraphs; examples, which begin with `>>>`; and arguments, a line for each with the rest of it indented:

    stride, dilation: an int of at least 1, or a pair of them:
        (height, width).

Here they become reStructuredText. A name in backticks becomes a link where it is public, and so does the name of a
public class in the text. Whatever is markup in reStructuredText alone, such as the bars of max|src|, stays as it is.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_args, get_origin

import blockconv
from blockconv.core import checks

__all__ = ["setup", "signature", "to_rst"]

ARGUMENT = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (\S.*)")
CODE = re.compile(r"(``.+?``|`.+?`)")
CLASS = re.compile(r"\b(?:[A-Z][a-z0-9]+){2,}\b")  # Layout and Plan are words too, and are links in backticks alone
METHODS = types.FunctionType, types.MethodType, property, functools.cached_property


def to_rst(docstring: str, owner: str, report: Callable[[str], None]) -> str:
    """The docstring in reStructuredText. owner: the public class that it belongs to, or "". report: is told what
    cannot be read."""
    blocks = re.split(r"\n{2,}", docstring.strip("\n"))
    return "\n\n".join(_block(block.splitlines(), owner, report) for block in blocks) + "\n"


def _block(lines: list[str], owner: str, report: Callable[[str], None]) -> str:
    if lines[0].startswith(">>> "):
        return "\n".join(lines)
    if not ARGUMENT.match(lines[0]):
        raises = next((k for k, line in enumerate(lines) if line.startswith("Raises ")), 0)
        return "\n\n".join(_inline(part, owner) for part in (lines[:raises], lines[raises:]) if part)
    items: list[tuple[str, list[str]]] = []
    for line in lines:
        if found := ARGUMENT.fullmatch(line):
            items.append((found[1], [found[2]]))
        elif line.startswith("    "):
            items[-1][1].append(line)
        else:
            report(f"neither begins an argument nor is indented, as the rest of one is: {line!r}")
    return "\n".join(f"{_names(names)}\n    {_inline(text, owner)}" for names, text in items)


def _names(names: str) -> str:
    return ", ".join(f"``{name}``" for name in names.split(", "))


def _inline(lines: Iterable[str], owner: str) -> str:
    text = " ".join(line.strip() for line in lines)
    parts = CODE.split(text)
    return "".join(_code(part.strip("`"), owner) if k % 2 else _prose(part) for k, part in enumerate(parts))


def _code(code: str, owner: str = "") -> str:
    """A link to what is public, or a method or property of the owner; else the code."""
    for name in (code, f"{owner}.{code}"):
        first, _, rest = name.partition(".")
        subject = getattr(blockconv, first, None) if first in blockconv.__all__ else None
        if subject is not None and (not rest or isinstance(getattr(subject, rest, None), METHODS)):
            return f":py:obj:`{code} <blockconv.{name}>`"
    return f"``{code}``"


def _prose(text: str) -> str:
    escaped = re.sub(r"[\\*|]|(?<=\w)_(?!\w)", r"\\\g<0>", text)
    return CLASS.sub(lambda found: _code(found[0]) if found[0] in blockconv.__all__ else found[0], escaped)


class _Source(str):
    """What stands in the source, to be shown as it is."""

    __repr__ = str.__str__


def signature(subject: Any) -> tuple[str, str | None]:
    """The arguments and the result's type as the source writes them: names of types, not what these stand for."""
    found = inspect.signature(subject)
    arguments = [_as_written(argument) for argument in found.parameters.values()]
    if inspect.isfunction(subject) and arguments and arguments[0].name in ("self", "cls"):
        del arguments[0]
    result = found.return_annotation
    written = found.replace(parameters=arguments, return_annotation=inspect.Signature.empty)
    return str(written), result if isinstance(result, str) and result != "None" else None


def _as_written(argument: inspect.Parameter) -> inspect.Parameter:
    annotation, default = argument.annotation, argument.default
    if isinstance(annotation, str):
        checked = getattr(checks, annotation, None)  # a type whose values a class checks itself
        annotation = _Source(get_args(checked)[0].__name__ if get_origin(checked) is Annotated else annotation)
    if isinstance(default, type) and default is not argument.empty:
        default = _Source(f"{default.__module__}.{default.__qualname__}")
    return argument.replace(annotation=annotation, default=default)


# ---------------------------------------------------------------- as an extension of Sphinx


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of it."""
    app.connect("autodoc-process-docstring", _on_docstring)
    app.connect("autodoc-process-signature", _on_signature)
    app.connect("autodoc-skip-member", _on_member)
    app.connect("missing-reference", _on_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _on_docstring(app: Any, kind: str, name: str, subject: object, options: object, lines: list[str]) -> None:
    from sphinx.util import logging

    def report(text: str) -> None:
        logging.getLogger(__name__).warning("docstring of %s: %s", name, text)

    first = name.removeprefix("blockconv.").partition(".")[0]
    owner = first if inspect.isclass(getattr(blockconv, first, None)) else ""
    lines[:] = to_rst("\n".join(lines), owner, report).split("\n")


def _on_signature(
    app: Any, kind: str, name: str, subject: Any, options: object, arguments: str | None, result: str | None
) -> tuple[str, str | None] | None:
    """The page has the last word on classes: where it gives () the class is not to be made by its users."""
    if kind == "class" and arguments not in (None, "()"):
        return signature(subject)[0], None
    return signature(subject) if kind in ("function", "method") else None


def _on_member(app: Any, kind: str, name: str, subject: object, skip: bool, options: object) -> bool | None:
    """The fields of a NamedTuple are in the docstring of their class; their own say nothing."""
    return True if type(subject).__name__ == "_tuplegetter" else None


def _on_missing(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """A name in a signature may be that of a type, which Sphinx before 9 looks for among classes alone."""
    if (node.get("refdomain"), node.get("reftype")) != ("py", "class"):
        return None
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "type", node["reftarget"], node, shown)
