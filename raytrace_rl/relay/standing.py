"""How bringing a node's spools home stands: what came there, what keeps it, and how far behind home is."""

from __future__ import annotations

from dataclasses import dataclass
from time import time_ns
from typing import Any


@dataclass
class Standing:
    """What a relay tells of it.

    Attributes:
        carried: Bytes so far.
        failures: Rounds that failed.
        acknowledged_ns: When home last had all that there was, ns since the epoch; 0 if never.
        behind_bytes: What home has not got, at most.
        failure: What keeps anything from coming home just now, for a person; empty if nothing does.
        last_error: What last did.
        last_error_ns: When.
    """

    carried: int = 0
    failures: int = 0
    acknowledged_ns: int = 0
    behind_bytes: int = 0
    failure: str = ""
    last_error: str = ""
    last_error_ns: int = 0

    def succeeded(self) -> None:
        """Home has all that there was."""
        self.acknowledged_ns = time_ns()
        self.behind_bytes = 0
        self.failure = ""

    def failed(self, error: Exception, behind_bytes: int) -> None:
        """A round has failed."""
        self.failures += 1
        self.failure = self.last_error = f"{type(error).__name__}: {error}"
        self.last_error_ns = time_ns()
        self.behind_bytes = behind_bytes

    def counts(self) -> dict[str, int]:
        """Returns what adds up over relays."""
        return {"bytes": self.carried, "failures": self.failures}

    def now(self) -> dict[str, Any]:
        """Returns what is so just now."""
        return {
            "acknowledged_ns": self.acknowledged_ns,
            "behind_bytes": self.behind_bytes,
            "failure": self.failure,
            "last_error": self.last_error,
            "last_error_ns": self.last_error_ns,
        }
