"""GPU time of spans, profiled iterations and collectives. CUDA itself is tested where there is a GPU."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import isend as plain_isend

from raytrace_rl import RLSpanGroup as G
from raytrace_rl import _state, iteration_scope, managed_span, setup
from raytrace_rl._span import ManagedSpan
from raytrace_rl.integrations import _gpu_time
from raytrace_rl.integrations.torch import (
    COLLECTIVE,
    RL_COLLECTIVE_ASYNC_ATTR,
    RL_COLLECTIVE_BYTES_ATTR,
    RL_COLLECTIVE_RANKS_ATTR,
    RL_GPU_DURATION_ATTR,
    RL_HOST_DURATION_ATTR,
    RL_PROFILE_PATH_ATTR,
    ProfilerWindow,
    gpu_span,
    settle_gpu_spans,
    trace_collectives,
)
from tests.running import attributes, child, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["tests.telemetry_fixtures"]

NAME = "rl.test.gpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


class FakeGpu:
    """Stands in for ``torch.cuda`` where there is none: a GPU whose progress the test decides on.

    Attributes:
        reached: Events up to this number have come to pass.
        capturing: A CUDA graph is being captured.
    """

    def __init__(self) -> None:
        self.recorded = self.made = 0
        self.reached = 0
        self.capturing = False
        self.broken = False

    def event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    """A CUDA event, a second of GPU time after the one before."""

    device = torch.device("cuda", 0)

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.number = 0

    def record(self) -> None:
        assert not self.gpu.capturing, "an event recorded into a graph has no time"
        self.gpu.recorded += 1
        self.number = self.gpu.recorded

    def query(self) -> bool:
        assert not self.gpu.capturing, "asking an event fails the capture of a graph"
        return self.number <= self.gpu.reached

    def elapsed_time(self, other: FakeEvent) -> float:
        if self.gpu.broken:
            raise RuntimeError("CUDA error")
        return 1000.0 * (other.number - self.number)


@pytest.fixture
def gpu(monkeypatch) -> Iterator[FakeGpu]:
    """A `FakeGpu` in the place of CUDA."""
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    yield fake
    _gpu_time._pending.clear()
    _gpu_time._free.clear()


def test_without_cuda_it_is_a_plain_span_and_cuda_stays_untouched(telemetry):
    """Catches a span that initialises CUDA before the worker has chosen its device, or that differs without it."""
    assert type(gpu_span(G.POLICY_UPDATE, NAME)) is ManagedSpan
    with gpu_span(G.POLICY_UPDATE, NAME, n=1):
        pass
    assert not torch.cuda.is_initialized()
    span = telemetry.span(NAME)
    assert attributes(span)["n"] == 1
    assert RL_GPU_DURATION_ATTR not in attributes(span)


def test_nothing_is_imported_from_torch():
    """Catches an import that makes a worker without torch fail, or one with it wait."""
    child("import raytrace_rl.integrations.torch, sys; assert 'torch' not in sys.modules")


def test_work_that_is_done_at_the_end_is_measured_at_once(telemetry, gpu):
    """Catches a duration that comes late although the body has synchronised anyhow."""
    gpu.reached = 10
    with gpu_span(G.POLICY_UPDATE, NAME):
        pass
    found = attributes(telemetry.span(NAME))
    assert found[RL_GPU_DURATION_ATTR] == 1.0
    assert found[RL_HOST_DURATION_ATTR] < 1.0
    assert found["rl.bucket"] == "productive"


def test_work_under_way_is_not_waited_for_and_measured_later(telemetry, gpu):
    """Catches a span that synchronises, that loses its GPU time, or whose host's end moves with the GPU's."""
    with gpu_span(G.POLICY_UPDATE, NAME):
        pass
    with managed_span(G.POLICY_UPDATE, "after"):
        pass
    assert [span.name for span in telemetry.spans()] == ["after"]
    settle_gpu_spans()
    assert len(telemetry.spans()) == 1
    gpu.reached = 2
    settle_gpu_spans()
    span, after = telemetry.span(NAME), telemetry.span("after")
    assert attributes(span)[RL_GPU_DURATION_ATTR] == 1.0
    assert span.end_time_unix_nano <= after.start_time_unix_nano
    assert not _state.open_spans


def test_the_next_span_settles_the_one_before_and_events_are_used_again(telemetry, gpu):
    """Catches GPU times that are only known at the end of the run, and two new events for each span of it."""
    for step in range(20):
        with gpu_span(G.POLICY_UPDATE, NAME, step=step):
            gpu.reached = gpu.recorded  # the GPU keeps up with the host's starts
    gpu.reached = gpu.recorded
    settle_gpu_spans()
    assert [attributes(span)["step"] for span in telemetry.spans()] == list(range(20))
    assert gpu.made <= 4


def test_shutdown_keeps_the_hosts_end_of_work_under_way(tmp_path, gpu):
    """Catches a span of the last step that is read as truncated, or as lasting until shutdown, or is lost."""
    with running(tmp_path / "run") as telemetry:
        with gpu_span(G.POLICY_UPDATE, NAME):
            pass
        with gpu_span(G.POLICY_UPDATE, "done"):
            pass
        with managed_span(G.POLICY_UPDATE, "after"):
            pass
        gpu.reached = 2
    done, span = telemetry.span(NAME), telemetry.span("done")
    assert attributes(done)[RL_GPU_DURATION_ATTR] == 1.0
    assert RL_GPU_DURATION_ATTR not in attributes(span)
    assert span.end_time_unix_nano <= telemetry.span("after").start_time_unix_nano
    assert "rl.truncated" not in attributes(span)


def test_a_span_that_nobody_ended_is_still_truncated(tmp_path, gpu):
    """Catches a span that is open at shutdown and disappears because its GPU work never ended."""
    with running(tmp_path / "run") as telemetry:
        gpu_span(G.POLICY_UPDATE, NAME).__enter__()
    assert attributes(telemetry.span(NAME))["rl.truncated"] is True


def test_an_exception_in_the_body_is_the_spans_and_goes_on(telemetry, gpu):
    """Catches a status that is lost between the end on the host and the end on the GPU."""
    with pytest.raises(ValueError, match="diverged"), gpu_span(G.POLICY_UPDATE, NAME):
        raise ValueError("diverged")
    gpu.reached = 2
    settle_gpu_spans()
    assert telemetry.span(NAME).status.message == "ValueError: diverged"


def test_nothing_is_asked_of_the_gpu_while_a_graph_is_captured(telemetry, gpu):
    """Catches a call that would make ``torch.cuda.graph`` fail (the fakes refuse it)."""
    with gpu_span(G.POLICY_UPDATE, "before"):
        pass
    gpu.capturing = True
    with gpu_span(G.POLICY_UPDATE, NAME):
        settle_gpu_spans()
    gpu.capturing = False
    gpu.reached = 9
    settle_gpu_spans()
    assert RL_GPU_DURATION_ATTR not in attributes(telemetry.span(NAME))
    assert attributes(telemetry.span("before"))[RL_GPU_DURATION_ATTR] == 1.0


def test_a_failed_gpu_costs_the_duration_alone(telemetry, gpu, caplog):
    """Catches telemetry that raises, or drops the span, where CUDA reports an error."""
    gpu.broken, gpu.reached = True, 9
    for _ in range(2):
        with gpu_span(G.POLICY_UPDATE, NAME):
            pass
    assert len(telemetry.spans()) == 2
    assert RL_GPU_DURATION_ATTR not in attributes(telemetry.spans()[0])
    assert caplog.text.count("is not known") == 1


def test_a_disabled_group_and_an_umbrella_record_no_event(tmp_path, gpu):
    """Catches events on a disabled path, and a step that has not ended because the GPU has not."""
    with running(tmp_path / "run", span_groups="step") as telemetry:
        with gpu_span(G.POLICY_UPDATE, NAME) as off, gpu_span(G.STEP, "rl.test.step"):
            assert off is None
        assert [span.name for span in telemetry.spans()] == ["rl.test.step"]
    assert gpu.recorded == 0


@needs_gpu
def test_gpu_time_of_real_kernels(telemetry):
    """Catches a duration that is the launch's and not the work's, and a span that synchronises."""
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    with gpu_span(G.POLICY_UPDATE, NAME):
        for _ in range(20):
            matrix @ matrix
    assert telemetry.spans() == [], "the host was not held up until the GPU was done"
    torch.cuda.synchronize()
    settle_gpu_spans()
    found = attributes(telemetry.span(NAME))
    assert found[RL_GPU_DURATION_ATTR] > found[RL_HOST_DURATION_ATTR]


@needs_gpu
def test_a_graph_can_be_captured_inside_a_gpu_span(telemetry):
    """Catches an event that is asked for, or recorded, during a capture."""
    static = torch.zeros(16, device="cuda")
    with gpu_span(G.POLICY_UPDATE, "before"):
        static += 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), gpu_span(G.POLICY_UPDATE, NAME):
        static += 1
    graph.replay()
    torch.cuda.synchronize()
    settle_gpu_spans()
    assert {span.name for span in telemetry.spans()} == {"before", NAME}


def test_chosen_iterations_are_profiled_and_filed_with_the_run(telemetry):
    """Catches a profile of the wrong iteration, one that nobody finds, and a file that a viewer cannot read."""
    window = ProfilerWindow({2, 4})
    for step in range(1, 5):
        with iteration_scope(step), window(step):
            torch.ones(8).sum()
    exports = [span for span in telemetry.spans() if span.name == "rl.torch.profile_export"]
    assert [attributes(span)["rl.iteration"] for span in exports] == [2, 4]
    assert {attributes(span)["rl.bucket"] for span in exports} == {"overhead"}
    paths = [telemetry.run_dir / attributes(span)[RL_PROFILE_PATH_ATTR] for span in exports]
    assert sorted((telemetry.run_dir / "profiles").iterdir()) == sorted(paths)
    for path in paths:
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        assert any(event.get("name") == "aten::sum" for event in events)


def test_a_profiler_that_cannot_start_costs_nothing_but_a_warning(telemetry, caplog):
    """Catches a wrong option, or a second profiler, that ends the training step."""
    window = ProfilerWindow({1}, no_such_option=True)
    with window(1):
        ran = torch.ones(1)
    assert ran == 1
    assert caplog.text.count("is not profiled") == 1


NESTED = """
import sys, threading
import torch
from raytrace_rl import setup
from raytrace_rl.integrations.torch import ProfilerWindow

