"""Rules RT201 to RT204: a span's group and name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.groups import Groups, SpanCall
from raytrace_rl.lint.model import Finding, finding
from raytrace_rl.lint.module import Module
from raytrace_rl.lint.strings import HOLE
from raytrace_rl.span_groups import RLSpanGroup

_NAME: Final = re.compile(r"rl\.[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
_OWNED: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")
#: The one name of two parts: everything before the first step.
_SHORT: Final = frozenset({"rl.startup"})


def check(groups: Groups, module: Module) -> Iterator[Finding]:
    """Yields the findings of a file."""
    if api.in_library(module.name):
        return  # its primitives hand groups and names on, and have names of their own
    for span in groups.span_calls(module):
        yield from _group(groups, span)
        if span.name is not None:
            yield from _names(groups, module, span.name, groups.strings.texts(module, span.name))
        elif span.opener.decorator and _is_nameless(span.call):
            message = f"{span.opener_name} without a name: the span has the function's qualified name"
            yield finding("RT204", module.shown, span.call, message)
    yield from _timers(groups, module)


def _names(groups: Groups, module: Module, node: ast.expr, texts: list[str]) -> Iterator[Finding]:
    for text in texts:
        if not is_span_name(text, groups.namespaces):
            shown = text.replace(HOLE, "{...}")
            yield finding("RT204", module.shown, node, f"{shown!r} is no name for a span")


def _is_nameless(call: ast.Call) -> bool:
    """True if a decorator is given no name; ``*args`` and ``**kwargs`` may hold one."""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    return not starred and all(keyword.arg is not None for keyword in call.keywords)


def _timers(groups: Groups, module: Module) -> Iterator[Finding]:
    """``Timer(span_prefix=...)``, whose prefix is half of a name, and ``Timer.time(label, group=...)``, the other."""
    for call in module.calls:
        if groups.project.api(module, call.func) == api.TIMER:
            prefix = groups.timer_prefix(module, call)
            if prefix is not None and prefix != "rl" and not is_span_name(f"{prefix}.x", groups.namespaces):
                shown = prefix.replace(HOLE, "{...}")
                yield finding("RT204", module.shown, call, f"{shown!r} begins no name of a span: rl.<algorithm> does")
    for span in groups.timer_calls(module):
        yield from _group(groups, span)
        if span.name is None:
            continue
        for text in groups.timer_names(span):
            # Behind an unknown prefix, or a wrong one that is a finding already, the label still has to fit.
            known = text.startswith("rl.") or text.partition(".")[0] in groups.namespaces
            label = text if known else f"rl.x.{text.partition('.')[2]}"
            yield from _names(groups, module, span.name, [label])


def is_span_name(text: str, namespaces: set[str]) -> bool:
    """True if a name may be one: its unknown parts are taken to be whatever makes it right."""
    if text.startswith(HOLE):
        return True
    for part in ("x", "x.x", ""):
        name = text.replace(HOLE, part)
        if name in _SHORT or _NAME.fullmatch(name):
            return True
        if name.partition(".")[0] in namespaces and _OWNED.fullmatch(name):
            return True
    return False


def _group(groups: Groups, span: SpanCall) -> Iterator[Finding]:
    group = groups.group(span)
    if group is None or span.group is None:
        return
    shown = span.module.shown
    if span.opener.umbrella and not group.umbrella:
        yield finding("RT201", shown, span.group, f"{group.shown} is a leaf group, in {span.opener_name}")
    # emit_span serves both: there is no other way to record an umbrella whose times are known already.
    if group.umbrella and span.opener.umbrella is None and span.opener_name != "emit_span":
        yield finding("RT202", shown, span.group, f"{group.shown} is an umbrella group, in {span.opener_name}")
    if group.umbrella and group.alias is not None and hasattr(RLSpanGroup, f"U_{group.alias}"):
        yield finding("RT203", shown, span.group, f"{group.shown} is an umbrella: RLSpanGroup.U_{group.alias}")
