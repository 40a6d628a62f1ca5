"""What a run is once it is read: its spans, its processes, and what could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from raytrace_rl import semconv

if TYPE_CHECKING:
    from raytrace_rl._decode import Attributes, Event, Link, Scope, Span
    from raytrace_rl.monitor.signals import LogRow, MetricRow
    from raytrace_rl.monitor.skew import Skew
    from raytrace_rl.monitor.windows import Windows
    from raytrace_rl.spool.reader import Damage

State = Literal["alive", "dead", "closed", "unknown"]

#: Instrumentation scope under which the library's own spans travel outside the spool.
SCOPE_NAME: Final = "raytrace_rl"

#: Names of the OTLP enums ``Span.SpanKind`` and ``Status.StatusCode``, by number.
KINDS: Final = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
STATUSES: Final = ("UNSET", "OK", "ERROR")

#: In the order in which they own an instant that several of them claim.
BUCKETS: Final = ("productive", "overhead", "wasted", "idle")
_BUCKETS: Final = frozenset(BUCKETS)

_THREAD_ID: Final = "thread.id"
_THREAD_NAME: Final = "thread.name"


class UnreadableRunError(Exception):
    """Nothing is there to read; the message is one line for a person."""


class StackRow(NamedTuple):
    """Where the thread of an open span stood at ``time_ns`` (ns since the epoch)."""

    trace_id: str
    span_id: str
    time_ns: int
    text: str


@dataclass(eq=False, slots=True)
class Process:
    """One process of the run: a lane.

    Attributes:
        key: Unique in the run.
        node: Name of its node's directory, or its host name where it was read from an OTLP file.
        pid: Process id, 0 where unknown.
        start_ns: When its telemetry started, ns since the epoch; 0 where unknown.
        resource: Its OTLP resource attributes, the latest it gave.
        state: ``closed`` (it ended its spool itself), ``alive`` or ``dead`` (both proven), ``unknown``.
        heartbeat_ns: Last heartbeat, ns since the epoch; 0 where unknown.
        last_ns: Last sign of life of any kind (heartbeat, start or end of a span), ns since the epoch.
        drops: What it counted as lost, by kind (spans, attributes, metrics, logs, bytes).
        threads: Where its threads without an open span stood when stacks were last taken.
        boot_id: Its kernel's boot id, hexadecimal; empty where unknown.
        anchors: Its wall and its monotonic clock (ns), read together: at its start, then each time that the wall clock
            had been set. Its spans are in terms of the first. Empty where unknown.
        peers: Of nodes whose clocks it asked: how much later its own was (ns) when the answer came, the least of it.
    """

    key: str
    node: str = ""
    pid: int = 0
    start_ns: int = 0
    resource: Attributes = field(default_factory=dict)
    state: State = "unknown"
    heartbeat_ns: int = 0
    last_ns: int = 0
    drops: dict[str, int] = field(default_factory=dict)
    threads: StackRow | None = None
    boot_id: str = ""
    anchors: list[tuple[int, int]] = field(default_factory=list)
    peers: dict[str, int] = field(default_factory=dict)

    def text(self, key: str) -> str | None:
        """The resource attribute ``key`` if it is a non-empty string."""
        value = self.resource.get(key)
        return value if isinstance(value, str) and value else None

    def number(self, key: str) -> int | None:
        """The resource attribute ``key`` if it is an integer, or text that is one (environments only know text)."""
        value = self.resource.get(key)
        if isinstance(value, str) and value.isdecimal() and len(value) < 19:
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def role(self) -> str | None:
        """``driver`` or ``worker``."""
        return self.text(semconv.RL_ROLE)

    @property
    def worker_group(self) -> str | None:
        """Name of its worker group."""
        return self.text(semconv.RL_WORKER_GROUP)

    @property
    def rank(self) -> int | None:
        """Rank within its worker group."""
        return self.number(semconv.NV_DL_RANK)

    @property
    def node_id(self) -> str:
        """Ray's node id, else the node's name."""
        return self.text(semconv.RAY_NODE_ID) or self.node

    @property
    def actor_id(self) -> str | None:
        """Ray's actor id."""
        return self.text(semconv.RAY_ACTOR_ID)

    @property
    def actor_class(self) -> str | None:
        """Class of its Ray actor."""
        return self.text(semconv.RAY_ACTOR_CLASS)

    @property
    def incarnation(self) -> int | None:
        """How often Ray had restarted the actor."""
        return self.number(semconv.RAY_ACTOR_INCARNATION)

    @property
    def attempt(self) -> int:
        """Which attempt of the run it belongs to, from 1."""
        return self.number(semconv.RL_ATTEMPT) or 1

    @property
    def label(self) -> str:
        """What a person calls it: worker group and rank, else actor class, else role."""
        kind = self.worker_group or self.actor_class or self.role or self.text(semconv.SERVICE_NAME) or "process"
        rank = self.rank
        if self.worker_group and rank is not None:
            kind += f"[{rank}]"
        actor = self.text(semconv.RAY_ACTOR_NAME)
        if self.worker_group and (not actor or actor.startswith(self.worker_group)):  # a group's names say no more
            actor = self.actor_class
        parts = [kind] + ([actor] if actor and actor != kind else []) + ([f"pid {self.pid}"] if self.pid else [])
        return " ".join(parts)


