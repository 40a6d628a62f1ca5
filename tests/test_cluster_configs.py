"""cluster_configs/: each file held against the strictest schema or parser that is to be had, and against the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml

from examples.async_grpo.metrics import CRITIC_SERIES, STEP_SERIES
from raytrace_rl import resources, semconv
from raytrace_rl.config import TelemetryConfig, resolve
from raytrace_rl.integrations import _vllm_stats
from raytrace_rl.span_groups import ALL_GROUPS
from tests import collector_schema
from tests.kuberay_schema import SCHEMAS

CONFIGS = Path(__file__).parent.parent / "cluster_configs"
DASHBOARDS = sorted((CONFIGS / "grafana").glob("*.json"))
KUBERNETES = "1.33"


def documents(name: str) -> list[Any]:
    """The YAML documents of a file, anchors resolved."""
    return [document for document in yaml.safe_load_all((CONFIGS / name).read_text()) if document]


def pods(value: Any) -> list[Any]:
    """Every pod specification inside a document."""
    if isinstance(value, dict):
        found = [value["template"]["spec"]] if isinstance(value.get("template"), dict) else []
        return found + [pod for inner in value.values() for pod in pods(inner)]
    return [pod for inner in value for pod in pods(inner)] if isinstance(value, list) else []


def ids(path: Path) -> str:
    """A file, for the name of a test."""
    return str(path.relative_to(CONFIGS))


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
    jsonschema.validate(document, SCHEMAS[document["kind"]])
    found = pods(document)
    assert len(found) >= 2
    for spec in found:
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}, KUBERNETES, strict=True
        )


def test_kuberay_schema_sees_a_misspelt_field():
    """The schema accepts anything, and the test above says nothing."""
    (document,) = documents("kuberay/raycluster.yaml")
    document["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(document, SCHEMAS["RayCluster"])


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


# -- dashboards ----------------------------------------------------------------------------------------------------

#: Of the collector itself, with the readers' suffixes switched off (`without_type_suffix`, `without_units`).
COLLECTORS_OWN = {
    "otelcol_receiver_accepted_spans",
    "otelcol_receiver_refused_spans",
    "otelcol_exporter_sent_spans",
    "otelcol_exporter_send_failed_spans",
    "otelcol_exporter_queue_size",
    "otelcol_exporter_queue_capacity",
    "otelcol_process_memory_rss",
    "otelcol_processor_tail_sampling_count_traces_sampled",
    "up",
}
COLLECTORS_LABELS = {"exporter", "instance", "job", "policy", "sampled"}


def series_of(name: str, kind: str, unit: str) -> set[str]:
    """The Prometheus series of an OpenTelemetry metric (OpenTelemetry specification, "Prometheus and OpenMetrics")."""
    base = re.sub(r"\W", "_", name)
    suffix = {"s": "seconds", "By": "bytes"}.get(unit, "")
    if suffix and suffix not in base.split("_"):
        base = f"{base}_{suffix}"
    if kind == "histogram":
        return {f"{base}_{part}" for part in ("bucket", "sum", "count")}
    return {f"{base}_total"} if kind == "counter" else {base}


def known_series() -> set[str]:
    """All series that the code records, that the gateway makes of spans, and that collectors have of themselves."""
    found = set(COLLECTORS_OWN)
    for row in (*_vllm_stats.STEP_SERIES, *STEP_SERIES, *CRITIC_SERIES):
        found |= series_of(row.name, row.kind, row.unit)
    found |= series_of("rl.efficiency.seconds", "gauge", "s") | series_of("rl.setup.duration", "gauge", "s")
    spans = documents("collector/gateway.yaml")[0]["connectors"]["spanmetrics"]
    found |= series_of(f"{spans['namespace']}.calls", "counter", "")
    found |= series_of(f"{spans['namespace']}.duration", "histogram", spans["histogram"]["unit"])
    return found


def known_labels() -> set[str]:
    """All labels that these series can have."""
    spans = documents("collector/gateway.yaml")[0]["connectors"]["spanmetrics"]
    names = {dimension["name"] for dimension in spans["dimensions"]}
    names |= {"span.name", "status.code", "rl.efficiency.category", "rl.setup.phase"}
    return {re.sub(r"\W", "_", name) for name in names} | COLLECTORS_LABELS | {"le"}


def selectors(query: str) -> tuple[set[str], set[str]]:
    """The series and labels that a query names; a query that Prometheus would refuse is an error."""
    plain = query.replace("$__rate_interval", "5m").replace("$run", "run")
    names: set[str] = set()
    labels: set[str] = set()

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            names.add(str(node.name))
            labels.update(matcher.name for matcher in node.matchers.matchers)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        return True

    promql_parser.walk(promql_parser.parse(plain), visit)
    return names, labels


@pytest.mark.parametrize("path", DASHBOARDS, ids=ids)
def test_dashboards_ask_for_what_there_is(path):
    """A metric is renamed in the code, and its panel is empty from then on."""
    dashboard = json.loads(path.read_text())
    (run,) = [variable for variable in dashboard["templating"]["list"] if variable["name"] == "run"]
    asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", run["definition"])
    assert asked is not None
    assert asked[1] in known_series()
    assert asked[2] in known_labels()
    for panel in dashboard["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names, labels = selectors(target["expr"])
            assert names <= known_series(), panel["title"]
            assert labels <= known_labels(), panel["title"]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known_labels(), panel["title"]
            groups = re.findall(r'rl_span_group=~?"([^"]*)"', target["expr"])
            assert {group for text in groups for group in text.split("|")} <= ALL_GROUPS, panel["title"]


def test_the_search_for_series_is_not_blind():
    """The check above passes whatever a query asks for."""
    names, labels = selectors('sum by (rl_bucket) (rate(no_such_total{rl_run_id=~"$run"}[$__rate_interval])) / other')
    assert names == {"no_such_total", "other"}
    assert labels == {"rl_bucket", "rl_run_id"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=ids)
def test_dashboards_fit_grafanas_grid(path):
    """Panels lie over each other, or share an id: Grafana moves them at will."""
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"] == f"raytrace-rl-{path.stem}"
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(identifiers) == len(set(identifiers))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"


def test_dashboards_are_provisioned_from_where_they_are_mounted():
    """Grafana comes up without dashboards, or with sources that panels do not find."""
    (provider,) = documents("compose/dashboards.yaml")[0]["providers"]
    volumes = documents("compose/compose.yaml")[0]["services"]["grafana"]["volumes"]
    assert f"../grafana:{provider['options']['path']}:ro" in volumes
    sources = {source["name"]: source for source in documents("compose/datasources.yaml")[0]["datasources"]}
    assert sources["Prometheus"]["url"] == "http://prometheus:9090"
    assert sources["Prometheus"]["isDefault"]
