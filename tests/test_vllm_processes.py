"""What a vLLM engine does to processes: its environment, its plugin, its own tracing."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from opentelemetry.sdk.resources import OTELResourceDetector

from raytrace_rl import setup
from raytrace_rl.integrations.vllm import (
    engine_args,
    load_model_span,
    plugin,
    trace_engine,
)
from raytrace_rl.relay.address import local_endpoint
from tests.running import attributes, child, running
from tests.vllm_shapes import LLM

pytest_plugins = ["tests.telemetry_fixtures"]


def test_an_engine_starts_under_its_span_and_away_from_other_endpoints(telemetry, monkeypatch):
    """Catches children that start a trace of their own, or export because of a variable meant for somebody else."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://elsewhere:4317")
    with load_model_span(model="tiny") as span:
        assert os.environ["TRACEPARENT"].split("-")[2] == span.span_id.hex()
        assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" not in os.environ
    assert "TRACEPARENT" not in os.environ
    assert os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://elsewhere:4317"
    assert attributes(telemetry.span("rl.vllm.load_model"))["rl.span_group"] == "model_init"


def test_engines_that_load_side_by_side_leave_the_environment_as_it_was(telemetry, monkeypatch):
    """Catches a variable of the user's that is lost, or a parent that stays, when two engines start at once."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://elsewhere:4317")
    before = dict(os.environ)
    one, two, three = load_model_span(), load_model_span(), load_model_span()
    for loading in (one, two, three):
        loading.__enter__()
    one.__exit__(None, None, None)
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" not in os.environ
    three.__exit__(None, None, None)
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" not in os.environ
    two.__exit__(None, None, None)
    assert dict(os.environ) == before


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
        assert endpoint == local_endpoint(os.environ["RAYTRACE_RL_RUN_ID"])
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


def test_without_the_plugin_the_local_receiver_takes_vllms_spans(tmp_path, monkeypatch, caplog):
    """Catches a receiver that is not used, or used as the environment says the relay is to send."""
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a")
    before = dict(os.environ)
    with running(tmp_path / "run", vllm_native_tracing=True, otlp_receiver=True, service_name="a run"):
        assert engine_args()["otlp_traces_endpoint"] == local_endpoint(os.environ["RAYTRACE_RL_RUN_ID"])
        with load_model_span():
            assert not {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_TRACES_SAMPLER"} & os.environ.keys()
            told = dict(OTELResourceDetector().detect().attributes)
        assert told == {
            "rl.worker_group": "vllm.engine",
            "process.parent_pid": str(os.getpid()),
            "service.name": "a run",
            "team": "a",
        }
    assert dict(os.environ) == before
    assert "VLLM_PLUGINS" not in caplog.text


def test_vllms_processes_do_not_sample(tmp_path, monkeypatch):
    """Catches start-up spans of an engine's children that are sampled away before the spool has them."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with running(tmp_path / "run", vllm_native_tracing=True):
        with load_model_span():
            assert "OTEL_TRACES_SAMPLER" not in os.environ
        assert os.environ["OTEL_TRACES_SAMPLER"] == "always_off"


def test_the_plugin_leaves_other_processes_alone(monkeypatch, tmp_path):
    """Catches a driver that becomes a worker because it imported vLLM first."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "run"))
    plugin()
    assert setup.get_telemetry_handle() is None


@pytest.mark.ray
def test_an_actor_that_makes_an_engine_before_telemetry_is_no_process_of_the_engine(ray_cluster, tmp_path):
    """Catches an actor that vLLM's plugins named after its engine before it could name itself, and the converse."""
    import ray

    class Actor:
        def named(self) -> tuple[str | None, str | None]:
            plugin()
            setup.init_telemetry_worker(worker_group="generation", rank=0)
            process = setup._process.current
            assert process is not None
            return process.resource["rl.worker_group"], process.resource.get("rl.vllm.process")

    class OfVllm(Actor):
        pass

    OfVllm.__module__ = "vllm.v1.executor.ray_utils"
    environment = {"env_vars": {"RAYTRACE_RL_ENABLED": "1", "RAYTRACE_RL_RUN_DIR": str(tmp_path / "run")}}
    actors = [ray.remote(one).options(runtime_env=environment).remote() for one in (Actor, OfVllm)]
    named = ray.get([actor.named.remote() for actor in actors], timeout=60)
    assert named == [("generation", None), ("vllm.engine", "OfVllm")]


PLUGIN = """
import multiprocessing, random, sys
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
        for _ in range(2):
            random.seed(0)
            with trace.get_tracer("vllm").start_as_current_span("Load model"):
                pass
    provider.force_flush()
    print(setup.get_telemetry_handle().run_dir, flush=True)
    setup.shutdown_telemetry()

engine_core.__module__ = "vllm.v1.engine.core"

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
    kept = Counter(span.name for span in run.spans)
    # Whose generator of ids the workers of an engine seed alike is not ours to choose where vLLM's exporter stays.
    assert kept == ({"Load model": 1} if exported else {"Load model": 2, "begun before": 1})
    (process,) = run.processes
    assert (process.worker_group, process.resource["rl.vllm.process"]) == ("generation.engine", "EngineCore")
    assert ("exported" in done.stdout) == exported


FORKED = """
import multiprocessing
from raytrace_rl import managed_span, setup
from raytrace_rl.integrations.vllm import plugin

def worker():
    plugin()
    plugin()
    with managed_span("generation", "rl.test.worker"):
        pass

def engine_core():
    plugin()
    process = multiprocessing.get_context("fork").Process(target=worker, name="VllmWorker-0")
    process.start()
    process.join()
    with managed_span("generation", "rl.test.core"):
        pass

def users_own():
    plugin()
    with managed_span("generation", "rl.test.own"):
        pass

worker.__module__ = engine_core.__module__ = "vllm.v1.engine.core"
setup.init_telemetry_worker(rank=3, worker_group="generation")
for target in (engine_core, users_own):
    process = multiprocessing.get_context("fork").Process(target=target, name="EngineCore")
    process.start()
    process.join()
setup.shutdown_telemetry()
"""


def test_an_engines_forked_processes_are_no_ranks_of_their_parents_group(tmp_path):
    """Catches two processes that both pass for rank 3, and a child of the user's that passes for an engine's."""
    run_dir = tmp_path / "run"
    child(FORKED, RAYTRACE_RL_ENABLED="1", RAYTRACE_RL_RUN_DIR=str(run_dir), RAYTRACE_RL_SPAN_GROUPS="all")
    from raytrace_rl.monitor import load_run

    found = {
        span.name: (span.process.worker_group, span.rank, span.process.resource.get("rl.vllm.process"))
        for span in load_run(run_dir).spans
    }
    assert found == {
        "rl.test.core": ("generation.engine", None, "EngineCore"),
        "rl.test.worker": ("generation.engine", None, "VllmWorker-0"),
        "rl.test.own": ("generation", 3, None),
    }
