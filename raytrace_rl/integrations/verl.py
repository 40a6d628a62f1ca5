"""verl: what its worker groups need besides `dispatch`.

A verl group is dispatched to like any other: ``traced(group).train(batch)``, or ``dispatch_with_trace_context(
group.train, batch)``, whatever the dispatch mode (how: `raytrace_rl._verl_groups`). Its workers learn from their
environment who they are. This module imports without verl.
"""

from __future__ import annotations

from collections.abc import Mapping

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._workers import env


def worker_env(worker_group: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the ``worker_env`` of a ``verl.single_controller.ray.RayWorkerGroup``.

    It names the group (verl's own ``WG_PREFIX`` is random), brings telemetry's settings to a cluster that was up
    before, and has the trace context that is current here, under which a `TracedActor`'s constructor runs.

    Args:
        worker_group: The group's name, such as ``actor``.
        base: The user's own variables; what they set holds.
    """
    try:
        return env.group_environment(worker_group, base)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("verl:env", "The workers of %s get no settings of telemetry: %r", worker_group, error)
        return dict(base or {})
