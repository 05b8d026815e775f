"""The target of compiled code: the instruction set, the caches, the processors that may be used."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from blockconv.core.errors import ArgumentError, failing, ignoring
from blockconv.core.record import frozen


def read_fact(path: str | Path) -> str:
    """The text of a file in which the system tells something of itself; "" where there is none."""
    with ignoring(OSError):
        return os.fsdecode(Path(path).read_bytes())
    return ""


_triple = ""  # of the machine that this process makes kernels for, where it runs none


def make_for(triple: str) -> None:
    """Make kernels for machines of this triple from now on. This process then runs none: it lists and compiles them.

    ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` say which processor. For a process of its own, before its first plan.
    """
    global _triple
    _triple = triple
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def is_elsewhere() -> bool:
    """Whether kernels are made for another machine, so that none may run here."""
    return bool(_triple)


def triple() -> str:
    """LLVM's name of the architecture and system that kernels are made for, as "x86_64-unknown-linux-gnu"."""
    return _triple or _process_triple()


_process_triple = functools.cache(llvm.get_process_triple)


COMPILE = "BLOCKCONV_COMPILE"


def may_compile() -> bool:
    """Whether this process may compile kernels: ``BLOCKCONV_COMPILE=never`` forbids it."""
    return os.environ.get(COMPILE) != "never"


def is_x86() -> bool:
    """Whether kernels are made for x86-64."""
    return triple().startswith("x86_64")


def is_arm64() -> bool:
    """Whether kernels are made for Arm's 64-bit architecture."""
    return triple().startswith(("aarch64", "arm64"))


@frozen
class Isa:
    """The instruction set of generated code: vector width and the number of vector registers.

    Taken from the features that Numba targets (``NUMBA_CPU_NAME``, ``NUMBA_CPU_FEATURES``), which need not be the
    machine's.

    halves: a vector runs as two halves (AMD's Zen 4), so vectors of half the width do as much in the same time.
    vnni: an instruction adds four products of a u8 and an s8 to each lane of an int32 vector (AVX-512 VNNI, or
        AVX-VNNI).
    bf16: one adds two products of bfloat16 to each lane of a float32 vector (AVX512-BF16, or Arm's BF16).
    f16: instructions convert vectors of float16 (F16C, or part of the instruction set).
    ssse3: one adds two products of a u8 and an s8 to an int16 (vpmaddubsw, of whatever width the vectors are).
    amx: a unit multiplies matrices of 8-bit integers, or of bfloat16, in registers of its own (Intel's AMX).
    vbmi: one permutes the bytes of a vector across its whole width (AVX512-VBMI).
    dotprod: one adds four products of an s8 and an s8 to each lane of an int32 vector (Arm's DotProd).
    i8mm: one does so with a u8 and an s8 (Arm's I8MM).
    """

    name: str
    vector_bytes: int
    registers: int
    fma: bool
    halves: bool = False
    vnni: bool = False
    bf16: bool = False
    f16: bool = False
    ssse3: bool = False
    amx: bool = False
    vbmi: bool = False
    dotprod: bool = False
    i8mm: bool = False

    @property
    def tile_registers(self) -> int:
        """Vector registers that tiles are made for: 32 or 16."""
        return 32 if self.registers == 32 else 16

    @property
    def is_x86(self) -> bool:
        return self.name != "neon"

    def has_masks(self, itemsize: int) -> bool:
        """Whether a load of elements of so many bytes takes no longer with a mask than without."""
        return self.name == "avx512" or (self.name == "avx2" and itemsize >= 4)


# Numba's settings where nobody gives them. Numba leaves out the AVX of the first processors that had it.
_WITHOUT_AVX = ("corei7-avx", "core-avx-i", "sandybridge", "ivybridge")
_UNSET: dict[str, Callable[[], Any]] = {
    "CPU_NAME": lambda: None,
    "CPU_FEATURES": lambda: "" if numba_setting("CPU_NAME") == "generic" else None,
    "ENABLE_AVX": lambda: int((numba_setting("CPU_NAME") or llvm.get_host_cpu_name()) not in _WITHOUT_AVX),
    "DISABLE_JIT": lambda: 0,
    "THREADING_LAYER": lambda: "default",
    "NUMBA_NUM_THREADS": lambda: affinity(),
}
_TEXTS = ("CPU_NAME", "CPU_FEATURES", "THREADING_LAYER")  # the others are numbers


def numba_setting(name: str) -> Any:
    """A setting of Numba, by its name in `numba.config`: what the user set there, else by a file or a variable.

    It imports Numba only for a value that it cannot read, as an import takes longer than all else of a process's start.
    """
    if "numba.core.config" not in sys.modules and not os.path.exists(".numba_config.yaml"):
        given = os.environ.get(f"NUMBA_{name.removeprefix('NUMBA_')}")
        if given is None:
            return _UNSET[name]()
        if name in _TEXTS or given.isdecimal():
            return given if name in _TEXTS else int(given)
    from numba import config

    return getattr(config, name)


@functools.cache
def feature_text() -> str:
    """The CPU features that Numba compiles for, as LLVM reads them: ``NUMBA_CPU_FEATURES``, else what the machine has.

    ``NUMBA_ENABLE_AVX=0`` takes away those whose names begin with avx.
    Raises ArgumentError for a feature without its sign, at which LLVM would end the process.
    """
    if (chosen := numba_setting("CPU_FEATURES")) is not None:
        given = str(chosen)
        if any(part and part[0] not in "+-" for part in given.split(",")):
            rule = "has to be features with + or - before each, separated by commas alone"
            raise ArgumentError("import blockconv", "NUMBA_CPU_FEATURES", given, rule, 'for example "+avx2,+fma"')
        return given
    try:
        features = llvm.get_host_cpu_features()
    except failing(RuntimeError):  # the system does not tell
        return ""
    if not numba_setting("ENABLE_AVX"):
        features.update({name: False for name in features if name.startswith("avx")})
    return features.flatten()


@functools.cache
def host_features() -> frozenset[str]:
    """The CPU features that this machine has, by LLVM's names, whatever Numba compiles for."""
    with ignoring(RuntimeError):  # the system may not tell
        return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
    return frozenset()


@functools.cache
def target_features() -> frozenset[str]:
    """The CPU features that Numba compiles for, by LLVM's names."""
    told = frozenset(part[1:] for part in feature_text().split(",") if part.startswith("+"))
    return told if is_x86() or numba_setting("CPU_FEATURES") is not None else told | _dot_products_of_arm()


# By LLVM's names: the entry of Linux's auxiliary vector, the bit in it, and Apple's name.
_ARM_DOTS = {"dotprod": (16, 1 << 20, "DotProd"), "i8mm": (26, 1 << 13, "I8MM"), "bf16": (26, 1 << 14, "BF16")}


def _dot_products_of_arm() -> frozenset[str]:
    """The dot products of this Arm processor, by LLVM's names. LLVM does not ask the system for them."""

    def has(entry: int, bit: int, name: str) -> bool:
        if sys.platform == "linux":  # AT_HWCAP and AT_HWCAP2 of the auxiliary vector
            getauxval = ctypes.CDLL(None).getauxval
            getauxval.restype = ctypes.c_ulong
            return bool(getauxval(entry) & bit)
        if sys.platform == "darwin":
            found, size = ctypes.c_int(0), ctypes.c_size_t(4)
            asked = f"hw.optional.arm.FEAT_{name}".encode(), ctypes.byref(found), ctypes.byref(size), None, 0
            return ctypes.CDLL(None).sysctlbyname(*asked) == 0 and found.value == 1
        windows = getattr(ctypes, "windll", None)  # whose feature 43 is PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
        return name == "DotProd" and bool(windows and windows.kernel32.IsProcessorFeaturePresent(43))

    return frozenset(feature for feature, asked in _ARM_DOTS.items() if has(*asked))


@functools.cache
def target_cpu() -> str:
    return numba_setting("CPU_NAME") or llvm.get_host_cpu_name()


# Processors that run a vector of 512 bits as two halves, by LLVM's names.
HALVES = frozenset({"znver4"})


@functools.cache
def isa() -> Isa:
    """The widest vector unit among `target_features`."""
    features = target_features()
    if {"avx512f", "avx512dq", "avx512vl", "avx512bw"} <= features:
        halves, has_dots = target_cpu() in HALVES, ("avx512vnni" in features, "avx512bf16" in features)
        more = {"amx": _may_use_amx(), "vbmi": "avx512vbmi" in features}
        return Isa("avx512", 64, 32, True, halves, *has_dots, f16=True, ssse3=True, **more)
    if {"avx2", "fma"} <= features:
        return Isa("avx2", 32, 16, True, vnni="avxvnni" in features, f16="f16c" in features, ssse3=True)
    if not is_x86():
        is_64 = is_arm64()
        more = {name: is_64 and name in features for name in _ARM_DOTS}
        return Isa("neon", 16, 32, True, f16=is_64, **more)
    ssse3 = not features.isdisjoint({"ssse3", "sse4.1", "sse4.2", "avx"})  # each implies the ones before it
    return Isa("sse", 16, 16, "fma" in features, f16="f16c" in features, ssse3=ssse3)


AMX = frozenset({"amx-tile", "amx-int8", "amx-bf16"})
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18  # Linux's numbers on x86-64


def targets_amx() -> bool:
    """Whether AMX is among what Numba compiles for; see `Isa.amx` for whether kernels may use it."""
    return target_features() >= AMX


def _may_use_amx() -> bool:
    """Whether AMX is there: its registers are the process's once the system has granted them."""
    if not targets_amx() or not sys.platform.startswith("linux"):
        return False
    return is_elsewhere() or bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0)


def affinity() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def container_quota(root: Path = Path("/")) -> float | None:
    """The container's CPU quota in processors (cgroup v2 and v1); None if there is none.

    A group's quota holds for all groups inside it, so the least on the way up counts.
    """
    quotas = [quota for files in _cgroup_files(root) if (quota := _quota(*files)) is not None]
    return min(quotas, default=None)


def _quota(*files: Path) -> float | None:
    """Processors, from v2's `cpu.max` ("150000 100000"), or from v1's two files."""
    with ignoring():  # no such group, or "max": no limit
        quota, period = map(float, " ".join(map(read_fact, files)).split())
        return quota / period if quota > 0 else None
    return None


def _cgroup_files(root: Path) -> Iterator[tuple[Path, ...]]:
    """The files of quota and period of every group that this process is in, and of those around it; v2 has one."""
    lines = read_fact(root / "proc/self/cgroup").splitlines()
    mounts = root / "sys/fs/cgroup"
    # In a container the path is often the host's, and the group itself is what is mounted.
    for line in [*lines, "0::/", "1:cpu:/"]:
        number, controllers, group = line.split(":", 2)
        if number == "0":
            base = mounts
        elif "cpu" in controllers.split(","):
            base = next((m for c in (controllers, "cpu") if os.path.isdir(m := mounts / c)), mounts / "cpu")
        else:
            continue
        inner = base / group.lstrip("/")
        for here in (inner, *inner.parents):
            if number == "0":
                yield (here / "cpu.max",)
            else:
                yield here / "cpu.cfs_quota_us", here / "cpu.cfs_period_us"
            if here == base:
                break


def omp_num_threads() -> int | None:
    """The value of OMP_NUM_THREADS; None where it is not set, or no number.

    Launchers of many processes (torchrun, Dask's nanny) set it to 1 for their workers. OpenMP reads a list, "4,2", as
    the numbers of nested regions, outermost first.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


@functools.cache
def default_threads() -> int:
    """The least of affinity, the container's quota, NUMBA_NUM_THREADS and OMP_NUM_THREADS, as far as they are set."""
    limits: list[int] = [affinity(), int(numba_setting("NUMBA_NUM_THREADS"))]
    if (quota := container_quota()) is not None:
        limits.append(int(quota + 0.5))
    if (threads := omp_num_threads()) is not None:
        limits.append(threads)
    return max(1, min(limits))


def first_level_cache() -> int:
    """Bytes of a core's first-level data cache; 32 KiB where the system does not tell."""
    return _cache_fact(1, "size") or 32 << 10


def second_level_cache() -> int:
    """Bytes of a core's second-level cache; 1 MiB where the system does not tell."""
    return _cache_fact(2, "size") or 1 << 20


def caches_are_known() -> bool:
    """Whether the system tells the sizes of caches."""
    return _cache_fact(2, "size") > 0


def last_level_cache() -> int:
    """Bytes of the third-level cache, else of the second."""
    return _cache_fact(3, "size") or second_level_cache()


def first_level_ways() -> int:
    """Ways of a core's first-level data cache; 8 where the system does not tell."""
    return _cache_fact(1, "ways_of_associativity") or 8


def cache_line() -> int:
    """Bytes of a line of a core's first-level data cache; 64 where the system does not tell."""
    return _cache_fact(1, "coherency_line_size") or 64


@functools.cache
def _cache_fact(level: int, name: str) -> int:
    """A number of a cache of data; 0 where the system does not tell."""
    index = 0 if level == 1 else level  # 1 is the first level's, of instructions
    text = read_fact(f"/sys/devices/system/cpu/cpu0/cache/index{index}/{name}").strip()
    with ignoring():
        return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0)
    with ignoring():  # a container may have no /sys; glibc reads these numbers from the processor
        first = 185 + 3 * level  # of a cache's numbers in glibc's sysconf, which Python has no names for
        return max(0, os.sysconf(first + _SYSCONF.index(name))) if sys.platform == "linux" else 0
    return 0


_SYSCONF = "size", "ways_of_associativity", "coherency_line_size"
