"""Writes docs/reference.md from the code: groups, presets, buckets, categories, spans, metrics, variables, commands.

``make reference`` (``python -m docs.reference``) writes it anew; ``tests/test_reference.py`` fails where it is behind.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from raytrace_rl import _recording, actors, cli, config, instrumentation, metrics, span_groups
from raytrace_rl._fields import RULES
from raytrace_rl._registry import default_bucket, is_umbrella
from raytrace_rl.buckets import Bucket
from raytrace_rl.efficiency import efficiency_categories
from raytrace_rl.integrations import megatron, torch, vllm
from raytrace_rl.lint.classes import Classes
from raytrace_rl.lint.dispatches import Dispatches
from raytrace_rl.lint.groups import Groups
from raytrace_rl.lint.handles import Handles
from raytrace_rl.lint.module import Module
from raytrace_rl.lint.project import Project
from raytrace_rl.lint.strings import HOLE
from raytrace_rl.span_groups import ALL_GROUPS, PRESETS, RLSpanGroup
from raytrace_rl.vocabulary import teed_metrics

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "reference.md"

_BUCKETS: Final = {
    Bucket.PRODUCTIVE: "what moves the weights: generation, reward, policy update",
    Bucket.OVERHEAD: "work that has to be done and moves none",
    Bucket.WASTED: "work that a later attempt did again, or that failed",
    Bucket.IDLE: "waiting",
}
#: What a reader meets first: RL's own variables, then OpenTelemetry's, then those of launchers.
_VARIABLE: Final = re.compile(
    r"(?:RAYTRACE_RL|NEMO_RL_OTEL|OTEL|NRL|SLURM|KUBERNETES|POD)_[A-Z0-9_]*[A-Z0-9]|RANK|LOCAL_RANK|WORLD_SIZE"
)


class Site(NamedTuple):
    """A place in the source that opens spans.

    Attributes:
        group: Span group; None for a span outside all groups, or one that is not known before the run.
        name: Span name, with ``<...>`` for what is known at run time only; None if nothing of it is.
        path: File, from the root of the repository.
    """

    group: str | None
    name: str | None
    path: str


class Emitted(NamedTuple):
    """A span that the package makes by itself."""

    name: str
    group: str
    by: str


# -- what the source opens -----------------------------------------------------------------------------------------


@lru_cache
def sites(*directories: str) -> list[Site]:
    """Returns every place in ``directories`` (from the root of the repository) that opens spans."""
    groups, modules = _parsed(*directories)
    return [site for module in modules for site in _sites(groups, module)]


@lru_cache
def emitted_groups() -> frozenset[str]:
    """Returns the groups that the package and the examples open spans in."""
    return frozenset(site.group for site in sites("raytrace_rl", "examples") if site.group is not None)


@lru_cache
def _parsed(*directories: str) -> tuple[Groups, list[Module]]:
    project = Project([ROOT / directory for directory in directories])
    return Groups(Dispatches(Handles(Classes(project))).strings), list(project.modules)


def _sites(groups: Groups, module: Module) -> Iterator[Site]:
    path = str(module.path.relative_to(ROOT))
    for span in groups.span_calls(module):
        by_helper = _HELPED.get(span.opener_name)
        if by_helper is not None:
            argument = groups.strings.text(module, span.call.args[0]) if span.call.args else ""
            if argument is not None:
                spanned = by_helper(argument.replace(HOLE, "<...>"))
                yield Site(spanned.group, spanned.name, path)
            continue
        names: list[str | None] = [*groups.strings.texts(module, span.name)]
        for name in names or [None]:
            yield Site(_group(groups, module, span.group), name.replace(HOLE, "<...>") if name else None, path)
    for span in groups.timer_calls(module):
        group = _group(groups, module, span.group)
        for name in groups.timer_names(span):
            if group is not None:
                yield Site(group, name.replace(HOLE, "<prefix>", 1).replace(HOLE, "<...>"), path)


def _group(groups: Groups, module: Module, node: ast.expr | None) -> str | None:
    if node is None:
        return None
    name = groups.project.api(module, node) or ""
    value = getattr(RLSpanGroup, name.removeprefix("RLSpanGroup."), None)
    word = value if isinstance(value, str) else groups.strings.text(module, node)
    return word if word in ALL_GROUPS else None


def _by(opener: str) -> Callable[[str], Emitted]:
    """Returns what a helper makes of its argument: found by calling it."""
    made: Callable[..., Any] = getattr(instrumentation, opener)

    @lru_cache
    def emit(argument: str) -> Emitted:
        with (
            tempfile.TemporaryDirectory() as directory,
            _recording.recording({"run_dir": directory, "metrics_enabled": False, "logs_enabled": False}) as recorded,
        ):
            span = made(argument) if argument else made()
            if hasattr(span, "__enter__") and opener != "start_efficiency_span":
                with span:
                    pass
            else:
                span.end()
            (row,) = recorded.spans
        return Emitted(row.name, str(row.group), f"`{opener}`")

    return emit


_HELPED: Final = {
    opener: _by(opener)
    for opener in (
        "startup_span",
        "setup_span",
        "evaluate_span",
        "checkpoint_finalize_span",
        "efficiency_span",
        "start_efficiency_span",
    )
}


def emitted_by_the_package() -> list[Emitted]:
    """Returns the spans whose names the package itself chooses."""
    found = [
        _HELPED["startup_span"](""),
        _HELPED["setup_span"]("<phase>"),
        Emitted(actors._MODEL_INIT_SPAN, actors._MODEL_INIT_GROUP, "`TracedActor` with `model_init=True`"),
        _HELPED["evaluate_span"]("<algorithm>"),
        _HELPED["checkpoint_finalize_span"]("<algorithm>"),
        Emitted("<job>.started", RLSpanGroup.JOB, "every job span, at its start, with no length of its own"),
        Emitted("rl.data_plane.<operation>", RLSpanGroup.DATA_PLANE, "`traced_data_plane`; `per_prompt` in its scope"),
        Emitted(vllm.LOAD_SPAN, RLSpanGroup.MODEL_INIT, "`integrations.vllm.load_model_span`"),
        Emitted(vllm.GENERATE_SPAN, RLSpanGroup.GENERATION, "`trace_engine`; `per_prompt` in its scope"),
        Emitted(vllm.BUSY_SPAN, RLSpanGroup.GENERATION, "`trace_engine`, inside a `per_prompt_scope`"),
        Emitted(f"{vllm.REQUEST_SPAN}, .queued, .prefill, .decode", RLSpanGroup.PER_PROMPT, "`trace_engine`"),
        Emitted(vllm.REFIT_SPAN, RLSpanGroup.DATA_PLANE, "`trace_engine`, `integrations.vllm.refit_span`"),
        Emitted("rl.vllm.sleep, rl.vllm.wake", RLSpanGroup.DATA_PLANE, "`trace_engine`"),
        Emitted("rl.megatron.log_probs", RLSpanGroup.LOGPROB, "`integrations.megatron.log_prob_span`"),
        Emitted("rl.megatron.forward_backward", RLSpanGroup.POLICY_UPDATE, "`forward_backward_span`"),
        Emitted("rl.megatron.optimizer", RLSpanGroup.POLICY_UPDATE, "`optimizer_span`"),
        Emitted("rl.megatron.weight_export", RLSpanGroup.DATA_PLANE, "`weight_export_span`"),
        Emitted("rl.megatron.timer.<timer>", megatron.MEGATRON_TIMER, "`trace_megatron_timers`"),
        Emitted("rl.collective.<function>", torch.COLLECTIVE, "`integrations.torch.trace_collectives`"),
    ]
    return found + [_HELPED["efficiency_span"](category) for category in efficiency_categories()]


# -- the page ------------------------------------------------------------------------------------------------------


_HEAD: Final = """\
# Reference

