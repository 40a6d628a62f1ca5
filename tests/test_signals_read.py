"""Reading metrics and logs back from the spools of a run, damaged ones included."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ScopeLogs
from opentelemetry.proto.metrics.v1 import metrics_pb2

from raytrace_rl import _decode_logs, _decode_metrics, _metrics_pipeline, managed_span
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.model import Process
from raytrace_rl.monitor.signals import log_rows, metric_rows
from raytrace_rl.spool.format import Kind, pack_header, pack_record
from tests.signals_running import signals
from tests.spooling import attributes, header, resource


def point(value: int, time_ns: int, **labels: str) -> metrics_pb2.NumberDataPoint:
    """A data point."""
    return metrics_pb2.NumberDataPoint(as_int=value, time_unix_nano=time_ns, attributes=attributes(labels))


def gauge(name: str, *points: metrics_pb2.NumberDataPoint) -> bytes:
    """A METRICS payload with one gauge."""
    metric = metrics_pb2.Metric(name=name, unit="s", gauge=metrics_pb2.Gauge(data_points=points))
    return metrics_pb2.ScopeMetrics(scope=InstrumentationScope(name="scope"), metrics=[metric]).SerializeToString()


def log(text: str, time_ns: int) -> bytes:
    """A LOGS payload with one record."""
    record = LogRecord(time_unix_nano=time_ns, severity_number=9, severity_text="INFO")
    record.body.string_value = text
    return ScopeLogs(scope=InstrumentationScope(name="a.b"), log_records=[record]).SerializeToString()


def spool(run_dir: Path, pid: int, *records: tuple[int, bytes], resource: bytes = b"", number: int = 0) -> Path:
    """A segment of a process that wrote these records."""
    path = run_dir / "spool" / "node" / f"{pid}-1000.{number}.rts"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack_header(header(resource=resource)) + b"".join(pack_record(*each) for each in records))
    return path


def resource_of(group: str) -> bytes:
    """A Resource with a worker group."""
    return bytes(resource(rl__worker_group=group))


def test_rows_of_all_processes_in_the_order_of_time(tmp_path):
    """Catches points of one process hiding another's, or a series that jumps back and forth in time."""
    spool(tmp_path, 1, (Kind.METRICS, gauge("m", point(1, 10), point(4, 40))), resource=resource_of("train"))
    spool(tmp_path, 2, (Kind.METRICS, gauge("m", point(2, 20))), (Kind.METRICS, gauge("m", point(3, 30, k="v"))))
    rows = load_run(tmp_path).metrics
    assert [(row.value, row.process.pid) for row in rows] == [(1, 1), (2, 2), (3, 2), (4, 1)]
    assert rows[0].process.worker_group == "train"
    assert (rows[2].attributes, rows[2].unit, rows[2].scope, rows[2].kind) == ({"k": "v"}, "s", "scope", "gauge")
    assert "m" in repr(rows[0])
    assert load_run(tmp_path / "spool").metrics[0].value == 1


def test_logs_and_metrics_do_not_mix(tmp_path):
    """Catches a record of one kind decoded as the other."""
    spool(tmp_path, 1, (Kind.LOGS, log("late", 20)), (Kind.METRICS, gauge("m", point(1, 10))), (Kind.LOGS, log("e", 5)))
    run = load_run(tmp_path)
    assert [(row.body, row.logger, row.severity) for row in run.logs] == [("e", "a.b", 9), ("late", "a.b", 9)]
    assert len(run.metrics) == 1
    assert run.damage == []


def test_the_latest_resource_names_the_process(tmp_path):
    """Catches an actor whose identity came after its start being nobody."""
    spool(tmp_path, 1, (Kind.METRICS, gauge("m", point(1, 1))), (Kind.RESOURCE, resource_of("late")))
    spool(tmp_path, 1, (Kind.METRICS, gauge("m", point(2, 2))), resource=resource_of("early"), number=1)
    assert {row.process.worker_group for row in load_run(tmp_path).metrics} == {"late"}


def test_what_cannot_be_read_is_said_and_the_rest_is_there(tmp_path):
    """Catches a torn or foreign record that hides a run's metrics, or that is passed over in silence."""
    path = spool(
        tmp_path,
        1,
        (Kind.METRICS, gauge("m", point(1, 1))),
        (Kind.METRICS, b"\xff\xff\xff"),
        (Kind.METRICS, gauge("m", point(2, 2))),
    )
    data = bytearray(path.read_bytes())
    data[-3] ^= 0xFF
    path.write_bytes(bytes(data))
    spool(tmp_path, 2, (Kind.METRICS, gauge("m", point(3, 3))), resource=b"\xff")
    run = load_run(tmp_path)
    assert [row.value for row in run.metrics] == [1, 3]
    assert {each.kind for each in run.damage} >= {"payload"}


