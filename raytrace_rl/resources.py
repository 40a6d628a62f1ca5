"""Who this process is: the attributes of its OTLP ``Resource``.

Detection is cheap (a few milliseconds at most, NVML excepted and only where GPUs are assigned), imports nothing that
is not loaded already, and is silent about what is absent. Nothing here raises.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import opentelemetry.version

from raytrace_rl import _state, semconv
from raytrace_rl._run_attributes import SIZES
from raytrace_rl._version import VERSION
from raytrace_rl.config import RankIdentity, resource_attributes

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from raytrace_rl.config import TelemetryConfig

#: Attributes that are whole numbers wherever they come from; an environment only knows text.
_INTEGERS: Final = SIZES | frozenset(
    {
        semconv.NV_DL_RANK,
        semconv.NV_DL_LOCAL_RANK,
        semconv.NV_DL_WORLD_SIZE,
        semconv.SLURM_NODE_ID,
        semconv.SLURM_PROCID,
        semconv.SLURM_NNODES,
        semconv.SLURM_NTASKS,
        semconv.SLURM_RESTART_COUNT,
    }
)

#: Attribute and the variables it is read from; the first that is set holds. Launchers such as ``ray.sub`` strip
#: SLURM's before the driver starts: what is there is taken, and nothing else depends on it.
_SLURM: Final[dict[str, tuple[str, ...]]] = {
    semconv.SLURM_JOB_ID: ("SLURM_JOB_ID", "SLURM_JOBID"),
    semconv.SLURM_JOB_NAME: ("SLURM_JOB_NAME",),
    semconv.SLURM_JOB_USER: ("SLURM_JOB_USER",),
    semconv.SLURM_JOB_ACCOUNT: ("SLURM_JOB_ACCOUNT",),
    semconv.SLURM_CLUSTER_NAME: ("SLURM_CLUSTER_NAME",),
    semconv.SLURM_PARTITION: ("SLURM_JOB_PARTITION",),
    semconv.SLURM_NODELIST: ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    semconv.SLURM_NODE_ID: ("SLURM_NODEID",),
    semconv.SLURM_PROCID: ("SLURM_PROCID",),
    semconv.SLURM_NNODES: ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    semconv.SLURM_NTASKS: ("SLURM_NTASKS",),
    semconv.SLURM_RESTART_COUNT: ("SLURM_RESTART_COUNT",),
    semconv.SLURM_ARRAY_JOB_ID: ("SLURM_ARRAY_JOB_ID",),
    semconv.SLURM_ARRAY_TASK_ID: ("SLURM_ARRAY_TASK_ID",),
}

#: Names that pod specifications commonly give the downward API's fields.
_KUBERNETES: Final[dict[str, tuple[str, ...]]] = {
    semconv.K8S_POD_NAME: ("POD_NAME", "K8S_POD_NAME", "MY_POD_NAME", "HOSTNAME"),
    semconv.K8S_POD_UID: ("POD_UID", "K8S_POD_UID", "MY_POD_UID"),
    semconv.K8S_NAMESPACE_NAME: ("POD_NAMESPACE", "K8S_NAMESPACE", "MY_POD_NAMESPACE"),
    semconv.K8S_NODE_NAME: ("K8S_NODE_NAME", "NODE_NAME", "MY_NODE_NAME"),
}

#: Where Kubernetes mounts the namespace into every pod that has a service account.
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def process_resource(
    config: TelemetryConfig,
    *,
    role: str,
    rank: RankIdentity | None = None,
    attempt: int | None = None,
    gpus: Sequence[str | int] | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    of_run: Mapping[str, AttributeValue] | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, AttributeValue]:
    """Returns the resource of this process. Weakest first: the host, the run, the environment, who we are, the caller.

    Args:
        config: Settled settings; ``run_id`` and ``service_name`` are taken from it.
        role: `semconv.ROLE_DRIVER` or `semconv.ROLE_WORKER`.
        rank: Place in the worker group; what is None is left out.
        attempt: Which start of this run id it is, from 1.
        gpus: Physical GPUs of this process (indices on the node, or UUIDs); None to ask Ray, or without Ray
            ``CUDA_VISIBLE_DEVICES``.
        attributes: What the program says; it wins over everything that is found.
        of_run: What the driver says of the whole run.
        environ: Where to look instead of ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    found: dict[str, AttributeValue | None] = {semconv.HOST_NAME: os.uname().nodename}
    found.update(_quietly(slurm_resource, environ))
    found.update(_quietly(kubernetes_resource, environ))
    found.update(of_run or {})
    found.update({key: _typed(key, value) for key, value in resource_attributes(environ).items()})
    found.update(_quietly(_identity, config, role, rank or RankIdentity(), attempt))
    found.update(_quietly(ray_resource))
    found.update(_quietly(gpu_resource, assigned_gpus(environ) if gpus is None else gpus))
    found.update(attributes or {})
    return {key: value for key, value in found.items() if value is not None}


