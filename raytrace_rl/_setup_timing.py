"""How long the phases of startup took: `SetupTimingMetrics`, and which logged key names which phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from raytrace_rl.vocabulary import as_scalar

#: The prefix under which a logger is given the phases, once, at step 0.
SETUP_TIMING_PREFIX: Final = "timing/setup"

#: A key that ends otherwise is no duration (a flag that rides along).
_SUFFIXES: Final = ("_time_s", "_s")


@dataclass
class SetupTimingMetrics:
    """Seconds that the driver spent in each phase of startup; None where there was no such phase.

    Phases nest and overlap: they are read one by one and never added up.

    Attributes:
        generation_init_time_s: Starting the generation engines, of which ``generation_init_reserve_time_s`` went
            into reserving and ``generation_init_load_time_s`` into loading.
        policy_init_time_s, value_init_time_s: Building the policy and the critic.
        environment_init_time_s: Starting the environments.
        collective_init_time_s: Joining the process groups.
        weight_sync_time_s: The first transfer of weights to the generation engines.
        data_init_time_s: Opening data sets.
        checkpoint_load_time_s: Restoring a checkpoint.
        parallel_wall_time_s: Phases that ran side by side, from the first begin to the last end.
        worker_setup_time_s: Creating actors.
        other_setup_time_s: What no phase accounts for.
        total_setup_time_s: All of it.
        extras: Further phases by key, ``<phase>_time_s``: what only some runs have, or only a run can name.
    """

    generation_init_time_s: float | None = None
    generation_init_reserve_time_s: float | None = None
    generation_init_load_time_s: float | None = None
    policy_init_time_s: float | None = None
    value_init_time_s: float | None = None
    environment_init_time_s: float | None = None
    collective_init_time_s: float | None = None
    weight_sync_time_s: float | None = None
    data_init_time_s: float | None = None
    checkpoint_load_time_s: float | None = None
    parallel_wall_time_s: float | None = None
    worker_setup_time_s: float | None = None
    other_setup_time_s: float | None = None
    total_setup_time_s: float | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def to_metrics_dict(self) -> dict[str, Any]:
        """Returns the dict for ``log_metrics(..., prefix="timing/setup")``: what is set, and the extras."""
        named = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "extras"}
        return {**{key: value for key, value in named.items() if value is not None}, **self.extras}


def setup_phase(key: str) -> str | None:
    """Returns the phase that a logged key names: ``policy_init`` for ``policy_init_time_s``; None for no duration."""
    for suffix in _SUFFIXES:
        if key.endswith(suffix):
            return key[: -len(suffix)] or None
    return None


def map_setup_seconds(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns ``{phase: seconds}`` for the durations in a logged dict.

    Args:
        metrics: As `SetupTimingMetrics.to_metrics_dict` returns it, or any dict of that shape.
    """
    found = {}
    for key, value in metrics.items():
        phase = setup_phase(str(key))
        seconds = as_scalar(value)
        if phase is not None and seconds is not None:
            found[phase] = seconds
    return found