Written by `python -m docs.reference` from the code; do not edit it by hand. Meanings are in
[architecture.md](architecture.md), the report's in [report.md](report.md), the rules of `raytrace-rl lint` in
[lint.md](lint.md)."""
_OF_GROUPS: Final = """\
An umbrella spans other work and has no bucket; its spans may overlap each other. A leaf has one. `all` also reaches
what libraries register."""
_OF_BUCKETS: Final = """\
Where several threads of a process claim an instant, it belongs to the first of productive, overhead, wasted, idle.
`rl.bucket` has one of:"""
_OF_CATEGORIES: Final = """\
Thread-seconds are never added to a wall clock. A value over `run` covers everything since the process started and sums
over no steps."""
_OF_FIELDS: Final = "Each field of `TelemetryConfig`; `NEMO_RL_OTEL_<FIELD>` stands behind `RAYTRACE_RL_<FIELD>`."


def page() -> str:
    """Returns the text of the page."""
    spans = [(f"`{span.name}`", f"`{span.group}`", span.by) for span in emitted_by_the_package()]
    buckets = [(f"`{bucket.value}`", text) for bucket, text in _BUCKETS.items()]
    parts = [
        _HEAD,
        "## Span groups",
        _OF_GROUPS,
        _table(("group", "kind", "default bucket", "`default`", "`per_step`", "`all`", "opened by"), _groups()),
        "## Presets",
        _table(("preset", "groups"), _presets()),
        "## Buckets",
        _OF_BUCKETS,
        _table(("bucket", "what it is"), buckets),
        "## Efficiency categories",
        _OF_CATEGORIES,
        _table(("category", "bucket", "clock", "window", "span", "bucket on the span"), _categories()),
        "## Spans",
        "Those whose names the package chooses; all others have the name that they are given.",
        _table(("span", "group", "made by"), spans),
        "The demo opens these:",
        _table(("span", "group", "file"), _demo_spans()),
        "## Metrics",
        "Those that the package declares:",
        _table(("series", "kind", "unit", "what it is"), _metrics()),
        "Those that the demo declares, each beside the code that logs it:",
        _table(("series", "kind", "unit", "logger key", "what it is"), _demo_metrics()),
        "## Environment variables",
        _OF_FIELDS,
        _table(("variable", "default", "meaning"), _fields()),
        "Read besides, by the modules named:",
        _table(("variable", "module"), _variables()),
        "## Command line",
        _table(("command", "what it does"), _commands()),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _constants() -> list[str]:
    """The groups in the order of their class."""
    return [value for name, value in vars(RLSpanGroup).items() if name.isupper() and not name.startswith("U_")]


def _groups() -> Iterator[tuple[str, ...]]:
    package = {site.group for site in sites("raytrace_rl")}
    demo = {site.group for site in sites("examples")}
    for group in _constants():
        by = [name for name, groups in (("package", package), ("demo", demo)) if group in groups]
        yield (
            f"`{group}`",
            "umbrella" if is_umbrella(group) else "leaf",
            "by category" if group == RLSpanGroup.EFFICIENCY else str(default_bucket(group) or ""),
            *("x" if group in span_groups.resolve(preset) else "" for preset in ("default", "per_step", "all")),
            ", ".join(by),
        )


def _presets() -> Iterator[tuple[str, str]]:
    for preset, members in PRESETS.items():
        yield f"`{preset}`", ", ".join(f"`{group}`" for group in _constants() if group in members)
    yield "`all`", "every registered group, also those that libraries register later"
    yield "`none`", "none"


def _categories() -> Iterator[tuple[str, ...]]:
    for category in efficiency_categories().values():
        yield (
            f"`{category.name}`",
            category.bucket.value,
            category.measurement,
            category.window,
            f"`{category.span_name}`",
            category.bucket.value if category.bucketed_span else "none",
        )


def _demo_spans() -> list[tuple[str, ...]]:
    found: dict[tuple[str, str], set[str]] = {}
    for site in sites("examples"):
        if site.name is not None:
            name = f"`{site.name.replace('<prefix>', 'rl.grpo')}`"
            group = f"`{site.group}`" if site.group else ""
            found.setdefault((name, group), set()).add(f"`{Path(site.path).name}`")
    return [(*key, ", ".join(sorted(files))) for key, files in sorted(found.items())]


def _metrics() -> Iterator[tuple[str, ...]]:
    for specs in metrics.registered_metric_groups().values():
        for spec in specs:
            yield f"`{spec.name}`", spec.kind, spec.unit, spec.description
    for row in teed_metrics():
        yield f"`{row.name}`", row.kind, row.unit, row.description


def _demo_metrics() -> Iterator[tuple[str, ...]]:
    groups, modules = _parsed("examples")
    names = ("logger_key", "name", "kind", "unit", "description")
    for module in modules:
        for call in module.calls:
            if groups.project.api(module, call.func) != "TeedMetric":
                continue
            given: dict[str | None, ast.expr] = {keyword.arg: keyword.value for keyword in call.keywords}
            given.update(zip(names, call.args, strict=False))
            texts = {name: groups.strings.text(module, given.get(name)) or "" for name in names}
            yield (
                f"`{texts['name']}`",
                texts["kind"] or "gauge",
                texts["unit"],
                f"`{texts['logger_key']}`",
                texts["description"],
            )


def _fields() -> Iterator[tuple[str, str, str]]:
    meanings = _meanings(config.TelemetryConfig.__doc__ or "")
    for field in dataclasses.fields(config.TelemetryConfig):
        if field.name in RULES:
            default = "" if field.default is None else f"`{config._env_text(field.default)}`"
            yield f"`{config.PREFIX}{field.name.upper()}`", default, meanings[field.name]


def _meanings(docstring: str) -> dict[str, str]:
    """Returns the texts of a docstring's ``Attributes:`` section by name; several names may share a line."""
    section = docstring.partition("Attributes:\n")[2].partition("\n\n")[0]
    found = {}
    for entry in re.split(r"\n(?=        \w)", "\n" + section):
        names, _, text = entry.strip().partition(": ")
        for name in names.split(", "):
            found[name] = " ".join(text.split()).replace("``", "`")
    return found


def _variables() -> list[tuple[str, str]]:
    fields = {prefix + field.upper() for field in RULES for prefix in (config.PREFIX, config.FALLBACK_PREFIX)}
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "raytrace_rl").rglob("*.py")):
        if "lint" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.value if isinstance(node, ast.Constant) else None
            if isinstance(name, str) and _VARIABLE.fullmatch(name) and name not in fields:
                found.setdefault(name, set()).add(f"`{path.stem}`")
    return [(f"`{name}`", ", ".join(sorted(modules))) for name, modules in sorted(found.items())]


def _commands() -> Iterator[tuple[str, str]]:
    for action in cli._parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, parser in action.choices.items():
                usage = " ".join(parser.format_usage().removeprefix("usage:").replace("[-h]", "").split())
                yield f"`{usage}`", helps[name]


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(prog="python -m docs.reference", description="Writes docs/reference.md anew.")
    parser.add_argument("out", nargs="?", type=Path, default=PAGE, help="file to write (default docs/reference.md)")
    out: Path = parser.parse_args().out
    out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
