"""What became of one signal on its way to one destination.

It is saved with the cursors, in the same file and the same moment: a relay that is killed loses no count of what its
cursors have passed, and the next one counts nothing of it twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from time import time_ns
from typing import Any, Final

#: Counts of what everything anew (`raytrace-rl push --again`) makes void: it is sent, or lost, once more.
_OF_ONE_PASS: Final = ("rejected", "dropped", "sampled_out", "damaged")


@dataclass
class Counts:
    """What a lane has done, in records; a record is a span, or a message of metrics or logs.

    Attributes:
        sent: Acknowledged by the receiver.
        bytes: Of the requests that were acknowledged.
        requests: Acknowledged requests.
        retries: Requests that were sent again, or will be.
        timed_out: Of these, requests to which no answer came in time.
        too_large: Requests that were too large for the receiver: sent again in parts, or dropped if they had none.
        rejected: Items refused by the receiver within requests that it accepted.
        dropped: Refused for good, with the whole request; they stay in the spool.
        sampled_out: Spans of traces that ``OTEL_TRACES_SAMPLER`` leaves out.
        damaged: Damages in the spools that were passed over.
    """

    sent: int = 0
    bytes: int = 0
    requests: int = 0
    retries: int = 0
    timed_out: int = 0
    too_large: int = 0
    rejected: int = 0
    dropped: int = 0
    sampled_out: int = 0
    damaged: int = 0

    def as_dict(self) -> dict[str, int]:
        """Returns the counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Tally:
    """Counts over all relays that a destination had, one after the other, and what was heard of it last.

    Attributes:
        counts: Those of this relay alone.
        begun_ns: When a relay last began to send there, ns since the epoch; 0 if none has.
        acknowledged_ns: When the receiver last accepted a request.
        failure: What keeps it from being sent just now, for a person; empty if nothing does.
        last_error: What the receiver last refused, or failed with.
        last_error_ns: When.
        changed: Something is not saved.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self.begun_ns = 0
        self.acknowledged_ns = 0
        self.failure = ""
        self.last_error = ""
        self.last_error_ns = 0
        self.changed = False
        self._before = Counts()

    def begin(self) -> None:
        """A relay begins to send there."""
        self.begun_ns = time_ns()
        self.failure = ""
        self.changed = True

    def accepted(self) -> None:
        """The receiver has accepted a request."""
        self.failure = ""
        self.acknowledged_ns = time_ns()
        self.changed = True

    def erred(self, message: str, *, lasts: bool = False) -> None:
        """The receiver has refused something, or failed.

        Args:
            message: What it says, for a person.
            lasts: Nothing can be sent until it changes its mind.
        """
        self.last_error = message
        self.last_error_ns = time_ns()
        self.failure = message if lasts else ""
        self.changed = True

    def start_anew(self) -> None:
        """Everything is sent once more: what was lost of it before is not lost any more."""
        for name in _OF_ONE_PASS:
            setattr(self._before, name, 0)
            setattr(self.counts, name, 0)
        self.changed = True

    def total(self) -> dict[str, int]:
        """Returns the counts over all relays."""
        return {name: n + getattr(self._before, name) for name, n in self.counts.as_dict().items()}

    def as_json(self) -> dict[str, Any]:
        """Returns what is saved."""
        return {
            **self.total(),
            "begun_ns": self.begun_ns,
            "acknowledged_ns": self.acknowledged_ns,
            "failure": self.failure,
            "last_error": self.last_error,
            "last_error_ns": self.last_error_ns,
        }

    def load(self, found: Mapping[str, Any]) -> None:
        """Takes over what another relay has saved."""
        self._before = Counts(**{field.name: _number(found.get(field.name)) for field in fields(Counts)})
        self.begun_ns = _number(found.get("begun_ns"))
        self.acknowledged_ns = _number(found.get("acknowledged_ns"))
        self.failure = str(found.get("failure") or "")
        self.last_error = str(found.get("last_error") or "")
        self.last_error_ns = _number(found.get("last_error_ns"))


def _number(found: object) -> int:
    return found if type(found) is int and found >= 0 else 0
