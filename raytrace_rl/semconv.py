"""The attribute names shared between modules, so that a typo is an ImportError and not a column that stays empty.

``rl.*`` names that only one module writes are constants beside their producer. Standard names follow the OpenTelemetry
semantic conventions (attribute registry); ``nv.dl.*``, ``dl.*`` and ``slurm.*`` those of NeMo; ``ray.*`` and ``rl.*``
are ours.
"""

from __future__ import annotations

from typing import Final

# Spans -----------------------------------------------------------------------------------------------------------
RL_SPAN_GROUP: Final = "rl.span_group"
RL_BUCKET: Final = "rl.bucket"
RL_ITERATION: Final = "rl.iteration"
RL_QUEUED_NS: Final = "rl.queued_ns"
#: The node by whose clock the call was sent, if that is not the callee's: it tells which two clocks made the delay.
RL_QUEUED_FROM: Final = "rl.queued_from"
RL_TRUNCATED: Final = "rl.truncated"

# Resource: the run and the part that this process plays in it ------------------------------------------------------
RL_RUN_ID: Final = "rl.run.id"
RL_ATTEMPT: Final = "rl.attempt"
RL_ROLE: Final = "rl.role"
RL_WORKER_GROUP: Final = "rl.worker_group"
RL_GPU_IDS: Final = "rl.gpu.ids"
RL_GPU_UUIDS: Final = "rl.gpu.uuids"

ROLE_DRIVER: Final = "driver"
ROLE_WORKER: Final = "worker"

# Resource: what the run trains -------------------------------------------------------------------------------------
RL_MODEL: Final = "rl.model"
RL_ALGORITHM: Final = "rl.algorithm"
RL_BACKEND: Final = "rl.backend"
RL_GENERATION_BACKEND: Final = "rl.generation.backend"
RL_REWARD: Final = "rl.reward"
RL_NUM_ROLLOUTS: Final = "rl.num_rollouts"
RL_NUM_PROMPT_GROUPS: Final = "rl.num_prompt_groups"
RL_NUM_GENERATIONS_PER_PROMPT: Final = "rl.num_generations_per_prompt"

# Resource: place in the worker group (a rank is local to its group: identity is the pair) ---------------------------
NV_DL_RANK: Final = "nv.dl.rank"
NV_DL_LOCAL_RANK: Final = "nv.dl.local_rank"
NV_DL_WORLD_SIZE: Final = "nv.dl.world_size"
NV_DL_TOPOLOGY_SIZE_TP: Final = "nv.dl.topology.size.tp"
NV_DL_TOPOLOGY_SIZE_PP: Final = "nv.dl.topology.size.pp"
NV_DL_TOPOLOGY_SIZE_DP: Final = "nv.dl.topology.size.dp"
NV_DL_TOPOLOGY_SIZE_CP: Final = "nv.dl.topology.size.cp"
NV_DL_TOPOLOGY_SIZE_EP: Final = "nv.dl.topology.size.ep"

# Spans and metrics: the other spelling of the same sizes -----------------------------------------------------------
DL_TENSOR_PARALLEL_SIZE: Final = "dl.tensor_parallel.size"
DL_PIPELINE_PARALLEL_SIZE: Final = "dl.pipeline_parallel.size"
DL_DATA_PARALLEL_SIZE: Final = "dl.data_parallel.size"
DL_CONTEXT_PARALLEL_SIZE: Final = "dl.context_parallel.size"
DL_EXPERT_PARALLEL_SIZE: Final = "dl.expert_parallel.size"
# and where a process stands among them
DL_TENSOR_PARALLEL_RANK: Final = "dl.tensor_parallel.rank"
DL_PIPELINE_PARALLEL_RANK: Final = "dl.pipeline_parallel.rank"
DL_DATA_PARALLEL_RANK: Final = "dl.data_parallel.rank"
DL_CONTEXT_PARALLEL_RANK: Final = "dl.context_parallel.rank"
DL_EXPERT_PARALLEL_RANK: Final = "dl.expert_parallel.rank"

# Resource: Ray -----------------------------------------------------------------------------------------------------
RAY_JOB_ID: Final = "ray.job.id"
RAY_NODE_ID: Final = "ray.node.id"
RAY_WORKER_ID: Final = "ray.worker.id"
RAY_NAMESPACE: Final = "ray.namespace"
RAY_ACTOR_ID: Final = "ray.actor.id"
RAY_ACTOR_NAME: Final = "ray.actor.name"
RAY_ACTOR_CLASS: Final = "ray.actor.class"
#: How often Ray has restarted the actor: 0 for its first process.
RAY_ACTOR_INCARNATION: Final = "ray.actor.incarnation"

# Resource: process and host (OpenTelemetry) ------------------------------------------------------------------------
SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
TELEMETRY_SDK_NAME: Final = "telemetry.sdk.name"
TELEMETRY_SDK_LANGUAGE: Final = "telemetry.sdk.language"
TELEMETRY_SDK_VERSION: Final = "telemetry.sdk.version"
TELEMETRY_DISTRO_NAME: Final = "telemetry.distro.name"
TELEMETRY_DISTRO_VERSION: Final = "telemetry.distro.version"
PROCESS_PID: Final = "process.pid"
PROCESS_PARENT_PID: Final = "process.parent_pid"
PROCESS_RUNTIME_NAME: Final = "process.runtime.name"
PROCESS_RUNTIME_VERSION: Final = "process.runtime.version"
HOST_NAME: Final = "host.name"

# Resource: Kubernetes (OpenTelemetry) ------------------------------------------------------------------------------
K8S_POD_NAME: Final = "k8s.pod.name"
K8S_POD_UID: Final = "k8s.pod.uid"
K8S_NAMESPACE_NAME: Final = "k8s.namespace.name"
K8S_NODE_NAME: Final = "k8s.node.name"

# Resource: SLURM (NeMo's spelling) ---------------------------------------------------------------------------------
SLURM_JOB_ID: Final = "slurm.job.id"
SLURM_JOB_NAME: Final = "slurm.job.name"
SLURM_JOB_USER: Final = "slurm.job.user"
SLURM_JOB_ACCOUNT: Final = "slurm.job.account"
SLURM_CLUSTER_NAME: Final = "slurm.cluster.name"
SLURM_PARTITION: Final = "slurm.partition"
SLURM_NODELIST: Final = "slurm.nodelist"
SLURM_NODE_ID: Final = "slurm.node.id"
SLURM_PROCID: Final = "slurm.procid"
SLURM_NNODES: Final = "slurm.nnodes"
SLURM_NTASKS: Final = "slurm.ntasks"
SLURM_RESTART_COUNT: Final = "slurm.restart_count"
SLURM_ARRAY_JOB_ID: Final = "slurm.array.job_id"
SLURM_ARRAY_TASK_ID: Final = "slurm.array.task_id"
