"""vLLM without our plugin: its own exporter sends to the node's local receiver, and all of it is in the run's tree."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest

from examples.vllm_megatron_grpo.config import EnginesConfig
from examples.vllm_megatron_grpo.engine import ENVIRONMENT
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import setup, traced, umbrella_span
from raytrace_rl.context import TraceContext, trace_context_env
from raytrace_rl.integrations.vllm import trace_headers
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.report import report
from raytrace_rl.relay.address import local_endpoint
from tests.conftest import start_cluster
from tests.running import read_records, spans_of, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from raytrace_rl.monitor.model import Run, SpanRow

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM here: make test-engines"),
]

REQUESTS = 32
CONFIG = EnginesConfig()
RUN_ID = "received"
WITHOUT_PLUGIN = {"VLLM_PLUGINS": "", "OTEL_BSP_SCHEDULE_DELAY": "200"}
SETTINGS = {
    "RAYTRACE_RL_ENABLED": "1",
    "RAYTRACE_RL_RUN_ID": RUN_ID,
    "RAYTRACE_RL_SPAN_GROUPS": "all",
    "RAYTRACE_RL_HEARTBEAT_S": "0.2",
    "RAYTRACE_RL_OTLP_RECEIVER": "1",
}


@dataclass
class Received:
    """The run as it lies there, and who was in it."""

    run: Run
    run_dir: Path
    actor_pids: list[int]
    answers: list[list[int]]

    def sent(self, name: str) -> list[SpanRow]:
        """The spans of a name that came through the receiver."""
        return [span for span in self.run.spans if span.name == name and "vllm.process_id" in span.resource]

    def ancestors(self, span: SpanRow) -> list[SpanRow]:
        """What is above a span, nearest first."""
        spans = {other.span_id: other for other in self.run.spans}
        found = []
        while (above := spans.get(span.parent_span_id or "")) is not None:
            span = above
            found.append(span)
        return found


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Received]:
    """An engine in an actor and a server of its own, both without the plugin; each does what it is asked."""
    import ray

    folder = tmp_path_factory.mktemp("received")
    run_dir = folder / "run"
    settings = {**SETTINGS, "RAYTRACE_RL_RUN_DIR": str(run_dir)}
    before = dict(os.environ)
    os.environ.update(settings)
    start_cluster(num_cpus=4, runtime_env={"env_vars": settings})
    setup.init_telemetry_driver()
    setup.attach_to_cluster()
    try:
        with umbrella_span(G.U_JOB, "rl.test.job"):
            yield _drive(CONFIG.model.write(folder / "model"), run_dir)
    finally:
        setup.shutdown_telemetry()
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _drive(model: Path, run_dir: Path) -> Received:
    import ray

    from examples.vllm_megatron_grpo.engine import EngineWorker

    native = {"env_vars": {**WITHOUT_PLUGIN, "RAYTRACE_RL_VLLM_NATIVE_TRACING": "1"}}
    with umbrella_span(G.U_SETUP, "rl.test.setup"):
        actor = traced(EngineWorker.options(runtime_env=native)).remote(0, CONFIG, str(model))
        pids = actor.pids.remote()
        with _server(model) as url:
            actor_pids = ray.get(pids, timeout=200)
            with umbrella_span(G.U_ROLLOUT, "rl.test.batch"):
                prompts = np.arange(4 * CONFIG.prompt_length).reshape(4, -1) % 10
                ray.get(traced(actor).generate.remote(prompts, 1, 0), timeout=100)
            answers = _rollouts(url)
            run = wait_for(lambda: _complete(run_dir), "the spans of vLLM's exporters", 60)
    return Received(run, run_dir, actor_pids, answers)


@contextlib.contextmanager
def _server(model: Path) -> Iterator[str]:
    """``vllm serve``, started by itself, with the receiver for its collector."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not the command line's entry, which looks for a distribution called "vllm": this build has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--otlp-traces-endpoint", local_endpoint(RUN_ID), "--tokens-only"]
    # Engines seed Python's generator of random numbers, from which their spans get their ids: each needs its own seed.
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--seed", "7"]
    about = {"OTEL_SERVICE_NAME": "server", "OTEL_RESOURCE_ATTRIBUTES": "rl.worker_group=server"}
    log = model.parent / "serve.log"
    with log.open("w") as output:
        environment = trace_context_env({**os.environ, **ENVIRONMENT, **WITHOUT_PLUGIN, **about})
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            wait_for(lambda: _healthy(port, process), "the server", 200)
            yield f"http://127.0.0.1:{port}/inference/v1/generate"
        except BaseException:
            print(log.read_text()[-4000:])
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _healthy(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the server ended"
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
    except OSError:
        return False


def _rollouts(url: str) -> list[list[int]]:
    """Asks the server from as many rollouts at once as there are to be requests."""
    job = TraceContext.capture()
    answers: list[list[int]] = []

    def rollout(place: int) -> None:
        with umbrella_span(G.U_ROLLOUT, "rl.test.rollout", place=place):
            body = {"token_ids": [place % 10, 10], "sampling_params": {"max_tokens": 8, "ignore_eos": True}}
            headers = {"Content-Type": "application/json", **trace_headers()}
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=100) as response:
                answers.append(json.load(response)["choices"][0]["token_ids"])

    threads = [job.thread(rollout, args=(place,)) for place in range(REQUESTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not [thread for thread in threading.enumerate() if thread in threads]
    return answers


def _complete(run_dir: Path) -> Run | None:
    run = load_run(run_dir)
    names = Counter(span.name for span in run.spans)
    return run if names["llm_request"] == REQUESTS + 4 and names["Load model"] == names["Executor init"] == 2 else None


def test_a_servers_requests_are_as_many_as_were_made_each_under_its_own_rollout(received):
    """Catches trace headers that a server does not take up, and spans that never reach the run or reach another."""
    assert [len(answer) for answer in received.answers] == [8] * REQUESTS
    requests = [span for span in received.sent("llm_request") if span.worker_group == "server"]
    above = [received.ancestors(span)[0] for span in requests]
    assert {span.name for span in above} == {"rl.test.rollout"}
    assert sorted(span.attributes["place"] for span in above) == list(range(REQUESTS))
    assert {span.attributes["gen_ai.usage.completion_tokens"] for span in requests} == {8}


def test_an_engines_children_without_the_plugin_are_in_the_tree(received):
    """Catches an engine whose own processes are missing because somebody's VLLM_PLUGINS leaves the plugin out."""
    assert {span.name for span in received.run.spans if span.parent_span_id is None} <= {
        "rl.test.job",
        "rl.test.job.started",
    }
    assert len({span.trace_id for span in received.run.spans}) == 1
    loads = [span for span in received.run.spans if span.name == "rl.vllm.load_model"]
    (inside,) = [span for span in received.sent("Load model") if span.worker_group == "generation.engine"]
    assert loads[0].span_id in [span.span_id for span in received.ancestors(inside)]
    assert int(inside.resource["process.parent_pid"]) == loads[0].pid == received.actor_pids[0]
    of_actor = [process for process in received.run.processes if process.pid in received.actor_pids[1:]]
    assert of_actor == [], "no process of the engine has a spool of its own"


def test_the_actors_own_part_goes_to_its_spool(received):
    """Catches requests of a traced engine that take the long way round, and are lost with its process."""
    requests = [span for span in received.run.spans if span.name == "llm_request" and span.worker_group == "generation"]
    assert len(requests) == 4
    assert {span.pid for span in requests} == {received.actor_pids[0]}
    assert not any("vllm.process_id" in span.resource for span in requests)
    assert all("rl.test.batch" in [above.name for above in received.ancestors(span)] for span in requests)


def test_nothing_is_there_twice(received):
    """Catches spans that are kept and exported as well."""
    records, damage = read_records(received.run_dir)
    assert not damage
    spans = Counter((span.trace_id, span.span_id) for span in spans_of(records))
    assert [found for found in spans.values() if found > 1] == []
    assert report(received.run)["loss"]["duplicates"] == 0


def test_an_actor_and_its_engine_are_one_unit_of_the_fleet(received):
    """Catches an engine's processes counted as workers beside their actor where all that is known is what they sent."""
    groups = Counter(process.worker_group for process in received.run.processes)
    assert groups["generation"] == 1
    assert groups["generation.engine"] >= 2
    fleet = report(received.run)["goodput"]["fleet"]
    assert fleet["units"] == 1 + groups["server"]
