"""Efficiency categories: waits and waste with a name, the clock each is measured on, and its goodput bucket.

A category is what a ``Timer`` label, an ``rl.efficiency.seconds`` point and an efficiency span share. The clock says
what may be added up: seconds of the driver's wall clock can be compared with a step; the collector's run beside them;
thread-seconds exceed any wall clock and are never added to one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from raytrace_rl._registry import bucket_value
from raytrace_rl.buckets import Bucket
from raytrace_rl.vocabulary import INIT_TOTAL_CATEGORY

WALL_CLOCK: Final = "wall_clock"
COLLECTOR_WALL_CLOCK: Final = "collector_wall_clock"
THREAD_SECONDS: Final = "thread_seconds"
MEASUREMENTS: Final = frozenset({WALL_CLOCK, COLLECTOR_WALL_CLOCK, THREAD_SECONDS})

#: A value covers one step (and sums over steps), or everything since the process started (and does not).
STEP_WINDOW: Final = "step"
RUN_WINDOW: Final = "run"
WINDOWS: Final = frozenset({STEP_WINDOW, RUN_WINDOW})

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class EfficiencyCategory:
    """One category.

    Attributes:
        name: Two words with a slash, such as ``idle/refit_bubble``.
        bucket: Its goodput bucket.
        measurement: The clock that its seconds are measured on: `WALL_CLOCK`, `COLLECTOR_WALL_CLOCK` or
            `THREAD_SECONDS`.
        window: What one value covers: `STEP_WINDOW` or `RUN_WINDOW`.
        bucketed_span: False where its span overlaps work that is bucketed itself: the span then carries no bucket.
            The metric carries it all the same, with the measurement that says what it may be added to.

    Raises:
        ValueError: The name is no such pair of words, or bucket, measurement or window does not exist.
    """

    name: str
    bucket: Bucket
    measurement: str
    window: str
    bucketed_span: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"efficiency category {self.name!r}: write <kind>/<what>, such as 'idle/refit_bubble'")
        if self.measurement not in MEASUREMENTS:
            raise ValueError(f"measurement {self.measurement!r}: one of {', '.join(sorted(MEASUREMENTS))}")
        if self.window not in WINDOWS:
            raise ValueError(f"window {self.window!r}: one of {', '.join(sorted(WINDOWS))}")
        bucket = bucket_value(self.bucket)
        if bucket is None:
            raise ValueError(f"bucket {self.bucket!r}: one of {', '.join(each.value for each in Bucket)}")
        object.__setattr__(self, "bucket", Bucket(bucket))  # its string will do

    @property
    def span_name(self) -> str:
        """``rl.idle.refit_bubble`` for ``idle/refit_bubble``."""
        return f"rl.{self.name.replace('/', '.')}"

    @property
    def logger_key(self) -> str:
        """``efficiency/idle/refit_bubble_s`` for ``idle/refit_bubble``: where a logged dict has its seconds."""
        return efficiency_key(self.name)


def efficiency_key(category: str) -> str:
    """Returns the key under which a logged dict holds the seconds of ``category``."""
    return f"efficiency/{category}_s"


_categories: Final[dict[str, EfficiencyCategory]] = {}


def register_efficiency_category(category: EfficiencyCategory) -> None:
    """Adds a category; the same one twice is no clash.

    Args:
        category: Its name must not be taken by another.

    Raises:
        ValueError: The name is taken.
    """
    known = _categories.setdefault(category.name, category)
    if known != category:
        raise ValueError(f"efficiency category {category.name!r} is already declared as {known}")


def efficiency_category(name: str) -> EfficiencyCategory | None:
    """Returns the category called ``name``, None if nobody declared it."""
    return _categories.get(name)


def efficiency_categories() -> Mapping[str, EfficiencyCategory]:
    """Returns all categories by name."""
    return dict(_categories)


def efficiency_measurements() -> dict[str, str]:
    """Returns ``{category: measurement}``, what `map_efficiency_seconds` takes."""
    return {name: category.measurement for name, category in dict(_categories).items()}


for _category in (
    # The driver blocks until the buffer holds a first batch, while the generation workers fill it.
    EfficiencyCategory(INIT_TOTAL_CATEGORY, Bucket.OVERHEAD, WALL_CLOCK, RUN_WINDOW, bucketed_span=False),
    EfficiencyCategory("idle/buffer_starvation", Bucket.IDLE, WALL_CLOCK, STEP_WINDOW),
    EfficiencyCategory("idle/refit_bubble", Bucket.IDLE, WALL_CLOCK, STEP_WINDOW),
    EfficiencyCategory("idle/validation", Bucket.IDLE, WALL_CLOCK, STEP_WINDOW),
    # The collector's loop waits on one thread, beside the driver's clock; its timer is never reset.
    EfficiencyCategory(
        "idle/generation_limit_pause", Bucket.IDLE, COLLECTOR_WALL_CLOCK, RUN_WINDOW, bucketed_span=False
    ),
    EfficiencyCategory("idle/refit_event_wait", Bucket.IDLE, COLLECTOR_WALL_CLOCK, RUN_WINDOW, bucketed_span=False),
    # Added up over a collector's batch threads.
    EfficiencyCategory("idle/buffer_full_backoff", Bucket.IDLE, THREAD_SECONDS, RUN_WINDOW),
    EfficiencyCategory("wasted/failed_trajectory", Bucket.WASTED, THREAD_SECONDS, RUN_WINDOW),
):
    register_efficiency_category(_category)
