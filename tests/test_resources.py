"""Who this process is, without Ray: what is found, which source wins, and that nothing of it raises."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl import resources, semconv
from raytrace_rl.config import RankIdentity, TelemetryConfig
from raytrace_rl.resources import assigned_gpus, gpu_resource, kubernetes_resource, process_resource, slurm_resource

CONFIG = TelemetryConfig(service_name="trainer", run_id="r1")


def _resource(**kwargs):
    return process_resource(CONFIG, **{"role": semconv.ROLE_WORKER, "environ": {}, **kwargs})


def test_identity_of_a_process():
    """Catches an attribute that the monitor groups by and that is absent, misspelt or of another type."""
    found = _resource(rank=RankIdentity(3, 1, 8, "policy"), attempt=2, gpus=["0", 1])
    assert found[semconv.SERVICE_NAME] == "trainer"
    assert found["rl.run.id"] == "r1"
    assert found["rl.attempt"] == 2
    assert found["rl.role"] == "worker"
    assert found["rl.worker_group"] == "policy"
    assert (found["nv.dl.rank"], found["nv.dl.local_rank"], found["nv.dl.world_size"]) == (3, 1, 8)
    assert found["rl.gpu.ids"] == ["0", "1"]
    assert found["process.pid"] == os.getpid()
    assert found["host.name"]
    assert found["telemetry.sdk.language"] == "python"
    assert found["telemetry.sdk.name"] == "opentelemetry"
    assert found["telemetry.sdk.version"][0].isdigit()


def test_what_is_unknown_is_left_out():
    """Catches None among the attributes, or a rank 0 that nobody gave."""
    found = _resource(rank=RankIdentity(rank=0))
    assert found["nv.dl.rank"] == 0
    assert not {"nv.dl.world_size", "rl.worker_group", "rl.attempt", "rl.gpu.ids", "ray.job.id"} & found.keys()
    assert None not in found.values()


def test_instance_ids_are_unique_whatever_the_seed():
    """Catches two processes, or a fork and its parent, that a backend would take for one service instance."""
    import random

    ids = set()
    for _ in range(100):
        random.seed(42)
        ids.add(_resource()["service.instance.id"])
    assert len(ids) == 100


def test_an_inherited_environment_cannot_overrule_who_we_are():
    """Catches a child process that reports its parent's instance id, pid, role or run."""
    environ = {
        "OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=parent,process.pid=1,rl.role=driver,rl.run.id=x,nv.dl.rank=7,"
        "nv.dl.world_size=16,nv.dl.topology.size.tp=2,team=a%2Cb,host.name=node-7"
    }
    found = _resource(rank=RankIdentity(rank=3), environ=environ)
    assert found["service.instance.id"] != "parent"
    assert found["process.pid"] == os.getpid()
    assert (found["rl.role"], found["rl.run.id"], found["nv.dl.rank"]) == ("worker", "r1", 3)
    assert (found["nv.dl.world_size"], found["nv.dl.topology.size.tp"]) == (16, 2)
    assert (found["team"], found["host.name"]) == ("a,b", "node-7")


def test_the_caller_wins_over_everything_found():
    """Catches a program's own attributes being overwritten by what we detect."""
    given_attributes = {"host.name": "mine", "service.instance.id": "mine", "rl.model": "llama", "process.pid": None}
    found = _resource(attributes=given_attributes, environ={"OTEL_RESOURCE_ATTRIBUTES": "rl.model=other"})
    assert (found["host.name"], found["service.instance.id"], found["rl.model"]) == ("mine", "mine", "llama")
    assert "process.pid" not in found


def test_slurm_is_read_where_it_is_there():
    """Catches a job id that is lost, numbers left as text, or attributes outside SLURM."""
    environ = {"SLURM_JOBID": "77", "SLURM_NODEID": "3", "SLURM_PROCID": "x", "SLURM_JOB_NODELIST": "n[1-4]"}
    assert slurm_resource(environ) == {
        "slurm.job.id": "77",
        "slurm.node.id": 3,
        "slurm.procid": "x",
        "slurm.nodelist": "n[1-4]",
    }
    assert slurm_resource({}) == {}


