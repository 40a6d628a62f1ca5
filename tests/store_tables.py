"""The Parquet files of a run's processes, read back: what the tests hold columns against rows with."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from raytrace_rl.monitor import fragments, load
from raytrace_rl.monitor.bulk import table_reading, table_rows


def tables(directory: Path) -> dict[str, Any]:
    """Every Parquet file in a directory, with repeated text as plain text: what is in it, not how it is kept."""
    found = {}
    for path in sorted(directory.glob("*.parquet")):
        table = pq.read_table(path)
        schema = [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in table.schema
        ]
        found[path.name] = table.cast(pa.schema(schema)).replace_schema_metadata()
    return found


def converted(run_dir: Path, out: Path) -> tuple[dict[str, Any], list[Any]]:
    """Converts each process of a run; returns the tables and what could not be read."""
    out.mkdir()
    damage = []
    for files in load.spool_processes(run_dir):
        base, state = str(out / f"{files.node}.{files.stem}"), fragments.state_of(files)
        damage += fragments.convert(files, base, "sign", str(out), state)
    return tables(out), damage


def by_rows(run_dir: Path, out: Path) -> tuple[dict[str, Any], list[Any]]:
    """The same with every segment read row by row."""
    with mock.patch.object(table_reading, "LARGE_BYTES", 1 << 60):
        return converted(run_dir, out)


def by_columns(run_dir: Path, out: Path, worth: int = 2) -> tuple[dict[str, Any], list[Any]]:
    """The same with every segment read as columns, a shape from ``worth`` records on."""
    with mock.patch.object(table_reading, "LARGE_BYTES", 0), mock.patch.object(table_rows, "_WORTH", worth):
        return converted(run_dir, out)


def differences(run_dir: Path, out: Path, worth: int = 2) -> list[str]:
    """Where the tables that both ways make differ."""
    (rows, damage), (columns, damage_of_columns) = (
        by_rows(run_dir, out / "rows"),
        by_columns(run_dir, out / "columns", worth),
    )
    wrong = [] if damage == damage_of_columns else [f"damage {damage}, {damage_of_columns} found"]
    if rows.keys() != columns.keys():
        return [*wrong, f"files {list(rows)}, {list(columns)} found"]
    for name, table in rows.items():
        for column in table.column_names:
            wanted, found = (one.column(column).to_pylist() for one in (table, columns[name]))
            if wanted != found:
                pairs = [pair for pair in zip(wanted, found, strict=False) if pair[0] != pair[1]]
                wrong.append(f"{name}: {column}: {pairs[:3]}, {len(wanted)} and {len(found)} rows")
        if table.schema != columns[name].schema:
            wrong.append(f"{name}: {table.schema}, {columns[name].schema} found")
    return wrong
