"""The processes of a soak, each a program of its own: ``python -m tests.soak_processes ROLE DIRECTORY ...``.

What they report is mapped files with a byte for each span, by its number: what was written by a kill stays. ``noted``
by a writer once the span has ended; ``received`` counts arrivals at the server, ``cut`` those marked as truncated.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: What stands in ``noted``.
ENDED, BEGUN = 1, 2
#: Spans that the collector has open at any moment, and how long each of them is (seconds), twice this at most.
OPEN = 512
_OPEN_S = 30.0
#: A writer that is late makes up for it, but not more than this at once (spans).
_BURST = 200


def flags(directory: Path, kind: str, rank: int, size: int = 0) -> mmap.mmap:
    """Maps the file of one writer; makes it, of ``size`` bytes, if there is a size."""
    path = directory / f"{kind}-{rank}"
    if size:
        path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def write(directory: Path, rank: int, rate: float) -> None:
    """Ends ``rate`` spans a second until SIGTERM, then shuts down in order."""
    from raytrace_rl import setup
    from raytrace_rl.instrumentation import managed_span

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    noted = flags(directory, "noted", rank)
    setup.init_telemetry_worker(rank=rank, worker_group="soak")
    begun, n = time.monotonic(), 0
    while not stopped.wait(0.02):
        due = min(int((time.monotonic() - begun) * rate), n + _BURST, len(noted))
        while n < due:
            with managed_span("generation", "soak.work", n=n, note="x" * 100, share=0.25):
                pass
            noted[n] = ENDED
            n += 1
    setup.shutdown_telemetry()


def collect(directory: Path, rank: int, rate: float) -> None:
    """An asynchronous collector: `OPEN` rollouts at any moment, and short spans besides, until it is killed."""
    from raytrace_rl import setup
    from raytrace_rl.instrumentation import managed_span, umbrella_span
    from raytrace_rl.integrations.collector import CollectorThreads

    noted = flags(directory, "noted", rank)
    setup.init_telemetry_worker(rank=rank, worker_group="soak")
    chosen = random.Random(rank)
    numbers = itertools.count()

    async def rollout() -> None:
        while True:
            n = next(numbers)
            with umbrella_span("rollout", "soak.rollout", n=n, turns=0) as span:
                noted[n] = BEGUN
                for turn in range(4):
                    await asyncio.sleep(chosen.uniform(0, _OPEN_S) / 2)
                    span.set_attribute("turns", turn)
            noted[n] = ENDED

    async def steps() -> None:
        while True:
            await asyncio.sleep(1 / rate)
            n = next(numbers)
            with managed_span("generation", "soak.work", n=n, note="y" * 100):
                pass
            noted[n] = ENDED

    async def loop() -> None:
        await asyncio.gather(steps(), *(rollout() for _ in range(OPEN)))

    threads = CollectorThreads()
    thread = threads.thread(loop, name="collection-loop")
    thread.start()
    thread.join()


def relay(node_dir: str, run_id: str, url: str, bound_bytes: int) -> None:
    """The node's relay, until SIGTERM; then it sends what is left."""
    from raytrace_rl import _env_otlp
    from raytrace_rl.relay.relay import relay_for
    from raytrace_rl.relay.work import Work

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    settings = _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    running = relay_for(Work(node_dir, run_id, settings, idle_s=1e9, bound_bytes=bound_bytes))
    assert running.acquire(30)
    running.start()
    print("ready", flush=True)
    stopped.wait()
    print("drained" if running.drain(120) else "not drained", flush=True)
    running.stop()


def serve(directory: Path) -> None:
    """A real OTLP/gRPC receiver that counts the arrivals of each span; prints its port."""
    import grpc
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    known: dict[int, tuple[mmap.mmap, mmap.mmap]] = {}
    lock = threading.Lock()

    def take(data: bytes, _context: Any) -> bytes:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            rank = next((a.value.int_value for a in resource.resource.attributes if a.key == "nv.dl.rank"), None)
            if rank is None:
                continue
            with lock:
                if rank not in known:
                    known[rank] = flags(directory, "received", rank), flags(directory, "cut", rank)
                received, cut = known[rank]
                for span in (one for scope in resource.scope_spans for one in scope.spans):
                    values = {a.key: a.value for a in span.attributes}
                    if "n" in values:
                        n = values["n"].int_value
                        (cut if "rl.truncated" in values else received)[n] += 1
        return b""

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            handler = take if "TraceService" in details.method else lambda _data, _context: b""
            return grpc.unary_unary_rpc_method_handler(handler)

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handlers()])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    threading.Event().wait()


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    if role == "relay":
        relay(where, rest[0], rest[1], int(rest[2]))
    elif role == "serve":
        serve(Path(where))
    else:
        (write if role == "write" else collect)(Path(where), int(rest[0]), float(rest[1]))
