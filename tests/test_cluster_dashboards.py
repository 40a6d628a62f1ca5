"""The dashboards of cluster_configs/grafana/: held against Grafana's schema, PromQL, and the series that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from examples.async_grpo.metrics import CRITIC_SERIES, STEP_SERIES
from raytrace_rl.integrations import _vllm_stats
from raytrace_rl.span_groups import ALL_GROUPS
from tests.cluster_files import CONFIGS, documents, ids

DASHBOARDS = sorted((CONFIGS / "grafana").glob("*.json"))

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


@pytest.mark.parametrize("path", DASHBOARDS, ids=ids)
def test_dashboards_are_grafanas(path):
    """A misspelt option of a panel is ignored: classes that Grafana makes of its own schema take all that is there."""
    dashboard = json.loads(path.read_text())
    assert lost_by_grafana(dashboard) == ["templating.list[1].definition"]  # what the editor shows, of no schema
    dashboard["panels"][0]["fieldConfig"]["defaults"]["unitt"] = "s"
    dashboard["panels"][0]["targets"][0]["legendFormatt"] = "x"
    assert len(lost_by_grafana(dashboard)) == 3


def lost_by_grafana(dashboard: Any) -> list[str]:
    """What is not, or not the same, in a dashboard that went through Grafana's classes."""
    plugins.register_default_plugins()  # its kinds of panels and queries
    taken = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(dashboard)))

    def lost(ours: Any, theirs: Any, path: str) -> Iterator[str]:
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for key, value in ours.items():
                yield from lost(value, theirs.get(key), f"{path}.{key}")
        elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                yield from lost(one, other, f"{path}[{n}]")
        elif ours != theirs:
            yield path.lstrip(".")

    return list(lost(dashboard, taken, ""))


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
