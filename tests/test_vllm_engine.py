"""A traced vLLM engine stays what it is: driven by hand, refitted, put to sleep, let go of, counted."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from raytrace_rl import RLSpanGroup as G
from raytrace_rl import iteration_scope, umbrella_span
from raytrace_rl.integrations.vllm import (
    STEP_SERIES,
    GenerationStats,
    load_model_span,
    refit_span,
    step_metrics,
    take_stats,
    trace_engine,
    trace_headers,
    weight_version,
)
from tests.running import attributes
from tests.vllm_shapes import LLM, PARAMS, PHASES, AsyncLLM, EngineDeadError, LLMEngine, collect, names, output, timings

pytest_plugins = ["tests.telemetry_fixtures"]


def test_an_engine_driven_by_hand(telemetry):
    """Catches requests that hang under whoever steps, and a span for each of a thousand steps."""
    engine = trace_engine(LLMEngine(), weight_version=1)
    with umbrella_span(G.U_ROLLOUT, "rl.test.rollout"), iteration_scope(4):
        assert engine.add_request("a", "prompt", PARAMS) == "internal-a"
        engine.add_request("b", "prompt", PARAMS)
    engine.set_weight_version("2")
    engine.queue = [output("a", 1, (None,)), output("a", metrics=timings()), output("c")]
    for _ in range(4):
        engine.step()
    assert "rl.vllm.generate" not in names(telemetry)
    engine.abort_request(["b"])
    rollout, busy = telemetry.span("rl.test.rollout"), telemetry.span("rl.vllm.generate")
    assert busy.parent_span_id == rollout.span_id
    assert attributes(busy)["rl.bucket"] == "productive"
    done, aborted = [span for span in telemetry.spans() if span.name == "rl.vllm.request"]
    assert {done.parent_span_id, aborted.parent_span_id} == {rollout.span_id}
    assert (attributes(done)["rl.iteration"], attributes(done)["rl.weight_version"]) == (4, 2)
    assert aborted.status.message == "aborted"
    stats = take_stats(engine)
    assert (stats.ok, stats.failed) == (1, 1)


def test_ids_that_are_used_again_are_requests_of_their_own(telemetry):
    """Catches a request that is forgotten for another of its name, and an engine that is busy ever after."""
    engine = trace_engine(LLMEngine())
    for place in range(2):
        with umbrella_span(G.U_ROLLOUT, "rl.test.rollout", place=place):
            engine.add_request("same", "prompt", PARAMS)
    engine.queue = [output("same", metrics=timings()), output("same", metrics=timings())]
    engine.step()
    assert "rl.vllm.generate" not in names(telemetry)
    engine.step()
    rollouts = [span.span_id for span in telemetry.spans() if span.name == "rl.test.rollout"]
    requests = [span for span in telemetry.spans() if span.name == "rl.vllm.request"]
    assert [span.parent_span_id for span in requests] == rollouts
    assert names(telemetry).count("rl.vllm.generate") == 1


def test_requests_end_however_the_engine_lets_go_of_them(telemetry):
    """Catches an engine that passes for busy until the end of the run."""
    engine = trace_engine(LLMEngine())
    engine.add_request("a", "prompt", PARAMS)
    engine.abort_request(["internal-a"])  # by the id that vLLM has given it
    engine.add_request("b", "prompt", PARAMS)
    engine.unfinished = 0  # gone to sleep, which aborts
    engine.step()
    engine.add_request("c", "prompt", PARAMS)
    engine.failure = EngineDeadError()
    with pytest.raises(EngineDeadError):
        engine.step()
    requests = [span for span in telemetry.spans() if span.name == "rl.vllm.request"]
    assert [span.status.message for span in requests] == ["aborted", "lost", "EngineDeadError"]
    assert names(telemetry).count("rl.vllm.generate") == 3
    assert take_stats(engine).failed == 3


def test_an_llm_and_its_own_engine_tell_a_request_once(telemetry):
    """Catches two spans for each request where a program traces both, in either order."""
    for inner_first in (False, True):
        llm = LLM([output("0", metrics=timings())])
        for engine in (llm.llm_engine, llm) if inner_first else (llm, llm.llm_engine):
            trace_engine(engine)
        llm.generate(["a"], PARAMS)
        llm.llm_engine.queue = [output("0")]
        llm.llm_engine.step()
    assert Counter(names(telemetry)) == {"rl.vllm.generate": 2, "rl.vllm.request": 2, **dict.fromkeys(PHASES, 2)}


# -- the engine stays what it is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LLM, LLMEngine, lambda: AsyncLLM([])])
def test_a_traced_engine_is_free_to_go(telemetry, make):
    """Catches ``del llm`` after which its processes live, and its GPU memory is taken, until a garbage collection."""
    engine = make()
    kind = type(engine)
    gone = weakref.ref(trace_engine(engine))
    assert isinstance(engine, kind)
    assert (type(engine).__name__, type(engine).__module__) == (kind.__name__, kind.__module__)
    del engine
    assert gone() is None


def test_methods_keep_their_signatures_and_kinds(telemetry):
    """Catches a wrapper at which whoever looks before calling goes wrong."""
    for make in (LLM, LLMEngine, lambda: AsyncLLM([])):
        plain, traced = make(), trace_engine(make())
        for name in ("generate", "sleep", "update_weights", "collective_rpc", "add_request", "finish_weight_update"):
            if hasattr(plain, name):
                before, after = getattr(plain, name), getattr(traced, name)
                assert inspect.signature(after) == inspect.signature(before)
                assert inspect.iscoroutinefunction(after) == inspect.iscoroutinefunction(before)
                assert inspect.isasyncgenfunction(after) == inspect.isasyncgenfunction(before)


def test_a_subclass_and_a_method_put_in_by_hand_are_called(telemetry):
    """Catches a program's own ``generate`` that is passed over."""

    class Own(LLM):
        def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
            return [*super().generate(prompts, sampling_params, **kwargs), *super().generate(prompts)]

    llm = trace_engine(Own([output("0")]))
    assert len(llm.generate(["a"], PARAMS, use_tqdm=False)) == 2
    patched = LLM()
    patched.__dict__["generate"] = lambda _prompts, _params: [output("0"), output("1"), output("2")]
    assert len(trace_engine(patched).generate(["a"], PARAMS)) == 3
    assert names(telemetry).count("rl.vllm.generate") == 2


