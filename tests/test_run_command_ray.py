"""`raytrace-rl run` around real Ray programs that know nothing of it, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from raytrace_rl.monitor import load_run
from tests.running import wait_for

if TYPE_CHECKING:
    from raytrace_rl.monitor import Run

pytestmark = [pytest.mark.ray]

DRIVER = Path(__file__).with_name("unedited_driver.py")
OPTIONS = "include_dashboard=False, logging_level='ERROR', log_to_driver=False"
#: What the driver calls, and how often, each named as it shows.
CALLS = {
    "ray.call.Worker.__init__": 3,
    "ray.call.Worker.plain": 6,
    "ray.call.Worker.inherited": 1,
    "ray.call.Worker.ask_peer": 1,
    "ray.call.Worker.ask_peer_from_thread": 1,
    "ray.call.Worker.stream": 1,
    "ray.call.Worker.pair": 1,
    "ray.call.Worker.static": 2,
    "ray.call.Worker.of_class": 1,
    "ray.call.Worker.fail": 1,
    "ray.call.Worker.die": 1,
    "ray.call.Loop.__init__": 1,
    "ray.call.Loop.one": 1,
    "ray.call.Loop.stream": 1,
    "ray.call.double": 2,
    "ray.call.stream": 1,
}


def run_script(run_dir: Path, *command: object, timeout_s: float = 150, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program under ``raytrace-rl run``."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "raytrace_rl.cli",
            "run",
            "--dir",
            str(run_dir),
            "--",
            sys.executable,
            *map(str, command),
        ],
        env={**os.environ, **env},
        cwd=run_dir.parent,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_code(run_dir: Path, code: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program given as text."""
    script = run_dir.with_name("script.py")
    script.write_text(textwrap.dedent(code))
    return run_script(run_dir, script, *arguments, **env)


def assert_whole(run: Run, calls: dict[str, int]) -> None:
    """The run is one trace under one job, and has these calls."""
    assert len({span.trace_id for span in run.spans}) == 1
    (job,) = [span for span in run.spans if span.parent_span_id is None]
    assert job.name == "rl.run.job"
    assert not job.truncated
    ids = {span.span_id for span in run.spans}
    assert {span.parent_span_id for span in run.spans} <= {*ids, None}
    assert Counter(span.name for span in run.spans if span.span_group == "actor_call") == calls


def parent(run: Run, name: str) -> set[str]:
    """The names of the parents of the spans with a name."""
    ids = {span.span_id: span for span in run.spans}
    return {ids[str(span.parent_span_id)].name for span in run.spans if span.name == name}


@pytest.fixture(scope="module")
def unedited(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Run]:
    """The driver that uses everything, which calls ``ray.init`` itself, with a ``runtime_env``."""
    run_dir = tmp_path_factory.mktemp("unedited") / "run"
    done = run_script(run_dir, DRIVER, "init", 3)
    return done, load_run(run_dir)


def test_an_unedited_program_is_one_trace(unedited):
    """An existing Ray program shows a heap of unconnected traces, misses kinds of calls, or does not run at all."""
    done, run = unedited
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert_whole(run, {**CALLS, "ray.call.<lambda>": 1})
    driver = next(process for process in run.processes if process.role == "driver")
    assert driver.state == "closed"


def test_calls_hang_under_whoever_made_them(unedited):
    """Nested calls are siblings of those that made them; those from plain threads have no parent."""
    _, run = unedited
    assert parent(run, "ray.call.Worker.ask_peer") == {"rl.run.job"}
    # By the driver, by another actor, and by threads: the driver's belongs to the job, the actor's to who made it.
    assert parent(run, "ray.call.Worker.plain") == {"rl.run.job", "ray.call.Worker.ask_peer"}
    assert all(span.queued_ns is not None for span in run.spans if span.name == "ray.call.Worker.plain")


def test_a_local_call_of_a_method_opens_no_span(unedited):
    """``self.helper()`` shows as a Ray call, and costs what one costs."""
    _, run = unedited
    assert not [span for span in run.spans if span.name.endswith(".helper")]


def test_errors_and_deaths_show_as_what_they_are(unedited):
    """A call that failed passes for one that went well, or one that killed its actor vanishes."""
    _, run = unedited
    (fail,) = [span for span in run.spans if span.name == "ray.call.Worker.fail"]
    (die,) = [span for span in run.spans if span.name == "ray.call.Worker.die"]
    assert fail.status == "ERROR"
    assert die.truncated


