"""The CPU that figures hold for: the name of a record's, and the folder that its results are kept in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockconv.machine.identity import describe, microarchitecture, slug

__all__ = ["describe", "folder", "name"]


def name(record: Mapping[str, Any]) -> str:
    """The full name of a record's CPU; of one without `isa`, from before names were full, as far as it tells."""
    if "isa" in record or "numba_cpu" not in record:
        return str(record["cpu"])
    features = record.get("numba_features", ())
    isa = next((isa for isa, feature in (("avx512", "avx512f"), ("avx2", "avx2")) if feature in features), "")
    parts = [part for part in (microarchitecture(record["numba_cpu"]), isa) if part]
    return f"{record['cpu']} ({', '.join(parts)})"


def folder(record: Mapping[str, Any]) -> str:
    """The name as one of a folder: amd-epyc-zen-5-family-26-model-2-avx512."""
    return slug(name(record))
