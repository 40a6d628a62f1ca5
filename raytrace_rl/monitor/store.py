"""`Store`: a run as SQL tables. Spools become Parquet once, in parallel processes; DuckDB reads those.

The Parquet files are a cache in the run directory, never trusted over their source: a process whose files have changed
is read again. One whose files may still change is read at each query, into files that go with it. Needs the ``report``
extra.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.monitor.load import spool_processes
from raytrace_rl.monitor.model import UnreadableRunError

if TYPE_CHECKING:
    from raytrace_rl.spool.listing import ProcessFiles
    from raytrace_rl.spool.reader import Damage

TABLES: Final = ("spans", "metrics", "logs", "stacks", "processes", "runs")
#: Below so many bytes a run is read in this process: to start others takes longer.
_ALONE_BYTES: Final = 32 << 20

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

    Raises:
        UnreadableRunError: Nothing is there to read.
        MissingExtraError: pyarrow or duckdb is missing.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> None:
        try:
            import duckdb
            import pyarrow.parquet
        except ImportError as error:
            raise MissingExtraError(f"{error.name} is needed for this: pip install 'raytrace-rl[report]'") from None
        self.path = Path(path)
        self.damage: list[Damage] = []
        self.read = 0
        self._parquet = pyarrow.parquet
        self._directory = self._place()
        self._passing: tempfile.TemporaryDirectory[str] | None = None
        bases = self._bring_up_to_date(progress)
        self.connection = duckdb.connect()
        self._views(bases)

    def _place(self) -> Path:
        """Where the cache is: beside the run, or in the system's temporary directory where that cannot be written."""
        own = self.path / "cache" if self.path.is_dir() else None
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
        from raytrace_rl.monitor import fragments

        work: list[tuple[Callable[..., list[Damage]], Any, Path, str]] = []
        bases: list[Path] = []
        if self.path.is_dir():
            for files in spool_processes(self.path):
                name = re.sub(r"[^\w.-]", "_", f"{files.node}.{files.stem}")
                sign = fragments.signature(files)
                base = (self._directory if sign else self._passing_directory()) / name
                bases.append(base)
                if not sign or self._cached(base) != sign:
                    work.append((fragments.convert, files, base, sign))
        else:
            if not self.path.exists():
                raise UnreadableRunError(f"{self.path}: no such file or directory")
            base = self._directory / "file"
            bases.append(base)
            sign = fragments.file_signature(self.path)
            if self._cached(base) != sign:
                work.append((fragments.convert_file, str(self.path), base, sign))
        self.read = len(work)
        for done, damage in enumerate(self._converted(work), 1):
            self.damage += damage
            if progress is not None:
                progress(done, len(work))
        return bases

    def _passing_directory(self) -> Path:
        """Where the files of processes that may still live are: another query, at the same time, reads more of them."""
        if self._passing is None:
            self._passing = tempfile.TemporaryDirectory(prefix="live-", dir=self._directory)
        return Path(self._passing.name)

    def _cached(self, base: Path) -> str | None:
        """What the files of ``base`` were made from; None if one is missing, damaged, or not of the others' making."""
        from raytrace_rl.monitor.columns import file_sign

        try:
            metadata = self._parquet.read_table(f"{base}.processes.parquet").schema.metadata or {}
            signs = json.loads(metadata[b"files"])
            for table in ("spans", "metrics", "logs", "stacks"):
                if file_sign(Path(f"{base}.{table}.parquet")) != signs.get(table, []):
                    return None
        except Exception:  # whatever a damaged file makes pyarrow raise: it is made anew
            return None
        return str(metadata.get(b"raytrace_rl", b""), "utf-8", "replace")

    @staticmethod
    def _converted(work: list[tuple[Callable[..., list[Damage]], Any, Path, str]]) -> Any:
        sizes = [_size(source) for _, source, _, _ in work]
        workers = min(os.cpu_count() or 1, len(work))
        if workers < 2 or sum(sizes) < _ALONE_BYTES:
            for convert, source, base, sign in work:
                yield convert(source, str(base), sign)
            return
        # Started anew rather than forked: this process may have threads, and DuckDB's among them.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context) as pool:
            # The largest first, so that no long one is left for the end.
            order = sorted(range(len(work)), key=lambda n: -sizes[n])
            jobs = [pool.submit(work[n][0], work[n][1], str(work[n][2]), work[n][3]) for n in order]
            for job in as_completed(jobs):
                yield job.result()

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
        """Where spans come from: each counts once, its ended form before a truncated or open one."""
        found = self.connection.execute(
            "SELECT count(*), count(DISTINCT trace_id || span_id) FROM own_spans"
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
        if self._passing is not None:
            self._passing.cleanup()


def _size(source: Any) -> int:
    if isinstance(source, str):
        return Path(source).stat().st_size
    files: ProcessFiles = source
    whole = 0
    for path in files.segments.values():
        with contextlib.suppress(OSError):
            whole += Path(path).stat().st_size
    return whole


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
