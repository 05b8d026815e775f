"""Libraries that use ONNX Runtime run on `blockconv.onnxruntime` with nothing but the import changed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")

READS_TEXT = """
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont
    from rapidocr_onnxruntime import RapidOCR
    image = Image.new("RGB", (400, 120), "white")
    draw = ImageDraw.Draw(image)
    draw.text((20, 30), "blocked layouts 12345", fill="black", font=ImageFont.load_default(32))
    found, _ = RapidOCR()(np.array(image))
    print([(text, round(float(score), 2)) for _, text, score in found])
"""
HEARS_SPEECH = """
    import torch
    from silero_vad import load_silero_vad
    torch.manual_seed(0)
    model, sound = load_silero_vad(onnx=True), torch.randn(3, 512) / 4
    print([round(float(model(part, 16000)), 3) for part in sound])
"""
KNOWS_FILES = """
    from magika import Magika
    print(Magika().identify_bytes(b"import os\\nprint(os.getcwd())\\n" * 20).output.label)
"""
USERS = {"rapidocr_onnxruntime": READS_TEXT, "silero_vad": HEARS_SPEECH, "magika": KNOWS_FILES}
PLAIN = re.compile(r"^(\s*)import onnxruntime( as \w+)?$", re.MULTILINE)
PARTS = re.compile(r"^(\s*)from onnxruntime import", re.MULTILINE)


def with_our_import(package: str, folder: Path) -> int:
    """A copy of an installed package in which these imports, and nothing else, are ours: how many there are."""
    found = importlib.util.find_spec(package)
    assert found
    assert found.submodule_search_locations
    shutil.copytree(found.submodule_search_locations[0], folder / package)
    changed = 0
    for path in (folder / package).rglob("*.py"):
        text, plain = PLAIN.subn(_ours, path.read_text(encoding="utf-8"))
        text, parts = PARTS.subn(r"\1from blockconv.onnxruntime import", text)
        if plain + parts:
            path.write_text(text, encoding="utf-8")
        changed += plain + parts
    return changed


def _ours(match: re.Match[str]) -> str:
    return f"{match[1]}import blockconv.onnxruntime{match[2] or ' as onnxruntime'}"


@pytest.mark.nightly
@pytest.mark.parametrize("package", USERS)
def test_a_library_gives_what_it_gives_on_onnx_runtime(package: str, tmp_path: Path, run_python: Any) -> None:
    pytest.importorskip(package)
    code = "import warnings\nwarnings.simplefilter('ignore')\n" + textwrap.dedent(USERS[package])
    wanted = run_python(code).stdout
    assert with_our_import(package, tmp_path)
    found = run_python(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{code}\nassert 'blockconv' in sys.modules"
    ).stdout
    assert found == wanted != ""
