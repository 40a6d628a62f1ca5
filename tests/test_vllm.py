"""Calls of a vLLM ``LLM`` and ``AsyncLLM`` as spans, on engines of the same shape; `tests/engines` drives real ones."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from raytrace_rl import RLSpanGroup as G
from raytrace_rl import iteration_scope, umbrella_span
from raytrace_rl.context import current_trace_carrier
from raytrace_rl.instrumentation import per_prompt_scope
from raytrace_rl.integrations.vllm import (
    GenerationStats,
    request_parents,
    take_stats,
    trace_engine,
)
from tests.running import attributes, child, running
from tests.vllm_shapes import LLM, PARAMS, PHASES, AsyncLLM, collect, names, output, timings

pytest_plugins = ["tests.telemetry_fixtures"]


def test_nothing_is_imported_from_vllm():
    """Catches an import that a worker without vLLM cannot do."""
    child("import raytrace_rl.integrations.vllm, sys; assert not {'vllm', 'torch', 'ray'} & sys.modules.keys()")


def test_a_batch_is_one_leaf_with_tokens_and_version(telemetry):
    """Catches a call that is not a span, counts samples as requests, or changes what the engine returns."""
    answers = [output("0", 3, ("length", "stop")), output("1", 2, ("length", "abort"))]
    llm = trace_engine(LLM(answers), weight_version=3)
    with iteration_scope(5):
        assert llm.generate(["a", "b"], PARAMS, use_tqdm=False) == answers
    span = telemetry.span("rl.vllm.generate")
    found = attributes(span)
    assert found["rl.bucket"] == "productive"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (8, 10)
    assert (found["rl.num_prompt_groups"], found["rl.num_generations_per_prompt"]) == (2, 2)
    assert (found["rl.weight_version"], found["rl.iteration"], found["gen_ai.request.model"]) == (3, 5, "tiny")
    assert found["gen_ai.response.finish_reasons"] == ["abort", "length", "stop"]
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.operation.name"]) == (8, "text_completion")
    stats = take_stats(llm)
    assert (stats.requests, stats.prompt_tokens, stats.generation_tokens, stats.ok, stats.failed) == (2, 8, 10, 3, 1)
    assert take_stats(llm) == GenerationStats()


@pytest.mark.parametrize(
    ("prompts", "count"), [("one", 1), (["a", "b", "c"], 3), ([1, 2, 3], 1), ({"prompt": "x"}, 1), (None, None)]
)
def test_prompts_are_counted_as_vllm_takes_them(telemetry, prompts, count):
    """Catches the characters of a string, or the tokens of one prompt, taken for prompts."""
    trace_engine(LLM()).generate(prompts, PARAMS)
    assert attributes(telemetry.span("rl.vllm.generate")).get("rl.num_prompt_groups") == count


def test_requests_are_told_by_the_engines_own_timings(telemetry):
    """Catches request spans that last as long as the call, or phases that do not join."""
    llm = trace_engine(LLM())
    llm.answers = [output("7", metrics=timings())]
    llm.generate(["a"], PARAMS)
    request, call = telemetry.span("rl.vllm.request"), telemetry.span("rl.vllm.generate")
    assert request.parent_span_id == call.span_id
    found = attributes(request)
    assert "rl.bucket" not in found
    assert (found["gen_ai.request.id"], found["rl.vllm.timings"]) == ("7", "engine")
    assert found["gen_ai.latency.time_in_model_decode"] == pytest.approx(2e-3, abs=1e-5)
    phases = [telemetry.span(name) for name in PHASES]
    assert {phase.parent_span_id for phase in phases} == {request.span_id}
    assert phases[0].start_time_unix_nano == request.start_time_unix_nano
    assert phases[2].end_time_unix_nano == request.end_time_unix_nano
    for before, after in pairwise(phases):
        assert before.end_time_unix_nano == after.start_time_unix_nano


def test_another_hosts_clock_is_moved_to_ours(telemetry):
    """Catches requests drawn days away from their call, where the engine core runs on another node."""
    llm = trace_engine(LLM([output(metrics=timings(clock_s=86_400))]))
    llm.generate(["a"], PARAMS)
    request, call = telemetry.span("rl.vllm.request"), telemetry.span("rl.vllm.generate")
    assert attributes(request)["rl.vllm.timings"] == "engine_shifted"
    assert request.end_time_unix_nano <= call.end_time_unix_nano
    assert attributes(request)["gen_ai.latency.time_in_model_decode"] == pytest.approx(2e-3, abs=1e-5)


def test_an_engine_without_timings_is_named_once(telemetry, caplog):
    """Catches requests that get lost, or invented phases, where vLLM keeps no statistics."""
    llm = trace_engine(LLM([output("0"), output("1")]))
    llm.generate(["a", "b"], PARAMS)
    llm.generate(["a", "b"], PARAMS)
    assert names(telemetry).count("rl.vllm.request") == 4
    assert not set(PHASES) & set(names(telemetry))
    assert caplog.text.count("disable_log_stats=False") == 1


def test_each_request_of_a_batch_can_have_its_own_parent(telemetry):
    """Catches requests of several rollouts that all hang under the call that gathered them."""
    llm = trace_engine(LLM([output(str(i), metrics=timings()) for i in range(3)]))
    carriers: list[Any] = []
    for place in range(2):
        with umbrella_span(G.U_ROLLOUT, "rl.test.rollout", place=place):
            carriers.append(current_trace_carrier())
    with request_parents([*carriers, {}]):
        llm.generate(["a", "b", "c"], PARAMS)
    rollouts = [span.span_id for span in telemetry.spans() if span.name == "rl.test.rollout"]
    call = telemetry.span("rl.vllm.generate")
    requests = [span for span in telemetry.spans() if span.name == "rl.vllm.request"]
    assert [span.parent_span_id for span in requests] == [*rollouts, call.span_id]
    assert [link.span_id for link in requests[0].links] == [call.span_id]


def test_parents_that_do_not_fit_the_batch_are_named(telemetry, caplog):
    """Catches requests attributed to the wrong rollout."""
    llm = trace_engine(LLM([output(metrics=timings())]))
    with request_parents([{}, {}]):
        llm.generate(["a"], PARAMS)
    assert telemetry.span("rl.vllm.request").parent_span_id == telemetry.span("rl.vllm.generate").span_id
    assert caplog.text.count("2 parents for 1 requests") == 1


def test_a_batch_that_fails_is_counted_and_its_exception_goes_on(telemetry):
    """Catches telemetry that swallows an engine's failure, or forgets it."""
    llm = trace_engine(LLM(ValueError("dead engine")))
    with pytest.raises(ValueError, match="dead engine"):
        llm.generate(["a", "b"], PARAMS)
    assert telemetry.span("rl.vllm.generate").status.message == "ValueError: dead engine"
    assert take_stats(llm).failed == 2


