"""Code written for NeMo-RL's telemetry runs here after its prefix is changed, with telemetry on and off.

`PROGRAM` uses each name in the form that NeMo-RL's documentation and call sites have: group and name by position,
``tracer`` by keyword.
"""

from __future__ import annotations

import ast
import textwrap
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry import metrics as otel_metrics
from opentelemetry import trace

from raytrace_rl import _metric_registry, _tee, setup, vocabulary
from tests.readback import TracedTest

pytest_plugins = ["tests.ray_fixtures"]

PROGRAM = textwrap.dedent(
    '''
    import asyncio

    from nemo_rl.telemetry.config import TelemetryConfig
    from nemo_rl.telemetry.instrumentation import (
        Bucket,
        accepts_trace_context,
        bucket_scope,
        current_trace_carrier,
        dispatch_with_trace_context,
        efficiency_span,
        in_per_prompt_scope,
        is_span_group_enabled,
        iteration_scope,
        managed_span,
        per_prompt_scope,
        remote_trace_context,
        safe_set_span_attributes,
        setup_span,
        span_cm,
        startup_span,
        streaming_umbrella_span,
        trace_context_kwargs,
        trace_fn,
        umbrella_span,
        umbrella_trace_fn,
    )
    from nemo_rl.telemetry.metrics import (
        RL_METRIC_GROUP,
        MetricSpec,
        map_efficiency_seconds,
        record_metrics,
        register_metric_group,
        tee_rl_metrics_to_otel,
    )
    from nemo_rl.telemetry.setup import (
        get_telemetry_handle,
        init_telemetry_driver,
        init_telemetry_worker,
        shutdown_telemetry,
    )
    from nemo_rl.telemetry.span_groups import RLSpanGroup, register_span_groups
    from nemo_rl.telemetry.vocabulary import TeedMetric, register_teed_metrics

    DEPTH_KEY = "nemo_style_depth"
    register_teed_metrics((TeedMetric(DEPTH_KEY, "rl.nemo_style.depth", kind="gauge", description="Queue depth."),))
    SECONDS = MetricSpec("nemo_style_seconds", "rl.nemo_style.seconds", "gauge", unit="s")
    register_metric_group(RL_METRIC_GROUP, [SECONDS])
    register_span_groups()


    class Generation:
        @trace_fn(RLSpanGroup.GENERATION, "rl.vllm.generate")
        def generate(self, prompts, greedy=False):
            return [prompt + "!" for prompt in prompts]

        @trace_fn(RLSpanGroup.GENERATION, "rl.vllm.generate_async")
        async def generate_async(self, prompts):
            await asyncio.sleep(0)
            return self.generate(prompts)


    def startup():
        with startup_span():
            with setup_span("ray_init"):
                pass
            with setup_span("workers"):
                return "ready"


    def step(iteration, tracer=None):
        generation = Generation()
        with iteration_scope(iteration):
            with umbrella_span(RLSpanGroup.U_STEP, "rl.grpo.step", tracer=tracer):
                with umbrella_span(RLSpanGroup.U_ROLLOUT, "rl.grpo.generation", **{"rl.k": 2}) as span:
                    responses = generation.generate(["a", "b"])
                    if span is not None:
                        span.set_attribute("rl.num_generations_per_prompt", 2)
                with managed_span(
                    RLSpanGroup.REWARD, "rl.grpo.reward_calculation", tracer=tracer, **{"rl.iteration": iteration}
                ) as span:
                    safe_set_span_attributes(span, {"rl.reward.mean": 0.5, "rl.reward.std": None})
                with managed_span(RLSpanGroup.GENERATION, "rl.grpo.regenerate", **{"rl.bucket": "wasted"}):
                    pass
                with efficiency_span("idle/refit_bubble"):
                    pass
        return responses


    def validate():
        with umbrella_span(RLSpanGroup.U_EVALUATE, "rl.grpo.evaluate"), bucket_scope(Bucket.OVERHEAD):
            return asyncio.run(Generation().generate_async(["v"]))


    def put():
        group = RLSpanGroup.U_PER_PROMPT if in_per_prompt_scope() else RLSpanGroup.DATA_PLANE
        with managed_span(group, "rl.data_plane.put"):
            return in_per_prompt_scope()


    def puts():
        with per_prompt_scope():
            inside = put()
        return [inside, put()]


    @umbrella_trace_fn(RLSpanGroup.U_JOB, "rl.grpo.job")
    def train(tracer=None):
        return [startup(), step(7, tracer), validate(), puts()]


    async def stream(items):
        with streaming_umbrella_span(RLSpanGroup.U_ROLLOUT, "rl.grpo.stream") as on_step:
            for item in items:
                with on_step():
                    made = Generation().generate([item])
                yield made


    def streamed(items):
        async def collect():
            return [item async for item in stream(items)]

        return asyncio.run(collect())


    def always_on(telemetry):
        with span_cm("rl.grpo.setup", tracer=telemetry.tracer if telemetry is not None else None) as span:
            return span is not None


    def collect(carrier):
        """In a thread of its own, as the collector's: no context comes by itself."""
        with remote_trace_context(carrier):
            with umbrella_span(RLSpanGroup.U_ROLLOUT, "rl.grpo.rollout"):
                return "collected"


    class Worker:
        def __init__(self):
            self.telemetry = init_telemetry_worker(rank=0, world_size=1, worker_group="policy")

        @accepts_trace_context
        @trace_fn(RLSpanGroup.POLICY_UPDATE, "rl.policy.train")
        def train(self, batch):
            return len(batch)

        @accepts_trace_context
        async def score(self, batch):
            with managed_span(RLSpanGroup.REWARD, "rl.policy.score"):
                return len(batch)

        def plain(self, batch):
            return len(batch)

        def shutdown(self):
            shutdown_telemetry()
            return get_telemetry_handle() is None


    class WorkerGroup:
        """Its methods take the worker's method by name, and everything by keyword."""

        def __init__(self, workers):
            self.workers = workers

        def run_all_workers_single_data(self, method_name, **kwargs):
            return [getattr(worker, method_name).remote(**kwargs) for worker in self.workers]


    def dispatch(worker, group):
        with umbrella_span(RLSpanGroup.U_STEP, "rl.grpo.step"):
            return [
                dispatch_with_trace_context(worker.train, [1, 2]),
                dispatch_with_trace_context(worker.score, batch=[1]),
                dispatch_with_trace_context(worker.plain, [1, 2, 3]),
                *group.run_all_workers_single_data("train", batch=[1], **trace_context_kwargs()),
            ]


    def metrics(meter):
        tee_rl_metrics_to_otel({DEPTH_KEY: 3, "efficiency/idle/refit_bubble_s": 1.5}, "train")
        record_metrics(meter, RL_METRIC_GROUP, {"nemo_style_seconds": 2.5}, attributes={"queue": "replay"})
        record_metrics(meter, RL_METRIC_GROUP, nemo_style_seconds=2.5)
    '''
)


