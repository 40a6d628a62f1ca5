"""Two real vLLM engines used as nobody should: a span for each request whatever became of it, and engines unharmed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from examples.vllm_megatron_grpo.model import ModelConfig
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.report import report
from tests.engines.hostile import CONTEXT, MANY

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run, SpanRow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM here: make test-engines"),
]


@dataclass
class Hostile:
    """The program's run, and what it saw itself."""

    run: Run
    saw: dict[str, Any]

    def requests(self, rollout: str) -> list[SpanRow]:
        """The requests below the rollouts of a name."""
        spans = {span.span_id: span for span in self.run.spans}

        def below(span: SpanRow | None) -> bool:
            while span is not None and span.name != rollout:
                span = spans.get(span.parent_span_id or "")
            return span is not None

        return [span for span in self.run.spans if span.name == "rl.vllm.request" and below(span)]

    def outcomes(self, rollout: str) -> Counter[tuple[str, str]]:
        """Ids and errors of these requests."""
        return Counter(
            (str(span.attributes["gen_ai.request.id"]), span.status_message) for span in self.requests(rollout)
        )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    """One run of the program."""
    folder = tmp_path_factory.mktemp("hostile")
    model = ModelConfig(context=CONTEXT).write(folder / "model")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.hostile", str(model), str(folder / "run")],
        cwd=Path(__file__).parents[2],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("RAYTRACE_RL_")}, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return Hostile(load_run(folder / "run"), json.loads(done.stdout.splitlines()[-1]))


def test_the_engines_do_as_they_did(hostile):
    """Catches an engine that answers otherwise, or raises something else, because it is traced."""
    offline, online = hostile.saw["offline"], hostile.saw["online"]
    assert (offline["empty"], offline["samples"], offline["many"]) == ([], [3, 3], MANY)
    assert offline["by_hand"] == ["c", "same", "same"]
    assert offline["refused"] == online["refused"] == "VLLMValidationError"
    assert (online["many"], online["same"], online["aborted"]) == (MANY, [4, 4], "abort")
    assert online["dead"] == ["EngineDeadError"] * 4
    assert hostile.saw["gone"] == 1, "`del llm` ends its process at once"


@pytest.mark.parametrize(("rollout", "parent"), [("rl.test.one_of_many", None), ("rl.test.online", "rl.vllm.generate")])
def test_hundreds_of_requests_at_once_are_one_span_each_under_their_own_rollout(hostile, rollout, parent):
    """Catches requests that are lost, doubled, or mixed up, at ten times the load of the other tests."""
    spans = {span.span_id: span for span in hostile.run.spans}
    requests = hostile.requests(rollout)
    above = [spans[request.parent_span_id] for request in requests]
    if parent is not None:
        assert {span.name for span in above} == {parent}
        above = [spans[span.parent_span_id] for span in above]
    assert sorted(span.attributes["place"] for span in above) == list(range(MANY))
    assert {span.name for span in above} == {rollout}
    assert {request.attributes["rl.vllm.timings"] for request in requests} == {"engine"}


def test_requests_that_came_to_nothing_are_told_with_their_reason(hostile):
    """Catches a request without a span because it was refused, aborted, cancelled, left, or its engine died."""
    assert hostile.outcomes("rl.test.refused") == {("3", "VLLMValidationError"): 1}, "of three, one had been added"
    assert hostile.outcomes("rl.test.by_hand") == {
        ("a", "aborted"): 1,
        ("b", "aborted"): 1,
        ("c", ""): 1,
        ("same", ""): 2,
    }
    assert hostile.outcomes("rl.test.left") == {
        ("cancelled", "CancelledError"): 1,
        ("closed", "GeneratorExit"): 1,
        ("abandoned", "GeneratorExit"): 1,
        ("aborted", "abort"): 1,
        ("refused", "VLLMValidationError"): 1,
    }
    assert hostile.outcomes("rl.test.dead") == {(f"dead-{place}", "EngineDeadError"): 1 for place in range(4)}


def test_samples_pieces_and_a_cached_prefix_are_counted(hostile):
    """Catches tokens counted by sample, by piece of a stream, or without those that the cache had."""
    first, second, third = [request.attributes for request in hostile.requests("rl.test.job")[:3]]
    assert [found["gen_ai.usage.output_tokens"] for found in (first, second, third)] == [12, 12, 4]
    assert third["gen_ai.usage.cache_read.input_tokens"] == hostile.saw["offline"]["cached"] > 0
    pieces = {request.attributes["gen_ai.request.id"]: request for request in hostile.requests("rl.test.pieces")}
    assert [pieces[f"pieces-{kind}"].attributes["gen_ai.usage.output_tokens"] for kind in ("DELTA", "CUMULATIVE")] == [
        12,
        12,
    ]
    counted = {
        name: {key: found[key] for key in ("requests", "generation_tokens", "ok", "failed")}
        for part in ("offline", "online")
        for name, found in hostile.saw[part].items()
        if name.startswith("stats")
    }
    tokens = 2 * 3 * 4 + 4 + MANY * 4
    assert counted["stats"] == {
        "requests": 2 + 1 + 3 + MANY,
        "generation_tokens": tokens,
        "ok": 6 + 1 + MANY,
        "failed": 3,
    }
    assert counted["stats_by_hand"] == {"requests": 5, "generation_tokens": 3 * 8, "ok": 3, "failed": 2}
    assert counted["stats_many"] == {"requests": MANY, "generation_tokens": MANY * 4, "ok": MANY, "failed": 0}
    assert counted["stats_pieces"] == {"requests": 4, "generation_tokens": 2 * 12 + 2 * 4, "ok": 6, "failed": 0}
    assert (counted["stats_left"]["ok"], counted["stats_left"]["failed"]) == (0, 5)
    assert counted["stats_dead"] == {"requests": 4, "generation_tokens": 0, "ok": 0, "failed": 4}


def test_nothing_is_left_open_dropped_or_counted_twice(hostile):
    """Catches an engine that passes for busy after its last request, and spans that telemetry could not keep."""
    assert not any(hostile.saw["dropped"].values())
    loss = report(hostile.run)["loss"]
    assert (loss["truncated"], loss["dropped"], loss["damaged_records"], loss["duplicates"]) == (0, 0, 0, 0)
    spans = Counter(span.name for span in hostile.run.spans)
    assert spans["rl.vllm.busy"] == 1, "all that was asked for inside prompts overlapped"
    assert spans["rl.vllm.request"] == len(
        {span.span_id for span in hostile.run.spans if span.name.endswith("request")}
    )


def test_an_engines_processes_are_one_unit_of_the_fleet(hostile):
    """Catches an engine core and its worker counted as two of the fleet's, on a run without a GPU."""
    fleet = report(hostile.run)["goodput"]["fleet"]
    engines = [process for process in hostile.run.processes if process.resource.get("rl.vllm.process")]
    assert len(engines) == 2
    assert (fleet["unit"], fleet["units"]) == ("worker", 1)
