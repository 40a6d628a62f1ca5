"""Calls of vLLM engines as spans, on engines of the same shape. The real ones are driven in `tests/engines`."""

from __future__ import annotations

import asyncio
import os
import threading
from itertools import pairwise
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from raytrace_rl import RLSpanGroup as G
from raytrace_rl import iteration_scope, setup, umbrella_span
from raytrace_rl.context import current_trace_carrier
from raytrace_rl.instrumentation import per_prompt_scope
from raytrace_rl.integrations.vllm import (
    STEP_SERIES,
    GenerationStats,
    engine_args,
    load_model_span,
    plugin,
    refit_span,
    request_parents,
    step_metrics,
    take_stats,
    trace_engine,
    trace_headers,
    weight_version,
)
from tests.running import attributes, child, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytest_plugins = ["tests.telemetry_fixtures"]

PARAMS = SimpleNamespace(max_tokens=8, temperature=0.5, top_p=1.0, n=2, output_kind=None)
PHASES = ["rl.vllm.request.queued", "rl.vllm.request.prefill", "rl.vllm.request.decode"]


def output(request_id: str = "r", tokens: int = 3, reasons: tuple[str | None, ...] = ("length",), **more: Any) -> Any:
    """A ``RequestOutput``: four prompt tokens, and ``tokens`` in each sample."""
    samples = [
        SimpleNamespace(index=i, token_ids=[1] * tokens, finish_reason=reason, weight_versions=more.get("versions"))
        for i, reason in enumerate(reasons)
    ]
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3, 4],
        num_cached_tokens=0,
        outputs=samples,
        metrics=more.get("metrics"),
        finished=all(reasons),
    )


def timings(clock_s: float = 0.0) -> Any:
    """``RequestStateStats`` of a request answered just now, on a monotonic clock that is ``clock_s`` off."""
    last = monotonic() + clock_s
    return SimpleNamespace(
        queued_ts=last - 4e-3, scheduled_ts=last - 3e-3, first_token_ts=last - 2e-3, last_token_ts=last
    )


class LLM:
    """The shape of vLLM's ``LLM``."""

    def __init__(self, answers: Any = (), endpoint: str | None = None) -> None:
        self.model_config = SimpleNamespace(model="tiny")
        observability = SimpleNamespace(otlp_traces_endpoint=endpoint)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(observability_config=observability))
        self.answers = answers

    def generate(self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True) -> Any:
        if isinstance(self.answers, BaseException):
            raise self.answers
        return list(self.answers)

    def chat(self, messages: Any, sampling_params: Any = None) -> Any:
        return list(self.answers)

    def wait_for_completion(self) -> Any:
        return list(self.answers)

    def sleep(self, level: int = 1) -> int:
        return level

    def wake_up(self) -> str:
        return "awake"

    def collective_rpc(self, method: Any, args: tuple = ()) -> Any:
        return [method, args]

    def update_weights(self, request: Any) -> Any:
        return self.collective_rpc("update_weights", (request,))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.collective_rpc("finish_weight_update")


class AsyncLLM:
    """The shape of vLLM's ``AsyncLLM``."""

    def __init__(self, answers: list[Any], endpoint: str | None = None) -> None:
        self.model_config = SimpleNamespace(model="tiny", served_model_name=["served"])
        self.vllm_config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))
        self.answers = answers
        self.headers: list[Any] = []
        self.closed = 0

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, trace_headers: Any = None
    ) -> AsyncIterator[Any]:
        self.headers.append(trace_headers)
        try:
            for answer in self.answers:
                await asyncio.sleep(0)
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            self.closed += 1

    async def sleep(self, level: int = 1) -> int:
        return level

    async def collective_rpc(self, method: Any) -> Any:
        await asyncio.sleep(0)
        return method

    async def update_weights(self, request: Any) -> Any:
        return await self.collective_rpc("update_weights")

    async def update_weight_version(self, new_version: str) -> None:
        await asyncio.sleep(0)


