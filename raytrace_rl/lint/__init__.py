"""Static checks for code that traces with `raytrace_rl`: what is wired or named wrongly is silent at run time.

Reads source files as syntax trees and never imports them. `docs/lint.md` lists the rules.
"""

from __future__ import annotations

from raytrace_rl.lint.model import RULES, Finding, Rule, Severity
from raytrace_rl.lint.runner import Report, UnreadablePathError, lint, lint_paths

__all__ = ["RULES", "Finding", "Report", "Rule", "Severity", "UnreadablePathError", "lint", "lint_paths"]
