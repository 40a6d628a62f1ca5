"""A real trace backend: the demo on Ray sends to an Arize Phoenix server, which is then asked for what it has.

`make test-phoenix` installs the server in an environment of its own and names it in ``PHOENIX``; without it there is
nothing to test here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl.monitor import load_run
from tests.relay.real_collector import free_ports
from tests.running import wait_for

PHOENIX = os.environ.get("PHOENIX", "")
ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(not PHOENIX, reason="`make test-phoenix` installs a Phoenix server, and runs this"),
]


class Phoenix:
    """A server that runs."""

    def __init__(self, http: int, grpc: int) -> None:
        self.grpc_url = f"http://127.0.0.1:{grpc}"
        self._url = f"http://127.0.0.1:{http}"

    def answers(self) -> bool:
        """Whether it is up."""
        try:
            urllib.request.urlopen(f"{self._url}/healthz", timeout=5).close()
        except OSError:
            return False
        return True

    def spans(self) -> dict[str, dict[str, Any]]:
        """Every span that it has, by its id."""
        found: dict[str, dict[str, Any]] = {}
        cursor = ""
        while True:
            page = f"{self._url}/v1/projects/default/spans/otlpv1?limit=500" + (f"&cursor={cursor}" if cursor else "")
            with urllib.request.urlopen(page, timeout=30) as answer:
                told = json.load(answer)
            for one in told["data"]:
                assert found.setdefault(one["span_id"], one) is one, "no span twice"
            cursor = told["next_cursor"]
            if not cursor:
                return found


@contextmanager
def phoenix(directory):
    """A server with an empty database, for the length of a ``with`` statement."""
    http, grpc = free_ports()
    env = {
        **os.environ,
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_WORKING_DIR": str(directory),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    log = directory / "phoenix.log"
    with log.open("wb") as out, subprocess.Popen([PHOENIX, "serve"], env=env, stdout=out, stderr=out) as process:
        server = Phoenix(http, grpc)
        try:
            wait_for(lambda: server.answers() or process.poll() is not None, "Phoenix is up", timeout_s=180)
            assert process.poll() is None, log.read_text()
            yield server
        finally:
            process.terminate()


def value(held):
    """What an attribute holds, as Phoenix tells it."""
    (found,) = [one for one in held.values() if one is not None] or [None]
    if isinstance(found, dict):
        return [value(one) for one in found["values"]]
    return found


def test_phoenix_has_every_span_of_the_demo_as_it_was(tmp_path):
    """Catches spans that a real backend refuses, drops or hangs elsewhere, though our own receivers take them."""
    directory = tmp_path / "phoenix"
    directory.mkdir()
    run_dir = tmp_path / "run"
    with phoenix(directory) as server:
        env = {
            **os.environ,
            "RAYTRACE_RL_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": server.grpc_url,
        }
        command = [sys.executable, "-m", "examples.async_grpo", "--steps", "3", "--run-dir", str(run_dir)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        run = load_run(run_dir)
        rows = {row.span_id: row for row in run.spans}
        assert len({row.process.key for row in run.spans}) >= 5
        # Phoenix acknowledges a request before its database has it.
        wait_for(lambda: len(server.spans()) >= len(rows), "it has them all", timeout_s=60)
        found = server.spans()
    assert found.keys() == rows.keys()
    assert Counter(one["name"] for one in found.values()) == Counter(row.name for row in rows.values())
    for span_id, row in rows.items():
        one = found[span_id]
        assert (one["trace_id"], one["parent_span_id"]) == (row.trace_id, row.parent_span_id), row.name
        assert (one["name"], one["kind"]) == (row.name, f"SPAN_KIND_{row.kind}")
        # Phoenix keeps microseconds.
        assert abs(one["start_time_unix_nano"] - row.start_ns) < 2000
        assert abs(one["end_time_unix_nano"] - row.end_ns) < 2000
        assert {held["key"]: value(held["value"]) for held in one["attributes"]} == row.attributes, row.name