def test_rows_of_a_payload():
    """Catches the two functions that ``load_run`` uses knowing another payload than the spool has."""
    process = Process("p")
    (row,) = metric_rows(gauge("m", point(7, 1)), process)
    assert (row.value, row.process) == (7, process)
    (line,) = log_rows(log("x", 3), process)
    assert (line.body, line.time_ns, line.process, line.trace_id) == ("x", 3, process, None)
    assert "INFO" in repr(line)


def test_fields_that_are_not_packed_and_kinds_that_we_do_not_write():
    """Catches another encoder's summary or unpacked bucket counts being refused, or read as something else."""
    unpacked = b"\x31" + (3).to_bytes(8, "little") + b"\x39" + bytes(8) + b"\x21" + (3).to_bytes(8, "little")
    (metric,) = _decode_metrics.scope_metrics(_wrap(0x4A, unpacked)).metrics
    assert (metric.points[0].bucket_counts, metric.points[0].bounds) == ((3,), (0.0,))
    summary = metrics_pb2.Metric(
        name="s", summary=metrics_pb2.Summary(data_points=[metrics_pb2.SummaryDataPoint(count=2, sum=3.5)])
    )
    message = metrics_pb2.ScopeMetrics(metrics=[summary]).SerializeToString()
    (row,) = metric_rows(message, Process("p"))
    assert (row.kind, row.count, row.sum, row.min) == ("summary", 2, 3.5, None)
    bare = metrics_pb2.ScopeMetrics(
        metrics=[metrics_pb2.Metric(histogram=metrics_pb2.Histogram(data_points=[metrics_pb2.HistogramDataPoint()]))]
    )
    (row,) = metric_rows(bare.SerializeToString(), Process("p"))
    assert (row.count, row.sum, row.bucket_counts) == (0, None, ())


def _wrap(tag: int, point_bytes: bytes) -> bytes:
    """A ScopeMetrics around one data point of a kind."""
    data = b"\x0a" + bytes([len(point_bytes)]) + point_bytes
    metric = bytes([tag, len(data)]) + data
    return b"\x12" + bytes([len(metric)]) + metric


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_value_error(data):
    """Catches a record of rubbish that ends the reading of a run in another way than as damage."""
    for decode in (
        _decode_metrics.scope_metrics,
        _decode_metrics.metric,
        _decode_logs.scope_logs,
        _decode_logs.log_record,
    ):
        try:
            decode(data)
        except ValueError:
            continue


@given(st.data())
def test_broken_messages_are_a_message_or_a_value_error(data):
    """Catches the same in bytes that are almost a message: in every field of every kind of point."""
    buckets = metrics_pb2.ExponentialHistogramDataPoint.Buckets(offset=-3, bucket_counts=[1, 300, 2**40])
    point = metrics_pb2.ExponentialHistogramDataPoint(count=3, sum=1.5, scale=2, positive=buckets, negative=buckets)
    exponential = metrics_pb2.ExponentialHistogram(data_points=[point], aggregation_temporality=2)
    explicit = metrics_pb2.HistogramDataPoint(count=3, bucket_counts=[1, 2], explicit_bounds=[0.5], min=0.1, max=2)
    message = metrics_pb2.ScopeMetrics(
        metrics=[
            metrics_pb2.Metric(name="e", exponential_histogram=exponential),
            metrics_pb2.Metric(name="h", histogram=metrics_pb2.Histogram(data_points=[explicit])),
        ]
    )
    raw = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(0, len(raw))) :]
    try:
        _decode_metrics.scope_metrics(bytes(raw))
    except ValueError:
        return


def test_from_a_running_process_to_rows(tmp_path):
    """Catches any break in the way from a log call and a measurement to what a person reads."""
    with signals(tmp_path / "run", logs_enabled=True) as started:
        with managed_span("generation", "rl.x.y") as span:
            logging.getLogger("a").warning("slow")
        started.handle.meter.create_histogram("h").record(2.5)
        _metrics_pipeline.collect(time.monotonic() + 5)
        run = load_run(started.run_dir)
        (line,), (row,) = run.logs, run.metrics
        assert (line.trace_id, line.span_id) == (span.trace_id.hex(), span.span_id.hex())
        assert (row.count, row.sum, row.min, row.max, sum(row.bucket_counts)) == (1, 2.5, 2.5, 2.5, 1)
        assert row.process.role == line.process.role == "driver"
        assert row.start_ns <= row.time_ns
