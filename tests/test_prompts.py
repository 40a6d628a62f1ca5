"""The bound on per-prompt spans: N prompts a step, every sample of a prompt or none."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import nullcontext
from enum import Enum
from threading import Thread
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl import RLSpanGroup as G
from raytrace_rl import (
    _carrier,
    _prompts,
    _scopes,
    init_telemetry_driver,
    init_telemetry_worker,
    iteration_scope,
    managed_span,
    shutdown_telemetry,
    trace_fn,
)
from raytrace_rl.context import TraceContext, current_trace_carrier, remote_trace_context
from raytrace_rl.instrumentation import (
    emit_span,
    in_per_prompt_scope,
    per_prompt_scope,
    streaming_umbrella_span,
    umbrella_span,
)
from raytrace_rl.monitor import load_run
from tests.disks import warnings_of
from tests.running import drive

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts telemetry with a bound; what it returns ends it and counts spans by step and name."""

    def begin(limit: int | None) -> Any:
        run_dir = tmp_path / "run"
        init_telemetry_driver(
            {"enabled": True, "span_groups": "all", "run_dir": str(run_dir), "per_prompt_limit": limit}
        )

        def read() -> Counter[tuple[int | None, str]]:
            shutdown_telemetry()
            return Counter((span.iteration, span.name) for span in load_run(run_dir).spans)

        return read

    return begin


def prompt(name: str, samples: int = 3) -> None:
    """One prompt's work: a span for each sample, and a leaf that is not per-prompt."""
    with per_prompt_scope():
        assert in_per_prompt_scope()
        for _ in range(samples):
            with umbrella_span(G.U_PER_PROMPT, name):
                pass
        with managed_span(G.REWARD, f"reward of {name}"):
            pass


def test_without_a_bound_every_prompt_is_recorded(start):
    """Catches a bound that nobody asked for."""
    read = start(None)
    for n in range(20):
        prompt(f"p{n}")
    assert sum(count for (_, name), count in read().items() if name.startswith("p")) == 60


def test_n_prompts_a_step_and_whole_groups(start):
    """Catches a bound over the run instead of the step, half a group of samples, and other spans muted with them."""
    read = start(2)
    for step in (1, 2):
        with iteration_scope(step):
            for n in range(5):
                prompt(f"p{n}")
    assert read() == {
        **{(step, f"p{n}"): 3 for step in (1, 2) for n in (0, 1)},
        **{(step, f"reward of p{n}"): 1 for step in (1, 2) for n in range(5)},
    }


def test_samples_that_name_their_prompt_stand_or_fall_together(start):
    """Catches samples in scopes of their own that each count as a prompt."""
    read = start(2)
    with iteration_scope(1):
        for sample in range(4):
            for n in range(5):
                with per_prompt_scope(n), umbrella_span(G.U_PER_PROMPT, f"p{n}", sample=sample):
                    pass
    assert read() == {(1, "p0"): 4, (1, "p1"): 4}


def test_the_decision_travels_with_the_carrier(start):
    """Catches a remote worker that records what its caller has muted, or the reverse."""
    read = start(1)
    with iteration_scope(1):
        for name in ("first", "second"):
            with per_prompt_scope():
                carrier = _carrier.current()

                def remote(carrier: Any = carrier, name: str = name) -> None:
                    attachment = _carrier.read(carrier, dispatched=True)
                    assert attachment is not None
                    _scopes.var.set(attachment[1])
                    with per_prompt_scope(), managed_span(G.PER_PROMPT, f"remote of {name}"):
                        assert in_per_prompt_scope()

                thread = Thread(target=remote)
                thread.start()
                thread.join()
    assert read() == {(1, "remote of first"): 1}


def test_every_way_of_making_a_span_keeps_the_bound(start):
    """Catches a primitive that goes round it."""
    read = start(0)

    @trace_fn(G.PER_PROMPT, "decorated")
    def decorated() -> str:
        return "ran"

    @trace_fn(G.PER_PROMPT, "generator")
    def generator() -> Any:
        yield "ran"

    with per_prompt_scope():
        assert decorated() == "ran"
        assert list(generator()) == ["ran"]
        emit_span(G.PER_PROMPT, "emitted", 1.0, 2.0)
        with streaming_umbrella_span(G.U_PER_PROMPT, "stream") as step, step() as span:
            assert span is None
    decorated()
    assert read() == {(None, "decorated"): 1}


def test_a_name_that_cannot_be_one_mutes_nothing(start, caplog):
    """Catches an unhashable prompt that ends the rollout."""
    read = start(0)
    unhashable: Any = ["a", "list"]
    with per_prompt_scope(unhashable), managed_span(G.PER_PROMPT, "kept"):
        pass
    assert "hashable" in caplog.text
    assert read() == {(None, "kept"): 1}


