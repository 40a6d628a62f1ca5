"""The SQL tables hold what the run holds, and the cache behind them is never believed over its source."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl import cli
from raytrace_rl.monitor import converting, load_run, scratch, store
from raytrace_rl.monitor.model import UnreadableRunError
from raytrace_rl.spool.format import Kind, pack_record
from tests.spooling import SECOND, T0, TRACE, Spool, ended, resource, span, span_id

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")


def _ask(path: Path, query: str) -> list[tuple[Any, ...]]:
    opened = store.Store(path)
    try:
        rows: list[tuple[Any, ...]] = opened.connection.execute(query).fetchall()
        return rows
    finally:
        opened.close()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """A driver with a step, a worker that learnt who it is late, and was killed in the middle of a span."""
    made = Spool(tmp_path / "run")
    driver = ended(span(1, 0, 20, name="job"), span(2, 1, 9, parent=1, name="step", rl__iteration=3, note="é\ud7ff"))
    made.segment(10, driver, resource=resource(rl__role="driver", rl__run__id="my-run"), heartbeat_ns=T0 + 20 * SECOND)
    late = pack_record(Kind.RESOURCE, resource(rl__role="worker", rl__worker_group="generation", nv__dl__rank=1))
    first = ended(*(span(100 + n, n, n + 1, name="generate", rl__bucket="productive") for n in range(5)))
    made.segment(11, first + late, heartbeat_ns=T0 + 12 * SECOND, resource=resource(rl__role="worker"))
    stack = TRACE + span_id(200) + T0.to_bytes(8, "little") + b'  File "a.py", line 1, in f\n'
    opened = span(200, 8, None, parent=2, name="generate", thread__name="MainThread")
    made.journal(
        11,
        pack_record(Kind.OPEN_SPAN, opened) + pack_record(Kind.OPEN_SPAN, span(104, 4, None)) + pack_record(3, stack),
    )
    made.live_file(11)
    return made


def test_spans_are_those_of_the_run(spool):
    """Catches a span that is missing, there twice, or another one in SQL than in the report."""
    run = load_run(spool.run_dir)
    columns = (
        "trace_id, span_id, parent_span_id, name, start_ns, end_ns, bucket, iteration, worker_group, rank, pid, lane"
    )
    columns += ", thread, truncated, kind, status, attempt"
    rows = _ask(spool.run_dir, f"SELECT {columns} FROM spans ORDER BY start_ns, span_id")
    names = columns.split(", ")
    assert rows == [
        tuple(getattr(row, name) for name in names) for row in sorted(run.spans, key=lambda r: (r.start_ns, r.span_id))
    ]
    assert _ask(spool.run_dir, "SELECT attributes->>'note' FROM spans WHERE name = 'step'") == [("é\ud7ff",)]


def test_a_killed_span_is_truncated_and_an_ended_one_is_not(spool):
    """Catches an open span that stays open after its process is dead, and an ended one told as cut short."""
    rows = _ask(spool.run_dir, "SELECT span_id, truncated, duration_ns FROM spans WHERE lane LIKE '%11-%' ORDER BY 1")
    assert rows[-1] == (span_id(200).hex(), True, 4 * SECOND)
    assert [row[1] for row in rows[:-1]] == [False] * 5


def test_identity_that_comes_late_holds_for_all_spans(spool):
    """Catches a worker whose first spans have no worker group, because it learnt of it later."""
    assert _ask(spool.run_dir, "SELECT DISTINCT worker_group, rank FROM spans WHERE name = 'generate'") == [
        ("generation", 1)
    ]


def test_the_other_tables(spool):
    """Catches tables that are empty, or gone, where their part of the run is."""
    assert _ask(spool.run_dir, "SELECT span_id, text FROM stacks") == [
        (span_id(200).hex(), '  File "a.py", line 1, in f\n')
    ]
    assert _ask(spool.run_dir, "SELECT state, role FROM processes ORDER BY pid") == [
        ("closed", "driver"),
        ("dead", "worker"),
    ]
    assert _ask(spool.run_dir, "SELECT run_id, attempts, processes, spans, damaged_records FROM runs") == [
        ("my-run", 1, 2, 8, 0)
    ]
    assert _ask(spool.run_dir, "SELECT count(*) FROM metrics, logs") == [(0,)]


def test_metrics_and_logs(tmp_path):
    """Catches data points and log records that do not reach their tables."""
    import logging

    from raytrace_rl import metrics
    from tests.running import running

    with running(tmp_path / "run", logs_enabled=True) as telemetry:
        meter = telemetry.handle.meter
        meter.create_gauge("rl.reward.mean").set(0.5, {"part": "a"})
        logging.getLogger("train").warning("slow %s", "down")
        assert metrics is not None
    assert ("rl.reward.mean", 0.5, "a") in _ask(
        tmp_path / "run", "SELECT name, value, attributes->>'part' FROM metrics"
    )
    assert ("WARN", "slow down", "train") in [
        (text[:4], body, logger)
        for text, body, logger in _ask(tmp_path / "run", "SELECT severity_text, body, logger FROM logs")
    ]


def test_the_same_span_in_two_files_counts_once(spool):
    """Catches a span that two nodes' spools hold, counted twice; or its truncated copy before the ended one."""
    other = Spool(spool.run_dir, "node-b")
    other.segment(10, ended(span(2, 1, 9, parent=1, name="step", rl__iteration=3)))
    other.journal(12, pack_record(Kind.OPEN_SPAN, span(100, 0, None)))
    other.live_file(12)
    rows = _ask(
        spool.run_dir,
        "SELECT span_id, truncated FROM spans WHERE span_id IN (lpad('2', 16, '0'), "
        f"'{span_id(100).hex()}') ORDER BY 1",
    )
    assert rows == [(span_id(2).hex(), False), (span_id(100).hex(), False)]


