"""How many spans a second one core forwards to a null OTLP server: our relay, and the SDK's own batch exporter.

Server, writer, relay and SDK are processes of their own; relay and SDK are each held to one core, the server to the
other. The server takes real gRPC, counts the spans in each request by walking over their lengths, and acknowledges.
The relay starts with a full spool and is done when everything is acknowledged; the SDK is given spans that have ended
already, and is done when ``force_flush`` returns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.table import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Spans in the spool that the relay finds, and spans that the SDK exports.
SPANS = 500_000
SDK_SPANS = 40_000
ROUNDS = 3

_SERVER = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from raytrace_rl.relay.raw import fields

spans = 0

def count(data):
    found = 0
    for tag, _, at, stop in fields(data):
        resource = data[at:stop]
        for tag, _, at, stop in fields(resource):
            if tag == 0x12:
                found += sum(1 for tag, *_ in fields(resource[at:stop]) if tag == 0x12)
    return found

class Null(grpc.GenericRpcHandler):
    def service(self, details):
        def take(data, context):
            global spans
            if "Trace" in details.method:
                spans += count(data)
            return b""
        return grpc.unary_unary_rpc_method_handler(take)

server = grpc.server(ThreadPoolExecutor(2), handlers=[Null()], options=[("grpc.max_receive_message_length", 4 << 20)])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
for line in sys.stdin:
    print(spans, flush=True)
"""

_WRITER = """
import sys
from raytrace_rl import init_telemetry_driver, managed_span, shutdown_telemetry
init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "spool_max_mib": 4096})
for n in range(int(sys.argv[2])):
    with managed_span("generation", "rl.grpo.generation", prompts=n & 63, mode="train"):
        pass
shutdown_telemetry()
"""

_RELAY = """
import json, os, resource, sys, time
from pathlib import Path
from raytrace_rl import _env_otlp
from raytrace_rl.relay.relay import Relay
(node_dir,) = (Path(sys.argv[1]) / "spool").iterdir()
relay = Relay(node_dir, _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": sys.argv[2]}))
assert relay.acquire()
begun, cpu = time.monotonic(), time.process_time()
relay.start()
assert relay.drain(600)
seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
relay.stop()
print(json.dumps({"spans": relay.counts()["traces"]["sent"], "seconds": seconds, "cpu_s": cpu,
                  "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""

_SDK = """
import json, resource, sys, time
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
ended = []
class Keep(SpanProcessor):
    def on_end(self, span):
        ended.append(span)
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(Keep())
tracer = provider.get_tracer("benchmark")
for n in range(int(sys.argv[1])):
    with tracer.start_as_current_span("rl.grpo.generation", attributes={"prompts": n & 63, "mode": "train"}):
        pass
exporter = OTLPSpanExporter(sys.argv[2], insecure=True)
batch = BatchSpanProcessor(exporter, max_queue_size=len(ended) + 1, max_export_batch_size=8192)
begun, cpu = time.monotonic(), time.process_time()
for span in ended:
    batch.on_end(span)
assert batch.force_flush(600_000)
seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
batch.shutdown()
print(json.dumps({"spans": len(ended), "seconds": seconds, "cpu_s": cpu,
                  "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


@dataclass(frozen=True)
class Export:
    """One contender's run.

    Attributes:
        spans: What the server counted.
        seconds: Wall clock from the first to the last acknowledgement.
        cpu_s: CPU time of the process meanwhile.
        rss_mib: Its largest resident memory.
    """

    spans: int
    seconds: float
    cpu_s: float
    rss_mib: float

    @property
    def rate(self) -> float:
        """Spans acknowledged a second."""
        return self.spans / self.seconds


def rows() -> list[Row]:
    """Measures both in turn."""
    relay: list[Export] = []
    sdk: list[Export] = []
    with tempfile.TemporaryDirectory() as run_dir:
        _python(_WRITER, run_dir, SPANS)
        for _ in range(ROUNDS):
            # A server of its own each: to the relay's cursors it is another destination, which has nothing yet.
            for found, code, arguments, spans in (
                (relay, _RELAY, [run_dir], SPANS),
                (sdk, _SDK, [SDK_SPANS], SDK_SPANS),
            ):
                with _server() as (port, counted):
                    one = _export(code, *arguments, f"http://127.0.0.1:{port}")
                    _check(one, counted(), spans)
                    found.append(one)
    rate, theirs = (statistics.median(one.rate for one in each) for each in (relay, sdk))
    ratios = [mine.rate / other.rate for mine, other in zip(relay, sdk, strict=True)]
    return [
        Row(
            "thousand spans a second through one relay core",
            rate / 1e3,
            _spread([one.rate / 1e3 for one in relay]),
            bar=100,
            aim=200,
            ours=f"{rate:,.0f}/s",
            theirs=f"{theirs:,.0f}/s",
            unit="k",
            at_least=True,
        ),
        Row(
            "the same / SDK's batch exporter, one core each",
            statistics.median(ratios),
            _spread(ratios),
            bar=5,
            aim=12,
            ours=f"{relay[0].cpu_s / SPANS * 1e6:.2f} µs",
            theirs=f"{sdk[0].cpu_s / SDK_SPANS * 1e6:.2f} µs",
            at_least=True,
        ),
        Row(
            "largest resident memory of the relay",
            max(one.rss_mib for one in relay),
            _spread([one.rss_mib for one in relay]),
            bar=200,
            aim=100,
            ours=f"{max(one.rss_mib for one in relay):.0f} MiB",
            theirs=f"{max(one.rss_mib for one in sdk):.0f} MiB",
            unit="Mi",
        ),
    ]


def _spread(values: list[float]) -> float:
    first, _, third = statistics.quantiles(values, n=4)
    return third - first


def _check(found: Export, counted: int, expected: int) -> None:
    if not found.spans == counted == expected:
        raise RuntimeError(f"{expected} spans: {found.spans} acknowledged, {counted} counted by the server")


def _export(code: str, *arguments: object) -> Export:
    return Export(**json.loads(_python(code, *arguments, core=0)))


def _python(code: str, *arguments: object, core: int | None = None) -> str:
    done = subprocess.run(
        _command(code, core, *arguments), check=True, capture_output=True, text=True, timeout=900, env=_environment()
    )
    return done.stdout


def _command(code: str, core: int | None, *arguments: object) -> list[str]:
    cores = sorted(os.sched_getaffinity(0))
    if core is not None and len(cores) > 1:
        code = f"import os; os.sched_setaffinity(0, {{{cores[core]}}})\n{code}"
    return [sys.executable, "-c", code, *map(str, arguments)]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "RAYTRACE_RL_"))}


@contextmanager
def _server() -> Iterator[tuple[int, Any]]:
    with subprocess.Popen(
        _command(_SERVER, 1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def counted() -> int:
            stdin.write("\n")
            stdin.flush()
            return int(stdout.readline())

        try:
            yield int(stdout.readline()), counted
        finally:
            process.kill()