def test_requests_added_before_are_told_from_the_engine_alone(telemetry):
    """Catches requests of ``enqueue`` that begin with the call that waits for them."""
    llm = trace_engine(LLM())
    asked = timings()
    llm.answers = [output(metrics=asked)]
    llm.wait_for_completion()
    span = telemetry.span("rl.vllm.request")
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(4e6, abs=1e4)


def test_requests_that_were_aborted_are_told_too_and_move_no_parent(telemetry):
    """Catches an answer attributed to its neighbour's rollout because one before it never came, and requests lost."""
    llm = trace_engine(LLM([output("11", metrics=timings()), output("13", metrics=timings())]))
    llm.added = ["10", "11", "12", "13"]
    carriers: list[Any] = []
    for place in range(4):
        with umbrella_span(G.U_ROLLOUT, "rl.test.rollout", place=place):
            carriers.append(current_trace_carrier())
    with request_parents(carriers):
        llm.generate(["a", "b", "c", "d"], PARAMS)
    rollouts = {span.span_id: attributes(span)["place"] for span in telemetry.spans() if "rollout" in span.name}
    requests = [span for span in telemetry.spans() if span.name == "rl.vllm.request"]
    found = {attributes(span)["gen_ai.request.id"]: span for span in requests}
    assert {key: rollouts[span.parent_span_id] for key, span in found.items()} == {"10": 0, "11": 1, "12": 2, "13": 3}
    assert {key for key, span in found.items() if span.status.message == "aborted"} == {"10", "12"}
    stats = take_stats(llm)
    assert (stats.requests, stats.ok, stats.failed) == (4, 2, 2)


