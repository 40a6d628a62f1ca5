"""What a finding is, and the table of rules: the ids are stable, so that an opt-out in a user's tree stays true."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import Enum
from typing import Final


class Severity(str, Enum):
    """An error makes the command fail; information does not."""

    ERROR = "error"
    INFO = "info"


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: ``RT`` and three digits; the first says the family.
        name: A few words, for people.
        what: What is wrong, and what it costs at run time.
        instead: What to write instead.
        severity: Whether it fails a build.
    """

    id: str
    name: str
    what: str
    instead: str
    severity: Severity = Severity.ERROR


@dataclass(frozen=True, order=True)
class Finding:
    """One place that breaks a rule.

    Attributes:
        path: The file, as it was given or found below what was given.
        line: From 1.
        column: From 1.
        rule: The rule's id.
        message: What is wrong here and what to write instead, one line.
        last_line: Where the flagged code ends: an opt-out on any of its lines counts.
    """

    path: str
    line: int
    column: int
    rule: str
    message: str
    last_line: int = field(default=0, compare=False)

    @property
    def severity(self) -> Severity:
        """That of its rule."""
        return RULES[self.rule].severity

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.rule} {self.severity.value}: {self.message}"


def finding(rule: str, path: str, node: ast.AST, message: str) -> Finding:
    """Returns a finding at ``node``; the rule's ``instead`` completes the message."""
    line = getattr(node, "lineno", 1)
    # A definition is flagged at its name, and an opt-out beside its body would look like one for the body.
    last = line if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else node_end(node, line)
    column = getattr(node, "col_offset", 0) + 1
    return Finding(path, line, column, rule, f"{message}. {RULES[rule].instead}", last)


def node_end(node: ast.AST, default: int) -> int:
    """Returns the last line of ``node``."""
    return getattr(node, "end_lineno", None) or default