@pytest.fixture
def program(monkeypatch) -> Any:
    """The program with its prefix changed; what it registers of metrics is taken back."""
    rl_group: Any = _metric_registry._groups[vocabulary.RL_METRIC_GROUP]
    monkeypatch.setattr(rl_group, "specs", dict(rl_group.specs))
    monkeypatch.setattr(vocabulary, "_rows", dict(vocabulary._rows))
    monkeypatch.setattr(_tee, "_declared", ())
    made = ModuleType("nemo_style_program")
    exec(compile(PROGRAM.replace("nemo_rl.telemetry.", "raytrace_rl."), "nemo_style_program", "exec"), vars(made))
    return made


#: What `train` returns, whether or not anybody watches.
TRAINED = ["ready", ["a!", "b!"], ["v!"], [True, False]]


def test_the_program_has_every_name():
    """The program is no longer NeMo-RL's, or leaves out a name that NeMo-RL's code imports."""
    listed = {
        "instrumentation": """Bucket bucket_scope managed_span trace_fn umbrella_span umbrella_trace_fn span_cm
            iteration_scope startup_span setup_span per_prompt_scope in_per_prompt_scope accepts_trace_context
            dispatch_with_trace_context trace_context_kwargs current_trace_carrier remote_trace_context""",
        "setup": "get_telemetry_handle init_telemetry_driver init_telemetry_worker shutdown_telemetry",
        "span_groups": "RLSpanGroup register_span_groups",
        "vocabulary": "TeedMetric register_teed_metrics",
        "metrics": "register_metric_group record_metrics RL_METRIC_GROUP map_efficiency_seconds",
        "config": "TelemetryConfig",
    }
    imported = {
        node.module: {alias.name for alias in node.names}
        for node in ast.parse(PROGRAM).body
        if isinstance(node, ast.ImportFrom)
    }
    assert imported.keys() == {f"nemo_rl.telemetry.{module}" for module in listed}
    for module, names in listed.items():
        assert set(names.split()) <= imported[f"nemo_rl.telemetry.{module}"]
    assert "raytrace_rl" not in PROGRAM


# -- off -----------------------------------------------------------------------------------------------------------


