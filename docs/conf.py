"""How Sphinx builds these pages: `python -m sphinx -W --keep-going docs build/docs`; a warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import figures  # noqa: E402

import blockconv  # noqa: E402  (the sources beside these pages, installed or not)

figures.write()

project, author, release = "blockconv", "The blockconv authors", blockconv.__version__
copyright = "the blockconv authors, BSD 3-Clause"

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "command_output"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
smartquotes = False  # quotes are those of Python's strings

add_module_names = False
autodoc_typehints = "none"  # signatures are written by docstrings.py
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 80
default_role = "code"
toc_object_entries_show_parents = "hide"

# Whatever looks like a link is one; what signatures name of others, or of the library's inside, is none.
nitpicky = True
OTHERS = "np|npt|numpy|torch|da|os|Any|Iterable|Mapping|Sequence|PathLike"
INSIDE = "Op|OwnCosts|Remake|BinaryKind|PoolKind|Choice|Site|TileSize|StrPath"
nitpick_ignore_regex = [("py:.*", rf"(ops\.)?({OTHERS}|{INSIDE})(\..*)?")]

html_theme = "furo"
html_title = f"blockconv {release}"
html_static_path = ["_static"]
html_css_files = ["blockconv.css"]
html_copy_source = False
html_show_sourcelink = False