def _identity(
    config: TelemetryConfig, role: str, rank: RankIdentity, attempt: int | None
) -> dict[str, AttributeValue | None]:
    """Returns what this process knows of itself. An environment is inherited by children, so it cannot overrule it."""
    values: dict[str, AttributeValue | None] = {
        semconv.SERVICE_NAME: config.service_name,
        semconv.SERVICE_INSTANCE_ID: new_instance_id(),
        semconv.TELEMETRY_SDK_NAME: "opentelemetry",
        semconv.TELEMETRY_SDK_LANGUAGE: "python",
        semconv.TELEMETRY_SDK_VERSION: opentelemetry.version.__version__,
        semconv.TELEMETRY_DISTRO_NAME: "raytrace-rl",
        semconv.TELEMETRY_DISTRO_VERSION: VERSION,
        semconv.PROCESS_PID: os.getpid(),
        semconv.PROCESS_PARENT_PID: os.getppid(),
        semconv.PROCESS_RUNTIME_NAME: sys.implementation.name,
        semconv.PROCESS_RUNTIME_VERSION: ".".join(str(part) for part in sys.version_info[:3]),
        semconv.RL_RUN_ID: config.run_id,
        semconv.RL_ATTEMPT: attempt,
        semconv.RL_ROLE: role,
        semconv.RL_WORKER_GROUP: rank.worker_group,
        semconv.NV_DL_RANK: rank.rank,
        semconv.NV_DL_LOCAL_RANK: rank.local_rank,
        semconv.NV_DL_WORLD_SIZE: rank.world_size,
    }
    return {key: value for key, value in values.items() if value is not None}


def new_instance_id() -> str:
    """Returns a ``service.instance.id``: random, since pids repeat across containers and attempts of a run.

    From the kernel and not from ``random``, which a program seeds alike on every rank.
    """
    return str(uuid.UUID(bytes=os.urandom(16), version=4))


def ray_resource() -> dict[str, AttributeValue]:
    """Returns what Ray says of this process, empty where Ray is not imported or not initialised. Never raises.

    One request to Ray's control store, a few milliseconds, and only in an actor: its class and its number of restarts
    are kept nowhere else.
    """
    context = _ray_context()
    if context is None:
        return {}
    found: dict[str, AttributeValue | None] = {
        semconv.RAY_JOB_ID: _call(context, "get_job_id"),
        semconv.RAY_NODE_ID: _call(context, "get_node_id"),
        semconv.RAY_WORKER_ID: _call(context, "get_worker_id"),
        semconv.RAY_NAMESPACE: _ask(lambda: context.namespace),
        semconv.RAY_ACTOR_ID: (actor_id := _call(context, "get_actor_id")),
    }
    if actor_id:
        record = _ask(lambda: _actor_record(str(actor_id))) or {}
        found[semconv.RAY_ACTOR_NAME] = _call(context, "get_actor_name")
        found[semconv.RAY_ACTOR_CLASS] = record.get("ActorClassName")
        found[semconv.RAY_ACTOR_INCARNATION] = record.get("NumRestarts")
    # An unnamed actor's name is the empty string.
    return {key: value for key, value in found.items() if value is not None and value != ""}