_TABLE: Final = (
    Rule(
        "RT101",
        "call without a carrier",
        "A method, function or constructor that accepts a trace context is called without one: its spans start traces "
        "of their own.",
        "Write traced(actor).method.remote(...), dispatch_with_trace_context(actor.method, ...) or, to a worker group, "
        "**trace_context_kwargs().",
    ),
    Rule(
        "RT102",
        "never dispatched",
        "A method is decorated with @accepts_trace_context and nothing that was read dispatches it: the decorator does "
        "nothing.",
        "Dispatch it with a carrier, or take the decorator away.",
    ),
    Rule(
        "RT103",
        "carrier to an undecorated method",
        "A call brings a carrier to what does not accept one: the carrier is left out, or the call is refused by Ray.",
        "Decorate the callee with @accepts_trace_context (a constructor: derive its class from TracedActor).",
    ),
    Rule(
        "RT104",
        "kill without a flush",
        "ray.kill of a traced actor: metrics and logs of the last interval, and spans that are still open, end "
        "uncleanly.",
        "Write flush_and_kill([actor]), or flush_actors([actor]) before it.",
        Severity.INFO,
    ),
    Rule(
        "RT105",
        "late init_telemetry_worker",
        "init_telemetry_worker outside __init__: what the actor does before that call is not traced, and at import it "
        "starts in processes that are no workers. A worker_process_setup_hook, a helper that only constructors call, "
        "and a script's main are no mistake.",
        "Derive the actor from TracedActor, or call it on the first line of __init__.",
    ),
    Rule(
        "RT201",
        "leaf group in umbrella_span",
        "A leaf group is given to umbrella_span: at run time it warns, and records a leaf with a bucket.",
        "Write managed_span, or an umbrella group (RLSpanGroup.U_...).",
    ),
    Rule(
        "RT202",
        "umbrella group in managed_span",
        "An umbrella group is given to managed_span. It records rightly, as an umbrella, but whoever reads the call "
        "takes it for time that goodput counts.",
        "Write umbrella_span with the group's U_ name, or give the span a leaf group.",
    ),
    Rule(
        "RT203",
        "umbrella group without U_",
        "An umbrella group of RLSpanGroup is spelled without U_, so that the call does not show that the span carries "
        "no bucket.",
        "Write RLSpanGroup.U_...",
    ),
    Rule(
        "RT204",
        "span name",
        "A span's name is neither rl.<algorithm>.<phase> nor under the namespace of a library that registered span "
        "groups: nobody who looks for the phase finds it. So too a decorator without a name, whose span has the "
        "function's, and a Timer's prefix and label where it opens a span.",
        "Write rl.<algorithm>.<phase> in lower case (more parts may follow), or an owner's prefix such as rl.vllm., "
        "rl.setup., rl.data_plane.",
    ),
    Rule(
        "RT205",
        "span without a None guard",
        "What `with managed_span(...) as span` yields is None while the group is disabled: the program then fails "
        "because telemetry is off.",
        "Write safe_set_span_attributes(span, {...}), or ask `if span is not None`.",
    ),
    Rule(
        "RT206",
        "span in a per-token loop",
        "A span is opened for every token: the trace grows with the tokens, and so does what it costs.",
        "Open one span around the loop, with the number of tokens as an attribute.",
    ),
    Rule(
        "RT207",
        "bucket on an umbrella",
        "An umbrella span is given an rl.bucket of its own: its time counts twice, in it and in the leaves below.",
        "Leave rl.bucket to the leaves, or open a bucket_scope around them.",
    ),
    Rule(
        "RT208",
        "raw tracer",
        "A tracer from OpenTelemetry itself in algorithm code: its spans have no group to switch them, no bucket and "
        "no iteration.",
        "Write managed_span(group, name), or span_cm(name) for a cold path outside all groups.",
    ),
    Rule(
        "RT301",
        "rl.iteration by hand",
        "rl.iteration is set on one span: those below it, and those of remote workers, are without it.",
        "Open the spans inside `with iteration_scope(step):`.",
    ),
    Rule(
        "RT302",
        "raw text as an attribute",
        "A prompt, completion, response or message goes into a span as text: it is redacted by default, and no trace "
        "should hold the data.",
        "Record its length, a count or an id.",
    ),
    Rule(
        "RT303",
        "shape as an attribute",
        "A tensor's whole shape is an attribute: nothing can add it up or compare it.",
        "Record the dimension that matters as a number of its own, such as **{'rl.num_tokens': x.shape[1]}.",
    ),
    Rule(
        "RT304",
        "literal nv.dl name",
        "An nv.dl.* name is written out: a typo is then a column that stays empty.",
        "Import the constant from raytrace_rl.semconv.",
    ),
    Rule(
        "RT401",
        "metric name",
        "A metric's name is not rl.<subsystem>.<metric> (nor <owner>.<subsystem>.<metric> of an owner that registered "
        "a metric group), or it lies under dl.*, which is not ours to write into.",
        "Write rl.<subsystem>.<metric> in lower case (short ones: rl.grad_norm, rl.learning_rate, rl.entropy).",
    ),
    Rule(
        "RT402",
        "growing metric label",
        "A metric's label takes a new value with every step or request: one time series each, for ever.",
        "Leave the label out; a step or a request belongs on a span.",
    ),
    Rule(
        "RT403",
        "growing metric name",
        "A value that grows with steps or requests is spelled into a metric's name: one metric each, for ever.",
        "Write one name without it.",
    ),
    Rule(
        "RT501",
        "private import",
        "Algorithm code reaches into a private module or name of the library, which may change without notice.",
        "Import the public name, from raytrace_rl or from the module that owns it.",
    ),
    Rule(
        "RT901",
        "opt-out without a reason",
        "An opt-out does not say why, and is not in force.",
        "Write `# raytrace: ignore[RT101] the reason`.",
    ),
    Rule(
        "RT902",
        "unused opt-out",
        "An opt-out stands where its rule finds nothing, or names no rule.",
        "Take it away.",
    ),
    Rule(
        "RT903",
        "unreadable source",
        "A file is no Python that this version of it can parse: nothing in it was checked.",
        "Repair it, or leave it out of the paths.",
    ),
)

RULES: Final[dict[str, Rule]] = {rule.id: rule for rule in _TABLE}