# -- without a step ----------------------------------------------------------------------------------------------------


def test_outside_any_step_the_bound_is_each_rollouts(start):
    """Catches a collector whose first rollout uses up the bound of the whole run."""
    read = start(2)
    with umbrella_span(G.U_JOB, "job"):
        for rollout in range(3):
            with umbrella_span(G.U_ROLLOUT, f"rollout {rollout}"), managed_span(G.REWARD, "rewards"):
                for n in range(4):
                    prompt(f"{rollout}.{n}", samples=1)
    recorded = {name for _, name in read() if name[0].isdigit()}
    assert recorded == {f"{rollout}.{n}" for rollout in range(3) for n in range(2)}


def test_the_rollouts_of_a_step_share_its_bound(start):
    """Catches a step that records the bound's number of prompts for each of its rollouts."""
    read = start(3)
    with iteration_scope(1):
        for rollout in range(2):
            with umbrella_span(G.U_ROLLOUT, f"rollout {rollout}"):
                for n in range(2):
                    prompt(f"{rollout}.{n}", samples=1)
    assert {name for _, name in read() if name[0].isdigit()} == {"0.0", "0.1", "1.0"}


def test_a_rollout_in_threads_and_in_parts_is_one_rollout(start):
    """Catches a thread, or a span between, that begins to count anew."""
    read = start(2)

    def part(n: int) -> None:
        with managed_span(G.REWARD, "scoring"):
            prompt(f"p{n}", samples=1)

    with umbrella_span(G.U_ROLLOUT, "rollout"):
        for n in range(4):
            thread = TraceContext.capture().thread(part, args=(n,))
            thread.start()
            thread.join()
    assert {name for _, name in read() if name.startswith("p")} == {"p0", "p1"}


def test_a_worker_counts_for_each_call_from_outside(start):
    """Catches a worker, called from many rollouts, that records nothing after the first of them."""
    read = start(1)
    carriers = []
    for _ in range(2):
        with umbrella_span(G.U_ROLLOUT, "rollout"):
            carriers.append(current_trace_carrier())
    for call, carrier in enumerate(carriers):
        with remote_trace_context(carrier):
            for n in range(3):
                prompt(f"{call}.{n}", samples=1)
    assert {name for _, name in read() if name[0].isdigit()} == {"0.0", "1.0"}


# -- in several processes ----------------------------------------------------------------------------------------------


class Sorted(Enum):
    """Names as enumerations have them."""

    EASY = "easy"


class Odd:
    """Is another one in every process."""


NAMES: tuple[Any, ...] = (
    0,
    31,
    np.int64(3),
    "a",
    "üöß",
    b"raw",
    UUID(int=5),
    ("data", 7),
    Sorted.EASY,
    10**30,
    -1,
    1.5,
)

DECIDE = """
import sys
from enum import Enum
from uuid import UUID
import numpy as np
from raytrace_rl import _prompts

class Sorted(Enum):
    EASY = "easy"

names = [0, 31, np.int64(3), "a", "üöß", b"raw", UUID(int=5), ("data", 7), Sorted.EASY, 10**30, -1, 1.5]
print([_prompts._agreed(name, 32, limit) for name in names for limit in range(33)])
"""


