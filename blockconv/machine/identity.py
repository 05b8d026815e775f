"""The name of a processor, which tells models apart in records, profiles and folders of results."""

import platform
import re

import llvmlite.binding as llvm

from blockconv.core import target


def describe() -> dict[str, str]:
    """This machine's part of a record: `cpu`, its full name, and `isa`, the instruction set that kernels use.

    A maker's name alone may say nothing ("AMD EPYC"). So the name has the microarchitecture as LLVM knows it, the
    family and model where the system tells them, and the instruction set: "AMD EPYC (Zen 5, family 26 model 2,
    avx512)". Settings of Numba may have lowered the last.
    """
    facts = _facts()
    brand = facts.get("model name") or platform.machine()
    parts = [microarchitecture(llvm.get_host_cpu_name())]
    if "cpu family" in facts and "model" in facts:
        parts.append(f"family {facts['cpu family']} model {facts['model']}")
    isa = target.isa().name
    return {"cpu": f"{brand} ({', '.join([*parts, isa])})", "isa": isa}


def microarchitecture(llvm_name: str) -> str:
    """A processor's name, of LLVM's."""
    zen = re.fullmatch(r"znver(\d+)", llvm_name)
    return f"Zen {zen[1]}" if zen else llvm_name


def slug(name: str) -> str:
    """A full name as one of a file or folder: amd-epyc-zen-5-family-26-model-2-avx512."""
    plain = re.sub(r"\((r|tm)\)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def _facts() -> dict[str, str]:
    """Linux's facts about the first processor; {} on other systems."""
    first = target.read_fact("/proc/cpuinfo").partition("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in first)
    return {key.strip(): value.strip() for key, _, value in pairs}
