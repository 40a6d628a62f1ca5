"""The fields of KubeRay's RayCluster and RayJob (API ray.io/v1), as JSON schemas: what is not listed is a mistake.

Read off the operator's API types (ray-operator/apis/ray/v1/*_types.go), of which its CRDs are generated. Pod templates
are left to Kubernetes' own schemas.
"""

from __future__ import annotations

from typing import Any

import jsonschema

_STRINGS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_TEMPLATE: dict[str, Any] = {"type": "object", "required": ["spec"]}


def _closed(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_CLUSTER_SPEC = _closed(
    ["headGroupSpec"],
    {
        "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "autoscalerOptions": _closed(
            [],
            {
                "resources": {"type": "object"},
                "image": {"type": "string"},
                "imagePullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
                "env": {"type": "array"},
                "envFrom": {"type": "array"},
                "volumeMounts": {"type": "array"},
                "securityContext": {"type": "object"},
                "idleTimeoutSeconds": _COUNT,
                "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
            },
        ),
        "headServiceAnnotations": _STRINGS,
        "suspend": {"type": "boolean"},
        "headGroupSpec": _closed(
            ["rayStartParams", "template"],
            {
                "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                "headService": {"type": "object"},
                "enableIngress": {"type": "boolean"},
                "rayStartParams": _STRINGS,
                "template": _TEMPLATE,
            },
        ),
        "workerGroupSpecs": {
            "type": "array",
            "items": _closed(
                ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                {
                    "groupName": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"},
                    "replicas": _COUNT,
                    "minReplicas": _COUNT,
                    "maxReplicas": _COUNT,
                    "numOfHosts": {"type": "integer", "minimum": 1},
                    "rayStartParams": _STRINGS,
                    "template": _TEMPLATE,
                    "scaleStrategy": _closed([], {"workersToDelete": {"type": "array", "items": {"type": "string"}}}),
                },
            ),
        },
    },
)


def _resource(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _closed(
        ["apiVersion", "kind", "metadata", "spec"],
        {
            "apiVersion": {"const": "ray.io/v1"},
            "kind": {"const": kind},
            "metadata": {"type": "object", "required": ["name"]},
            "spec": spec,
        },
    )


SCHEMAS: dict[str, dict[str, Any]] = {
    "RayCluster": _resource("RayCluster", _CLUSTER_SPEC),
    "RayJob": _resource(
        "RayJob",
        _closed(
            ["entrypoint", "rayClusterSpec"],
            {
                "activeDeadlineSeconds": {"type": "integer", "minimum": 1},
                "backoffLimit": _COUNT,
                "clusterSelector": _STRINGS,
                "entrypoint": {"type": "string", "minLength": 1},
                "entrypointNumCpus": {"type": "number"},
                "entrypointNumGpus": {"type": "number"},
                "entrypointResources": {"type": "string"},
                "jobId": {"type": "string"},
                "managedBy": {"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]},
                "metadata": _STRINGS,
                "rayClusterSpec": _CLUSTER_SPEC,
                "runtimeEnvYAML": {"type": "string"},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
                "submitterConfig": _closed([], {"backoffLimit": _COUNT}),
                "submitterPodTemplate": _TEMPLATE,
                "suspend": {"type": "boolean"},
                "ttlSecondsAfterFinished": _COUNT,
            },
        ),
    ),
}


def check(document: dict[str, Any]) -> None:
    """Fails where the operator would refuse a resource, by its schema or by its own validation."""
    jsonschema.validate(document, SCHEMAS[document["kind"]])
    spec = document["spec"]
    for group in spec.get("rayClusterSpec", spec)["workerGroupSpecs"]:
        assert group["minReplicas"] <= group.get("replicas", group["minReplicas"]) <= group["maxReplicas"]
    if spec.get("ttlSecondsAfterFinished"):
        assert spec["shutdownAfterJobFinishes"], "a time to live is for clusters that are shut down"
