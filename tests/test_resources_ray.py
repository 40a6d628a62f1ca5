"""Who this process is, on a real Ray cluster: driver, named, unnamed and restarted actors, tasks, GPUs."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from raytrace_rl.resources import assigned_gpus, ray_resource

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

#: The GPUs exist in Ray's bookkeeping only.
RAY_OPTIONS = {"num_gpus": 2, "namespace": "tests"}


class Identity:
    """Reports its own identity, as found in ``__init__``."""

    def __init__(self):
        self.found = ray_resource()
        self.gpus = assigned_gpus()

    def identity(self):
        return self.found, self.gpus, os.getpid()


def test_a_driver_is_no_actor():
    """Catches actor attributes, or Ray's warning about asking for them, in the driver."""
    found = ray_resource()
    assert found.keys() == {"ray.job.id", "ray.node.id", "ray.worker.id", "ray.namespace"}
    assert found["ray.job.id"] == ray.get_runtime_context().get_job_id()
    assert found["ray.namespace"] == "tests"


def test_a_named_actor_knows_its_ids_inside_its_constructor():
    """Catches identity that is complete only after ``__init__``, where the first spans are long written."""
    actor = ray.remote(Identity).options(name="gen-0", num_gpus=1).remote()
    found, gpus, _ = ray.get(actor.identity.remote(), timeout=60)
    assert found["ray.actor.id"] == actor._actor_id.hex()
    assert found["ray.actor.name"] == "gen-0"
    assert found["ray.actor.class"] == "Identity"
    assert found["ray.actor.incarnation"] == 0
    assert found["ray.namespace"] == "tests"
    assert found["ray.node.id"] == ray.get_runtime_context().get_node_id()
    assert len(gpus) == 1
    assert gpus[0] in {"0", "1"}


def test_an_unnamed_actor_without_gpus():
    """Catches an empty name as an attribute, and GPUs of the node given to an actor that took none."""
    actor = ray.remote(Identity).remote()
    found, gpus, _ = ray.get(actor.identity.remote(), timeout=60)
    assert "ray.actor.name" not in found
    assert found["ray.actor.class"] == "Identity"
    assert gpus == []


def test_a_restarted_actor_counts_its_incarnation():
    """Catches two lives of one actor that the report could not tell apart."""
    actor = ray.remote(Identity).options(max_restarts=1, max_task_retries=1).remote()
    first, _, pid = ray.get(actor.identity.remote(), timeout=60)
    os.kill(pid, signal.SIGKILL)
    second, _, new_pid = ray.get(actor.identity.remote(), timeout=120)
    # The first answer after the kill may still come from the old process.
    while new_pid == pid:
        second, _, new_pid = ray.get(actor.identity.remote(), timeout=120)
    assert first["ray.actor.id"] == second["ray.actor.id"]
    assert (first["ray.actor.incarnation"], second["ray.actor.incarnation"]) == (0, 1)
    assert first["ray.worker.id"] != second["ray.worker.id"]


def test_a_task_has_its_worker_and_no_actor():
    """Catches a remote function's process without identity."""
    found = ray.get(ray.remote(ray_resource).remote(), timeout=60)
    assert found.keys() == {"ray.job.id", "ray.node.id", "ray.worker.id", "ray.namespace"}
    assert found["ray.worker.id"] != ray.get_runtime_context().get_worker_id()
