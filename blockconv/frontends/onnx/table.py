"""The table of ONNX's ops that are read, as `blockconv ops` and the reference show it."""

from __future__ import annotations

import collections

from onnx import defs

from blockconv.frontends.onnx.ops import OPS
from blockconv.frontends.onnx.rules import RUNTIMES

HEADINGS = ("ops", "opsets", "limits")


def rows() -> list[tuple[str, str, str]]:
    """(ops, opsets, limits), ops of the same opsets and limits in one row."""
    groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name, op in sorted(OPS.items()):
        opsets = _opsets(name, op.since)
        if opsets:
            groups[opsets, op.limits].append(name)
    return sorted((", ".join(names), opsets, limits) for (opsets, limits), names in groups.items())


def _opsets(name: str, since: int) -> str:
    """The opsets that have an op and are supported; empty if the installed onnx knows none."""
    domain, _, _ = name.rpartition(".")
    if domain:  # it defines none of other domains
        return f"{domain} {since}"
    history = {
        s.since_version: s.deprecated for s in defs.get_all_schemas_with_history() if (s.domain, s.name) == ("", name)
    }
    if not history:
        return "any, in models that ONNX Runtime saved" if name in RUNTIMES else ""
    first, last = max(since, min(history)), max(history)
    return f"{first} to {last - 1}" if history[last] else f"from {first}"


def markdown() -> str:
    """The table that the reference shows."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
