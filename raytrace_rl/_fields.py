"""The rule of each setting: what it accepts, from code, YAML or the environment, and what it makes of it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from raytrace_rl._env import FALSE, TRUE, parse_int

Value: TypeAlias = "bool | int | float | str | None"
Rule: TypeAlias = "Callable[[Any], Value]"

#: What names a directory on every file system, and needs no quoting in a shell.
_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class FieldError(ValueError):
    """A value cannot be used; the message says what is allowed, without naming field or value."""


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if text in TRUE:
        return True
    if text in FALSE:
        return False
    raise FieldError(f"allowed are {', '.join(sorted(TRUE))} and {', '.join(sorted(FALSE))}")


def _choice(*allowed: str) -> Rule:
    def rule(value: Any) -> str:
        if isinstance(value, str) and (text := value.strip().lower()) in allowed:
            return text
        raise FieldError(f"allowed are {', '.join(allowed)}")

    return rule


def _number(value: Any, low: float, high: float, allowed: str) -> float:
    """Reads a real number within bounds; a boolean is none, though Python counts it as one."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value) if not isinstance(value, str) or "_" not in value else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:  # false for nan
        raise FieldError(f"allowed is {allowed}")
    return number


def _heartbeat(value: Any) -> float:
    return _number(value, 0.01, 3600.0, "a number of seconds from 0.01 to 3600")


def _stack_after(value: Any) -> float:
    return _number(value, 0.0, 1e9, "a number of seconds from 0 to 1e9")


def _relay_idle(value: Any) -> float:
    return _number(value, 1.0, 1e9, "a number of seconds from 1 to 1e9")


def _max_mib(value: Any) -> int | None:
    return _whole(value, 1, "a whole number of MiB from 1 up")


def _prompts(value: Any) -> int | None:
    return _whole(value, 0, "a whole number of prompts from 0 up")


def _whole(value: Any, least: int, allowed: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = parse_int(value)
        except ValueError:
            raise FieldError(f"allowed is {allowed}") from None
    number = _number(value, least, 2**40, allowed)
    if number != int(number):
        raise FieldError(f"allowed is {allowed}")
    return int(number)


def _text(value: Any) -> str:
    """Reads text that goes into an environment variable and into UTF-8."""
    if isinstance(value, str) and (text := value.strip()) and text.isprintable():
        return text
    raise FieldError("allowed is printable text that is not empty")


def _span_groups(value: Any) -> str:
    if not isinstance(value, (str, Mapping)) and isinstance(value, Iterable):
        value = ",".join(item if isinstance(item, str) else "" for item in value)
    try:
        words = [word.strip() for word in _text(value).split(",")]
    except FieldError:
        words = []
    if not words or not all(words):
        raise FieldError("allowed are names of presets and groups joined by commas, such as 'per_step,generation'")
    return ",".join(words)


def _run_id(value: Any) -> str | None:
    """Reads a name that is one component of a path. A whole number is one too: YAML reads a SLURM job id as such."""
    if value is None or value == "":
        return None
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and _RUN_ID.fullmatch(text.strip()):
        return text.strip()
    raise FieldError("allowed are letters, digits, '.', '_' and '-', at most 128, not beginning with a sign")


def _path(value: Any) -> str | None:
    """Reads a path; ``~`` is the home directory, as YAML and the environment, unlike a shell, leave it to us."""
    if value is None or value == "":
        return None
    try:
        text: object = os.fspath(value)
        if not isinstance(text, str) or b"\0" in os.fsencode(text):
            raise TypeError
    except (TypeError, UnicodeEncodeError):
        raise FieldError("allowed is the path of a directory") from None
    return os.path.expanduser(text)  # noqa: PTH111  (pathlib raises where the user is unknown)


#: Every field of `TelemetryConfig`, in its order.
RULES: Final[dict[str, Rule]] = {
    "enabled": _boolean,
    "service_name": _text,
    "span_groups": _span_groups,
    "traces_enabled": _boolean,
    "metrics_enabled": _boolean,
    "logs_enabled": _boolean,
    "exporter": _choice("spool", "otlp", "console", "none"),
    "run_dir": _path,
    "run_id": _run_id,
    "vllm_native_tracing": _boolean,
    "trace_per": _choice("auto", "run", "step"),
    "spool_dir": _path,
    "heartbeat_s": _heartbeat,
    "stack_after_s": _stack_after,
    "spool_max_mib": _max_mib,
    "otlp_receiver": _boolean,
    "relay_idle_s": _relay_idle,
    "per_prompt_limit": _prompts,
}
