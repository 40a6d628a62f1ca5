"""What a collector that is not there costs on a cluster: an actor's steps, and the driver's end."""

from __future__ import annotations

import time
from functools import partial

import pytest
import ray

from raytrace_rl import setup
from raytrace_rl.monitor.relay_counters import relay_counters
from raytrace_rl.relay import asking
from raytrace_rl.relay.cursors import noted
from tests.conftest import start_cluster
from tests.relay.relay_actors import Stepping
from tests.relay.stepping import DEADLINE_S, EXTRA_S, SLACK, Step, collectors, in_turns, ratios, settle
from tests.running import wait_for

pytest_plugins = ["tests.telemetry_fixtures"]
pytestmark = [pytest.mark.ray, pytest.mark.slow]


def step_of(actor) -> Step:
    """One step of an actor."""
    return Step(*ray.get(actor.step.remote()))


@pytest.mark.parametrize("kind", ["dead", "black hole"])
def test_a_collector_that_is_not_there_changes_neither_steps_nor_the_end(tmp_path, monkeypatch, kind):
    """Catches an actor that waits for its node's relay, and a driver whose end waits for a collector that is down."""
    monkeypatch.setattr(asking, "_LOOK_S", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "500")
    run_dir = tmp_path / "run"
    with collectors() as urls:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", urls[kind])
        settings = {"enabled": True, "span_groups": "all", "exporter": "otlp", "heartbeat_s": 0.1}
        assert setup.init_telemetry_driver({**settings, "run_dir": str(run_dir)}) is not None
        try:
            start_cluster(num_cpus=2, runtime_env=setup.telemetry_runtime_env())
            setup.attach_to_cluster()
            actors = {kind: ray.remote(Stepping).options(num_cpus=0.5).remote()}
            without = setup.telemetry_runtime_env({"env_vars": {"RAYTRACE_RL_EXPORTER": "spool"}})
            actors["none"] = ray.remote(Stepping).options(num_cpus=0.5, runtime_env=without).remote()
            assert ray.get([one.exporter.remote() for one in actors.values()]) == ["otlp", "spool"]
            ray.get([one.step.remote() for one in actors.values()])
            (node_dir,) = (run_dir / "spool").iterdir()
            wait_for(lambda: any(one.tally["retries"] for one in noted(node_dir)), "the relay has tried")

            def measure() -> list[str]:
                # Measured inside: what Ray takes of a call is in neither.
                steps = in_turns({name: partial(step_of, one) for name, one in actors.items()})
                ((_, (cpu, wall)),) = ratios(steps).items()
                return [f"CPU {cpu:.2f}, time {wall:.2f}"] if max(cpu, wall) > SLACK else []

            settle(measure)
            begun = time.monotonic()
            setup.shutdown_telemetry(DEADLINE_S * 1000)
            took_s = time.monotonic() - begun
        finally:
            setup.shutdown_telemetry()
            ray.shutdown()
    assert took_s < DEADLINE_S + EXTRA_S
    section = relay_counters(str(run_dir))
    assert section["wrong"]
    assert section["unsent"] >= 2 * 25 * 100