def _read(path: Path) -> int:
    opened = store.Store(path)
    opened.close()
    return opened.read


def test_what_is_over_is_read_once(spool):
    """Catches a cache that is never used: each query would read ten million spans anew."""
    assert _read(spool.run_dir) == 2
    assert _read(spool.run_dir) == 0


def test_what_may_still_change_is_read_each_time(spool):
    """Catches a live process that is frozen at the first query."""
    live = spool.alive(11)
    try:
        assert (_read(spool.run_dir), _read(spool.run_dir)) == (2, 1)
        spool.segment(11, ended(span(300, 1, 2, name="new")), number=1)
        assert _ask(spool.run_dir, "SELECT count(*) FROM spans WHERE name = 'new'") == [(1,)]
    finally:
        live.release()


def test_a_changed_source_is_read_again(spool):
    """Catches a cache that is believed over the spool that it was made from."""
    _read(spool.run_dir)
    path = spool.segment(10, ended(span(1, 0, 20, name="changed")), resource=resource(rl__role="driver"))
    os.utime(path, ns=(1, 1))
    assert _ask(spool.run_dir, "SELECT name FROM spans WHERE pid = 10") == [("changed",)]


@pytest.mark.parametrize("table", ["spans", "processes"])
@pytest.mark.parametrize("damage", [b"", b"PAR1 and rubbish"])
def test_a_damaged_cache_is_made_anew(spool, table, damage):
    """Catches a query that fails on a cache that a full disk, or a kill, left broken."""
    before = _ask(spool.run_dir, "SELECT count(*) FROM spans")
    for path in (spool.run_dir / "cache").glob(f"*.{table}.parquet"):
        path.write_bytes(damage)
    assert _ask(spool.run_dir, "SELECT count(*) FROM spans") == before


