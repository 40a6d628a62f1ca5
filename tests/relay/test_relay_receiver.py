from __future__ import annotations

import contextlib
import gzip
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import threading
from collections import Counter

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceResponse,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource as SdkResource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from raytrace_rl._env_otlp import settings
from raytrace_rl.monitor import load_run
from raytrace_rl.relay import address, intake
from raytrace_rl.relay import receiver as module
from raytrace_rl.relay.lock import NodeLock
from raytrace_rl.relay.relay import relay_for
from raytrace_rl.relay.work import Work
from tests import spooling
from tests.relay.otlp_server import receiver
from tests.relay.receiving import post, traces
from tests.running import attributes, wait_for

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.receiver_fixtures"]


def test_spans_of_an_sdk_land_in_the_run_over_the_socket(relay, node_dir):
    """Catches an engine's server whose spans stand in no run, under no name, or out of the trace."""
    provider = TracerProvider(resource=SdkResource({"service.name": "sglang"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(address.local_endpoint("r"), insecure=True)))
    with provider.get_tracer("engine").start_as_current_span("request", attributes={"n": 7}):
        pass
    provider.shutdown()
    run = load_run(node_dir.parent.parent)
    (row,) = run.spans
    assert (row.name, row.attributes["n"], row.scope.name) == ("request", 7, "engine")
    assert row.process.resource["service.name"] == "sglang"
    assert row.process.resource["rl.run.id"] == "r"
    assert row.process.state == "alive"
    relay.stop()
    assert load_run(node_dir.parent.parent).processes[0].state == "closed"
    assert not address.socket_path("r").exists()


def test_all_signals_are_taken_over_http_and_sent_on(node_dir):
    """Catches a signal that is dropped, or does not reach the collector behind the relay."""
    with receiver() as server:
        running = relay_for(
            Work(str(node_dir), "r", settings({"OTEL_EXPORTER_OTLP_ENDPOINT": server.url}), receives=True)
        )
        assert running.acquire()
        running.start()
        point = NumberDataPoint(as_double=1.5, time_unix_nano=5)
        metric = Metric(name="tool.calls", gauge=Gauge(data_points=[point]))
        metrics = ResourceMetrics(scope_metrics=[ScopeMetrics(metrics=[metric])])
        logs = ResourceLogs(scope_logs=[ScopeLogs(log_records=[LogRecord(severity_text="INFO")])])
        assert post(traces(spooling.span(1, 0, 1)).SerializeToString()) == (200, b"")
        data = ExportMetricsServiceRequest(resource_metrics=[metrics]).SerializeToString()
        assert post(data, path="/v1/metrics") == (200, b"")
        data = gzip.compress(ExportLogsServiceRequest(resource_logs=[logs]).SerializeToString())
        assert post(data, path="/v1/logs", **{"Content-Encoding": "gzip"}) == (200, b"")
        server.wait(lambda: len(server.received) == 3, "all are sent on")
        running.stop()
        assert server.numbers() == [1]
        assert Counter(name for name, _ in server.received) == {
            "TraceService": 1,
            "MetricsService": 1,
            "LogsService": 1,
        }


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"token": "wrong"}, 401),
        ({"token": ""}, 401),
        ({"path": "/v1/other"}, 404),
        ({"kind": "application/json"}, 415),
        ({"Content-Length": str(1 << 30)}, 413),
        ({"Content-Encoding": "gzip"}, 413),
    ],
)
def test_http_refuses_what_it_should(relay, node_dir, options, status):
    """Catches a port of loopback, which every user of the machine reaches, that takes anything from anybody."""
    assert post(b"\x0a\x00", **options)[0] == status
    assert not list(node_dir.glob("*.rts"))


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", traces(b"").SerializeToString()[:-1]])
def test_rubbish_is_refused_and_not_stored(relay, node_dir, data):
    """Catches bytes that would be damage in the run's own files."""
    assert post(data)[0] == 400
    assert not list(node_dir.glob("*.rts"))


def test_a_compressed_bomb_is_refused(relay):
    """Catches a few kilobytes that take all of a node's memory."""
    assert post(gzip.compress(bytes(64 << 20)), **{"Content-Encoding": "gzip"})[0] == 413