def test_an_unknown_engine_is_named_once_and_left_alone(telemetry, caplog):
    """Catches a release that lacks what we wrap and breaks for it, or is silently not traced."""
    thing = SimpleNamespace(generate=None)
    assert trace_engine(trace_engine(thing)) is thing
    assert vars(thing) == {"generate": None}
    assert caplog.text.count("its calls make no spans") == 1
    assert "was run against vllm 0.32.0" in caplog.text
    assert (take_stats(thing), weight_version(thing)) == (GenerationStats(), None)


def test_tracing_twice_wraps_once(telemetry):
    """Catches two spans for each call of an engine that two parts of a program trace."""
    llm = trace_engine(trace_engine(LLM([output(metrics=timings())]), weight_version=1), weight_version=2)
    llm.generate(["a"], PARAMS)
    assert names(telemetry).count("rl.vllm.generate") == 1
    assert weight_version(llm) == 2


def test_with_telemetry_off_engines_work_and_count(monkeypatch):
    """Catches an engine that needs telemetry once it has been traced."""
    llm = trace_engine(LLM([output()]))
    assert len(llm.generate(["a"], PARAMS)) == 1
    engine = trace_engine(AsyncLLM([output()]))
    assert len(asyncio.run(collect(engine.generate("a", PARAMS, "1")))) == 1
    assert take_stats(llm).ok == take_stats(engine).ok == 1
    with load_model_span():
        assert "TRACEPARENT" not in os.environ
    assert trace_headers() == {}


