"""The problems in benchdnn's files of shapes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, overload

from blockconv.core.checks import checked_word
from blockconv.core.errors import ArgumentError, UnsupportedError
from blockconv.core.problem import Conv2dProblem, Pool2dProblem


@overload
def read_shape_file(
    path: str | Path, op: Literal["conv2d"], *, skip_unsupported: bool = False
) -> list[Conv2dProblem]: ...
@overload
def read_shape_file(
    path: str | Path, op: Literal["pool2d"], *, skip_unsupported: bool = False
) -> list[Pool2dProblem]: ...
def read_shape_file(path: str | Path, op: str, *, skip_unsupported: bool = False) -> Any:
    """The problems of a benchdnn shape file: one descriptor a line, with blank lines and `#` comments.

    Pools have the kind "max". A 3-D line raises `UnsupportedError`, or is skipped with skip_unsupported.
    """
    classes: dict[str, Any] = {"conv2d": Conv2dProblem, "pool2d": Pool2dProblem}
    checked_word("read_shape_file", "op", op, classes)
    problems = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        text = _COMMENT.sub(r"\1", line).strip()
        if not text:
            continue
        try:
            problems.append(classes[op].from_descriptor(text))
        except UnsupportedError:
            if not skip_unsupported:
                raise
        except ArgumentError as error:
            rule = f"{error.rule} ({Path(path).name}, line {number})"
            raise ArgumentError(error.op, error.argument, error.value, rule, error.remedy) from error
    return problems


_COMMENT = re.compile(r'^((?:[^"#]|"[^"]*")*)#.*$')
