"""Packs: kernels that one machine compiled for others, in a file that is only read.

A pack is a zip. Its member `pack.json` is a record of each target, and `NAME.zip` has the object code of the target's
kernels. Python's and Numba's versions do not matter: object code needs nothing of them. A process uses a target if the
generating code is the same to the byte, and the processor has the same `Isa` and the target's features.
"""

import dataclasses
import functools
import io
import json
import os
import re
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from blockconv.core import target
from blockconv.core.errors import UnsupportedError, failing, ignoring, warn
from blockconv.core.files import DAMAGED, replacing
from blockconv.jit.private_directory import read_trusted

VARIABLE = "BLOCKCONV_PACKS"  # files, and folders of files, separated as in PATH
RECORD, SUFFIX = "pack.json", ".pack"
ABI = 1  # of the file, and of what object code takes from the process


class Target(NamedTuple):
    """A processor that kernels can be compiled for on any machine, by LLVM's name, and its features that they use."""

    cpu: str
    features: str
    triple: str = "x86_64-unknown-linux-gnu"


_AVX2 = "avx avx2 bmi bmi2 cx16 f16c fma lzcnt movbe popcnt sse3 sse4.1 sse4.2 ssse3"
_AVX512 = f"{_AVX2} adx avx512bw avx512cd avx512dq avx512f avx512vl prfchw"
_DOTS = "avx512vnni avx512vbmi avx512vbmi2 avx512bitalg avx512ifma avx512vpopcntdq gfni vaes vpclmulqdq"
_TARGETS = (
    Target("haswell", _AVX2),
    Target("alderlake", f"{_AVX2} adx avxvnni gfni prfchw vaes vpclmulqdq"),
    Target("skylake-avx512", _AVX512),
    Target("cascadelake", f"{_AVX512} avx512vnni"),
    Target("icelake-server", f"{_AVX512} {_DOTS}"),
    Target("sapphirerapids", f"{_AVX512} {_DOTS} amx-bf16 amx-int8 amx-tile avx512bf16 avx512fp16 avxvnni"),
    Target("znver4", f"{_AVX512} {_DOTS} avx512bf16"),
    Target("znver5", f"{_AVX512} {_DOTS} avx512bf16 avxvnni"),
    Target("neoverse-n1", "dotprod", "aarch64-unknown-linux-gnu"),
)
TARGETS = {each.cpu: each for each in _TARGETS}


def record(digest: str) -> dict[str, Any]:
    """The facts that kernels of this process depend on, except their names. digest: of the generating code."""
    return {
        "abi": ABI,
        "digest": digest,
        "triple": target.triple(),
        "cpu": target.target_cpu(),
        "features": sorted(target.target_features()),
        "isa": dataclasses.asdict(target.isa()),
    }