@pytest.mark.parametrize("damage", ["missing", "changed", "of another"])
def test_a_cache_that_is_not_whole_is_made_anew(spool, damage):
    """Catches spans that a query silently leaves out, or takes from elsewhere, since their file still has a footer."""
    before = _ask(spool.run_dir, "SELECT count(*), sum(duration_ns) FROM spans")
    one, other = sorted((spool.run_dir / "cache").glob("*.spans.parquet"))
    if damage == "missing":
        one.unlink()
    elif damage == "changed":
        data = bytearray(one.read_bytes())
        data[len(data) // 10] ^= 1
        one.write_bytes(data)
    else:
        one.write_bytes(other.read_bytes())
    assert _ask(spool.run_dir, "SELECT count(*), sum(duration_ns) FROM spans") == before


@pytest.mark.parametrize("table", ["spans", "processes"])
def test_a_bit_that_flips_on_the_disk_is_noticed(spool, table):
    """Catches a sum of other numbers than the run's, and a query that ends in DuckDB's words for a torn page."""
    query = "SELECT count(*), sum(duration_ns), min(name), max(span_id), min(pid) FROM spans"
    before = _ask(spool.run_dir, query)
    rng = random.Random(3)
    for _ in range(12):
        for path in (spool.run_dir / "cache").glob(f"*.{table}.parquet"):
            found = path.stat()
            data = bytearray(path.read_bytes())
            data[rng.randrange(4, len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert _ask(spool.run_dir, query) == before


def test_two_queries_at_once_of_a_live_run(spool):
    """Catches a query whose files another one takes away, or replaces by what it has read of a process since."""
    live = spool.alive(11)
    try:
        first = store.Store(spool.run_dir)
        spool.segment(11, ended(span(300, 1, 2)), number=1)
        second = store.Store(spool.run_dir)
        counts = [one.connection.execute("SELECT count(*) FROM spans").fetchone() for one in (first, second)]
        assert counts == [(8,), (9,)]
        second.close()
        assert first.connection.execute("SELECT count(*) FROM spans").fetchone() == (8,)
        first.close()
        left = {path.name.split(".")[1].split("-")[0] for path in (spool.run_dir / "cache").iterdir()}
        assert left == {"10"}, "nothing stays of a process that may still change"
    finally:
        live.release()


ASK = """
import sys, time
from raytrace_rl.monitor import columns, store
if __name__ == "__main__":
    if sys.argv[2] == "midway":
        columns.Sink.close = lambda sink: (sink._flush("spans"), print("there", flush=True), time.sleep(600))
    opened = store.Store(sys.argv[1])
    print("there", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("when", ["midway", "at the end"])
def test_what_a_killed_query_left_goes_at_the_next(spool, tmp_path, when):
    """Catches files of killed queries that pile up in the cache, and such of a running one that are taken away."""
    script, live = tmp_path / "ask.py", spool.alive(11)
    script.write_text(ASK)
    asking = subprocess.Popen(
        [sys.executable, str(script), str(spool.run_dir), when], stdout=subprocess.PIPE, text=True
    )
    cache = spool.run_dir / "cache"
    try:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "there\n"
        (held,) = (path for path in cache.glob("live-*") if path.is_dir())
        assert {path.suffix for path in held.iterdir()} > {""}, "the token, and Parquet"
        _read(spool.run_dir)
        assert held.is_dir(), "its process lives"
    finally:
        asking.kill()
        asking.communicate()
    assert held.is_dir()
    (cache / "live-older").mkdir()
    _read(spool.run_dir)
    live.release()
    assert {path.name.split(".")[1].split("-")[0] for path in cache.iterdir()} == {"10"}


def test_a_query_that_fails_leaves_nothing(spool, monkeypatch):
    """Catches a directory that stays in the cache when a run cannot be converted."""
    from raytrace_rl.monitor import fragments

    monkeypatch.setattr(fragments.TableReader, "read", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.Store(spool.run_dir)
    assert list((spool.run_dir / "cache").iterdir()) == []


def test_names_that_are_taken_for_the_moment(tmp_path, monkeypatch):
    """Catches two queries that share a directory, or one that runs in a directory that another may take away."""
    names = iter(["a", "a", "b", "c"])
    monkeypatch.setattr(scratch.secrets, "token_hex", lambda size: next(names) if size == 6 else "token")
    first = scratch.Scratch(tmp_path)
    second = scratch.Scratch(tmp_path)
    assert (first.path.name, second.path.name) == ("live-a", "live-b")
    scratch.clean(tmp_path)
    assert (first.path.is_dir(), second.path.is_dir()) == (True, True)
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_two_writers_at_once_of_the_same_files(spool, monkeypatch):
    """Catches two first queries at once of which one fails, for the other has renamed the file that it writes."""
    from raytrace_rl.monitor import columns
    from raytrace_rl.monitor.columns import Sink

    monkeypatch.setattr(columns, "BATCH", 1)
    run, base = load_run(spool.run_dir), spool.run_dir / "base"
    sinks = [Sink(base, "same", base.parent), Sink(base, "same", base.parent)]
    for sink in sinks:
        sink.spans(run.spans)
        sink.rest(run, run.processes, run.stacks)
    assert [len(sink.close()) for sink in sinks] == [3, 3]
    assert not list(spool.run_dir.glob("*.part"))


def test_an_older_version_of_the_cache_is_made_anew(spool, monkeypatch):
    """Catches columns that an older release has cached otherwise."""
    from raytrace_rl.monitor import fragments

    _read(spool.run_dir)
    monkeypatch.setattr(fragments, "VERSION", fragments.VERSION + 1)
    assert _read(spool.run_dir) == 2


def test_a_run_that_cannot_be_written_is_cached_elsewhere(spool, tmp_path, monkeypatch):
    """Catches a run on a read-only file system that cannot be asked anything."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    (spool.run_dir / "cache").write_text("no directory")
    assert _ask(spool.run_dir, "SELECT count(*) FROM spans") == [(8,)]
    assert _read(spool.run_dir) == 0


def test_several_processes_at_once_give_the_same(spool, monkeypatch):
    """Catches conversion in processes of their own that loses a source, or its damage."""
    spool.segment(13, ended(span(400, 0, 1)) + b"?" * 40 + ended(span(401, 0, 1)))
    alone = _ask(spool.run_dir, "SELECT * FROM spans ORDER BY span_id")
    monkeypatch.setattr(converting, "ALONE_BYTES", 0)
    for path in (spool.run_dir / "cache").iterdir():
        path.unlink()
    opened = store.Store(spool.run_dir)
    assert opened.connection.execute("SELECT * FROM spans ORDER BY span_id").fetchall() == alone
    assert [damage.kind for damage in opened.damage] == ["record"]
    opened.close()
    assert _ask(spool.run_dir, "SELECT damaged_records FROM runs") == [(1,)], "and the cache knows of it too"


def test_an_otlp_file_has_tables_too(spool, tmp_path, monkeypatch):
    """Catches a collector's file that can be reported on and not asked."""
    out = tmp_path / "traces.jsonl"
    assert cli.main(["export", str(spool.run_dir), "--format", "otlp-json", "--out", str(out)]) == cli.OK
    assert _ask(out, "SELECT count(*), count(DISTINCT lane) FROM spans") == [(8, 2)]


def test_nothing_to_read(tmp_path):
    """Catches an empty table where there is no run."""
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UnreadableRunError):
            store.Store(path)


def test_numbers_that_json_and_sql_do_not_know(tmp_path):
    """Catches one attribute out of range that costs the whole table."""
    made = Spool(tmp_path / "run")
    made.segment(1, ended(span(1, 0, 1, a=float("nan"), b=[float("inf")], c=b"\xff", d={"e": -float("inf")})))
    ((text,),) = _ask(tmp_path / "run", "SELECT attributes FROM spans")
    assert json.loads(text) == {"a": "nan", "b": ["inf"], "c": "ff", "d": {"e": "-inf"}}


# -- commands ----------------------------------------------------------------------------------------------------------

QUERY = "SELECT name, count(*) AS n FROM spans GROUP BY 1 ORDER BY 2 DESC, 1"


def test_sql_prints_a_table(spool, capsys):
    """Catches output that a person cannot read."""
    assert cli.main(["sql", str(spool.run_dir), QUERY]) == cli.OK
    assert capsys.readouterr().out == "name      n\n--------  -\ngenerate  6\njob       1\nstep      1\n"


def test_sql_for_programs(spool, capsys):
    """Catches output that a program cannot read."""
    assert cli.main(["sql", str(spool.run_dir), QUERY, "--csv"]) == cli.OK
    assert list(csv.reader(io.StringIO(capsys.readouterr().out)))[:2] == [["name", "n"], ["generate", "6"]]
    assert cli.main(["sql", str(spool.run_dir), QUERY, "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"name": "generate", "n": 6}
    numbers = "SELECT 'nan'::DOUBLE AS a, ['inf'::DOUBLE, 1] AS b"
    assert cli.main(["sql", str(spool.run_dir), numbers, "--json"]) == cli.OK
    assert capsys.readouterr().out == '{"a": null, "b": [null, 1.0]}\n', "JSON has no NaN"


def test_a_query_that_is_none(spool, capsys):
    """Catches a traceback at a typing error."""
    assert cli.main(["sql", str(spool.run_dir), "SELEC 1"]) == cli.UNUSABLE
    assert re.fullmatch(r"raytrace-rl: .*SELEC.*\n", capsys.readouterr().err)
    for empty in ("", " ;", "-- nothing"):
        assert cli.main(["sql", str(spool.run_dir), empty]) == cli.UNUSABLE
        assert capsys.readouterr().err == "raytrace-rl: the query is empty\n"


@pytest.mark.parametrize("module", ["duckdb", "pyarrow.parquet"])
@pytest.mark.parametrize("command", [["sql", "RUN", QUERY], ["export", "RUN", "--format", "parquet", "--out", "OUT"]])
def test_without_the_extra_the_command_says_what_to_install(spool, tmp_path, monkeypatch, capsys, module, command):
    """Catches an ImportError's traceback in an environment without the extra."""
    monkeypatch.setitem(sys.modules, module, None)
    arguments = [
        str(spool.run_dir) if one == "RUN" else str(tmp_path / "out") if one == "OUT" else one for one in command
    ]
    assert cli.main(arguments) == cli.UNUSABLE
    assert "pip install 'raytrace-rl[report]'" in capsys.readouterr().err


def test_parquet_export_has_the_documented_columns(spool, tmp_path, capsys):
    """Catches a column that docs/sql.md does not describe, or one it describes in vain."""
    import pyarrow.parquet as pq

    out = tmp_path / "tables"
    assert cli.main(["export", str(spool.run_dir), "--format", "parquet", "--out", str(out)]) == cli.OK
    assert "8 spans written" in capsys.readouterr().err
    page = (Path(__file__).parents[1] / "docs" / "sql.md").read_text()
    for table in store.TABLES:
        section = page.split(f"\n## {table}\n")[1].split("\n## ")[0]
        described = {
            name
            for line in section.splitlines()
            if line.startswith("| `")
            for name in re.findall(r"`(\w+)`", line.split("|")[1])
        }
        assert set(pq.read_schema(out / f"{table}.parquet").names) == described, table
    assert pq.read_table(out / "spans.parquet").num_rows == 8
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{table}.parquet" for table in store.TABLES)
    assert (
        cli.main(["export", str(spool.run_dir), "--format", "parquet", "--out", str(out / "spans.parquet")])
        == cli.UNUSABLE
    )


@pytest.mark.parametrize("table", ["spans", "metrics", "logs", "stacks", "processes", "runs"])
def test_a_loaded_run_gives_the_same_tables(spool, table):
    """Catches a column of the Arrow tables that is not that of SQL, or holds something else."""
    wanted = store.Store(spool.run_dir)
    try:
        query = f"SELECT * FROM {table}" + (" ORDER BY start_ns, span_id" if table == "spans" else "")
        expected = wanted.connection.sql(query).to_arrow_table().to_pylist()
    finally:
        wanted.close()
    found = load_run(spool.run_dir).arrow(table)
    rows = found.to_pylist()
    if table == "spans":
        rows.sort(key=lambda row: (row["start_ns"], row["span_id"]))
    assert [list(row) for row in rows] == [list(row) for row in expected]
    assert rows == expected
