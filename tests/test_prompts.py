"""The bound on per-prompt spans: N prompts a step, every sample of a prompt or none."""

from __future__ import annotations

from collections import Counter
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from raytrace_rl import RLSpanGroup as G
from raytrace_rl import (
    _carrier,
    _scopes,
    init_telemetry_driver,
    iteration_scope,
    managed_span,
    shutdown_telemetry,
    trace_fn,
)
from raytrace_rl.instrumentation import (
    emit_span,
    in_per_prompt_scope,
    per_prompt_scope,
    streaming_umbrella_span,
    umbrella_span,
)
from raytrace_rl.monitor import load_run

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
