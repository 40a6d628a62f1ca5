"""Opt-outs: ``# raytrace: ignore[RT101] the reason``, on a line of the flagged code or alone on the line above it."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from raytrace_rl.lint.model import RULES, Finding
from raytrace_rl.lint.module import Module

_COMMENT: Final = re.compile(r"#\s*raytrace:\s*ignore\b(?:\s*\[([^\]]*)\])?(.*)")
#: The linter's own findings cannot be opted out of.
_OWN: Final = "RT9"


@dataclass
class _OptOut:
    line: int
    column: int
    rules: frozenset[str]
    reason: str
    #: The line of code that it speaks for.
    speaks_for: int
    used: set[str] = field(default_factory=set)


def apply(module: Module, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yields the findings of a file that no opt-out covers, and findings about the opt-outs themselves."""
    opt_outs = list(_opt_outs(module)) if "raytrace:" in module.text else []
    for finding in findings:
        covering = [each for each in opt_outs if each.reason and _covers(each, finding)]
        for each in covering:
            each.used.add(finding.rule)
        if not covering:
            yield finding
    for each in opt_outs:
        if not each.reason or not each.rules:
            missing = "a reason" if each.rules else "the rule's id in brackets"
            yield _about("RT901", module, each, f"this opt-out lacks {missing}")
            continue
        for rule in sorted(each.rules - each.used):
            why = "finds nothing here" if rule in RULES and not rule.startswith(_OWN) else "cannot be opted out of"
            yield _about("RT902", module, each, f"{rule} {why if rule in RULES else 'is no rule'}")


def _covers(opt_out: _OptOut, finding: Finding) -> bool:
    first, last = finding.line, max(finding.line, finding.last_line)
    named = finding.rule in opt_out.rules and not finding.rule.startswith(_OWN)
    return named and first <= opt_out.speaks_for <= last


def _about(rule: str, module: Module, opt_out: _OptOut, message: str) -> Finding:
    return Finding(module.shown, opt_out.line, opt_out.column, rule, f"{message}. {RULES[rule].instead}", opt_out.line)


def _opt_outs(module: Module) -> Iterator[_OptOut]:
    lines = module.text.splitlines()
    try:
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if match is not None:
                line, column = token.start
                alone = not lines[line - 1][:column].strip()
                rules = frozenset(word.strip() for word in (match[1] or "").split(",") if word.strip())
                speaks_for = _below(lines, line) if alone else line
                yield _OptOut(line, column + 1, rules, match[2].strip(" :-\t"), speaks_for)
    except (tokenize.TokenError, SyntaxError):  # an unreadable file is a finding already
        return


def _below(lines: list[str], line: int) -> int:
    """Returns the first line of code under a comment that stands alone."""
    for number in range(line + 1, len(lines) + 1):
        text = lines[number - 1].strip()
        if text and not text.startswith("#"):
            return number
    return line