def test_requests_of_a_batch_that_fails_are_told(telemetry):
    """Catches requests under way when an engine died that leave no span, or are counted twice."""
    llm = trace_engine(LLM(RuntimeError("dead")))
    llm.added = ["0", "1"]  # of the third it never heard
    with pytest.raises(RuntimeError, match="dead"):
        llm.generate(["a", "b", "c"], PARAMS)
    requests = [span for span in telemetry.spans() if span.name == "rl.vllm.request"]
    assert [span.status.message for span in requests] == ["RuntimeError"] * 2
    assert {span.parent_span_id for span in requests} == {telemetry.span("rl.vllm.generate").span_id}
    assert take_stats(llm).failed == 3


def test_an_empty_batch_is_a_call_without_requests(telemetry):
    """Catches a division by nothing, and a request counted for a batch that had none."""
    llm = trace_engine(LLM())
    assert llm.generate([], PARAMS) == []
    assert attributes(telemetry.span("rl.vllm.generate"))["rl.num_prompt_groups"] == 0
    assert take_stats(llm).requests == 0


def test_vllms_own_spans_of_a_batch_get_each_request_its_own_parent(telemetry):
    """Catches ``llm_request`` spans of several rollouts that all hang under the call: it takes no trace headers."""
    llm = trace_engine(LLM([output("0"), output("1")], endpoint="http://127.0.0.1:1"))
    with umbrella_span(G.U_ROLLOUT, "rl.test.rollout") as rollout:
        carrier = current_trace_carrier()
    with request_parents([carrier, {}]):
        llm.generate(["a", "b"], PARAMS)
    call = telemetry.span("rl.vllm.generate")
    headers = [found["traceparent"].split("-")[2] for found in llm.llm_engine.headers]
    assert headers == [rollout.span_id.hex(), call.span_id.hex()]
    assert "rl.vllm.request" not in names(telemetry)


def test_without_per_prompt_there_are_no_requests(tmp_path):
    """Catches a span for each request in a run that asked for its steps."""
    with running(tmp_path / "run", span_groups="per_step") as telemetry:
        trace_engine(LLM([output(metrics=timings())])).generate(["a"], PARAMS)
        assert names(telemetry) == ["rl.vllm.generate"]


def test_inside_a_prompt_the_call_carries_no_bucket_and_the_engines_time_does(telemetry):
    """Catches calls by the thousand that each claim the engine's time, or an engine whose time nobody claims."""
    llm = trace_engine(LLM([output(metrics=timings())]))
    with per_prompt_scope():
        llm.generate(["a"], PARAMS)
    call, busy = attributes(telemetry.span("rl.vllm.generate")), attributes(telemetry.span("rl.vllm.busy"))
    assert "rl.bucket" not in call
    assert call["rl.span_group"] == "per_prompt"
    assert (busy["rl.bucket"], busy["gen_ai.usage.output_tokens"]) == ("productive", 3)