def test_all_members_of_a_compressed_body_are_taken(relay, node_dir):
    """Catches spans that are acknowledged and gone: gzip may have several members, one after the other."""
    members = [gzip.compress(traces(spooling.span(n, 0, 1)).SerializeToString()) for n in (1, 2)]
    assert post(b"".join(members), **{"Content-Encoding": "gzip"})[0] == 200
    assert len(load_run(node_dir.parent.parent).spans) == 2
    assert post(members[0][:-4], **{"Content-Encoding": "gzip"})[0] == 413


def test_a_body_that_was_cut_off_is_refused_and_a_sender_that_is_gone_is_no_stack(relay, node_dir, capfd):
    """Catches an acknowledgement of what never came, and stacks on a run's output for each sender that was killed."""
    url, token = wait_for(lambda: address.local_http_endpoint("r"), "it listens")
    where = ("127.0.0.1", int(url.rpartition(":")[2]))
    body = traces(spooling.span(1, 0, 1)).SerializeToString()
    about = f"Authorization: Bearer {token}\r\nContent-Type: application/x-protobuf\r\nContent-Length: {len(body) + 9}"
    head = f"POST /v1/traces HTTP/1.1\r\n{about}\r\n\r\n".encode()
    with socket.create_connection(where) as sender:
        sender.sendall(head + body)
        sender.shutdown(socket.SHUT_WR)
        assert sender.makefile("rb").readline().split()[1] == b"400"
    assert not list(node_dir.glob("*.rts"))
    reset = struct.pack("ii", 1, 0)
    with socket.create_connection(where) as sender:
        sender.sendall(head + body)
        wait_for(lambda: handlers() == 1, "it reads")
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    wait_for(lambda: not handlers(), "it has noticed")
    assert "Traceback" not in capfd.readouterr().err


def test_senders_that_stand_still_in_a_request_keep_nobody_out_for_long(relay, node_dir, monkeypatch):
    """Catches four servers that were stopped in the midst of a request, and no other whose spans come through."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.3)
    url, token = wait_for(lambda: address.local_http_endpoint("r"), "it listens")
    about = f"Authorization: Bearer {token}\r\nContent-Type: application/x-protobuf\r\nContent-Length: 99"
    with contextlib.ExitStack() as stack:
        for _ in range(module._THREADS):
            stalled = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            stack.enter_context(stalled).sendall(f"POST /v1/traces HTTP/1.1\r\n{about}\r\n\r\n".encode())
        wait_for(lambda: handlers() == module._THREADS, "they are in the midst of it")
        assert post(traces(spooling.span(1, 0, 1)).SerializeToString())[0] == 200


def handlers():
    """Threads of the receiver that are at a request over HTTP."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_content_is_redacted_by_key(relay, node_dir):
    """Catches prompts of a tool server that stand in the run, and are sent on, although nobody asked for content."""
    span = Span(trace_id=spooling.TRACE, span_id=b"12345678", name="s")
    content = {"gen_ai.prompt": "who", "gen_ai.usage.completion_tokens": 7, "messages": ["a", "b"], "model": "m"}
    span.attributes.extend(spooling.attributes({**content, "call": {"arguments": "x", "n": 1}}))
    event = span.events.add(name="e")
    event.attributes.extend(spooling.attributes({"content": "secret", "n": 1}))
    link = span.links.add(trace_id=spooling.TRACE, span_id=b"12345678")
    link.attributes.extend(spooling.attributes({"api.key": "secret"}))
    assert post(traces(span.SerializeToString()).SerializeToString())[0] == 200
    (row,) = load_run(node_dir.parent.parent).spans
    assert row.attributes == {
        "gen_ai.prompt": "[redacted]",
        "gen_ai.usage.completion_tokens": 7,
        "messages": "[redacted]",
        "model": "m",
        "call": {"arguments": "[redacted]", "n": 1},
    }
    assert row.events[0].attributes == {"content": "[redacted]", "n": 1}
    assert row.links[0].attributes == {"api.key": "[redacted]"}


def test_content_passes_when_it_is_asked_for(node_dir, monkeypatch):
    """Catches a setting that holds for our own spans alone."""
    monkeypatch.setenv("RAYTRACE_RL_CAPTURE_CONTENT", "1")
    running = relay_for(Work(str(node_dir), "r", receives=True))
    assert running.acquire()
    running.start()
    assert post(traces(spooling.span(1, 0, 1, prompt="who")).SerializeToString())[0] == 200
    running.stop()
    assert load_run(node_dir.parent.parent).spans[0].attributes["prompt"] == "who"