def test_engines_are_driven_from_many_threads(telemetry):
    """Catches counts that are lost between threads."""
    llm = trace_engine(LLM([output(metrics=timings())]))
    threads = [threading.Thread(target=lambda: [llm.generate(["a"], PARAMS) for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert take_stats(llm).requests == names(telemetry).count("rl.vllm.request") == 160


# -- refit, sleep, wake ------------------------------------------------------------------------------------------------


def test_sleep_wake_and_refit_are_overhead(telemetry):
    """Catches a pause of the engine that no span explains, and a refit that is told once for each layer of calls."""
    llm = trace_engine(LLM(), weight_version=1)
    assert (llm.sleep(2), llm.wake_up()) == (2, "awake")
    assert llm.update_weights("w") == ["update_weights", ("w",)]
    llm.finish_weight_update("5")
    llm.collective_rpc("check_health")
    llm.collective_rpc("load_weights_from")
    assert names(telemetry) == ["rl.vllm.sleep", "rl.vllm.wake", *["rl.vllm.refit"] * 3]
    spans = [attributes(span) for span in telemetry.spans()]
    assert {found["rl.bucket"] for found in spans} == {"overhead"}
    assert [found["rl.vllm.method"] for found in spans[2:]] == [
        "update_weights",
        "finish_weight_update",
        "load_weights_from",
    ]
    assert weight_version(llm) == 5


def test_coroutine_methods_stay_coroutines(telemetry):
    """Catches a span that ends when the coroutine is made, and not when it has run."""
    engine = trace_engine(AsyncLLM([]))

    async def refit() -> None:
        assert await engine.sleep(1) == 1
        with refit_span(engine, 9):
            assert await engine.update_weights("w") == "update_weights"
            await engine.update_weight_version("8")

    asyncio.run(refit())
    assert names(telemetry) == ["rl.vllm.sleep", "rl.vllm.refit"]
    assert weight_version(engine) == 9


def test_a_refit_that_fails_leaves_the_version(telemetry):
    """Catches generations attributed to weights that never arrived."""
    llm = trace_engine(LLM(), weight_version=1)
    with pytest.raises(OSError, match="gone"), refit_span(llm, 2):
        raise OSError("gone")
    assert weight_version(llm) == 1


def test_the_engines_own_version_of_an_answer_holds(telemetry):
    """Catches an answer that is attributed to the weights that arrived while it was made."""
    spans = [SimpleNamespace(version="3", start=0, end=1), SimpleNamespace(version="4", start=1, end=3)]
    llm = trace_engine(LLM([output(metrics=timings(), versions=spans)]), weight_version=9)
    llm.generate(["a"], PARAMS)
    found = attributes(telemetry.span("rl.vllm.request"))
    assert (found["rl.weight_version.first"], found["rl.weight_version"]) == (3, 4)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_steps_numbers_are_the_sum_over_engines():
    """Catches means of means, and a duration that adds up what ran side by side."""
    second = 10**9
    one = GenerationStats(2, 8, 20, ok=3, failed=1, started_ns=10 * second, ended_ns=12 * second)
    two = GenerationStats(2, 4, 12, ok=4, failed=0, started_ns=11 * second, ended_ns=14 * second)
    found = step_metrics([one, two, GenerationStats()])
    assert found == {
        "vllm/prompt_tokens": 12,
        "vllm/generation_tokens": 32,
        "vllm/generations_ok": 7,
        "vllm/generations_failed": 1,
        "vllm/prompt_length_mean": 3.0,
        "vllm/generation_length_mean": 4.0,
        "vllm/batch_duration_s": 4.0,
    }
    assert found.keys() == {row.logger_key for row in STEP_SERIES}
    assert step_metrics([]).keys() == {
        "vllm/prompt_tokens",
        "vllm/generation_tokens",
        "vllm/generations_ok",
        "vllm/generations_failed",
    }


def test_the_series_bear_nemo_rls_names():
    """Catches a dashboard of NeMo-RL's that stays empty."""
    assert {row.name for row in STEP_SERIES} == {
        "rl.vllm.prompt_tokens",
        "rl.vllm.generation_tokens",
        "rl.vllm.prompt_length.mean",
        "rl.vllm.generation_length.mean",
        "rl.vllm.generations.ok",
        "rl.vllm.generations.failed",
        "rl.vllm.batch.duration",
    }
