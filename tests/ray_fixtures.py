"""Fixtures of the tests across real Ray: a cluster whose workers trace, and a root span to find a test's spans by.

Test modules name it in ``pytest_plugins``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from raytrace_rl import setup
from raytrace_rl.instrumentation import bucket_scope, iteration_scope, umbrella_span
from tests.conftest import start_cluster
from tests.readback import BUCKET, ITERATION, TracedTest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cluster for the module, in whose workers telemetry may start; yields the run directory."""
    import ray

    run_dir = tmp_path_factory.mktemp("run")
    env = {
        "RAYTRACE_RL_ENABLED": "1",
        "RAYTRACE_RL_RUN_DIR": str(run_dir),
        "RAYTRACE_RL_RUN_ID": "test",
        "RAYTRACE_RL_SPAN_GROUPS": "all",
        "RAYTRACE_RL_HEARTBEAT_S": "0.1",
    }
    start_cluster(num_cpus=8, runtime_env={"env_vars": env})
    yield run_dir
    ray.shutdown()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """Two raylets on this machine, with logical CPUs and GPUs."""
    import ray
    from ray.cluster_utils import Cluster

    nodes: Any = Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=4, num_gpus=2, include_dashboard=False)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def traced_test(cluster: Path) -> Iterator[TracedTest]:
    """Telemetry on in the driver, and a root span with an iteration and a bucket around the test."""
    setup.init_telemetry_driver({"enabled": True, "run_dir": str(cluster), "run_id": "test", "span_groups": "all"})
    with umbrella_span("step", "test.root") as root, iteration_scope(ITERATION), bucket_scope(BUCKET):
        yield TracedTest(cluster, root)
    setup.shutdown_telemetry()
