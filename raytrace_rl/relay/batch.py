"""What one request takes: a portion a process, and how far it moves that process's cursors once it is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Portion:
    """What a request takes of one process.

    Attributes:
        stem: The process.
        resource: OTLP ``Resource`` of the process.
        payloads: Payloads by kind of record.
        offsets: Offset behind the last record taken, by segment number.
        done: Numbers of segments that are exhausted.
        truncated: How many of its spans were closed for it and are among the payloads (the last ones).
        finished: Nothing is left of the process, and nothing more will come.
    """

    stem: str
    resource: bytes
    payloads: dict[int, list[bytes]]
    offsets: dict[int, int] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    truncated: int = 0
    finished: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send of it."""
        return not any(self.payloads.values())


@dataclass(slots=True)
class Batch:
    """What one request takes.

    Attributes:
        portions: One a process.
        full: More is waiting.
    """

    portions: list[Portion]
    full: bool

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return all(portion.empty for portion in self.portions)