def test_a_restarted_actor_is_traced_in_its_next_life(unedited):
    """The wrapper, or the hooks in the worker, are gone after a restart; or its queueing lasts since the first life."""
    _, run = unedited
    lives = [span for span in run.spans if span.name == "ray.call.Worker.__init__"]
    (second,) = [span for span in lives if span.process.incarnation]
    assert second.queued_ns is None
    assert [s.name for s in run.spans if s.process is second.process] == [second.name, "ray.call.Worker.plain"]


def test_the_summary_shows_the_calls_where_there_is_no_goodput(unedited):
    """A program without spans of its own gets a screen full of zeros."""
    done, _ = unedited
    assert "Run run: " in done.stderr
    assert "put managed_span around the work" in done.stderr
    assert "ray.call.Worker.ask_peer" in done.stderr


@pytest.mark.slow
def test_a_program_that_never_calls_ray_init_and_then_shuts_down(tmp_path):
    """The first actor, whose creation connects to Ray, is missed; or the end in ``ray.shutdown`` loses the job."""
    done = run_script(tmp_path / "run", DRIVER, "implicit", "shutdown", RAY_USAGE_STATS_ENABLED="0")
    assert done.returncode == 0, done.stderr
    assert_whole(load_run(tmp_path / "run"), CALLS)


@pytest.mark.slow
def test_a_program_with_a_job_config_of_its_own_that_fails(tmp_path):
    """The runtime_env in a JobConfig is replaced by ours; the job of a program that failed shows no error."""
    done = run_script(tmp_path / "run", DRIVER, "job_config", "fail")
    assert done.returncode == 1
    assert "RuntimeError: the loop broke" in done.stderr
    run = load_run(tmp_path / "run")
    assert_whole(run, {**CALLS, "ray.call.<lambda>": 1})
    assert next(span.status for span in run.spans if span.name == "rl.run.job") == "ERROR"


@pytest.mark.slow
def test_a_cluster_that_is_up_already(tmp_path):
    """Workers of a cluster that others have started inherit nothing, and are not traced."""
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=3, include_dashboard=False)
        done = run_script(tmp_path / "run", DRIVER, "auto", RAY_ADDRESS=nodes.address)
        assert done.returncode == 0, done.stderr
        assert_whole(load_run(tmp_path / "run"), CALLS)
    finally:
        nodes.shutdown()


@pytest.mark.slow
def test_a_worker_whose_environment_lacks_the_package(tmp_path):
    """An actor with an environment of its own cannot load its class any more: tracing has ended the run."""
    lacking = tmp_path / "lacking"
    (lacking / "raytrace_rl").mkdir(parents=True)
    (lacking / "raytrace_rl" / "__init__.py").write_text("raise ImportError('not installed here')")
    code = f"""
    import sys
    import ray
    ray.init(num_cpus=3, {OPTIONS})

    @ray.remote
    class Actor:
        def __init__(self, peer=None):
            self.peer = peer
        async def has_it(self):
            return "raytrace_rl.setup" in sys.modules
        async def stream(self):
            yield 1
        async def ask(self):
            return await self.peer.has_it.remote()

    @ray.remote
    def has_it():
        return "raytrace_rl.setup" in sys.modules

    env = {{"runtime_env": {{"env_vars": {{"PYTHONPATH": sys.argv[1]}}}}}}
    here = Actor.remote()
    there = Actor.options(**env).remote(here)
    assert ray.get([here.has_it.remote(), there.has_it.remote()]) == [True, False]
    assert [ray.get(ref) for ref in there.stream.remote()] == [1]
    assert ray.get(there.ask.remote())
    assert not ray.get(has_it.options(**env).remote())
    """
    done = run_code(tmp_path / "run", code, lacking)
    assert done.returncode == 0, done.stderr
    names = Counter(span.name for span in load_run(tmp_path / "run").spans)
    assert names == {
        "rl.run.job": 1,
        "rl.run.job.started": 1,
        "ray.call.Actor.__init__": 1,
        "ray.call.Actor.has_it": 1,  # that asked by the other one has no carrier
    }


