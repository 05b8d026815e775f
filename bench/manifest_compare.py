"""Two manifests: what differs, in groups, and whether anything but names does.

Kernels are compared by their assembly, so moving or renaming one is no difference. Nor is a new name of a blocking's
field. A name that is in one file alone means the name in the other file with the same values in every case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["GROUPS", "Change", "Differences", "compare", "show"]

Record = dict[str, Any]
Manifest = tuple[Record, Mapping[str, Record]]  # a header, and records by key
GROUPS = ("row changed", "blocking changed", "assembly changed", "bits changed", "appeared", "disappeared")
WIDTH = 100


@dataclass(frozen=True)
class Change:
    """One of GROUPS; what changed, the same for many cases; the case, and how it changed there."""

    group: str
    what: str
    key: str
    how: str = ""


@dataclass
class Differences:
    """changes: what differs. names: what is called otherwise, and is the same. notes: what was not compared."""

    changes: list[Change] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def compare(old: Manifest, new: Manifest, renamed: Mapping[str, str] | None = None) -> Differences:
    """renamed: rows of the table that have another name in the new file. Raises ValueError if the two manifests are
    not of the same processors and caches."""
    (head, before), (new_head, after) = old, new
    found, isas = Differences(), _comparable(head, new_head)
    found.notes = list(_notes(head, new_head, isas))
    before, after = _of(before, isas), _of(after, isas)
    before = dict(_renamed(record, renamed or {}) for record in before.values())
    found.names = dict(renamed or {}) | _fields(before, after)
    names = [_kernels(records) for records in (before, after)]
    found.names |= _kernel_names(*names)
    partial = head["quick"] != new_head["quick"] or head["only"] != new_head["only"]
    for key in sorted({*before, *after}):
        if _is_kernel(key):
            continue
        if key in before and key in after:
            isa = key.split(" ", 1)[0]
            ran = all(header["targets"][isa]["runs"] for header in (head, new_head))
            found.changes += _case(before[key], after[key], found.names, names, ran)
        elif not partial:
            found.changes.append(Change("appeared" if key in after else "disappeared", _suite(key), key))
    return found


def _comparable(old: Record, new: Record) -> list[str]:
    """The instruction sets of both."""
    if old["caches"] != new["caches"] or old["threads"] != new["threads"]:
        raise ValueError("manifest: the two were made for other caches or threads, and cannot be compared")
    isas = [isa for isa in old["targets"] if isa in new["targets"]]
    for isa in isas:
        if any(old["targets"][isa][what] != new["targets"][isa][what] for what in ("cpu", "features")):
            raise ValueError(f"manifest: {isa} is another processor in the two files, and they cannot be compared")
    if not isas:
        raise ValueError("manifest: the two files have no instruction set in common")
    return isas


def _notes(old: Record, new: Record, isas: Iterable[str]) -> Iterator[str]:
    for isa in sorted({*old["targets"], *new["targets"]}.difference(isas)):
        yield f"{isa} is in one file alone, and was not compared"
    for isa in isas:
        if not all(header["targets"][isa]["runs"] for header in (old, new)):
            yield f"{isa} was not run for both files: its bits were not compared"
    if old["quick"] != new["quick"] or old["only"] != new["only"]:
        yield "one file has only a part of the cases: only those in both were compared"
    for name, version in old["versions"].items():
        if version != new["versions"].get(name):
            yield f"{name} {version} before, {new['versions'].get(name)} now: assembly and bits may follow from that"


def _of(records: Mapping[str, Record], isas: Iterable[str]) -> dict[str, Record]:
    known = set(isas)
    return {key: record for key, record in records.items() if key.split(" ", 1)[0] in known}


def _renamed(record: Record, renamed: Mapping[str, str]) -> tuple[str, Record]:
    """A record with its row's new name, in its key too."""
    row = record.get("row", "")
    if row not in renamed:
        return record["key"], record
    name, key = renamed[row], record["key"]
    key = key.removesuffix(row) + name if key.endswith(f" {row}") else key
    return key, record | {"row": name, "key": key}


# ---------------------------------------------------------------- names


def _is_kernel(key: str) -> bool:
    return key.split(" ")[1] == "kernel"


def _suite(key: str) -> str:
    """The suite of a case: the instruction set and the first word or two of its name."""
    isa, *words = key.split(" ")
    return " ".join([isa, *words[: 2 if words[0] in ("sample", "plan") else 1]])


def _kernels(records: Mapping[str, Record]) -> dict[tuple[str, str], list[str]]:
    """The names of kernels by instruction set and digest."""
    pairs = ((key.split(" "), record["names"]) for key, record in records.items() if _is_kernel(key))
    return {(isa, digest): names for (isa, _, digest), names in pairs}


def _kernel_names(
    old: Mapping[tuple[str, str], list[str]], new: Mapping[tuple[str, str], list[str]]
) -> dict[str, str]:  # fmt: skip
    """Builders of kernels that have other names or modules now."""
    found = {}
    for known, names in old.items():
        gone, come = ({name.split("(")[0] for name in group} for group in (names, new.get(known, names)))
        if len(gone - come) == len(come - gone) == 1:
            found[(gone - come).pop()] = (come - gone).pop()
    return found


