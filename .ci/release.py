"""A release of a tag, in the folder release/.

    python .ci/release.py build v0.2.0     dist/ (source distribution and wheel), SHA256SUMS, notes.md
    python .ci/release.py build v0.2.0 resnet50   the same, with the kernels of stated networks in the wheel's pack
    python .ci/release.py publish v0.2.0   these on the project's page of releases, by `gh`

`build` refuses a tag that is not the version of the package, the citation and a section of the changelog with a date.

The wheel has a pack of kernels: of each of the harness's networks, in each of LAYOUTS, for each of TARGETS.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASE = ROOT / "release"
TARGETS = ["haswell", "skylake-avx512", "icelake-server", "sapphirerapids", "znver4", "znver5", "neoverse-n1"]
LAYOUTS = ["auto", "NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW16", "NCHW32", "NCHW64", "CHWN4"]
NETWORKS = "from bench.networks import NETWORKS; print(*NETWORKS)"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(changelog: str, version: str) -> tuple[str, str]:
    """(date, text) of a version's section; the date is empty where the section is missing or has none."""
    found = re.search(rf"^## {re.escape(version)}(.*)\n((?:(?!## ).*\n)*)", changelog, re.MULTILINE)
    if found is None:
        return "", ""
    date = re.fullmatch(r", (\d{4}-\d\d-\d\d)", found[1])
    return (date[1] if date else ""), found[2].strip() + "\n"


def faults(tag: str, changelog: str, package: str, citation: str) -> list[str]:
    """What keeps a tag from being released."""
    version = tag.removeprefix("v")
    date, text = section(changelog, version)
    said = {
        f"the tag {tag!r} has to be v and a version": re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag),
        f"_version.py: has to be {version}": f'__version__ = "{version}"' in package,
        f"CITATION.cff: version has to be {version}": f"\nversion: {version}\n" in citation,
        f"CHANGELOG.md: has to have a section '## {version}, YYYY-MM-DD'": date and text.strip(),
        f"CITATION.cff: date-released has to be {date or 'the date of the changelog'}": (
            date and f"\ndate-released: {date}\n" in citation
        ),
    }
    return [fault for fault, holds in said.items() if not holds]


def checksums(folder: Path) -> str:
    """As `sha256sum --check` reads them beside the files."""
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())
    )


def pack(python: Path, place: Path, networks: Sequence[str]) -> None:
    """A pack in the sources at `place`, made by the package that is installed in an environment."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments: str | Path) -> str:
        return subprocess.run([python, *arguments], check=True, env=variables, stdout=subprocess.PIPE, text=True).stdout

    models = [place.parent / f"{name}.onnx" for name in networks or run("-c", NETWORKS).split()]
    for model in models:
        run("-m", "bench.networks", model.stem, model)
    packs = place / "blockconv" / "data" / "packs"
    packs.mkdir()
    options = "--target", *TARGETS, "--layouts", *LAYOUTS, "--output", packs / "networks.pack"
    run("-m", "blockconv", "pack", *options)  # for README's first command
    print(run("-m", "blockconv", "pack", *models, *options), end="")


def build(tag: str, *networks: str) -> None:
    found = faults(tag, read("CHANGELOG.md"), read("blockconv/_version.py"), read("CITATION.cff"))
    if found:
        sys.exit("\n".join(found))
    shutil.rmtree(RELEASE, ignore_errors=True)
    dist = RELEASE / "dist"
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        (python,) = (path for name in ("bin/python", "Scripts/python.exe") if (path := Path(folder, name)).exists())
        pip = [python, "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", "setuptools>=77"], check=True)
        code = f"from setuptools import build_meta; build_meta.build_sdist({str(dist)!r})"
        subprocess.run([python, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (archive,) = dist.iterdir()
        shutil.unpack_archive(archive, folder, filter="data")
        sources = Path(folder, archive.name.removesuffix(".tar.gz"))
        subprocess.run([*pip, "install", "--quiet", f"{sources}[onnx]"], check=True)
        pack(python, sources, networks)
        wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", dist, sources]
        subprocess.run([*pip, *wheel], check=True)
    for left in (ROOT / "build", *ROOT.glob("*.egg-info")):
        shutil.rmtree(left, ignore_errors=True)
    (RELEASE / "SHA256SUMS").write_text(checksums(dist), encoding="utf-8")
    (RELEASE / "notes.md").write_text(section(read("CHANGELOG.md"), tag.removeprefix("v"))[1], encoding="utf-8")
    print((RELEASE / "SHA256SUMS").read_text(encoding="utf-8"), end="")


def publish(tag: str) -> None:
    files = [*sorted((RELEASE / "dist").iterdir()), RELEASE / "SHA256SUMS"]
    notes = ["--verify-tag", "--title", tag, "--notes-file", RELEASE / "notes.md"]
    subprocess.run(["gh", "release", "create", tag, *notes, *files], cwd=ROOT, check=True)


if __name__ == "__main__":
    {"build": build, "publish": publish}[sys.argv[1]](*sys.argv[2:])
