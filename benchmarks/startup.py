"""What it takes to begin: importing the package, and a worker from its start to its first span.

Each sample is a process of its own; it measures itself, so that the interpreter's start is in neither figure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Final

from benchmarks.rounds import ratio
from benchmarks.table import Row

ROUNDS: Final = 11

_IMPORT: Final = """
from time import perf_counter
begun = perf_counter()
import {module}
print(perf_counter() - begun)
"""

_OURS: Final = """
from time import perf_counter
begun = perf_counter()
from raytrace_rl import managed_span, setup
setup.init_telemetry_worker()
with managed_span("generation", "rl.grpo.generation"):
    pass
print(perf_counter() - begun, flush=True)
import os
os._exit(0)
"""

#: Against a port where nobody listens: setting up does not wait for the collector.
_SDK: Final = """
from time import perf_counter
begun = perf_counter()
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
provider = TracerProvider(resource=Resource.create({"service.name": "worker"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter("http://127.0.0.1:9", insecure=True)))
trace.set_tracer_provider(provider)
with trace.get_tracer("benchmarks").start_as_current_span("rl.grpo.generation"):
    pass
print(perf_counter() - begun, flush=True)
import os
os._exit(0)
"""


def _sample(program: str, environment: dict[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment},
    )
    return float(done.stdout.split()[-1])


def rows() -> list[Row]:
    """Measures the contenders in turn, each in a fresh process."""
    programs = {
        "import ours": _IMPORT.format(module="raytrace_rl"),
        "import theirs": _IMPORT.format(module="opentelemetry.trace"),
        "worker ours": _OURS,
        "worker theirs": _SDK,
    }
    found: dict[str, list[float]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as run_dir:
        environment = {
            "RAYTRACE_RL_ENABLED": "1",
            "RAYTRACE_RL_RUN_DIR": run_dir,
            "RAYTRACE_RL_RUN_ID": "startup",
            "RAYTRACE_RL_SPAN_GROUPS": "per_step",
            # An installed package is compiled; a checkout may not be, where bytecode is not to be written into it.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": f"{run_dir}/bytecode",
        }
        for turn in range(ROUNDS + 1):
            for name, program in programs.items():
                seconds = _sample(program, environment)
                if turn:  # the first one has written the bytecode
                    found[name].append(seconds)
    return [
        ratio(
            "import raytrace_rl / import opentelemetry.trace",
            found["import ours"],
            found["import theirs"],
            bar=1.5,
            aim=1.2,
        ),
        ratio(
            "worker to first span / SDK provider + OTLP exporter to it",
            found["worker ours"],
            found["worker theirs"],
            bar=0.5,
            aim=0.2,
        ),
    ]
