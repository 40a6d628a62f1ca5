"""What every test starts from: a clean environment, telemetry off, and Ray only where a test asks for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Ray must not send usage reports from a test, and a worker's log line is no part of a test's output.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# Ray's workers, and subprocesses, import the classes of test modules by reference.
_ROOT = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(_ROOT), str(_ROOT / "tests"), os.environ.get("PYTHONPATH")])
)

# Shared machines stall for longer than hypothesis' 200 ms, and a failure must come back when it is run again.
settings.register_profile(
    "raytrace", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("raytrace")

#: Variables that telemetry reads: none of the machine's own may reach a test, none of a test's may reach the next.
_PREFIXES = ("RAYTRACE_RL_", "NEMO_RL_OTEL_", "OTEL_", "NRL_", "SLURM_", "KUBERNETES_", "POD_")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TRACEPARENT", "TRACESTATE", "BAGGAGE")


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Takes telemetry's variables out of the environment, and puts it back exactly as it was."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_PREFIXES) or name in _NAMES:
            del os.environ[name]
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _clean_state(_clean_environment: None) -> Iterator[None]:
    """Shuts telemetry down that a test left running and forgets what was counted, warned about or left current."""
    yield
    if (context := sys.modules.get("raytrace_rl._otel_context")) is not None:
        context.otel_var.set(context.Context())
    if (scopes := sys.modules.get("raytrace_rl._scopes")) is not None:
        scopes.var.set(None)
    # Through sys.modules: a test that never imported them must not pay for them.
    if (setup := sys.modules.get("raytrace_rl.setup")) is not None and setup.get_telemetry_handle() is not None:
        setup.shutdown_telemetry()
    if (state := sys.modules.get("raytrace_rl._state")) is not None:
        state.drops.update(dict.fromkeys(state.drops, 0))
        state.forget_warnings()


@pytest.fixture
def start_ray() -> Iterator[Callable[..., Any]]:
    """A function that starts a local cluster (keywords as ``ray.init``); it is shut down after the test."""
    import ray

    yield start_cluster
    ray.shutdown()


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """One local cluster for all tests of a module; its ``RAY_OPTIONS`` are keywords of ``ray.init``."""
    import ray

    start_cluster(**getattr(request.module, "RAY_OPTIONS", {}))
    yield
    ray.shutdown()


def start_cluster(**kwargs: Any) -> Any:
    """Starts Ray, once more if its start timed out: on a loaded machine that happens now and then, and says so."""
    import ray

    options = {"num_cpus": 4, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR", **kwargs}
    try:
        return ray.init(**options)
    except Exception as error:
        if "timed out" not in str(error):
            raise
        print(f"ray.init timed out, trying once more: {error}", file=sys.stderr)
        ray.shutdown()
        return ray.init(**options)