def refusal(made: Mapping[str, Any], digest: str) -> str:
    """Why this process cannot use the kernels of a record; "" if it can."""
    here = record(digest)

    def system(triple: str) -> tuple[str, bool]:
        return triple.partition("-")[0], "linux" in triple

    features = target.host_features() | target.target_features()
    reasons = {
        f"its format is {made.get('abi')}, and {ABI} is read": made.get("abi") != ABI,
        "it was made of another version of blockconv": made.get("digest") != here["digest"],
        f"it is for {made.get('triple')}": system(str(made.get("triple"))) != system(here["triple"]),
        f"it is for another instruction set ({made.get('cpu')})": made.get("isa") != here["isa"],
        f"this processor lacks features of {made.get('cpu')}": not features.issuperset(made.get("features", ())),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


# ---------------------------------------------------------------- reading


class Pack:
    """The kernels of one target, read from a pack's bytes.

    label: the file and the target, for messages. names: of the kernels.
    """

    def __init__(self, label: str, kernels: bytes) -> None:
        self.label = label
        self._kernels = zipfile.ZipFile(io.BytesIO(kernels))
        self.names = frozenset(self._kernels.namelist())

    def holds(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str) -> bytes | None:
        with ignoring(*DAMAGED, KeyError):
            return self._kernels.read(name)
        return None


class Packs(NamedTuple):
    """The packs that this process uses, and the others, each with the reason as a sentence."""

    used: tuple[Pack, ...]
    refused: tuple[str, ...]


@functools.cache
def found(digest: str) -> Packs:
    """The packs of `BLOCKCONV_PACKS`, and then the package's own. Warns of a named one that cannot be used."""
    used: list[Pack] = []
    refused: list[str] = []
    for path, is_named in _files():
        try:
            source = io.BytesIO(read_trusted(path)) if is_named else path  # of the package's own, one target is read
            with zipfile.ZipFile(source) as outer:
                made = json.loads(outer.read(RECORD))
                reasons = {name: refusal(each, digest) for name, each in made.items()}
                fitting = [name for name, reason in reasons.items() if not reason]
                if fitting:  # several may: instruction sets are equal, and the order of instructions is another
                    name = target.target_cpu() if target.target_cpu() in fitting else fitting[0]
                    used.append(Pack(f"{path}: {name}", outer.read(f"{name}.zip")))
            unfit = "" if fitting else "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        except failing(*DAMAGED, AttributeError, KeyError) as error:
            unfit = f"{type(error).__name__}: {error}"
        if unfit:
            refused.append(f"{path} is not used. {unfit}")
            if is_named:
                warn(f"blockconv: {VARIABLE}: {refused[-1]}")
    return Packs(tuple(used), tuple(refused))


def _files() -> Iterator[tuple[Path, bool]]:
    """Files, and whether the user named them. A package in a zip has none of its own."""
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(text).absolute()
        yield from ((file, True) for file in (sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]))
    own = resources.files("blockconv") / "data" / "packs"
    if isinstance(own, Path):
        yield from ((file, False) for file in sorted(own.glob(f"*{SUFFIX}")))


# ---------------------------------------------------------------- making


# Object code may call C's functions of memory and mathematics, and the system's `sched_yield`.
SYMBOLS = re.compile(
    r"memcpy|memmove|memset|sched_yield|(cos|erfc?|exp|exp2|expm1|fmod|log|log10|log1p|log2|pow|sin|tanh|atan2)f?"
)


def checked(name: str, code: bytes) -> bytes:
    """The object code. Raises UnsupportedError if it needs more of the process than `SYMBOLS`."""
    if more := [symbol for symbol in undefined(code) if not SYMBOLS.fullmatch(symbol)]:
        rule = "which the kernels of a pack may not; report it, please"
        raise UnsupportedError(f"pack: the kernel {name} calls {', '.join(more)}, {rule}")
    return code


def undefined(code: bytes) -> Iterator[str]:
    """Names of the symbols that 64-bit ELF object code needs and does not define."""
    if code[:5] != b"\x7fELF\x02":
        raise UnsupportedError(f"pack: packs are made of ELF object code, and {sys.platform} has another kind")
    (headers,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQII", code, headers + k * size) for k in range(count)]
    for _, kind, _, _, start, nbytes, strings, _ in sections:
        if kind == 2:  # SHT_SYMTAB
            for at in range(start, start + nbytes, 24):
                name, _, _, section = struct.unpack_from("<IBBH", code, at)
                if section == 0 and name:
                    begin = sections[strings][4] + name
                    yield code[begin : code.index(b"\0", begin)].decode()


Contents = dict[str, tuple[dict[str, Any], dict[str, bytes]]]  # by target: a record, and object code by entry


def contents(path: Path) -> Contents:
    """All that a pack holds; nothing if there is no such file, or it is no pack."""
    found: Contents = {}
    with ignoring(*DAMAGED, AttributeError, KeyError), zipfile.ZipFile(path) as outer:
        for name, made in json.loads(outer.read(RECORD)).items():
            with zipfile.ZipFile(io.BytesIO(outer.read(f"{name}.zip"))) as inner:
                found[name] = made, {entry: inner.read(entry) for entry in inner.namelist()}
    return found


def write(path: Path, targets: Contents) -> None:
    """Make a pack, all at once."""
    with replacing("pack", path) as file, zipfile.ZipFile(file, "w") as outer:
        outer.writestr(RECORD, json.dumps({name: made for name, (made, _) in targets.items()}, indent=1))
        for name, (_, kernels) in targets.items():
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as inner:
                for entry, code in sorted(kernels.items()):
                    inner.writestr(zipfile.ZipInfo(entry), code, zipfile.ZIP_DEFLATED)
            outer.writestr(f"{name}.zip", packed.getvalue())
