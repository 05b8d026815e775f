"""What is published: the source distribution has all that its tests read, the wheel the package alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import blockconv as bc

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parent.parent
FOLDERS = (".ci", ".github/workflows", "blockconv", "tests", "bench", "docs", "examples")
FILES = (
    ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md",
    "pyproject.toml",
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project to build in, as building leaves folders behind."""
    copy = tmp_path_factory.mktemp("packaging") / "sources"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in (*FILES, "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def build(kind: str, sources: Path) -> Path:
    """What setuptools builds of the sources: kind is "sdist" or "wheel"."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('built'))"
    subprocess.run([sys.executable, "-c", code], cwd=sources, check=True, capture_output=True, timeout=120)
    (built,) = (sources / "built").glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


def files_of(sources: Path, folder: str) -> set[str]:
    """The files of a folder, as paths from the sources' root."""
    return {path.relative_to(sources).as_posix() for path in (sources / folder).rglob("*") if path.is_file()}


def test_the_source_distribution_has_what_its_tests_read(sources: Path) -> None:
    needed = {*FILES}.union(*(files_of(sources, folder) for folder in FOLDERS))
    with tarfile.open(build("sdist", sources)) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert needed <= packed, f"missing: {sorted(needed - packed)}"


def test_the_wheel_has_the_package_alone(sources: Path) -> None:
    with zipfile.ZipFile(build("wheel", sources)) as archive:
        packed = set(archive.namelist())
    described = {name for name in packed if re.match(r"blockconv-[^/]+\.dist-info/", name)}
    assert packed - described == files_of(sources, "blockconv")


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {bc.__version__}\n" in text
    assert re.search(r"^date-released: \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert "The blockconv authors" in text
