"""`Coder`: numbers for what comes up again and again."""

from __future__ import annotations

from typing import Any


class Coder:
    """Gives things numbers, in the order in which they come up."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._codes: dict[Any, int] = {}

    def code(self, thing: Any) -> int:
        """Returns the number of a thing."""
        found = self._codes.get(thing)
        if found is None:
            found = self._codes[thing] = len(self.things)
            self.things.append(thing)
        return found
