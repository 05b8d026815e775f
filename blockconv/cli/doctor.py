"""A report on this machine: threads, instruction set, caches, versions."""

import importlib
import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from blockconv import jit
from blockconv._version import __version__
from blockconv.cli.pack import kernels_of
from blockconv.core import target
from blockconv.core.errors import BlockconvError
from blockconv.jit.compile_processes import workers
from blockconv.machine.profile import selected
from blockconv.runtime import get_num_threads, openmp, pools

PACKAGES = ("numba", "llvmlite", "numpy", "tbb", "torch")
# Variables that change the pool, the number of threads of a call, or how an OpenMP runtime's threads behave.
VARIABLES = (
    pools.VARIABLE,
    "NUMBA_THREADING_LAYER",
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "OMP_DYNAMIC",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)


def findings(model: Path | None = None) -> dict[str, dict[str, str]]:
    """Sections of facts, by their names. Starts Numba's threading layer, and compiles nothing.

    model: an ONNX file, whose kernels are listed too.
    """
    found = {
        "versions": _versions(),
        "threads": _threads(),
        "processor": _processor(),
        "machine profile, which costs and tiles go by": _profile(),
        "kernels": _kernels(),
    }
    return found if model is None else {**found, f"kernels of {model}": _kernels_of(model)}


def _versions() -> dict[str, str]:
    found = {"blockconv": __version__, "python": f"{platform.python_version()} ({sys.platform})"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _threads() -> dict[str, str]:
    quota, openmp_threads = target.container_quota(), target.omp_num_threads()
    return {
        "used by a call": str(get_num_threads()),
        "processors allowed (affinity)": str(target.affinity()),
        "container's quota": "none" if quota is None else f"{quota:g} processors",
        "Numba's pool (NUMBA_NUM_THREADS)": str(target.numba_setting("NUMBA_NUM_THREADS")),
        "OpenMP's number (OMP_NUM_THREADS)": "not set" if openmp_threads is None else str(openmp_threads),
        **_pool(),
        "variables": ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
        or f"none of {', '.join(VARIABLES)} is set",
    }


def _pool() -> dict[str, str]:
    """The pool that calls run on here, why, and what PyTorch changes."""
    try:
        pool = pools.current()
    except BlockconvError as error:  # a variable asks for what cannot be had; the other facts help to see why
        return {"threading layer": f"none: {error}"}
    calls = "any number of calls at once" if pool.concurrent else "one call at a time"
    found = {"threading layer": f"{pool.name}, {calls}", "because": pool.why}
    library = pool.library or (_loaded("libtbb") or "found by the system's loader" if pool.name == "tbb" else None)
    if library is not None:
        found["its library"] = library
    if pool.until_torch:
        installed = importlib.util.find_spec("torch") is not None
        found["where PyTorch is imported"] = "openmp, on its own runtime" if installed else "PyTorch is not installed"
    if runtimes := openmp.loaded():
        found["OpenMP runtimes in this process"] = ", ".join(runtimes)
    return found


def _loaded(name: str) -> str | None:
    """The path of a shared library in this process, where the system tells."""
    return next((file for file in openmp.mapped_files() if f"/{name}." in file), None)


def _dot_products(isa: target.Isa) -> str:
    """The instructions that multiply several 8-bit integers, or bfloat16, at once."""
    integers = "VNNI" if isa.vnni else "I8MM" if isa.i8mm else "DotProd" if isa.dotprod else ""
    brain = ("AVX512-BF16" if isa.is_x86 else "BF16") if isa.bf16 else ""
    vectors = [f"{what} ({name})" for what, name in (("8-bit integers", integers), ("bfloat16", brain)) if name]
    matrices = "matrices of both (AMX)" if isa.amx else "no matrices"
    if not isa.amx and target.targets_amx():
        matrices += ", since the system does not grant AMX to this process"
    return f"{' and '.join(vectors) or 'none'}; {matrices}"


def _processor() -> dict[str, str]:
    isa = target.isa()
    multiply = "fused multiply-add" if isa.fma else "no fused multiply-add"
    return {
        "Numba targets": target.target_cpu(),
        "vectors": f"{isa.name}: {isa.registers} registers of {8 * isa.vector_bytes} bits, {multiply}",
        "dot products": _dot_products(isa),
        "features": " ".join(sorted(target.target_features())) or "none beyond the architecture's own",
        "second-level cache": f"{target.second_level_cache() / 2**20:g} MiB a core"
        if target.caches_are_known()
        else "unknown: the machine profile's counts",
    }


def _profile() -> dict[str, str]:
    """The machine profile that counts, and why."""
    try:
        known = selected()
    except BlockconvError as error:  # the variable names none; the other facts help to see why
        return {"name": f"none: {error}"}
    record = known.profile.record
    return {
        "name": known.profile.name,
        "measured on": f"{record['cpu']}, {record['date']}" if "date" in record else str(record["cpu"]),
        "file": str(known.file),
        "because": known.why,
    }


def _kernels() -> dict[str, str]:
    cache = jit.disk_cache()
    kept = next((kept for kept in cache.contents() if kept.fingerprint == cache.fingerprint), None)
    entries = "none" if kept is None else f"{kept.entries}, {kept.nbytes:,} bytes"
    known = jit.packs.found(jit.cache.source_digest())
    return {
        "kept in": str(cache.directory),
        "entries": entries,
        **({"not kept in": "; ".join(cache.refused)} if cache.refused else {}),
        "packs": "; ".join(f"{pack.label}, {len(pack.names)} kernels" for pack in known.used) or "none",
        **({"packs not used": "; ".join(known.refused)} if known.refused else {}),
    }


SECONDS = 0.25  # of CPU time to compile a kernel, on processors of 2021


def _kernels_of(model: Path) -> dict[str, str]:
    """Where the kernels of a model are that a plan with default options needs."""
    with workers() as pool:
        wanted, _ = pool.submit(kernels_of, model, True).result()
    cache = jit.disk_cache()
    entries = {getattr(importlib.import_module(module), name).entry(*params) for module, name, params in wanted}
    kept = set(filter(cache._replace(below=()).holds, entries))
    packed = set(filter(cache.holds, entries - kept))
    left = len(entries) - len(kept) - len(packed)
    return {
        "needed": str(len(entries)),
        "in the cache": str(len(kept)),
        "in packs, or caches that are only read": str(len(packed)),
        "to be compiled at the first call": f"{left}, about {left * SECONDS:.0f} s of CPU time" if left else "0",
    }
