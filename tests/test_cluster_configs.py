"""cluster_configs/: each file held against the strictest schema or parser that is to be had, and against the code."""

from __future__ import annotations

import functools
import json
import operator
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import kubernetes_validate
import pytest
import yaml

from raytrace_rl import resources, semconv
from raytrace_rl.config import TelemetryConfig, resolve
from raytrace_rl.span_groups import ALL_GROUPS
from tests import collector_schema, kuberay_schema
from tests.cluster_files import CONFIGS, documents, ids

KUBERNETES = "1.33"


def templates(value: Any) -> list[Any]:
    """Every pod template inside a document."""
    if isinstance(value, dict):
        found = [value["template"]] if isinstance(value.get("template"), dict) else []
        return found + [template for inner in value.values() for template in templates(inner)]
    return [template for inner in value for template in templates(inner)] if isinstance(value, list) else []


def pods(value: Any) -> list[Any]:
    """Every pod specification inside a document."""
    return [template["spec"] for template in templates(value)]


def check_kuberay(document: Any) -> None:
    """Fails where the operator, or the API server that gets its pods, would refuse a resource."""
    kuberay_schema.check(document)
    for template in templates(document):
        resource = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def misspelt(document: Any, free: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields where a field is, and the document with one more there, for each mapping; not below keys in ``free``."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if path and path[-1] in free:
            return
        if isinstance(value, dict):
            yield path
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            yield from places(inner, (*path, key))

    for path in places(document, ()):
        changed = json.loads(json.dumps(document))  # without what anchors share
        functools.reduce(operator.getitem, path, changed)["noSuchField"] = "x"
        yield "/".join(map(str, path)), changed


def refuses(check: Callable[[Any], None], document: Any) -> bool:
    """Whether a check finds something wrong."""
    try:
        check(document)
    except (AssertionError, KeyError, jsonschema.ValidationError, kubernetes_validate.ValidationError):
        return True
    return False


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=ids)
def test_yaml_has_no_key_twice(path):
    """The second of two equal keys wins in silence."""

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> Any:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{path}: {keys}"
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    assert list(yaml.load_all(path.read_text(), Loader))


def test_every_file_is_named_in_the_readme():
    """A configuration is added that nobody finds, and that no test here looks at."""
    told = (CONFIGS / "README.md").read_text()
    files = {ids(path) for path in CONFIGS.rglob("*") if path.is_file() and path.name != "README.md"}
    helpers = {f"compose/{name}.yaml" for name in ("prometheus", "datasources", "dashboards")}
    named = {file for file in files - helpers if file in told or f"{Path(file).parent}/*" in told}
    assert files - helpers == named


# -- SLURM ---------------------------------------------------------------------------------------------------------