def assigned_gpus(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the physical GPUs of this process: those that Ray assigned, else those of ``CUDA_VISIBLE_DEVICES``.

    Ray narrows that variable for its workers too, but a process that took no GPU may still see all of the node's.
    """
    environ = os.environ if environ is None else environ
    context = _ray_context()
    if context is not None:
        return [str(gpu) for gpu in (_call(context, "get_accelerator_ids") or {}).get("GPU", ())]
    return [gpu.strip() for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip() not in {"", "-1"}]


def gpu_resource(gpus: Iterable[str | int]) -> dict[str, AttributeValue]:
    """Returns ids and, where NVML answers for all of them, UUIDs of the given physical GPUs; empty without any."""
    ids = [str(gpu) for gpu in gpus]
    if not ids:
        return {}
    uuids = ids if all(gpu.startswith(("GPU-", "MIG-")) for gpu in ids) else _ask(lambda: _nvml_uuids(ids))
    return {semconv.RL_GPU_IDS: ids} | ({semconv.RL_GPU_UUIDS: uuids} if uuids else {})


def slurm_resource(environ: Mapping[str, str]) -> dict[str, AttributeValue]:
    """Returns what SLURM's variables say; empty outside a SLURM job."""
    return _from_variables(_SLURM, environ)


def kubernetes_resource(environ: Mapping[str, str]) -> dict[str, AttributeValue]:
    """Returns pod, namespace and node; empty outside Kubernetes (``KUBERNETES_SERVICE_HOST`` is set in every pod)."""
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        return {}
    found = _from_variables(_KUBERNETES, environ)
    if semconv.K8S_NAMESPACE_NAME not in found and (name := _ask(lambda: _NAMESPACE_FILE.read_text().strip())):
        found[semconv.K8S_NAMESPACE_NAME] = name
    return found


def _from_variables(table: Mapping[str, tuple[str, ...]], environ: Mapping[str, str]) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    for key, variables in table.items():
        if value := next((environ[name] for name in variables if environ.get(name)), None):
            found[key] = _typed(key, value)
    return found


def _typed(key: str, value: str) -> AttributeValue:
    return int(value) if key in _INTEGERS and value.isdecimal() and len(value) < 19 else value


def _ray_context() -> Any:
    """Returns Ray's runtime context, or None where Ray is not there, not started, or not to be imported for this."""
    ray = sys.modules.get("ray")  # it may be half imported: everything of it is asked for inside _ask
    return None if ray is None else _ask(lambda: ray.get_runtime_context() if ray.is_initialized() else None)


def _actor_record(actor_id: str) -> dict[str, Any]:
    # No public call gives class and restarts without the dashboard; ray.util.state needs it.
    from ray._private.state import actors

    return dict(actors(actor_id))


def _nvml_uuids(ids: Iterable[str]) -> list[str] | None:
    """Asks NVML. Ray's ids are indices in the order of the PCI bus, which is NVML's order."""
    nvml = _nvml()
    if nvml is None:
        return None
    nvml.nvmlInit()
    try:
        found = []
        for gpu in ids:
            if gpu.startswith(("GPU-", "MIG-")):
                found.append(gpu)
                continue
            name = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(gpu)))
            found.append(name.decode() if isinstance(name, bytes) else str(name))
        return found
    finally:
        nvml.nvmlShutdown()


def _nvml() -> Any:
    """Returns NVML's bindings: NVIDIA's own where installed, else the copy inside a Ray that is loaded already."""
    try:
        import pynvml
    except ImportError:
        if "ray" not in sys.modules:
            return None
        from ray._private.thirdparty import pynvml
    return pynvml


def _ask(question: Callable[[], Any]) -> Any:
    """Returns the answer, or None if asking failed: an attribute less, and the run goes on."""
    try:
        return question()
    except Exception as error:
        _state.logger.debug("resource detection: %r", error)
        return None


def _call(context: Any, method: str) -> Any:
    """Asks one method; another Ray, or Ray Client, may lack it."""
    return _ask(lambda: getattr(context, method)())


def _quietly(detect: Callable[..., Mapping[str, Any]], *args: Any) -> Mapping[str, Any]:
    return _ask(lambda: detect(*args)) or {}