def test_processes_agree_without_talking():
    """Catches a decision by Python's own hash, which is another one in every process."""
    here = [_prompts._agreed(name, 32, limit) for name in NAMES for limit in range(33)]
    done = subprocess.run([sys.executable, "-c", DECIDE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(here)
    assert {_prompts._agreed(name, 32, 0) for name in NAMES} == {False}
    assert {_prompts._agreed(name, 32, 32) for name in NAMES} == {True}


@given(st.integers(1, 200), st.integers(0, 250))
def test_indices_keep_the_bound_exactly(number, limit):
    """Catches a bound that is one off, or that indices of NumPy go round."""
    admitted = [n for n in range(number) if _prompts._agreed(np.int64(n), number, limit)]
    assert len(admitted) == min(number, limit)


@given(st.text() | st.uuids() | st.tuples(st.text(), st.integers()), st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_larger_bound_records_no_other_prompts(name, number, limit):
    """Catches prompts that fall out when the bound goes up, and a decision that a name makes twice."""
    now, more = (_prompts._agreed(name, number, each) for each in (limit, limit + 1))
    assert now in (True, False)
    assert more or not now
    assert now == _prompts._agreed(name, number, limit)


def test_other_names_keep_the_bound_on_average():
    """Catches a share that is far from the bound, so that the bound says nothing."""
    names = [f"uid-{n}" for n in range(20_000)]
    recorded = sum(bool(_prompts._agreed(name, 64, 8)) for name in names)
    assert 2_300 < recorded < 2_700


def test_the_decision_is_the_same_in_a_rollout_and_in_a_step(start):
    """Catches a prompt that is rolled out outside any step and trained on in one, recorded in one of the two."""
    read = start(2)
    for scope in (nullcontext(), iteration_scope(4), iteration_scope(5)):
        with scope:
            for n in range(8):
                with per_prompt_scope(f"uid-{n}", of=8), umbrella_span(G.U_PER_PROMPT, f"uid-{n}"):
                    pass
    times = Counter(name for _, name in read())
    assert set(times.values()) == {3}
    assert 0 < len(times) < 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": 3, "of": 0}, "whole number of prompts"),
        ({"prompt": 3, "of": "many"}, "whole number of prompts"),
        ({"prompt": Odd(), "of": 8}, "need not be the same in every process"),
        ({"prompt": ("a", Odd()), "of": 8}, "need not be the same in every process"),
    ],
)
def test_what_cannot_be_agreed_on_is_said_and_counted_here(start, arguments, says, caplog):
    """Catches a slip in the arguments that ends the rollout, or mutes it in silence."""
    read = start(1)
    for _ in range(2):
        with per_prompt_scope(**arguments), umbrella_span(G.U_PER_PROMPT, "kept"):
            pass
    assert [says in warning for warning in warnings_of(caplog)] == [True]
    assert read() == {(None, "kept"): 2}


def test_a_worker_that_counts_alone_says_so_once(tmp_path, monkeypatch, caplog):
    """Catches samples of one prompt, spread over workers, that are recorded by halves without a word."""
    for name, value in {"ENABLED": "1", "RUN_DIR": str(tmp_path / "run"), "SPAN_GROUPS": "all"}.items():
        monkeypatch.setenv(f"RAYTRACE_RL_{name}", value)
    monkeypatch.setenv("RAYTRACE_RL_PER_PROMPT_LIMIT", "1")
    init_telemetry_worker()
    for n in range(4):
        with per_prompt_scope(n, of=4):
            pass
        with per_prompt_scope():
            pass
    assert warnings_of(caplog) == []
    for n in range(4):
        with per_prompt_scope(n):
            pass
    (warning,) = warnings_of(caplog)
    assert "of=" in warning
    shutdown_telemetry()


DRIVER = """
import ray
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import TracedActor, accepts_trace_context, iteration_scope, telemetry_session, traced, umbrella_span
from raytrace_rl.instrumentation import per_prompt_scope

@ray.remote
class Worker(TracedActor):
    @accepts_trace_context
    def batch(self, names):  # its share of everybody's samples: it knows the prompts by name alone
        for name in names:
            with per_prompt_scope(name, of=8), umbrella_span(G.U_PER_PROMPT, f"rl.grpo.{name}"):
                pass

    @accepts_trace_context
    def sample(self, name):  # of a prompt that the driver is at
        with per_prompt_scope(), umbrella_span(G.U_PER_PROMPT, f"rl.grpo.{name}"):
            pass

with telemetry_session({"span_groups": "all", "per_prompt_limit": 3}, summary=False) as session:
    session.init_ray(num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    workers = [traced(Worker.remote()) for _ in range(3)]
    with umbrella_span(G.U_JOB, "rl.grpo.job"), iteration_scope(1):
        names = [f"uid_{n}" for n in range(8)]
        for kind in (names, range(8)):
            # Each worker meets the prompts in another order, as counting would notice.
            orders = [[kind[(n + 3 * i) % 8] for n in range(8)] for i in range(3)]
            ray.get([worker.batch.remote(order) for worker, order in zip(workers, orders)])
        for n in range(8):
            with per_prompt_scope():
                ray.get([worker.sample.remote(f"by_driver_{n}") for worker in workers])
"""


@pytest.mark.ray
def test_every_sample_of_a_prompt_or_none_whatever_the_worker(tmp_path: Path):
    """On real Ray, samples of one prompt that several workers handle are recorded by some of them."""
    done = drive(DRIVER, tmp_path)
    assert done.returncode == 0, done.stderr
    where: dict[str, set[int]] = defaultdict(set)
    for span in load_run(tmp_path / "run").spans:
        if span.span_group == G.PER_PROMPT:
            where[span.name.removeprefix("rl.grpo.")].add(span.pid)
    assert {len(pids) for pids in where.values()} == {3}
    assert {name for name in where if name.startswith("by_")} == {f"by_driver_{n}" for n in range(3)}
    assert {name for name in where if name.isdigit()} == {"0", "1", "2"}
    assert {name for name in where if name.startswith("uid")} == {
        f"uid_{n}" for n in range(8) if _prompts._agreed(f"uid_{n}", 8, 3)
    }