def test_senders_are_told_apart_and_their_number_is_bounded(relay, node_dir, monkeypatch):
    """Catches spans of one server under another's name, and a file a request of a sender that never looks the same."""
    monkeypatch.setattr(intake, "_MOST_SENDERS", 3)
    for n in range(1, 11):
        data = traces(spooling.span(n, 0, 1), host=f"tool-{n % 5}").SerializeToString()
        assert post(data)[0] == 200
    run = load_run(node_dir.parent.parent)
    by_host = Counter((row.process.resource["host"], row.span_id) for row in run.spans)
    assert set(by_host) == {(f"tool-{n % 5}", f"{n:016x}") for n in range(1, 11)}
    assert Counter(process.state for process in run.processes)["alive"] == 3


def test_what_is_larger_than_a_record_is_cut_or_rejected(relay, node_dir):
    """Catches a large request that is refused whole, and a span over 1 MiB that vanishes in silence."""
    spans = [spooling.span(n, 0, 1, note="x" * 200_000) for n in range(1, 11)]
    status, body = post(traces(*spans, spooling.span(99, 0, 1, note="x" * 1_100_000)).SerializeToString())
    assert status == 200
    assert ExportTraceServiceResponse.FromString(body).partial_success.rejected_spans == 1
    assert len(load_run(node_dir.parent.parent).spans) == 10


def test_a_full_segment_is_followed_by_another(relay, node_dir):
    """Catches a receiver that takes a megabyte and no more."""
    for n in range(1, 60):
        assert post(traces(spooling.span(n, 0, 1, note="x" * 100_000)).SerializeToString())[0] == 200
    run = load_run(node_dir.parent.parent)
    assert len(run.spans) == 59
    assert not run.damage
    wait_for(lambda: len([one for one in node_dir.glob("*.rts") if not one.is_symlink()]) > 1, "full ones are sealed")


def test_addresses_are_private(relay, node_dir):
    """Catches a socket, or a token, that other users of the machine can use."""
    wait_for(lambda: address.local_http_endpoint("r"), "it listens")
    assert stat.S_IMODE(address.socket_path("r").parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(address.http_path("r").stat().st_mode) == 0o600


def test_a_directory_that_somebody_else_has_made_is_not_used(node_dir, caplog):
    """Catches a socket in a directory of another user, who can put another in its place."""
    directory = address.socket_path("r").parent
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    running = relay_for(Work(str(node_dir), "r", receives=True))
    assert running.acquire()
    running.start()
    running.stop()
    assert "cannot listen" in caplog.text
    assert not list(directory.iterdir())


def test_a_relay_that_only_listens_leaves_when_idle_and_sends_the_last(node_dir, monkeypatch):
    """Catches a receiver that keeps its relay alive by its own files, or leaves with what came last unsent."""
    with receiver() as server:
        work = Work(str(node_dir), "r", settings({"OTEL_EXPORTER_OTLP_ENDPOINT": server.url}), idle_s=1, receives=True)
        running = relay_for(work)
        over = threading.Event()
        assert running.acquire()
        running.start(over.set)
        assert post(traces(spooling.span(1, 0, 1)).SerializeToString())[0] == 200
        assert over.wait(30)
        assert server.numbers() == [1]
    assert not NodeLock(node_dir).is_held()


def test_what_a_killed_relay_had_taken_is_not_lost(node_dir, root):
    """Catches spans that the receiver acknowledged and only had in memory."""
    code = """
    import sys, threading
    from raytrace_rl.relay import address
    from raytrace_rl.relay.relay import relay_for
    from raytrace_rl.relay.work import Work
    address._ROOT = sys.argv[2]
    relay = relay_for(Work(sys.argv[1], "r", receives=True))
    assert relay.acquire()
    relay.start()
    threading.Event().wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(node_dir), root]
    with subprocess.Popen(command) as process:
        for n in range(1, 51):
            assert post(traces(spooling.span(n, 0, 1)).SerializeToString())[0] == 200
        os.kill(process.pid, signal.SIGKILL)
    with receiver() as server:
        work = Work(str(node_dir), "r", settings({"OTEL_EXPORTER_OTLP_ENDPOINT": server.url}), receives=True)
        running = relay_for(work)
        assert running.acquire(5)
        running.start()
        assert running.drain(20)
        running.stop()
        assert Counter(server.numbers()) == Counter(range(1, 51))
        request = server.received[0][1]
        assert attributes(request.resource_spans[0].resource)["rl.role"] == "worker"
