"""What a collector that is not there costs a training process: its steps, and its end."""

from __future__ import annotations

import itertools
from collections import Counter

from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.relay_counters import relay_counters
from tests.relay.stepping import DEADLINE_S, EXTRA_S, ROUNDS, SLACK, collectors, in_turns, ratios, settle, steppers

pytest_plugins = ["tests.telemetry_fixtures"]


def test_a_collector_that_is_not_there_changes_neither_steps_nor_the_end(tmp_path):
    """Catches a relay beside a training loop that holds its GIL, or its exit, because of a collector that is down."""
    numbers = itertools.count()

    def measure() -> list[str]:
        directory = tmp_path / str(next(numbers))
        wrong = []
        with collectors() as urls, steppers(directory, urls) as processes:
            steps = in_turns({name: one.step for name, one in processes.items()})
            for name, (cpu, wall) in ratios(steps).items():
                if cpu > SLACK or wall > SLACK:
                    wrong.append(f"{name}: a step takes {cpu:.2f} of the CPU and {wall:.2f} of the time")
                busy = sum(one.others_s for one in steps[name]) / sum(one.wall_s for one in steps[name])
                if busy > 0.5:
                    wrong.append(f"{name}: other threads are busy for {busy:.0%} of a step")
            for name, one in processes.items():
                shutdown_s, whole_s = one.end()
                if shutdown_s > DEADLINE_S + EXTRA_S or whole_s > shutdown_s + 2 * EXTRA_S:
                    wrong.append(f"{name}: the shutdown took {shutdown_s:.2f} s, the end {whole_s:.2f} s")
            for name in processes:
                check_whole(directory / name, unsent=name != "none")
        return wrong

    settle(measure)


def check_whole(run_dir, *, unsent):
    """No span is lost, and what is unsent is known to be."""
    names = Counter(row.name for row in load_run(run_dir).spans)
    assert names["work"] == (ROUNDS + 1) * 100
    section = relay_counters(str(run_dir))
    assert section["unsent"] == (sum(names.values()) if unsent else 0)
    assert section["wrong"] is unsent
