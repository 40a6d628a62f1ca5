"""`Store`: a run as SQL tables. Spools become Parquet once, in parallel (`converting`); DuckDB reads those.

The Parquet files are a cache in the run directory, never trusted over their source: a process whose files have changed
is read again. One whose files may still change is read at each query, into files that go with it. Needs the ``report``
extra.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.monitor.load import spool_processes
from raytrace_rl.monitor.model import UnreadableRunError
from raytrace_rl.monitor.scratch import Scratch, clean

if TYPE_CHECKING:
    from raytrace_rl.monitor.converting import Order
    from raytrace_rl.monitor.model import State
    from raytrace_rl.spool.listing import ProcessFiles
    from raytrace_rl.spool.reader import Damage

TABLES: Final = ("spans", "metrics", "logs", "stacks", "processes", "runs")

_SPANS: Final = """
CREATE VIEW spans AS
SELECT s.trace_id, s.span_id, s.parent_span_id, s.name, s.kind, s.start_ns, s.end_ns,
       s.end_ns - s.start_ns AS duration_ns, s.status, s.status_message, s.span_group, s.bucket, s.iteration,
       p.worker_group, p.rank, p.node_id, p.actor_id, p.actor_class, p.incarnation, p.attempt, p.pid, s.thread,
       s.thread_id, s.lane, s.queued_ns, s.truncated, s.scope, s.attributes, s.events, s.links, p.resource
FROM {source} s LEFT JOIN processes p USING (lane)
"""
_RUNS: Final = """
CREATE VIEW runs AS
SELECT {path} AS path, (SELECT mode(run_id) FROM processes) AS run_id,
       (SELECT count(DISTINCT attempt) FROM processes) AS attempts, (SELECT count(*) FROM processes) AS processes,
       (SELECT count(*) FROM spans) AS spans, (SELECT min(start_ns) FROM spans) AS start_ns,
       (SELECT max(coalesce(end_ns, start_ns)) FROM spans) AS end_ns,
       (SELECT sum(damaged_records) FROM processes)::BIGINT AS damaged_records
