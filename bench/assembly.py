"""Assembly without its names: two texts are equal if and only if the processor is told the same.

A compiler's output has names that follow a function or a module (symbols, labels), and notes for the linker, the
debugger and the reader. Without them, a kernel that was moved or renamed keeps its text. A kernel whose body changed by
a single constant does not.
"""

from __future__ import annotations

import hashlib
import platform
import re

__all__ = ["digest", "strip"]

# Directives that place no byte: what symbols are called and how they are seen, unwinding, debugging, notes.
_NOTES = re.compile(
    r"\.(file|ident|loc|globl|global|local|weak|hidden|protected|type|size|cfi_\w+|addrsig\w*|build_version|"
    r"subsections_via_symbols|private_extern|no_dead_strip|set|def|scl|endef)\b"
)
_NO_CODE = re.compile(r'\.section\s+"?(\.note|\.debug|\.comment|__DWARF|\.llvm)')
_LABEL = re.compile(r'^("[^"]+"|[\w.$@?]+):')
_WORD = re.compile(r'"[^"]*"|[A-Za-z_.$?][\w.$@?]*')
_COMMENT = "//" if platform.machine().lower() in ("arm64", "aarch64") else "#"


def strip(text: str) -> str:
    """The instructions and data of an assembly text; labels and symbols that it defines are numbered as they come."""
    lines = list(_lines(text))
    labels = dict.fromkeys(found.group(1) for line in lines if (found := _LABEL.match(line)))
    numbers = {label: f"L{k}" for k, label in enumerate(labels)}

    def numbered(word: re.Match[str]) -> str:
        return numbers.get(word.group(), word.group())

    kept = []
    for line in lines:
        if found := _LABEL.match(line):
            kept.append(f"{numbers[found.group(1)]}:")
            line = line[found.end() :].strip()
        if line:
            mnemonic, _, operands = line.partition(" ")
            kept.append(f"  {mnemonic} {_WORD.sub(numbered, operands)}".rstrip())
    return "\n".join(kept) + "\n"


def _lines(text: str) -> list[str]:
    """Lines that place bytes or labels, without comments and with single blanks."""
    kept, skipping = [], False
    for raw in text.splitlines():
        line = " ".join(_without_comment(raw).split())
        if line.startswith((".section", ".text", ".data")):
            skipping = _NO_CODE.match(line) is not None
        # The end of a function is a label of its own, which only its size is reckoned from.
        if line and not skipping and not _NOTES.match(line) and not line.startswith(".Lfunc_end"):
            kept.append(line)
    return kept


def _without_comment(line: str) -> str:
    return line if '"' in line else line.partition(_COMMENT)[0]


def digest(data: bytes | str) -> str:
    """Sixteen hexadecimal digits."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]
