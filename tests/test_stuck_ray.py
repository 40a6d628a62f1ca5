from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from raytrace_rl import cli
from tests.running import wait_for

pytestmark = pytest.mark.ray

TRAIN = """
import asyncio, os, sys
import ray
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import TracedActor, accepts_trace_context, managed_span, telemetry_session, traced, umbrella_span

@ray.remote
class Buffer(TracedActor):
    def __init__(self):
        super().__init__(worker_group="replay_buffer")

    @accepts_trace_context
    async def sample(self):
        with managed_span(G.DATA_PLANE, "rl.grpo.buffer_sample"):
            await asyncio.Event().wait()  # here stands the buffer

@ray.remote
class Worker(TracedActor):
    def __init__(self):
        super().__init__(worker_group="generation", rank=0)

    @accepts_trace_context
    def generate(self, buffer):
        with managed_span(G.GENERATION, "rl.grpo.generation"):
            return ray.get(traced(buffer).sample.remote())  # here stands the worker

with telemetry_session({"run_dir": sys.argv[1], "heartbeat_s": 0.1, "stack_after_s": 0.5}) as session:
    session.init_ray(num_cpus=2, include_dashboard=False)
    with umbrella_span(G.U_JOB, "rl.grpo.job"), umbrella_span(G.U_STEP, "rl.grpo.step"):
        buffer, worker = Buffer.remote(), Worker.remote()
        ray.get(traced(worker).generate.remote(buffer))  # here stands the driver
"""
#: The innermost open span of each process, and the comment on the line where it stands.
PLACES = {
    "rl.grpo.buffer_sample": "here stands the buffer",
    "rl.grpo.generation": "here stands the worker",
    "rl.grpo.step": "here stands the driver",
}


def test_who_waits_for_whom_across_actors_alive_and_killed(tmp_path: Path, capsys):
    """Catches a chain of waiting that ends at ``ray.get``, or in the event loop of an async actor."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    run_dir = tmp_path / "run"

    def look():
        cli.main(["stuck", str(run_dir), "--json"])
        text = capsys.readouterr().out
        found = json.loads(text) if text else {"stands": []}
        codes = {
            stand["spans"][0]["name"]: " ".join(f["code"] for part in stand["stack"] for f in part["frames"])
            for stand in found["stands"]
        }
        return found if all(place in codes.get(name, "") for name, place in PLACES.items()) else None

    with subprocess.Popen([sys.executable, str(script), str(run_dir)], stderr=subprocess.DEVNULL) as driver:
        try:
            live = wait_for(look, "every stack", timeout_s=120)
        finally:
            driver.send_signal(signal.SIGKILL)
    for stand in live["stands"]:
        # Ray's own take down a worker whose driver is gone, cleanly; here they are to die as on a lost node.
        if stand["process"]["role"] == "worker":
            try:
                os.kill(stand["process"]["pid"], signal.SIGKILL)
            except ProcessLookupError:
                pass
    dead = wait_for(lambda: (found := look()) and found["run"]["state"] == "over" and found, "the run being over")
    for found in (live, dead):
        buffer, worker, driver_ = found["stands"]
        assert [one["spans"][0]["name"] for one in (buffer, worker, driver_)] == list(PLACES)
        assert buffer["stack"][0]["title"].startswith("Task")
        assert [one["stand"] for one in worker["waits_for"]] == [1]
        assert [one["stand"] for one in driver_["waits_for"]] == [2]
