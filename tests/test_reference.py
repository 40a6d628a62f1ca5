"""docs/reference.md keeps up with the code, and the groups of the code keep up with what presets are for."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from docs import reference
from examples.async_grpo.metrics import CRITIC_SERIES, STEP_SERIES
from raytrace_rl import _registry, span_groups
from raytrace_rl._fields import RULES
from raytrace_rl.buckets import Bucket
from raytrace_rl.config import TelemetryConfig
from raytrace_rl.efficiency import efficiency_categories
from raytrace_rl.monitor import load_run
from raytrace_rl.span_groups import ALL_GROUPS, PER_PROMPT_GROUPS, PRESETS, RLSpanGroup, register_span_groups
from tests.demo_runs import ancestors, named, run_demo

if TYPE_CHECKING:
    from raytrace_rl.monitor import Run


@pytest.fixture(name="emitted_groups")
def _emitted_groups() -> frozenset[str]:
    """EMITTED_GROUPS: those that the package and the examples open spans in, but for those of single prompts."""
    return reference.emitted_groups() - PER_PROMPT_GROUPS


def _section(heading: str) -> str:
    """What stands under a heading of the page."""
    return reference.PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def _cells(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading of the page, without marks of code."""
    section = _section(heading)
    table = section[section.index("| ") :].partition("\n\n")[0]
    return [[cell.strip().strip("`") for cell in line.strip("| \n").split(" | ")] for line in table.splitlines()[2:]]


def test_page_is_what_the_code_says(tmp_path: Path):
    """Code and page have drifted apart. (In a process of its own: other tests register groups and metrics.)"""
    written = tmp_path / "reference.md"
    done = subprocess.run(
        [sys.executable, "-m", "docs.reference", str(written)],
        cwd=reference.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert written.read_text() == reference.PAGE.read_text(), "run: make reference"


def test_page_has_every_row():
    """The page agrees with its generator, and both leave something out."""
    assert [row[0] for row in _cells("Span groups")] == list(dict.fromkeys(reference._constants()))
    assert {row[0] for row in _cells("Span groups")} == ALL_GROUPS
    assert {row[0] for row in _cells("Presets")} == {*PRESETS, "all", "none"}
    assert {row[0] for row in _cells("Buckets")} == {bucket.value for bucket in Bucket}
    categories = {row[0]: row for row in _cells("Efficiency categories")}
    assert categories.keys() == efficiency_categories().keys()
    for name, category in efficiency_categories().items():
        assert categories[name][1:4] == [category.bucket.value, category.measurement, category.window]
    variables = {row[0] for row in _cells("Environment variables")}
    assert variables == {f"RAYTRACE_RL_{field.name.upper()}" for field in dataclasses.fields(TelemetryConfig)}
    assert variables == {f"RAYTRACE_RL_{field.upper()}" for field in RULES}
    assert {row[0].split()[1] for row in _cells("Command line")} >= {"report", "export", "lint", "groups"}
    assert {row[0] for row in _cells("Metrics")} >= {"rl.efficiency.seconds", "rl.setup.duration"}
    assert {row.name for row in (*STEP_SERIES, *CRITIC_SERIES)} <= set(
        re.findall(r"`(rl\.[a-z_.]+)`", _section("Metrics"))
    )


def test_every_span_that_the_package_names_is_on_the_page():
    """A helper is added whose span stands in no table."""
    listed = {row[0] for row in _cells("Spans")}
    opened = {
        site.name.replace("<...>", "*")
        for site in reference.sites("raytrace_rl")
        if site.name is not None and site.group is not None and not site.name.startswith("<")
    }
    assert opened >= {"rl.startup", "rl.setup.*", "rl.*.evaluate", "rl.setup.model_init"}
    masked = {"rl.setup.<phase>": "rl.setup.*"}
    assert opened <= {masked.get(name, name.replace("<algorithm>", "*")) for name in listed} | listed


def test_emitted_groups_are_found(emitted_groups):
    """The search has gone blind, and everything that follows from it holds of nothing."""
    assert emitted_groups == ALL_GROUPS - PER_PROMPT_GROUPS  # each of them has code that opens it
    assert reference.emitted_groups() == ALL_GROUPS
    by_file = {Path(site.path).name for site in reference.sites("examples") if site.group is not None}
    assert {"__main__.py", "driver.py", "collector.py", "generation.py", "training.py"} <= by_file


def _unreached(emitted: frozenset[str]) -> frozenset[str]:
    """The groups that neither ``default`` nor ``per_step`` would ever record."""
    return emitted - span_groups.resolve("default") - span_groups.resolve("per_step")


def test_emitted_groups_are_reached_by_default_or_per_step(emitted_groups):
    """A group that code opens spans in is in no preset that people choose: nobody would ever see them."""
    assert _unreached(emitted_groups) == frozenset()


@pytest.mark.parametrize("group", sorted(ALL_GROUPS - PER_PROMPT_GROUPS))
def test_a_group_that_no_preset_reaches_is_noticed(group: str, monkeypatch: pytest.MonkeyPatch):
    """The check above passes whatever the presets hold."""
    without = {name: members - {group} for name, members in _registry.presets.items()}
    monkeypatch.setattr(_registry, "presets", without)
    assert _unreached(ALL_GROUPS - PER_PROMPT_GROUPS) == {group}


def test_per_prompt_groups_are_reached_by_all_and_nothing_else(raytrace_registrations):
    """Someone who chooses a preset gets spans by the prompt, as many as the data set is long."""
    register_span_groups(
        "lib", ["lib_leaf"], {"lib_all": ["lib_leaf", *PER_PROMPT_GROUPS], "default": PER_PROMPT_GROUPS}
    )
    presets = {*PRESETS, *_registry.presets}
    assert presets >= {"default", "per_step", "lib_all"}
    assert PER_PROMPT_GROUPS
    for preset in presets:
        assert span_groups.resolve(preset).isdisjoint(PER_PROMPT_GROUPS), preset
    assert span_groups.resolve(",".join(presets)).isdisjoint(PER_PROMPT_GROUPS)
    assert span_groups.resolve("all") >= PER_PROMPT_GROUPS


def test_groups_of_the_class_are_all_registered():
    """A constant is added to the class and stays out of the registry: ``all`` would not reach it."""
    assert {value for name, value in vars(RLSpanGroup).items() if name.isupper()} <= span_groups.resolve("all")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A demo run with ``span_groups=all``, and a bound of two prompts."""
    run_dir = tmp_path_factory.mktemp("all") / "run"
    return load_run(run_demo(run_dir, "--steps", "2", span_groups="all", per_prompt_limit="2").run_dir)


@pytest.mark.ray
@pytest.mark.slow
def test_a_demo_run_has_spans_of_every_registered_group(everything: Run):
    """A group is registered, documented, and nothing shows that a span of it ever arrives."""
    found = {span.span_group for span in everything.spans}
    assert ALL_GROUPS - found == set()


@pytest.mark.ray
@pytest.mark.slow
def test_a_demo_run_bounds_the_prompts_of_each_rollout(everything: Run):
    """The collector's first rollout uses up the bound of the whole run, since it is at work outside any step."""
    chains = ancestors(everything)
    rollouts = {span.span_id for span in named(everything, "rl.grpo.rollout")}
    scored = {row.span_id for span in named(everything, "rl.grpo.reward") for row in chains[span.span_id]} & rollouts
    assert len(scored) >= 8
    prompts = Counter(
        next(row.span_id for row in chains[span.span_id] if row.name == "rl.grpo.rollout")
        for span in named(everything, "rl.grpo.prompt_reward")
    )
    assert prompts == dict.fromkeys(scored, 2)
