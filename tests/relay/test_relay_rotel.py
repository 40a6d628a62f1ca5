"""The relay before a real collector: what arrives behind it, over both protocols, and restarts of it."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from raytrace_rl import _env_otlp, _process
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.relay import lane, retry
from raytrace_rl.relay.relay import Relay
from tests.relay.otlp_server import receiver
from tests.relay.real_collector import collector, free_ports
from tests.running import attributes, running, wait_for
from tests.spooling import Spool, ended, span

pytest_plugins = ["tests.telemetry_fixtures"]

P = "OTEL_EXPORTER_OTLP_"


@pytest.mark.parametrize(("protocol", "compression"), [("grpc", "none"), ("grpc", "gzip"), ("http/protobuf", "gzip")])
def test_what_was_recorded_stands_behind_a_real_collector(tmp_path, protocol, compression):
    """Catches requests that our own receiver takes and a real one does not, or understands otherwise."""
    with (
        receiver() as behind,
        collector(
            tmp_path, "--exporter", "otlp", "--otlp-exporter-endpoint", behind.url, "--batch-timeout", "50ms"
        ) as rotel,
        running(tmp_path / "run", logs_enabled=True) as telemetry,
    ):
        for n in range(300):
            with managed_span("generation", "s", n=n):
                if n == 7:
                    logging.getLogger("user").warning("seven")
        telemetry.handle.meter.create_counter("rl.test.count").add(3)
        _process._metrics_pipeline.stop(1e9)
        node_dir = next((tmp_path / "run" / "spool").iterdir())
        url = rotel.grpc if protocol == "grpc" else rotel.http
        settings = _env_otlp.settings({P + "ENDPOINT": url, P + "PROTOCOL": protocol, P + "COMPRESSION": compression})
        relay = Relay(node_dir, settings)
        assert relay.acquire()
        relay.start()
        assert relay.drain(20), {one.signal.name: one.failure for one in relay.lanes}
        relay.stop()
        behind.wait(lambda: len(behind.spans()) == 300, "the spans are through")
        behind.wait(lambda: len({name for name, _ in behind.received}) == 3, "metrics and logs are through")
        assert Counter(attributes(one)["n"] for one in behind.spans()) == Counter(range(300))
        request = next(request for name, request in behind.received if name == "TraceService")
        assert request.resource_spans[0].scope_spans[0].scope.name == "raytrace_rl"
        assert attributes(request.resource_spans[0].resource)["rl.role"] == "driver"
        logs = next(request for name, request in behind.received if name == "LogsService")
        (record,) = logs.resource_logs[0].scope_logs[0].log_records
        (seven,) = [one for one in behind.spans() if attributes(one)["n"] == 7]
        assert (record.body.string_value, record.span_id) == ("seven", seven.span_id)


def test_a_collector_that_is_restarted_gets_the_rest(tmp_path, monkeypatch):
    """Catches spans lost, or everything sent anew, when a collector is restarted under the relay."""
    monkeypatch.setattr(retry, "FIRST_S", 0.02)
    monkeypatch.setattr(retry, "LONGEST_S", 0.2)
    monkeypatch.setattr(lane, "INTERVAL_S", 0.02)
    monkeypatch.setattr(lane, "MAX_RECORDS", 500)
    spool = Spool(tmp_path / "run")
    live = spool.alive(1)
    ports = free_ports()
    relay = Relay(spool.node_dir, _env_otlp.settings({P + "ENDPOINT": f"http://127.0.0.1:{ports[0]}"}))
    assert relay.acquire()
    relay.start()
    received = 0
    for life in range(5):
        with collector(tmp_path, ports=ports) as rotel:
            goal = relay.counts()["traces"]["sent"] + 1500
            for part in range(4):
                numbers = range(life * 2000 + part * 500, life * 2000 + part * 500 + 500)
                spool.segment(1, ended(*[span(n, 0, 1) for n in numbers]), life * 4 + part, pad=100)
            if life == 4:
                goal = 10_000
            while relay.counts()["traces"]["sent"] < goal:
                wait_for(lambda: relay.drain(1), "it sends")
            rotel.stop()
            received += rotel.received()
    relay.stop()
    live.release()
    assert 10_000 <= received <= 10_000 + 4 * 500