def test_off(program, caplog):
    """A program that traces does something else, raises, or warns when telemetry is off."""
    assert program.get_telemetry_handle() is None
    assert program.train() == TRAINED
    assert program.streamed(["s"]) == [["s!"]]
    assert program.always_on(None) is False
    assert program.current_trace_carrier() == {}
    assert program.trace_context_kwargs() == {}
    for carrier in (None, {}, {"traceparent": f"00-{1:032x}-{2:016x}-01"}):
        assert program.collect(carrier) == "collected"
    assert not program.is_span_group_enabled(program.RLSpanGroup.GENERATION)
    worker = program.Worker()
    assert worker.telemetry is None
    assert worker.train([1, 2]) == 2
    assert worker.train([1, 2], _otel_carrier=None) == 2
    assert worker.shutdown()
    program.metrics(otel_metrics.get_meter("theirs"))
    assert caplog.records == []


def test_off_by_the_configuration(program):
    """A master configuration without telemetry, or with it switched off, starts it or ends the run."""
    for telemetry in (None, {"enabled": False}, program.TelemetryConfig()):
        assert program.init_telemetry_driver(SimpleNamespace(telemetry=telemetry), "grpo") is None
        assert program.get_telemetry_handle() is None
    program.shutdown_telemetry()


def test_dispatch_off(program):
    """With nothing to send, a call reaches its method with other arguments than it was given."""
    called: list[tuple[Any, ...]] = []
    method = SimpleNamespace(remote=lambda *args, **kwargs: called.append((args, kwargs)))
    program.dispatch_with_trace_context(method, "positional", keyword=1)
    assert called == [(("positional",), {"keyword": 1})]


# -- on ------------------------------------------------------------------------------------------------------------


def test_on(program, raytrace_spans):
    """A name, attribute, bucket or parent is another than the program's author was promised."""
    assert program.train() == TRAINED
    assert raytrace_spans.tree() == textwrap.dedent(
        """\
        rl.grpo.job
          rl.grpo.job.started
          rl.startup
            rl.setup.ray_init
            rl.setup.workers
          rl.grpo.step
            rl.grpo.generation
              rl.vllm.generate
            rl.grpo.reward_calculation
            rl.grpo.regenerate
            rl.idle.refit_bubble
          rl.grpo.evaluate
            rl.vllm.generate_async
              rl.vllm.generate
          rl.data_plane.put
          rl.data_plane.put"""
    )
    one = raytrace_spans.one
    assert {span.name: span.bucket for span in raytrace_spans if span.parent is one("rl.grpo.step")} == {
        "rl.grpo.generation": None,
        "rl.grpo.reward_calculation": "productive",
        "rl.grpo.regenerate": "wasted",
        "rl.idle.refit_bubble": "idle",
    }
    assert [span.bucket for span in raytrace_spans.named("rl.vllm.generate")] == ["productive", "overhead"]
    assert [(span.group, span.bucket) for span in raytrace_spans.named("rl.data_plane.put")] == [
        ("per_prompt", None),
        ("data_plane", "overhead"),
    ]
    rollout = one("rl.grpo.generation")
    assert (rollout.attributes["rl.k"], rollout.attributes["rl.num_generations_per_prompt"]) == (2, 2)
    reward = one("rl.grpo.reward_calculation")
    assert (reward.attributes["rl.reward.mean"], reward.iteration) == (0.5, 7)
    assert "rl.reward.std" not in reward.attributes
    assert one("rl.idle.refit_bubble").attributes["rl.efficiency.category"] == "idle/refit_bubble"
    assert {span.iteration for span in one("rl.grpo.step").children} == {7}


def test_on_with_a_tracer(program, raytrace_telemetry):
    """``tracer=telemetry.tracer``, as NeMo-RL's call sites pass it, loses the span, its bucket or its parent."""
    handle = program.get_telemetry_handle()
    assert program.step(7, tracer=handle.tracer) == ["a!", "b!"]
    assert program.always_on(handle) is True
    step, reward = (
        raytrace_telemetry.spans.one("rl.grpo.step"),
        raytrace_telemetry.spans.one("rl.grpo.reward_calculation"),
    )
    assert reward.parent is step
    assert (reward.group, reward.bucket, reward.iteration) == ("reward", "productive", 7)
    assert step.scope.name == "raytrace_rl"
    assert raytrace_telemetry.spans.one("rl.grpo.setup").bucket is None


@pytest.mark.parametrize("running", [False, True])
def test_a_tracer_is_given_by_keyword(program, request, running: bool):
    """A third positional argument passes for a tracer here, or is ignored in silence, on or off alike.

    NeMo-RL's signature would take ``tracer`` third by position; its code gives it by keyword. Here it is a TypeError at
    the call, before the body, whether or not telemetry is on: the mistake cannot wait until someone switches it on.
    """
    if running:
        request.getfixturevalue("raytrace_spans")
    tracer = trace.get_tracer("theirs")
    for opener in (program.managed_span, program.umbrella_span):
        with pytest.raises(TypeError, match="positional"):
            opener(program.RLSpanGroup.U_STEP, "rl.grpo.step", tracer)