def test_kubernetes_is_read_inside_a_pod_only(tmp_path, monkeypatch):
    """Catches every machine with a HOSTNAME reported as a pod, and a namespace that is only in the mounted file."""
    monkeypatch.setattr(resources, "_NAMESPACE_FILE", tmp_path / "namespace")
    assert kubernetes_resource({"HOSTNAME": "laptop", "POD_NAME": "p"}) == {}
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "worker-0", "POD_UID": "u", "NODE_NAME": "n"}
    expected = {"k8s.pod.name": "worker-0", "k8s.pod.uid": "u", "k8s.node.name": "n"}
    assert kubernetes_resource(pod) == expected
    (tmp_path / "namespace").write_text("rl\n")
    assert kubernetes_resource(pod) == {**expected, "k8s.namespace.name": "rl"}
    assert kubernetes_resource({**pod, "POD_NAMESPACE": "own"})["k8s.namespace.name"] == "own"


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, []), ("", []), ("-1", []), ("0, 2", ["0", "2"]), ("GPU-ab", ["GPU-ab"])]
)
def test_gpus_without_ray_are_the_visible_ones(visible, expected):
    """Catches a torchrun rank without its GPU, or a CPU process with one."""
    assert assigned_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


class _Nvml(SimpleNamespace):
    """NVML's bindings as far as they are used, for a machine with two GPUs."""

    def __init__(self, *, broken=False):
        self.open = 0
        self.broken = broken

    def nvmlInit(self):  # noqa: N802  (NVML's own spelling)
        if self.broken:
            raise OSError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return [b"GPU-a", "GPU-b"][index]

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return handle


def test_gpu_uuids_where_nvml_answers(monkeypatch):
    """Catches an index that gets another GPU's UUID, bytes of old bindings as text "b'...'", or NVML left open."""
    nvml = _Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_resource(["1", "0"]) == {"rl.gpu.ids": ["1", "0"], "rl.gpu.uuids": ["GPU-b", "GPU-a"]}
    assert gpu_resource(["MIG-x", "0"])["rl.gpu.uuids"] == ["MIG-x", "GPU-a"]
    assert nvml.open == 0


@pytest.mark.parametrize("gpus", [["0", "5"], ["TPU"]])
def test_gpus_without_a_complete_answer_keep_their_ids(monkeypatch, gpus):
    """Catches uuids that do not line up with ids, or a process that fails because of a GPU that NVML does not know."""
    nvml = _Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_resource(gpus) == {"rl.gpu.ids": gpus}
    assert nvml.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", _Nvml(broken=True))
    assert gpu_resource(gpus) == {"rl.gpu.ids": gpus}


def test_gpus_without_nvml(monkeypatch):
    """Catches a machine without the bindings being an error, and UUIDs that Ray already gave being asked for again."""
    monkeypatch.setattr(resources, "_nvml", lambda: None)
    assert gpu_resource(["0"]) == {"rl.gpu.ids": ["0"]}
    assert gpu_resource(["GPU-a"]) == {"rl.gpu.ids": ["GPU-a"], "rl.gpu.uuids": ["GPU-a"]}
    assert gpu_resource([]) == {}


def test_nvml_is_not_touched_without_gpus(monkeypatch):
    """Catches start-up paying for NVML (tens of milliseconds) in every CPU process."""
    asked = []
    monkeypatch.setattr(resources, "_nvml", lambda: asked.append(1))
    _resource()
    assert asked == []


def test_detection_never_raises(monkeypatch, tmp_path):
    """Catches one broken detector taking the others, or the process, with it."""

    def broken(*_):
        raise RuntimeError("broken")

    for name in ("slurm_resource", "kubernetes_resource", "ray_resource", "gpu_resource"):
        monkeypatch.setattr(resources, name, broken)
    assert _resource()["rl.role"] == "worker"


def test_a_half_imported_or_foreign_ray_is_no_error(monkeypatch):
    """Catches start-up from within Ray's own import, and a Ray (or Ray Client) that lacks a method."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    assert resources.ray_resource() == {}
    context = SimpleNamespace(get_job_id=lambda: "01", namespace="n")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert resources.ray_resource() == {"ray.job.id": "01", "ray.namespace": "n"}
    assert assigned_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == []


def test_detection_does_not_import_ray():
    """Catches a plain program paying seconds, and a Ray it may not have, for its identity."""
    code = (
        "import sys; from raytrace_rl import config, resources;"
        "resources.process_resource(config.TelemetryConfig(), role='driver');"
        "print([m for m in ('ray', 'pynvml') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


@given(
    st.dictionaries(st.sampled_from(["OTEL_RESOURCE_ATTRIBUTES", "SLURM_NODEID", "CUDA_VISIBLE_DEVICES"]), st.text())
)
def test_no_environment_breaks_detection(environ):
    """Catches a value of the environment that raises out of detection or lands as something OTLP cannot hold."""
    for value in _resource(environ=environ).values():
        assert isinstance(value, (str, int, list))
        assert not isinstance(value, int) or -(2**63) <= value < 2**63