class SpanRow:
    """One span, with the columns of the ``spans`` table.

    Attributes:
        trace_id, span_id: Hexadecimal.
        parent_span_id: Hexadecimal, None for a root.
        name, kind, status, status_message: As OTLP has them; kind and status by name (``INTERNAL``, ``ERROR``).
        start_ns: Start, ns since the epoch.
        end_ns: End, ns since the epoch; None while it is open.
        span_group, bucket, iteration, queued_ns: The ``rl.*`` attributes, None where absent.
        truncated: It was open when its process ended.
        thread, thread_id: Name and id of its thread.
        attributes, events, links, trace_state, flags, dropped: The rest of the OTLP span; ``dropped`` counts
            attributes, events and links that the process could not keep.
        scope: Its instrumentation scope; None for the library's own.
        process: The process it ran in.
    """

    __slots__ = (
        "attributes",
        "bucket",
        "dropped",
        "end_ns",
        "events",
        "flags",
        "iteration",
        "kind",
        "links",
        "name",
        "parent_span_id",
        "process",
        "queued_ns",
        "scope",
        "span_group",
        "span_id",
        "start_ns",
        "status",
        "status_message",
        "thread",
        "thread_id",
        "trace_id",
        "trace_state",
        "truncated",
    )

    def __init__(self, span: Span, process: Process, scope: Scope | None = None) -> None:
        self.trace_id = span.trace_id.hex()
        self.span_id = span.span_id.hex()
        self.parent_span_id = span.parent_span_id.hex() or None
        self.name = span.name
        self.kind = _enum(KINDS, span.kind)
        self.start_ns = span.start_ns
        self.end_ns: int | None = span.end_ns or None
        self.status = _enum(STATUSES, span.status_code)
        self.status_message = span.status_message
        self.attributes: Attributes = span.attributes
        get = span.attributes.get
        group = get(semconv.RL_SPAN_GROUP)
        self.span_group = group if type(group) is str else None
        bucket = get(semconv.RL_BUCKET)
        self.bucket = bucket if type(bucket) is str and bucket in _BUCKETS else None
        iteration = get(semconv.RL_ITERATION)
        self.iteration = iteration if type(iteration) is int else None
        queued = get(semconv.RL_QUEUED_NS)
        self.queued_ns = queued if type(queued) is int else None
        self.truncated = get(semconv.RL_TRUNCATED) is True
        thread = get(_THREAD_NAME)
        self.thread = thread if type(thread) is str else None
        thread_id = get(_THREAD_ID)
        self.thread_id = thread_id if type(thread_id) is int else None
        self.events: Sequence[Event] = span.events
        self.links: Sequence[Link] = span.links
        self.trace_state = span.trace_state
        self.flags = span.flags
        self.dropped = (span.dropped_attributes, span.dropped_events, span.dropped_links)
        self.scope = scope
        self.process = process

    def __repr__(self) -> str:
        return f"<SpanRow {self.name!r} {self.span_id} {self.start_ns}..{self.end_ns}>"

    def truncate(self, end_ns: int) -> None:
        """Ends an open span at ``end_ns`` (ns since the epoch, not before its start) and marks it truncated."""
        self.end_ns = max(end_ns, self.start_ns)
        self.truncated = True
        self.attributes[semconv.RL_TRUNCATED] = True

    @property
    def until_ns(self) -> int:
        """Its end; while it is open its process's last sign of life. Never before its start."""
        end = self.process.last_ns if self.end_ns is None else self.end_ns
        return max(end, self.start_ns)

    @property
    def duration_ns(self) -> int | None:
        """Its duration, None while it is open."""
        return None if self.end_ns is None else self.end_ns - self.start_ns

    @property
    def lane(self) -> str:
        """Key of its process."""
        return self.process.key

    @property
    def worker_group(self) -> str | None:
        """Its process's worker group."""
        return self.process.worker_group

    @property
    def rank(self) -> int | None:
        """Its process's rank within the worker group."""
        return self.process.rank

    @property
    def node_id(self) -> str:
        """Its process's node."""
        return self.process.node_id

    @property
    def actor_id(self) -> str | None:
        """Its process's Ray actor id."""
        return self.process.actor_id

    @property
    def actor_class(self) -> str | None:
        """Its process's Ray actor class."""
        return self.process.actor_class

    @property
    def incarnation(self) -> int | None:
        """How often Ray had restarted its actor."""
        return self.process.incarnation

    @property
    def attempt(self) -> int:
        """Attempt of the run, from 1."""
        return self.process.attempt

    @property
    def pid(self) -> int:
        """Its process's id."""
        return self.process.pid

    @property
    def resource(self) -> Attributes:
        """Its process's resource attributes."""
        return self.process.resource


def _enum(names: tuple[str, ...], number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)


@dataclass(slots=True)
class Run:
    """A run that has been read.

    Attributes:
        path: Where it was read from.
        run_id: ``rl.run.id`` of its processes, else the name of the path.
        spans: Every span once, ended ones and those still open, in the order of their start.
        processes: Its processes, in the order of their start.
        metrics: Every data point, in the order of time.
        logs: Every log record, in the order of time.
        stacks: Where threads of open spans stood, the latest of each span.
        damage: What was skipped, and why.
        duplicates: Spans that were met more than once (resent, or read from two files).
        skew: What is known of its nodes' clocks, once its times have been shifted by that.
        windows: Which part of it goodput is asked about; None for all.
    """

    path: str
    run_id: str
    spans: list[SpanRow] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    metrics: list[MetricRow] = field(default_factory=list)
    logs: list[LogRow] = field(default_factory=list)
    stacks: list[StackRow] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    duplicates: int = 0
    skew: Skew | None = None
    windows: Windows | None = None

    def arrow(self, table: str = "spans") -> Any:
        """Returns a table of docs/sql.md as a ``pyarrow.Table``.

        Args:
            table: ``spans``, ``metrics``, ``logs``, ``stacks``, ``processes`` or ``runs``.

        Raises:
            KeyError: There is no such table.
            ImportError: pyarrow, of the ``report`` extra, is missing.
        """
        from raytrace_rl.monitor.arrow import arrow

        return arrow(self, table)