setup.init_telemetry_driver({{"enabled": True, "span_groups": "all", "run_dir": sys.argv[1]}})
window = ProfilerWindow({{1, 2}})

def work():
    torch.ones(8).sum()

{body}
setup.shutdown_telemetry()
"""


TWICE = "with window(1), window(2): work()"
AROUND = """
with torch.profiler.profile() as own:
    with window(1):
        work()
own.export_chrome_trace(sys.argv[1] + "/own")
"""
THREADS = """
def both(n):
    with window(n):
        work()

threads = [threading.Thread(target=both, args=(n % 2 + 1,)) for n in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
"""


@pytest.mark.parametrize(
    ("body", "filed"),
    [
        (TWICE, 1),
        ("with window(1), ProfilerWindow({2})(2): work()", 1),
        ("with window(1):\n  with torch.profiler.profile(): work()", 0),
        (AROUND, 0),
        (THREADS, None),
        ("for _ in range(2):\n  with window(1): work()", 2),
    ],
    ids=["twice", "two windows", "user's inside", "user's around", "threads", "again"],
)
def test_profilers_that_meet_end_no_process_and_overwrite_nothing(tmp_path, body, filed):
    """Catches torch's segmentation fault where one profiler is begun within another, and a trace that is replaced."""
    done = child(NESTED.format(body=body), tmp_path / "run")
    profiles = list((tmp_path / "run" / "profiles").glob("iteration-*"))
    assert filed is None or len(profiles) == filed, done.stderr
    assert filed != 0 or "profile" in done.stderr


def test_without_telemetry_nothing_is_profiled(monkeypatch):
    """Catches a profiler that slows down a run in which telemetry is off."""
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: pytest.fail("profiled"))
    assert setup.get_telemetry_handle() is None
    with ProfilerWindow({1})(1):
        pass