class LLMEngine:
    """The shape of vLLM's ``LLMEngine``."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None))
        self.queue: list[Any] = []

    def add_request(self, request_id: str, prompt: Any, params: Any, trace_headers: Any = None) -> str:
        return f"internal-{request_id}"

    def abort_request(self, request_ids: Any) -> None:
        pass

    def step(self) -> Any:
        return [self.queue.pop(0)] if self.queue else []

    def set_weight_version(self, weight_version: str) -> None:
        pass


def names(telemetry: Any) -> list[str]:
    """The names of all ended spans, in the order in which they ended."""
    return [span.name for span in telemetry.spans()]


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


async def collect(stream: Any) -> list[Any]:
    """All that a stream brings."""
    return [one async for one in stream]


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
    assert telemetry.span("rl.vllm.request").status.message == "RuntimeError"


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


# -- LLMEngine ---------------------------------------------------------------------------------------------------------


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


# -- refit, sleep, wake, load ------------------------------------------------------------------------------------------


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


def test_an_engine_starts_under_its_span_and_away_from_other_endpoints(telemetry, monkeypatch):
    """Catches children that start a trace of their own, or export because of a variable meant for somebody else."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://elsewhere:4317")
    with load_model_span(model="tiny") as span:
        assert os.environ["TRACEPARENT"].split("-")[2] == span.span_id.hex()
        assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" not in os.environ
    assert "TRACEPARENT" not in os.environ
    assert os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://elsewhere:4317"
    assert attributes(telemetry.span("rl.vllm.load_model"))["rl.span_group"] == "model_init"


def test_children_are_told_their_actors_group(tmp_path, monkeypatch):
    """Catches an engine's processes that nobody can assign to their actor."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "run"))
    setup.init_telemetry_worker(worker_group="generation", rank=3)
    with load_model_span():
        assert os.environ["RAYTRACE_RL_WORKER_GROUP"] == "generation"
    assert "RAYTRACE_RL_WORKER_GROUP" not in os.environ
    setup.shutdown_telemetry()


def test_native_tracing_is_asked_for_and_leaves_no_trace_in_the_environment(tmp_path):
    """Catches vLLM's own spans that are on unasked, and its endpoint that later children take for theirs."""
    assert engine_args() == {"disable_log_stats": False}
    with running(tmp_path / "run"):
        assert engine_args() == {"disable_log_stats": False}
    with running(tmp_path / "native", vllm_native_tracing=True):
        endpoint = engine_args()["otlp_traces_endpoint"]
        os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = endpoint  # as vLLM does
        trace_engine(LLM(endpoint=endpoint))
        assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" not in os.environ
        os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = "http://elsewhere:4317"
        trace_engine(LLM(endpoint="http://elsewhere:4317"))
        assert os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://elsewhere:4317", "a user's own stays"


def test_native_tracing_needs_the_plugin(tmp_path, monkeypatch, caplog):
    """Catches engine processes that wait for an endpoint which is none, because vLLM does not load the plugin there."""
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    with running(tmp_path / "run", vllm_native_tracing=True):
        assert "otlp_traces_endpoint" not in engine_args()
    assert caplog.text.count("VLLM_PLUGINS") == 1


def test_the_plugin_leaves_other_processes_alone(monkeypatch, tmp_path):
    """Catches a driver that becomes a worker because it imported vLLM first."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "run"))
    plugin()
    assert setup.get_telemetry_handle() is None


PLUGIN = """
import multiprocessing, sys
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from raytrace_rl import setup
from raytrace_rl.integrations.vllm import plugin

class Exporter(SpanExporter):
    def export(self, spans):
        print("exported", [span.name for span in spans], flush=True)

def engine_core():
    provider = TracerProvider(resource=Resource({"vllm.instrumenting_module_name": "vllm.engine_core"}))
    provider.add_span_processor(BatchSpanProcessor(Exporter()))
    trace.set_tracer_provider(provider)
    with trace.get_tracer("vllm").start_as_current_span("begun before"):
        plugin()
        plugin()
        with trace.get_tracer("vllm").start_as_current_span("Load model"):
            pass
    provider.force_flush()
    print(setup.get_telemetry_handle().run_dir, flush=True)
    setup.shutdown_telemetry()

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=engine_core, name="EngineCore")
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(("native", "exported"), [("1", False), ("0", True)])
def test_in_a_child_our_spool_takes_over_from_vllms_exporter(tmp_path, native, exported):
    """Catches vLLM's start-up spans that go nowhere, twice, or to an endpoint which is none."""
    done = child(
        PLUGIN,
        RAYTRACE_RL_ENABLED="1",
        RAYTRACE_RL_RUN_DIR=str(tmp_path / "run"),
        RAYTRACE_RL_RUN_ID="r",
        RAYTRACE_RL_WORKER_GROUP="generation",
        RAYTRACE_RL_VLLM_NATIVE_TRACING=native,
    )
    from raytrace_rl.monitor import load_run

    run = load_run(tmp_path / "run")
    kept = {span.name for span in run.spans}
    assert kept == ({"Load model"} if exported else {"Load model", "begun before"})
    (process,) = run.processes
    assert (process.worker_group, process.resource["rl.vllm.process"]) == ("generation.engine", "EngineCore")
    assert ("exported" in done.stdout) == exported


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