def test_the_slurm_script_is_sound_bash():
    """A quoting mistake shows on a cluster, after hours in the queue."""
    script = CONFIGS / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True, timeout=30)
    checked = subprocess.run(
        [
            Path(sys.executable).with_name("shellcheck"),
            "--shell=bash",
            "--enable=all",
            "--exclude=SC2250,SC2310,SC2312,SC2329",
            "--severity=style",
            script,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.stdout == ""
    assert checked.returncode == 0


# -- Kubernetes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kuberay/raycluster.yaml", "kuberay/rayjob.yaml"])
def test_kuberay_resources(name):
    """The operator refuses the resource, or ignores a field that is spelt wrongly."""
    (document,) = documents(name)
    check_kuberay(document)
    assert len(pods(document)) >= 2


@pytest.mark.parametrize("name", ["kuberay/raycluster.yaml", "kuberay/rayjob.yaml"])
def test_a_misspelt_field_of_a_kuberay_resource_is_seen(name):
    """The schemas accept anything somewhere, and the test above says nothing of it."""
    (document,) = documents(name)
    free = {"metadata", "labels", "annotations", "rayStartParams", "requests", "limits", "nodeSelector", "matchLabels"}
    refused = [path for path, changed in misspelt(document, free) if refuses(check_kuberay, changed)]
    assert refused == [path for path, _ in misspelt(document, free)]
    assert len(refused) > 15


def test_collectors_in_kubernetes():
    """A Deployment that the API server refuses, or a service that leads to no pod."""
    found = documents("kuberay/collector.yaml")
    for document in found:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    labels = {json.dumps(d["spec"]["template"]["metadata"]["labels"]) for d in found if "template" in d["spec"]}
    services = {d["metadata"]["name"]: d for d in found if d["kind"] == "Service"}
    assert {json.dumps(service["spec"]["selector"]) for service in services.values()} == labels
    mounted = {arg.rpartition("/")[2] for pod in pods(found) for arg in pod["containers"][0]["args"]}
    assert mounted == {path.name for path in (CONFIGS / "collector").iterdir()}
    names = {container["image"] for pod in pods(found) for container in pod["containers"]}
    assert names == {documents("compose/compose.yaml")[0]["services"]["collector"]["image"]}
    for name in ("kuberay/raycluster.yaml", "kuberay/rayjob.yaml"):
        endpoints = re.findall(r"http://([\w-]+):4317", (CONFIGS / name).read_text())
        assert set(endpoints) <= services.keys()


@pytest.mark.parametrize("name", ["kuberay/raycluster.yaml", "kuberay/rayjob.yaml"])
def test_what_pods_are_told_is_understood(name):
    """A variable in a pod is none that the library reads, or has a value that it refuses."""
    kubernetes = {variable for variables in resources._KUBERNETES.values() for variable in variables}
    for pod in pods(documents(name)):
        for container in pod["containers"]:
            environ = {entry["name"]: entry.get("value", "x") for entry in container["env"]}
            settings = resolve(None, strict=True, environ=environ)
            assert settings.exporter == "otlp"
            others = {variable for variable in environ if not variable.startswith(("RAYTRACE_RL_", "OTEL_"))}
            assert others <= kubernetes


# -- Ray's cluster launcher ------------------------------------------------------------------------------------------


def test_the_cluster_launcher_accepts_its_file():
    """``ray up`` refuses the file."""
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    (document,) = documents("ray/cluster.yaml")
    jsonschema.validate(document, schema)
    assert document["head_node_type"] in document["available_node_types"]


# -- collector, compose, Prometheus ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["collector/agent.yaml", "collector/gateway.yaml"])
def test_collector_configurations(name):
    """The collector refuses its configuration, or a component in it is in no pipeline."""
    (document,) = documents(name)
    collector_schema.check(document)


@pytest.mark.parametrize("name", ["collector/agent.yaml", "collector/gateway.yaml"])
def test_a_misspelt_or_mistyped_setting_of_a_collector_is_seen(name):
    """The schemas accept anything somewhere, and the test above says nothing of it."""
    (document,) = documents(name)
    kept = [path for path, changed in misspelt(document, set()) if not refuses(collector_schema.check, changed)]
    assert kept == []
    for old, new in (('port: "4317"', "port: 4317"), ("10ms", "10"), ("insecure: true", 'insecure: "true"')):
        text = (CONFIGS / name).read_text()
        if old in text:
            assert refuses(collector_schema.check, yaml.safe_load(text.replace(old, new))), new


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not here")
def test_prometheus_accepts_its_file():
    """Prometheus does not start."""
    command = ["promtool", "check", "config", str(CONFIGS / "compose" / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gateway_knows_our_attributes():
    """Slow and broken steps are sampled away, or series lack the label that dashboards ask for."""
    (document,) = documents("collector/gateway.yaml")
    known = {value for name, value in vars(semconv).items() if name.isupper() and isinstance(value, str)}
    for dimension in document["connectors"]["spanmetrics"]["dimensions"]:
        assert dimension["name"] in known | {"rl.bucket", "rl.span_group", "rl.truncated"}
    policies = {policy["name"]: policy for policy in document["processors"]["tail_sampling"]["policies"]}
    assert set(policies["job-setup-evaluation-checkpoints"]["string_attribute"]["values"]) <= ALL_GROUPS
    # Steps are traces of their own where spans are sent, and only so can a slow one be told from the run.
    assert TelemetryConfig(exporter="otlp").trace_per == "auto"
    assert {"errors", "slow-steps", "cut-short"} <= policies.keys()


def test_the_compose_file():
    """``docker compose`` refuses the file, or mounts what is not there."""
    (document,) = documents("compose/compose.yaml")
    vendored = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(document, json.loads(vendored.read_text()))
    for service in document["services"].values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "a version, so that it is the same next year"
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in document["volumes"] or (CONFIGS / "compose" / source).resolve().exists()
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing of it has a password"
    (scraping,) = documents("compose/prometheus.yaml")
    targets = {target for job in scraping["scrape_configs"] for c in job["static_configs"] for target in c["targets"]}
    (gateway,) = documents("collector/gateway.yaml")
    own = gateway["service"]["telemetry"]["metrics"]["readers"][0]["pull"]["exporter"]["prometheus"]["port"]
    served = {gateway["exporters"]["prometheus"]["endpoint"].rpartition(":")[2], str(own)}
    assert targets == {f"collector:{port}" for port in served}