@pytest.fixture
def process_group() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_are_spans_while_asked_for(telemetry, process_group):
    """Catches a function that is not wrapped, wrapped twice, counted with its own parts, or never given back."""
    plain = dist.all_reduce
    tensor = torch.ones(4)
    with trace_collectives(), managed_span(G.POLICY_UPDATE, "rl.test.update"):
        with trace_collectives():
            dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        found: list[Any] = [None]
        dist.all_gather_object(found, {"a": 1})
        assert found == [{"a": 1}]
    dist.all_reduce(tensor)
    assert dist.all_reduce is plain
    spans = [span for span in telemetry.spans() if span.name.startswith("rl.collective.")]
    assert [span.name.removeprefix("rl.collective.") for span in spans] == [
        "all_reduce",
        "all_reduce",
        "all_gather_object",
    ]
    first = attributes(spans[0])
    assert (first[RL_COLLECTIVE_BYTES_ATTR], first[RL_COLLECTIVE_RANKS_ATTR]) == (16, 1)
    assert [attributes(span)[RL_COLLECTIVE_ASYNC_ATTR] for span in spans] == [False, True, False]
    update = telemetry.span("rl.test.update")
    assert {span.parent_span_id for span in spans} == {update.span_id}
    assert "rl.bucket" not in first, "they lie inside bucketed work, which keeps its time"


def test_sends_and_receives_that_were_taken_before_keep_working(telemetry, process_group):
    """Catches a batch of them that is refused, or sends where it should receive: torch compares these functions."""
    tensor = torch.ones(2)
    before = dist.P2POp(dist.isend, tensor, 0)
    with trace_collectives():
        dist.P2POp(plain_isend, tensor, 0)
        assert before.op is dist.isend
        assert dist.distributed_c10d.isend is dist.isend


def test_collectives_are_left_alone_while_their_group_is_off(tmp_path, process_group):
    """Catches spans by the thousand in a run that asked for its steps."""
    with running(tmp_path / "run", span_groups="per_step") as telemetry, trace_collectives():
        assert COLLECTIVE not in _state.enabled
        dist.barrier()
        assert telemetry.spans() == []


def test_a_torch_without_a_function_is_named_once(telemetry, monkeypatch, caplog):
    """Catches a release that lacks a collective and makes the request fail, or pass over the others silently."""
    monkeypatch.delattr(dist, "reduce_scatter_tensor")
    for _ in range(2):
        with trace_collectives():
            pass
    assert caplog.text.count("has no torch.distributed.reduce_scatter_tensor") == 1
    assert "was run against torch 2.13.0" in caplog.text
