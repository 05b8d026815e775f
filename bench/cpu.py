"""The CPU that figures hold for: a name that tells models apart, and the folder that its results are kept in."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from blockconv.core import target

__all__ = ["describe", "folder", "name"]


def describe() -> dict[str, str]:
    """This machine's part of a record: `cpu`, its full name, and `isa`, the instruction set that kernels use.

    A maker's name alone may say nothing ("AMD EPYC"), so the name has the microarchitecture as LLVM knows it, the
    family and model where the system tells them, and the instruction set, which settings of Numba may have lowered:
    "AMD EPYC (Zen 5, family 26 model 2, avx512)".
    """
    facts = _facts()
    brand = facts.get("model name") or platform.processor() or platform.machine()
    parts = [_microarchitecture(llvm.get_host_cpu_name())]
    if "cpu family" in facts and "model" in facts:
        parts.append(f"family {facts['cpu family']} model {facts['model']}")
    isa = target.isa().name
    return {"cpu": f"{brand} ({', '.join([*parts, isa])})", "isa": isa}


def name(record: Mapping[str, Any]) -> str:
    """The full name of a record's CPU; of one without `isa`, from before names were full, as far as it tells."""
    if "isa" in record or "numba_cpu" not in record:
        return str(record["cpu"])
    features = record.get("numba_features", ())
    isa = next((isa for isa, feature in (("avx512", "avx512f"), ("avx2", "avx2")) if feature in features), "")
    parts = [part for part in (_microarchitecture(record["numba_cpu"]), isa) if part]
    return f"{record['cpu']} ({', '.join(parts)})"


def folder(record: Mapping[str, Any]) -> str:
    """The name as one of a folder: amd-epyc-zen-5-family-26-model-2-avx512."""
    plain = re.sub(r"\((r|tm)\)", "", name(record).lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def _microarchitecture(llvm_name: str) -> str:
    zen = re.fullmatch(r"znver(\d+)", llvm_name)
    return f"Zen {zen[1]}" if zen else llvm_name


def _facts() -> dict[str, str]:
    """What Linux says of the first processor; {} elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
