"""The fields of the data set: one version, tables of columns with types and units.

A measured time is null if it was not measured: no prediction fills a gap. docs/reference/lab-data.md has `listed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..grid import markdown

__all__ = ["LICENCE", "MEASURED", "TABLES", "VERSION", "Column", "listed", "read_table", "write_table"]

VERSION = 1  # another number where a field changes its meaning or goes away
LICENCE = "BSD-3-Clause, as blockconv"


class Column(NamedTuple):
    """A column of a table. type: a name of an Arrow type, or "list<...>" of one."""

    name: str
    type: str
    text: str


MEASURED = (
    Column("measured_median_s", "double", "median of the rounds, seconds a call; null if not measured"),
    Column("measured_q1_s", "double", "lower quartile of the rounds, seconds; null if not measured"),
    Column("measured_q3_s", "double", "upper quartile of the rounds, seconds; null if not measured"),
    Column("rounds_count", "int64", "rounds of the measurement; null if not measured"),
    Column("calls_count", "int64", "calls in each round, whose mean is a sample; null if not measured"),
    Column("others_processors", "double", "processors that other processes kept busy meanwhile; null if unknown"),
)

TABLES: Mapping[str, tuple[Column, ...]] = {
    "candidates": (
        Column("node", "string", "the node of `graph.json`"),
        Column("op", "string", "its op"),
        Column("candidate", "int64", "number of the candidate among the node's, from 0"),
        Column("kernel", "string", "row of the kernel table; null for a view, and for an op that another library runs"),
        Column("is_view", "bool", "whether it runs no kernel: it costs its copies, or nothing"),
        Column("srcs", "list<string>", "layout of each input that is no constant, as a tag"),
        Column("dst", "string", "layout of the output, as a tag"),
        Column("key", "string", "of the measurement: equal kernels, problems, layouts and types; null for a view"),
        Column(
            "copies", "list<string>", "values that a view copies into its output: rows of `reorders`, `src` = `dst`"
        ),
        Column("predicted_s", "double", "predicted seconds on one thread"),
        *MEASURED,
    ),
    "reorders": (
        Column("value", "string", "the value of `graph.json`"),
        Column("readers", "list<string>", "nodes that read it"),
        Column("src", "string", "layout that is read, as a tag"),
        Column("dst", "string", "layout that is written, as a tag; `src` for the copy of a view"),
        Column(
            "is_free", "bool", "whether both layouts have the same bytes, so that nothing runs and nothing is timed"
        ),
        Column("key", "string", "of the measurement: equal shapes, layouts and sizes of elements"),
        Column("predicted_s", "double", "predicted seconds on one thread; null if impossible"),
        *MEASURED,
    ),
    "assignments": (
        Column("origin", "string", '"sample", or the planner and the costs that it saw: "optimal, predicted"'),
        Column("share", "double", "of a sample: the probability with which a node left the optimum; else null"),
        Column("chosen", "list<int64>", "candidate of each node, in the order of `graph.json`"),
        Column("reorders_count", "int64", "reorders of the assignment"),
        Column("predicted_s", "double", "sum of predicted seconds of its candidates and reorders"),
        Column("summed_s", "double", "sum of their measured medians; null if one was not measured"),
        Column("bound_s", "double", "by the costs that the planner saw no assignment costs less; null if unknown"),
        Column("is_optimal", "bool", "whether the costs that the planner saw allow none that costs less; else null"),
        Column("error_relative", "double", "largest error over the largest output, against the reference"),
        Column("reference_s", "double", "median of the plan that is optimal by predictions, in the same rounds: drift"),
        *MEASURED,
    ),
}


def listed(name: str) -> list[str]:
    """The columns of a table, as the lines of one in Markdown."""
    rows = [(f"`{column.name}`", column.type.replace("<", " of ").rstrip(">"), column.text) for column in TABLES[name]]
    return [*markdown(("column", "type", "meaning"), rows, range(3))]


def write_table(path: Path, name: str, rows: Iterable[Mapping[str, Any]], about: Mapping[str, str]) -> None:
    """Write rows as a table of the schema. about: what else the file says of itself, beside name and version.

    Raises ValueError for a row with a field that the schema does not have.
    """
    import pyarrow as pa
    from pyarrow import parquet

    columns, found = TABLES[name], list(rows)
    names = {column.name for column in columns}
    if unknown := {field for row in found for field in row} - names:
        raise ValueError(f"{name}: {sorted(unknown)[0]!r} is no column")
    fields = [pa.field(c.name, _arrow(c.type), metadata={"text": c.text}) for c in columns]
    schema = pa.schema(fields, metadata={"schema": f"blockconv-lab {VERSION}", "table": name, **about})
    table = pa.Table.from_pylist([{c.name: row.get(c.name) for c in columns} for row in found], schema=schema)
    parquet.write_table(table, path, compression="zstd")


def _arrow(name: str) -> Any:
    import pyarrow as pa

    if name.startswith("list<"):
        return pa.list_(_arrow(name[5:-1]))
    return {"string": pa.string(), "int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}[name]


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a table. Raises ValueError for a file of another schema."""
    from pyarrow import parquet

    table = parquet.read_table(path)
    said = (table.schema.metadata or {}).get(b"schema", b"nothing").decode()
    if said != f"blockconv-lab {VERSION}":
        raise ValueError(f"{path} says {said!r}; this reads 'blockconv-lab {VERSION}'")
    found: list[dict[str, Any]] = table.to_pylist()
    return found