"""


class MissingExtraError(Exception):
    """What it takes is not installed; the message says what to install."""


class Store:
    """The tables of one run.

    Args:
        path: As `raytrace_rl.monitor.load_run` takes it.
        progress: Called with how many sources have been read, and how many there are.

    Attributes:
        connection: DuckDB's, with the views `TABLES`.
        damage: What could not be read of what was read now; ``processes.damaged_records`` counts all of it.
        read: How many sources were read; the others were cached.
        read_by_ray: How many of them by Ray tasks.

    Raises:
        UnreadableRunError: Nothing is there to read.
        MissingExtraError: pyarrow, duckdb or numpy is missing.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> None:
        try:
            import duckdb
            import numpy as np  # noqa: F401 - large segments are read as its arrays
            import pyarrow.parquet
        except ImportError as error:
            raise MissingExtraError(f"{error.name} is needed for this: pip install 'raytrace-rl[report]'") from None
        self.path = Path(path)
        self.damage: list[Damage] = []
        self.read = 0
        self.read_by_ray = 0
        self._parquet = pyarrow.parquet
        self._directory = self._place()
        clean(self._directory)
        self._scratch: Scratch | None = None
        try:
            bases = self._bring_up_to_date(progress)
            self.connection = duckdb.connect()
            self._views(bases)
        except BaseException:
            self._let_go()
            raise

    def _place(self) -> Path:
        """Where the cache is: beside the run, or in the system's temporary directory where that cannot be written."""
        own = self.path.absolute() / "cache" if self.path.is_dir() else None
        if own is not None:
            with contextlib.suppress(OSError):
                own.mkdir(mode=0o700, exist_ok=True)
                if os.access(own, os.W_OK):
                    return own
        label = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:16]
        other = Path(tempfile.gettempdir()) / f"raytrace_rl-{os.getuid()}" / label
        other.mkdir(mode=0o700, parents=True, exist_ok=True)
        return other

    # -- from sources to Parquet

    def _bring_up_to_date(self, progress: Callable[[int, int], None] | None) -> list[Path]:
        from raytrace_rl.monitor.converting import Order, converted, size_of

        orders: list[Order] = []
        bases: list[Path] = []
        for name, source, state, sign in self._sources():
            base = (self._directory if sign else self._own().path) / name
            bases.append(base)
            if not sign or self._cached(base) != sign:
                orders.append(Order(source, state, str(base), sign, str(self._own().path), size_of(source)))
        self.read = len(orders)
        done = converted(orders, self._own().token, self._is_there) if orders else ()
        for number, (damage, by_ray) in enumerate(done, 1):
            self.damage += damage
            self.read_by_ray += by_ray
            if progress is not None:
                progress(number, len(orders))
        return bases

    def _sources(self) -> Iterator[tuple[str, ProcessFiles | str, State, str]]:
        """What the run is made of: a name of its Parquet files, the source, its state and its signature."""
        from raytrace_rl.monitor import fragments

        if self.path.is_dir():
            for files in spool_processes(self.path):
                state = fragments.state_of(files)
                name = re.sub(r"[^\w.-]", "_", f"{files.node}.{files.stem}")
                yield name, files, state, fragments.signature(files, state)
        elif self.path.exists():
            yield "file", str(self.path.absolute()), "unknown", fragments.file_signature(self.path)
        else:
            raise UnreadableRunError(f"{self.path}: no such file or directory")

    def _own(self) -> Scratch:
        """Where files are that are not whole, and those of processes that may still live: they go with this query."""
        if self._scratch is None:
            self._scratch = Scratch(self._directory)
        return self._scratch

    def _is_there(self, order: Order) -> bool:
        return self._cached(Path(order.base)) == order.sign

    def _cached(self, base: Path) -> str | None:
        """What the files of ``base`` were made from; None if one is missing, damaged, or not of the others' making."""
        from raytrace_rl.monitor.columns import file_sign

        try:
            path = f"{base}.processes.parquet"
            metadata = self._parquet.read_table(path, page_checksum_verification=True).schema.metadata or {}
            signs = json.loads(metadata[b"files"])
            for table in ("spans", "metrics", "logs", "stacks"):
                if file_sign(Path(f"{base}.{table}.parquet")) != signs.get(table, []):
                    return None
        except Exception:  # whatever a damaged file makes pyarrow raise: it is made anew
            return None
        return str(metadata.get(b"raytrace_rl", b""), "utf-8", "replace")

    # -- from Parquet to tables

    def _views(self, bases: list[Path]) -> None:
        from raytrace_rl.monitor.columns import SCHEMAS

        for table in ("processes", "spans", "metrics", "logs", "stacks"):
            paths = [path for base in bases if (path := f"{base}.{table}.parquet") and Path(path).exists()]
            name = f"own_{table}" if table == "spans" else table
            if paths:
                listed = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
                self.connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{listed}])")
            else:
                empty = SCHEMAS[table].empty_table()
                self.connection.register(f"empty_{table}", empty)
                self.connection.execute(f"CREATE VIEW {name} AS SELECT * FROM empty_{table}")
        self.connection.execute(_SPANS.format(source=self._deduplicated()))
        path = "'" + str(self.path).replace("'", "''") + "'"
        self.connection.execute(_RUNS.format(path=path))

    def _deduplicated(self) -> str:
        """Where spans come from: each counts once, its ended form before a truncated or open one.

        As many different hashes as spans are as many spans; fewer may be chance, and the longer way is right too.
        """
        found = self.connection.execute(
            "SELECT count(*), count(DISTINCT hash(trace_id, span_id)) FROM own_spans"
        ).fetchone()
        if found is None or found[0] == found[1]:
            return "own_spans"
        same = "PARTITION BY trace_id, span_id ORDER BY end_ns IS NULL, truncated, lane"
        return f"(SELECT * FROM own_spans QUALIFY row_number() OVER ({same}) = 1)"

    def export(self, directory: Path) -> int:
        """Writes the tables as Parquet files into ``directory``; returns how many spans there are.

        Raises:
            OSError: It cannot be made or written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for table in TABLES:
            order = {"spans": " ORDER BY start_ns", "metrics": " ORDER BY time_ns", "logs": " ORDER BY time_ns"}
            part, path = directory / f"{table}.{os.getpid()}.part", directory / f"{table}.parquet"
            quoted = str(part).replace("'", "''")
            select = f"SELECT * FROM {table}{order.get(table, '')}"
            self.connection.execute(f"COPY ({select}) TO '{quoted}' (FORMAT parquet, COMPRESSION zstd)")
            part.replace(path)
        found = self.connection.execute("SELECT count(*) FROM spans").fetchone()
        return int(found[0]) if found else 0

    def close(self) -> None:
        """Lets go of the connection, and of what was read of processes that may still live."""
        self.connection.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._scratch is not None:
            self._scratch.close()


def rows_as_json(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    """Returns the rows of a query as JSON, an object a line."""
    return "".join(json.dumps(_known(dict(zip(names, row, strict=True))), default=str) + "\n" for row in rows)


def _known(value: Any) -> Any:
    """A value without the numbers that JSON has no word for (NaN, infinity): null in their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _known(item) for key, item in value.items()}
    return [_known(item) for item in value] if isinstance(value, (list, tuple)) else value
