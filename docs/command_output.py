"""A directive that shows what the command line prints: `{command} run --help`.

A table that is printed by `--markdown` is shown as a table, anything else as text.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

__all__ = ["setup"]

COLUMNS = "72"  # what a telephone shows without scrolling far


class Command(SphinxDirective):
    """`blockconv` with the directive's arguments."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        arguments = self.arguments[0].split()
        environment = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, "-m", "blockconv", *arguments],
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        if done.returncode:
            raise self.error(f"blockconv {self.arguments[0]} failed:\n{done.stdout}{done.stderr}")
        if "--markdown" not in arguments:
            text = f"$ blockconv {self.arguments[0]}\n{done.stdout}"
            return [nodes.literal_block(text, text, language="text")]
        parent = nodes.container(classes=["wide"])
        self.state.nested_parse(StringList(done.stdout.splitlines(), "blockconv"), self.content_offset, parent)
        return [parent]


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of it."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