# -- AsyncLLM ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "lengths", "total"), [("DELTA", (2, 1, 3), 6), ("CUMULATIVE", (2, 3, 6), 6), ("FINAL_ONLY", (6,), 6)]
)
def test_a_stream_is_one_request_with_all_its_tokens(telemetry, kind, lengths, total):
    """Catches tokens that are counted once for each piece of the stream, or of its last piece alone."""
    pieces = [output("9", n, (None,)) for n in lengths[:-1]]
    engine = trace_engine(AsyncLLM([*pieces, output("9", lengths[-1], metrics=timings())]), weight_version=2)
    params = SimpleNamespace(**{**vars(PARAMS), "output_kind": SimpleNamespace(name=kind)})
    assert len(asyncio.run(collect(engine.generate("a", params, "9")))) == len(lengths)
    call, request = telemetry.span("rl.vllm.generate"), telemetry.span("rl.vllm.request")
    assert attributes(call)["gen_ai.usage.output_tokens"] == total
    assert attributes(call)["gen_ai.request.model"] == "served"
    assert request.parent_span_id == call.span_id
    assert attributes(request)["rl.weight_version"] == 2
    assert engine.headers == [None], "vLLM warns of headers while its own tracing is off"
    assert take_stats(engine).ok == 1


def test_concurrent_streams_hang_under_their_own_callers(telemetry):
    """Catches a context that is taken when the engine answers instead of when it was asked."""
    engine = trace_engine(AsyncLLM([output(metrics=timings())]))

    async def rollout(place: int) -> None:
        with umbrella_span(G.U_ROLLOUT, "rl.test.rollout", place=place), per_prompt_scope():
            await collect(engine.generate("a", PARAMS, str(place)))

    async def everyone() -> None:
        await asyncio.gather(*(rollout(place) for place in range(8)))

    asyncio.run(everyone())
    spans = {span.span_id: span for span in telemetry.spans()}
    requests = [span for span in spans.values() if span.name == "rl.vllm.request"]
    rollouts = {spans[spans[request.parent_span_id].parent_span_id].span_id for request in requests}
    assert len(requests) == len(rollouts) == 8
    assert names(telemetry).count("rl.vllm.busy") == 1, "one, over all of them"


def test_an_abandoned_stream_ends_at_once_and_counts_as_failed(telemetry):
    """Catches a request that vLLM works on until the garbage collector comes by, and one that is counted as fine."""
    engine = trace_engine(AsyncLLM([output(reasons=(None,)), output()]))

    async def leave() -> None:
        stream = engine.generate("a", PARAMS, "1")
        async for _ in stream:
            break
        await stream.aclose()
        assert engine.closed == 1

    asyncio.run(leave())
    assert telemetry.span("rl.vllm.request").status.message == "GeneratorExit"
    assert take_stats(engine).failed == 1


def test_an_error_in_the_stream_is_the_calls_and_goes_on(telemetry):
    """Catches an engine's failure that is swallowed, or that leaves the span open."""
    engine = trace_engine(AsyncLLM([RuntimeError("engine is dead")]))
    with pytest.raises(RuntimeError, match="engine is dead"):
        asyncio.run(collect(engine.generate("a", PARAMS, "1")))
    assert telemetry.span("rl.vllm.generate").status.message == "RuntimeError: engine is dead"
    request = telemetry.span("rl.vllm.request")
    assert (request.status.message, attributes(request)["gen_ai.request.id"]) == ("RuntimeError", "1")


def test_vllms_own_spans_get_the_calls_headers_and_replace_ours(telemetry):
    """Catches engine spans without a parent, and every request told twice."""
    engine = trace_engine(AsyncLLM([output(metrics=timings())], endpoint="http://127.0.0.1:1"))
    asyncio.run(collect(engine.generate("a", PARAMS, "1")))
    call = telemetry.span("rl.vllm.generate")
    assert engine.headers == [{"traceparent": f"00-{call.trace_id.hex()}-{call.span_id.hex()}-01"}]
    assert names(telemetry) == ["rl.vllm.generate"]


def test_headers_that_the_caller_gives_hold(telemetry):
    """Catches a server's own trace headers that are overwritten."""
    engine = trace_engine(AsyncLLM([output()], endpoint="http://127.0.0.1:1"))
    asyncio.run(collect(engine.generate("a", PARAMS, "1", trace_headers={"traceparent": "mine"})))
    assert engine.headers == [{"traceparent": "mine"}]
