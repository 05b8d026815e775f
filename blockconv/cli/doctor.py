"""What blockconv found on this machine: threads, instruction set, caches, versions."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from numba.core import config

from blockconv import jit
from blockconv._version import __version__
from blockconv.core import target
from blockconv.machine.profile import profile
from blockconv.runtime import get_num_threads, threading_layer

__all__ = ["findings"]

PACKAGES = ("numba", "llvmlite", "numpy", "tbb")


def findings() -> dict[str, dict[str, str]]:
    """Sections of facts, by their names. Starts Numba's threading layer, and compiles nothing."""
    return {"versions": _versions(), "threads": _threads(), "processor": _processor(), "kernels": _kernels()}


def _versions() -> dict[str, str]:
    found = {"blockconv": __version__, "python": f"{platform.python_version()} ({sys.platform})"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _threads() -> dict[str, str]:
    quota = target.container_quota()
    layer = threading_layer.threading_layer()
    calls = "any number of calls at once" if layer.concurrent else "one call at a time"
    found = {
        "used by a call": str(get_num_threads()),
        "processors allowed (affinity)": str(target.affinity()),
        "container's quota": "none" if quota is None else f"{quota:g} processors",
        "Numba's pool (NUMBA_NUM_THREADS)": str(config.NUMBA_NUM_THREADS),
        "threading layer": f"{layer.name}, {calls}",
    }
    if layer.name == "tbb":
        found["TBB"] = layer.tbb or _loaded("libtbb") or "found by the system's loader"
    return found


def _loaded(name: str) -> str | None:
    """The path of a shared library in this process, where the system tells."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if f"/{name}." in line), None)


def _processor() -> dict[str, str]:
    isa = target.isa()
    multiply = "fused multiply-add" if isa.fma else "no fused multiply-add"
    return {
        "Numba targets": target.target_cpu(),
        "vectors": f"{isa.name}: {isa.registers} registers of {8 * isa.vector_bytes} bits, {multiply}",
        "features": " ".join(sorted(target.target_features())) or "none beyond the architecture's own",
        "costs and tiles": _profile(),
        "second-level cache": f"{target.second_level_cache() / 2**20:g} MiB a core",
    }


def _profile() -> str:
    """Which machine profile counts, and whether it is this processor's."""
    known, isa = profile(), target.isa()
    same = (known.cpu, known.isa) == (target.target_cpu(), isa.name)
    return f"as measured on {known.record['cpu']}" + ("" if same else ": the nearest; blockconv tune --profile FILE")


def _kernels() -> dict[str, str]:
    cache = jit.disk_cache()
    kept = next((kept for kept in cache.contents() if kept.fingerprint == cache.fingerprint), None)
    entries = "none" if kept is None else f"{kept.entries}, {kept.nbytes:,} bytes"
    return {"kept in": str(cache.directory), "entries": entries}
