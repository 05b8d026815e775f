"""The tests of what changed against a commit, the nearest first: one path a line, for `.ci/run quick`.

    python .ci/changed.py origin/main

A changed test is itself. A module of `blockconv/a/b.py` has the files `tests/a/test_b*.py`, then the folder `tests/a`,
then the files of the modules that import it. Whatever a kernel shares, the table's ops go through it: one test of all.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Folders of tests with another name than the package's.
ELSEWHERE = {"blockconv/eager": "blockconv/frontends/torch", "blockconv/torch": "blockconv/frontends/torch",
             "blockconv/data": "blockconv/machine", "blockconv/__main__": "blockconv/cli",
             "blockconv/_pyinstaller": "blockconv/hostile_hosts"}  # fmt: skip
# What is no module, by its path. The first pattern counts.
OTHERS = {
    r"CONTRIBUTING\.md": ("tests/test_docs.py", "tests/test_contributing.py"),
    r"docs/.*|.*\.md": ("tests/test_docs.py",),
    r"examples/.*": ("tests/test_examples.py",),
    r"blockconv/(__init__|_version)\.py|blockconv/py\.typed": ("tests/test_packaging.py", "tests/api"),
    r"(?!blockconv/|bench/|tests/).*": ("tests/test_packaging.py", "tests/test_ci.py"),
}


def tests_of(path: str) -> Iterator[str]:
    """Tests of a changed file that exist, the nearest first."""
    for pattern, found in OTHERS.items():
        if re.fullmatch(pattern, path):
            yield from found
            return
    if path.startswith("tests/"):
        yield from _of_test(path)
        return
    for own, other in ELSEWHERE.items():
        path = re.sub(rf"{own}\b", other, path)
    parts = Path(path.removeprefix("blockconv/")).with_suffix("").parts
    for k in range(len(parts), 0, -1):
        folder, name = Path("tests", *parts[: k - 1]), parts[k - 1]
        near = [*(ROOT / folder).glob(f"test_{name}*.py")] or ([*(ROOT / "tests").rglob(f"test_{name}*.py")] * (k == 1))
        yield from (found.relative_to(ROOT).as_posix() for found in sorted(near))
        if (ROOT / folder / name).is_dir():
            yield (folder / name).as_posix()
            return


def _of_test(path: str) -> Iterator[str]:
    """A test's own path; of a module that tests import, the tests that name it."""
    if Path(path).name.startswith("test_"):
        yield path
    elif path.startswith("tests/support/"):
        for test in sorted((ROOT / "tests").rglob("test_*.py")):
            if re.search(rf"\b{Path(path).stem}\b", test.read_text(encoding="utf-8")):
                yield test.relative_to(ROOT).as_posix()


@functools.cache
def texts() -> dict[str, str]:
    """The text of each module of the package, by its path."""
    modules = sorted((ROOT / "blockconv").rglob("*.py"))
    return {module.relative_to(ROOT).as_posix(): module.read_text(encoding="utf-8") for module in modules}


def importers(path: str) -> list[str]:
    """Modules of the package that import a module of it."""
    if not re.fullmatch(r"blockconv/.*\.py", path):
        return []
    folder, name = Path(path).parent, Path(path).stem
    package = ".".join(folder.parts)
    imports = re.compile(rf"^ *(from|import) {package}\.{name}\b|^ *from {package} import .*\b{name}\b", re.MULTILINE)
    return [module for module, text in texts().items() if imports.search(text)]


def selected(paths: Iterable[str]) -> list[str]:
    """The tests of these files, each once: files of tests, then folders, then the files of modules that import them."""
    paths = [*paths]
    own = dict.fromkeys(test for path in paths for test in tests_of(path) if (ROOT / test).exists())
    nearest = sorted(own, key=lambda test: test.endswith(".py"), reverse=True)
    users = dict.fromkeys(test for path in paths for user in importers(path) for test in tests_of(user))
    if any(path.startswith("blockconv/kernels/") for path in paths):
        users = {"tests/kernels/test_conformance.py": None, **users}
    folders = tuple(f"{test}/" for test in own if not test.endswith(".py"))
    return nearest + [t for t in users if t.endswith(".py") and t not in own and not t.startswith(folders)]


def changed(base: str) -> list[str]:
    """Paths that differ from the last commit in common with a base, and files that git does not know yet."""
    commands = (["diff", "--name-only", f"{base}..."], ["diff", "--name-only", "HEAD"],
                ["ls-files", "--others", "--exclude-standard"])  # fmt: skip
    said = [subprocess.run(["git", *c], cwd=ROOT, check=True, capture_output=True, text=True).stdout for c in commands]
    return sorted({path for text in said for path in text.splitlines()})


if __name__ == "__main__":
    print(*selected(changed(sys.argv[1])), sep="\n")