@pytest.mark.slow
def test_an_instrumented_program_keeps_its_own_job_and_its_own_carriers(tmp_path):
    """A program with a session of its own gets a second job, a truncated one, or carriers that arrive twice."""
    code = f"""
    import ray
    from raytrace_rl import (RLSpanGroup as G, TracedActor, accepts_trace_context, managed_span, telemetry_session,
                             traced, umbrella_span)

    @ray.remote
    class Generator(TracedActor):
        @accepts_trace_context
        def generate(self, n):
            with managed_span(G.GENERATION, "rl.vllm.generate"):
                return n
        def undecorated(self):
            return self.generate(2)

    with telemetry_session(algorithm="grpo") as session:
        session.init_ray(num_cpus=2, {OPTIONS})
        generator = Generator.remote()
        with umbrella_span(G.U_JOB, "rl.grpo.job"):
            assert ray.get(traced(generator).generate.remote(1)) == 1
            assert ray.get(generator.generate.remote(1)) == 1
            assert ray.get(generator.undecorated.remote()) == 2
    """
    done = run_code(tmp_path / "run", code)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    jobs = [span for span in run.spans if span.span_group == "job" and not span.name.endswith(".started")]
    assert [(job.name, job.truncated) for job in jobs] == [("rl.grpo.job", False)]
    assert {process.attempt for process in run.processes} == {1}
    assert parent(run, "rl.vllm.generate") == {"rl.grpo.job", "ray.call.Generator.undecorated"}
    assert not [span for span in run.spans if span.name == "ray.call.Generator.generate"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 15), ("SIGINT", 1)])
def test_a_signal_ends_the_driver_as_it_would_without_us(tmp_path, name, code):
    """Flushing a busy actor takes longer than Ray lets a driver live after SIGTERM: it is aborted, with code 134."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import pathlib, sys, time
        import ray
        ray.init(num_cpus=1, {OPTIONS})

        @ray.remote
        class Actor:
            def stay(self, marker):
                pathlib.Path(marker).touch()
                while True:
                    time.sleep(1)

        actor = Actor.remote()
        ref = actor.stay.remote(sys.argv[1])
        while True:
            time.sleep(0.1)
        """)
    )
    run_dir, ready = tmp_path / "run", tmp_path / "ready"
    command = [sys.executable, "-m", "raytrace_rl.cli", "run", "--dir", str(run_dir), "--"]
    runner = subprocess.Popen([*command, sys.executable, str(script), str(ready)], cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        wait_for(ready.exists, "the actor at work", 120)
        runner.send_signal(getattr(signal, name))
        _, told = runner.communicate(timeout=60)
    finally:
        runner.kill()
    assert runner.returncode == code, told.decode()
    assert b"Run run: " in told
    run = load_run(run_dir)
    (job,) = [span for span in run.spans if span.name == "rl.run.job"]
    (stay,) = [span for span in run.spans if span.name == "ray.call.Actor.stay"]
    assert not job.truncated
    # Killed, unwound by an exception, or not proven dead yet, as Ray pleases.
    assert stay.truncated or stay.status == "ERROR" or stay.end_ns is None
    assert job.status == ("ERROR" if name == "SIGINT" else "UNSET")


@pytest.mark.slow
def test_a_driver_that_is_killed_is_summed_up_and_the_next_start_is_another_attempt(tmp_path):
    """After ``kill -9`` there is no summary; a restart in the same directory passes for the same attempt."""
    code = f"""
    import os, signal, sys
    import ray
    ray.init(num_cpus=1, {OPTIONS})

    @ray.remote
    class Actor:
        def work(self):
            return 1

    actor = Actor.remote()
    assert ray.get(actor.work.remote()) == 1
    if sys.argv[1:] == ["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = run_code(tmp_path / "run", code, "killed")
    assert killed.returncode == 128 + 9
    assert "Run run: " in killed.stderr
    again = run_code(tmp_path / "run", code)
    assert again.returncode == 0, again.stderr
    run = load_run(tmp_path / "run")
    assert sorted(span.truncated for span in run.spans if span.name == "rl.run.job") == [False, True]
    assert Counter(span.attempt for span in run.spans if span.name == "ray.call.Actor.work") == {1: 1, 2: 1}
    told = json.loads((tmp_path / "run" / "attempts" / "2.json").read_text())
    assert told["run_id"] == "run"
