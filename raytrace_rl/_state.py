"""What this process's telemetry is doing right now: the gates, the spool, the counts of what was lost.

All of it is module attributes, read as ``_state.name`` at call time: wrappers of by-value classes are pickled with
copies of the globals that they name, while a module goes by reference.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl._interrupts import is_interrupt

if TYPE_CHECKING:
    from raytrace_rl._sinks import Sink
    from raytrace_rl.config import TelemetryConfig
    from raytrace_rl.spool.opentable import OpenTable
    from raytrace_rl.spool.segment import Segment

logger: Final = logging.getLogger("raytrace_rl")

#: Span groups that record now. Empty: telemetry is off, or not started in this process.
enabled: frozenset[str] = frozenset()
#: Traces are on in this process (the gate of spans without a group, of carriers and of dispatch).
tracing: bool = False
#: Changes at start, shutdown and fork. A span that began under another epoch is not written: its process, or its run,
#: has already accounted for it.
epoch: int = 0
#: Pid of the process that started telemetry; a forked child differs until it has started its own.
pid: int = 0

segment: Segment | None = None
table: OpenTable | None = None
#: Behind the segment: opens the next one, and is where records go when there is none.
writer: Sink | None = None
config: TelemetryConfig | None = None
handle: Any = None

#: Spans of this process that have started and not ended; a dict for its order, used as a set.
open_spans: dict[Any, None] = {}

#: Encoded name, group and bucket of spans seen before, by (group, name, scope's bucket). Emptied when a registration
#: changes what a group means.
static_cache: dict[tuple[str | None, str, str | None], bytes] = {}

#: String attributes whose key names content pass only if this is true (RAYTRACE_RL_CAPTURE_CONTENT=1).
capture_content: bool = False

DROP_KINDS: Final = ("spans", "attributes", "metrics", "logs", "bytes")
#: What was lost since telemetry started here.
drops: dict[str, int] = dict.fromkeys(DROP_KINDS, 0)

_warned: set[str] = set()


def count_drop(kind: str, n: int = 1) -> None:
    """Adds ``n`` to the count of lost ``kind`` (one of `DROP_KINDS`)."""
    if kind not in drops:
        drops[kind] = 0
    drops[kind] += n  # no call in it: no thread and no signal handler comes between reading and writing


def warn_once(key: str, message: str, *args: object) -> None:
    """Logs a warning the first time that ``key`` comes up in this process; never raises."""
    if key in _warned:
        return
    _warned.add(key)
    try:
        try:
            _ = message % args if args else message
        except Exception as error:  # a repr() of the user's that fails: logging would print a traceback of ours
            if is_interrupt(error):
                raise
            message, args = "%s (%s)", (message, ", ".join(type(arg).__name__ for arg in args))
        logger.warning(message, *args)
    except Exception as error:  # a user's logging handler may raise; telemetry must not
        if is_interrupt(error):
            raise


def forget_warnings() -> None:
    """Lets every warning be given once more (a new start, a test)."""
    _warned.clear()