def test_stream_on(program, raytrace_spans):
    """The umbrella over a stream ends early, or its steps' spans lie outside it."""
    assert program.streamed(["s", "t"]) == [["s!"], ["t!"]]
    assert raytrace_spans.tree() == "rl.grpo.stream\n  rl.vllm.generate\n  rl.vllm.generate"


def test_carrier_on(program, raytrace_spans):
    """A collector's thread that reattaches the carrier it was constructed with starts a trace of its own."""
    with program.umbrella_span(program.RLSpanGroup.U_JOB, "rl.grpo.job"):
        carrier = program.current_trace_carrier()
    assert "traceparent" in carrier
    thread = threading.Thread(target=program.collect, args=(carrier,))
    thread.start()
    thread.join()
    program.collect(None)
    below, alone = raytrace_spans.named("rl.grpo.rollout")
    assert below.parent is raytrace_spans.one("rl.grpo.job")
    assert alone.parent is None
    assert program.trace_context_kwargs() == {}
    with program.umbrella_span(program.RLSpanGroup.U_JOB, "rl.grpo.job"):
        assert program.trace_context_kwargs().keys() == {"_otel_carrier"}


def test_accepts_trace_context_on(program, raytrace_spans):
    """The carrier of a call is handed on to the method, or does not parent its spans."""
    worker = program.Worker()
    assert worker.telemetry is program.get_telemetry_handle()
    with program.span_cm("caller"):
        carrier = program.current_trace_carrier()
    assert worker.train([1, 2], _otel_carrier=carrier) == 2
    assert raytrace_spans.one("rl.policy.train").parent is raytrace_spans.one("caller")


def test_metrics_on(program, raytrace_telemetry, raytrace_metrics):
    """A teed or recorded series does not arrive, or without its labels."""
    program.metrics(raytrace_telemetry.handle.meter)
    assert raytrace_metrics.latest("rl.nemo_style.depth").value == 3
    efficiency = raytrace_metrics.latest("rl.efficiency.seconds")
    assert (efficiency.value, efficiency.attributes["rl.efficiency.category"]) == (1.5, "idle/refit_bubble")
    assert raytrace_metrics.latest("rl.nemo_style.seconds", queue="replay").value == 2.5
    assert len(raytrace_metrics.named("rl.nemo_style.seconds")) >= 2


def test_map_efficiency_seconds(program):
    """The pure mapping takes sums for categories, or needs telemetry."""
    logged = {"efficiency/idle/refit_bubble_s": 12.0, "efficiency/idle/buffer_full_backoff_s": 80, "total_waste_s": 92}
    measurements = {"idle/refit_bubble": "wall_clock", "idle/buffer_full_backoff": "thread_seconds"}
    expected = {"idle/refit_bubble": 12.0, "idle/buffer_full_backoff": 80.0}
    assert program.map_efficiency_seconds(logged, measurements) == expected


def test_driver_on(program, tmp_path: Path):
    """A master configuration with a telemetry block starts nothing, or a shutdown leaves it running."""
    master = SimpleNamespace(
        policy={"model_name": "org/model"},
        telemetry=program.TelemetryConfig(enabled=True, span_groups="per_step", run_dir=str(tmp_path)),
    )
    handle = program.init_telemetry_driver(master, algorithm="grpo")
    assert handle is program.get_telemetry_handle()
    assert handle.is_exporting
    assert program.is_span_group_enabled(program.RLSpanGroup.GENERATION)
    assert program.train(handle.tracer) == TRAINED
    program.shutdown_telemetry()
    assert program.get_telemetry_handle() is None
    assert setup.get_telemetry_handle() is None


@pytest.mark.ray
@pytest.mark.slow
def test_across_ray(program, traced_test: TracedTest):
    """A call dispatched in either form of NeMo-RL reaches its worker without its parent."""
    import ray

    worker = ray.remote(program.Worker).options(max_concurrency=1).remote()
    results = ray.get(program.dispatch(worker, program.WorkerGroup([worker])))
    assert results == [2, 1, 3, 1]
    step = traced_test.one("rl.grpo.step")
    trains = traced_test.named("rl.policy.train", 2)
    assert {span.parent_span_id for span in trains} == {step.span_id}
    assert {(span.worker_group, span.rank) for span in trains} == {("policy", 0)}
    assert traced_test.one("rl.policy.score").parent_span_id == step.span_id
    assert ray.get(worker.shutdown.remote())