def _fields(before: Mapping[str, Record], after: Mapping[str, Record]) -> dict[str, str]:
    """Fields of blockings by their old name and their new: their values agree in all cases of a row."""
    columns: list[dict[tuple[str, str], list[Any]]] = []
    common = [key for key in sorted({*before} & {*after}) if before[key].get("row", "") == after[key].get("row")]
    for records in (before, after):
        found: dict[tuple[str, str], list[Any]] = {}
        for key in common:
            for name, value in _flat(records[key]["blocking"]):
                found.setdefault((records[key]["row"], name), []).append((key, value))
        columns.append(found)
    gone, come = ({k: v for k, v in columns[i].items() if k not in columns[1 - i]} for i in (0, 1))
    names: dict[str, str] = {}
    for (row, name), values in gone.items():
        match = next((k for k, v in come.items() if k[0] == row and v == values), None)
        if match is not None:
            del come[match]
            names[f"{row}.{name}"] = f"{row}.{match[1]}"
    return names


def _flat(fields: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# ---------------------------------------------------------------- one case


def _case(
    old: Record, new: Record, names: Mapping[str, str], kernels: list[dict[tuple[str, str], list[str]]], ran: bool
) -> Iterator[Change]:
    """The differences of a case. Another row brings another blocking and other kernels, which are not listed then."""
    key, row = new["key"], new.get("row", "")
    isa = key.split(" ", 1)[0]
    if _taken(old) != _taken(new):
        yield Change("row changed", f"{isa} {_taken(old)} → {_taken(new)}", key)
    else:
        before = {names.get(f"{row}.{name}", f"{row}.{name}"): value for name, value in _numbers(old)}
        after = {f"{row}.{name}": value for name, value in _numbers(new)}
        changed = {name: (before.get(name, "none"), after.get(name, "none")) for name in {**before, **after}}
        changed = {name.removeprefix(f"{row}."): pair for name, pair in changed.items() if pair[0] != pair[1]}
        if changed:
            how = ", ".join(f"{name} {a} → {b}" for name, (a, b) in changed.items())
            yield Change("blocking changed", f"{isa} {row}: {', '.join(changed)}", key, how)
        yield from _assembly(isa, key, _digests(old), _digests(new), kernels)
    for what in ("bits", "weights") if ran else ():
        if old.get(what) != new.get(what):
            group = "bits changed" if what == "bits" else "blocking changed"
            yield Change(group, f"{isa} {row or what}", key, f"{old.get(what)} → {new.get(what)}")


def _taken(record: Record) -> str:
    """The row, and of a plan's ops the layouts."""
    row = str(record.get("row", ""))
    return f"{row} {'+'.join(record['reads'])} > {record['writes']}".strip() if "reads" in record else row


def _numbers(record: Record) -> Iterator[tuple[str, Any]]:
    """All that is said of a case's blocking and tasks, by name."""
    yield from _flat(record.get("blocking", {}))
    for what, ops in _ops(record):
        for k, op in enumerate(ops):
            yield from ((f"{what}[{k}].{name}", value) for name, value in op.items() if name != "kernels")
    for what, more in record.items():
        if what.endswith(" threads"):
            yield from ((f"{what}.{name}", value) for name, value in _flat(more) if name != "ops")
    if "arena" in record:
        yield "arena", record["arena"]


def _ops(record: Record) -> Iterator[tuple[str, list[Record]]]:
    for name, value in record.items():
        if name in ("ops", "packing"):
            yield name, value
        elif name.endswith(" threads") and "ops" in value:
            yield f"{name}.ops", value["ops"]


def _digests(record: Record) -> Counter[str]:
    return Counter(digest for _, ops in _ops(record) for op in ops for digest in op.get("kernels", ()))


def _assembly(
    isa: str, key: str, old: Counter[str], new: Counter[str], kernels: list[dict[tuple[str, str], list[str]]]
) -> Iterator[Change]:
    """A change for each kernel that is in both under one name, and for each that only one has."""
    named: list[dict[str, str]] = []
    for digests, known in zip((old - new, new - old), kernels, strict=True):
        named.append({name.split(":")[1]: digest for digest in digests for name in known[isa, digest]})
    before, after = named
    for name in sorted({*before, *after}):
        if name not in after:
            what, how = f"{isa} without {name}", before[name]
        elif name not in before:
            what, how = f"{isa} with {name}", after[name]
        else:
            what, how = f"{isa} {name}", f"{before[name]} → {after[name]}"
        yield Change("assembly changed", what, key, how)


# ---------------------------------------------------------------- the table


def show(found: Differences, console: Console, every: bool = False) -> None:
    """Print what differs: for each change the number of its cases and one of them, or `every` one."""
    for note in found.notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)
    if found.names:
        table = _table(f"names changed, and what they name did not ({len(found.names)})", "old", "new")
        for old, new in sorted(found.names.items()):
            table.add_row(old, new)
        console.print(table, width=WIDTH)
    for group in GROUPS:
        kinds: dict[str, list[Change]] = {}
        for change in found.changes:
            if change.group == group:
                kinds.setdefault(change.what, []).append(change)
        if not kinds:
            continue
        table = _table(f"{group} ({sum(map(len, kinds.values()))})", "what", "cases", "for example")
        table.columns[1].justify = "right"
        for what, changes in sorted(kinds.items(), key=lambda item: -len(item[1])):
            for change in changes if every else changes[:1]:
                table.add_row(what, str(len(changes)), f"{change.key}\n{change.how}".rstrip())
        console.print(table, width=WIDTH)
    console.print("nothing differs" if not found.changes else f"{len(found.changes)} differences in all", style="bold")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", width=WIDTH)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
