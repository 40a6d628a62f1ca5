"""What the code that logs a metric and the code that exports it both need: `TeedMetric`, and who has declared which.

A row stands in the module that logs its key, and is registered when that module is imported; none is listed here.
Names follow ``nemo_rl.telemetry.vocabulary``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from raytrace_rl import _numbers, _state

#: Every series of ours begins with it; the registry key goes without.
METRIC_NAME_PREFIX: Final = "rl."
METRIC_KINDS: Final = frozenset({"gauge", "counter", "histogram", "up_down_counter"})

#: The efficiency category of startup, measured once, before the first step.
INIT_TOTAL_CATEGORY: Final = "init/total"
#: Categories on the driver's wall clock whose value covers the run and not one step, so that it adds to no step.
RUN_WINDOW_WALL_CLOCK_CATEGORIES: Final = frozenset({INIT_TOTAL_CATEGORY})

#: The series that have no subsystem in their name.
KNOWN_SHORT_NAMES: Final = frozenset({"rl.grad_norm", "rl.learning_rate", "rl.entropy"})
#: Sums over spans are the monitor's, which knows what overlaps: no process has such a series.
_ROLLED_UP: Final = re.compile(r"rl\.(goodput|bucket)(\..*)?")
#: Narrower than OpenTelemetry's instrument names, which compare without regard to case: one spelling for a series.
_NAME: Final = re.compile(r"rl(\.[a-z0-9_]+)+")
#: OpenTelemetry specification, "Metrics API", "Instrument name syntax".
_MAX_NAME: Final = 255

#: Seconds of each efficiency category; the tee's own, as the next is.
RL_EFFICIENCY_SECONDS_METRIC: Final = "rl.efficiency.seconds"
#: Seconds of each phase of startup.
RL_SETUP_DURATION_METRIC: Final = "rl.setup.duration"
_OWN: Final = frozenset({RL_EFFICIENCY_SECONDS_METRIC, RL_SETUP_DURATION_METRIC})

#: Who declares each series of the process, and as what: name to (kind, unit, metric group). Two kinds or units under
#: one name are two series that no backend can tell apart (OpenTelemetry SDK specification, "Duplicate instrument
#: registration"). Rows are of the group in which the tee records them.
_claims: dict[str, tuple[str, str, str]] = {}
RL_METRIC_GROUP: Final = "rl"


def as_scalar(value: Any) -> float | None:
    """Returns a logged value as a float; None for booleans and what is no number.

    Args:
        value: NumPy scalars, and zero-dimensional arrays and CPU tensors, are numbers.
    """
    found = _numbers.number(value)
    try:
        return None if found is None else float(found)
    except OverflowError:
        return None


def registry_key(name: str) -> str:
    """Returns the registry key of a series: ``reward_mean`` for ``rl.reward.mean``."""
    return name.removeprefix(METRIC_NAME_PREFIX).replace(".", "_")


@dataclass(frozen=True)
class TeedMetric:
    """One key of the dict that goes to ``log_metrics``, and the series that mirrors it.

    Attributes:
        logger_key: The key, such as ``reward``; the owner's constant, which also writes the dict.
        name: The series: ``rl.<subsystem>.<metric>``.
        kind: ``gauge``, ``counter``, ``histogram`` or ``up_down_counter``. A counter's value is what was added since
            the key was logged last.
        unit: UCUM unit, such as ``s`` or ``{token}``.
        description: One sentence.

    Raises:
        ValueError: The name is not of lower-case words joined by dots of which ``rl`` is the first, belongs to the
            monitor or the tee, or is longer than 255 characters; the key is empty; the kind does not exist.
    """

    logger_key: str
    name: str
    kind: str = "gauge"
    unit: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        if not self.logger_key:
            raise ValueError(f"the row of series {self.name!r} has no logger key")
        if not _NAME.fullmatch(self.name) or len(self.name) > _MAX_NAME:
            raise ValueError(
                f"series {self.name!r} of logger key {self.logger_key!r}: write rl.<subsystem>.<metric>, in lower-case "
                "letters, digits and '_'"
            )
        if self.name in _OWN:
            raise ValueError(f"series {self.name!r} is the tee's own; give {self.logger_key!r} a series of its own")
        if _ROLLED_UP.fullmatch(self.name):
            raise ValueError(f"series {self.name!r}: goodput and buckets are summed by the monitor, from spans")
        if self.kind not in METRIC_KINDS:
            raise ValueError(f"kind {self.kind!r} of series {self.name!r}: one of {', '.join(sorted(METRIC_KINDS))}")
        if self.name.count(".") < 2 and self.name not in KNOWN_SHORT_NAMES:
            _state.warn_once(f"series:{self.name}", "Series %r has no subsystem: rl.<subsystem>.<metric>.", self.name)

    @property
    def key(self) -> str:
        """Registry key, from the series name."""
        return registry_key(self.name)


def claim(series: Iterable[tuple[str, str, str]], group: str) -> None:
    """Takes series for a metric group. All of them or, on a clash, none.

    Args:
        series: Name, kind and unit of each.
        group: The metric group that they are of.

    Raises:
        ValueError: Another group holds one of the names with another kind or unit.
    """
    global _claims
    claims = dict(_claims)
    for name, kind, unit in series:
        held = claims.get(name)
        if held is None or held[2] == group:
            claims[name] = (kind, unit, group)
        elif held[:2] != (kind, unit):
            raise ValueError(
                f"series {name!r} of metric group {held[2]!r} is a {held[0]} (unit {held[1]!r}); "
                f"group {group!r} claims it as a {kind} (unit {unit!r})"
            )
        else:
            _state.warn_once(
                f"shared:{name}:{group}", "Metric groups %r and %r both record series %r.", held[2], group, name
            )
    _claims = claims


_rows: dict[str, TeedMetric] = {}


def register_teed_metrics(rows: Iterable[TeedMetric]) -> None:
    """Declares rows, from the module that logs their keys. All of them or, on a clash, none.

    The same row again is no clash. Rows that come after the first tee take effect at the next.

    Args:
        rows: The rows.

    Raises:
        ValueError: Two different rows have the same logger key, series or registry key: one would never be recorded,
            or both into one series. Or a metric group has the series, with another kind or unit.
    """
    global _rows
    known = dict(_rows)
    by_key = {row.key: row for row in known.values()}
    for row in rows:
        other = known.get(row.logger_key)
        if other is not None and other != row:
            raise ValueError(f"logger key {row.logger_key!r} is already teed as {other}; {row} claims it too")
        other = by_key.get(row.key)
        if other is not None and other != row:
            raise ValueError(f"series {row.name!r} is already declared by {other}; {row} claims it too")
        known[row.logger_key] = by_key[row.key] = row
    claim(((row.name, row.kind, row.unit) for row in known.values()), RL_METRIC_GROUP)
    _rows = known  # replaced whole: a tee on another thread iterates over the old one


def teed_metrics() -> tuple[TeedMetric, ...]:
    """Returns every row declared so far, in the order of declaration."""
    return tuple(_rows.values())
