"""How far one destination has acknowledged each segment of a node, on disk: where a relay that is killed goes on.

One small file a signal and destination, written anew after each acknowledgement and put in place by ``rename``: a kill
at any moment leaves the old one or the new one, and so costs at most one batch that is sent twice. The counts of what
became of it (`tally`) are in the same file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.relay import notes
from raytrace_rl.relay.tally import Tally

VERSION: Final = 1
#: Name of the directory of cursors within ``RUN_DIR/spool/<node>``.
DIRECTORY: Final = "relay"
_NAME: Final = re.compile(r"(traces|metrics|logs)-[0-9a-f]{8}\.json")


@dataclass(slots=True)
class _Place:
    """What is acknowledged of one process that is not finished.

    Attributes:
        below: Every segment with a smaller number is done.
        at: Offset behind the last acknowledged record, by segment number.
        done: Segments behind ``below`` that are done; numbers may have gaps.
        truncated: How many of its open spans, closed at its death, are acknowledged.
    """

    below: int = 0
    at: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    truncated: int = 0


class Cursors:
    """The cursors of one destination over the processes of one node.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
        signal: ``traces``, ``metrics`` or ``logs``.
        destination: Where it is sent, without credentials; another destination has cursors of its own.

    Attributes:
        path: The file.
        tally: What became of what the cursors have passed.
    """

    def __init__(self, node_dir: str | os.PathLike[str], signal: str, destination: str) -> None:
        import hashlib  # for the relay alone: a worker that looks for its relay has 2 ms less to wait

        label = hashlib.sha256(destination.encode()).hexdigest()[:8]
        self.path = Path(node_dir) / DIRECTORY / f"{signal}-{label}.json"
        self._destination = destination
        self._places: dict[str, _Place] = {}
        self._finished: dict[str, None] = {}
        self._refused: dict[str, set[int]] = {}
        self._changed = False
        self.tally = Tally()
        self.load()

    # -- what is acknowledged -------------------------------------------------------------------------------------

    def offset(self, stem: str, number: int) -> int:
        """Returns the offset behind the last acknowledged record of a segment, 0 where there is none."""
        place = self._places.get(stem)
        return 0 if place is None else place.at.get(number, 0)

    def is_done(self, stem: str, number: int) -> bool:
        """Whether all of a segment is acknowledged."""
        if stem in self._finished:
            return True
        place = self._places.get(stem)
        return place is not None and (number < place.below or number in place.done)

    def is_finished(self, stem: str) -> bool:
        """Whether all that a process wrote, and ever will, is acknowledged."""
        return stem in self._finished

    def truncated(self, stem: str) -> int:
        """Returns how many open spans of a dead process are acknowledged."""
        place = self._places.get(stem)
        return 0 if place is None else place.truncated

    def is_refused(self, stem: str, number: int) -> bool:
        """Whether something of a segment was passed over because it was refused: then only the spool has it."""
        return number in self._refused.get(stem, ())

    # -- moving ---------------------------------------------------------------------------------------------------

    def move(self, stem: str, number: int, offset: int) -> None:
        """Everything up to ``offset`` of a segment is acknowledged."""
        place = self._places.setdefault(stem, _Place())
        if offset > place.at.get(number, 0):
            place.at[number] = offset
            self._changed = True

    def refuse(self, stem: str, number: int) -> None:
        """Something of a segment is refused for good."""
        if not self.is_refused(stem, number):
            self._refused.setdefault(stem, set()).add(number)
            self._changed = True

    def finish_segment(self, stem: str, number: int) -> None:
        """All of a segment is acknowledged, and nothing more will be appended to it."""
        if not self.is_done(stem, number):
            place = self._places.setdefault(stem, _Place())
            place.done.add(number)
            place.at.pop(number, None)
            while place.below in place.done:
                place.done.remove(place.below)
                place.below += 1
            self._changed = True

    def add_truncated(self, stem: str, count: int) -> None:
        """``count`` more of a dead process's open spans are acknowledged."""
        if count:
            self._places.setdefault(stem, _Place()).truncated += count
            self._changed = True

    def finish(self, stem: str) -> None:
        """All that a process wrote is acknowledged, and it is over."""
        if stem not in self._finished:
            self._finished[stem] = None
            self._places.pop(stem, None)
            self._changed = True

    def forget(self, present: Mapping[str, Collection[int]]) -> None:
        """Drops what is known of files that are gone.

        Args:
            present: Numbers of the segments that are there, by process.
        """
        for stem in [stem for stem in (*self._finished, *self._places) if stem not in present]:
            self._finished.pop(stem, None)
            self._places.pop(stem, None)
            self._changed = True
        refused = {stem: numbers & set(present.get(stem, ())) for stem, numbers in self._refused.items()}
        self._refused = {stem: numbers for stem, numbers in refused.items() if numbers}

    def clear(self) -> None:
        """Nothing is acknowledged any more."""
        self._places, self._finished, self._refused = {}, {}, {}
        self._changed = True
        self.tally.start_anew()

    # -- the file -------------------------------------------------------------------------------------------------

    def save(self) -> bool:
        """Writes the file, if anything has changed. False, with one warning, if it cannot be written."""
        if not self._changed and not self.tally.changed:
            return True
        try:
            notes.replace(self.path, self._as_json())
        except OSError as error:
            if is_interrupt(error):
                raise
            _state.warn_once(
                "relay-cursors",
                "The relay cannot note in %s what was acknowledged (%s): a relay that is started anew will send it "
                "once more.",
                self.path,
                error,
            )
            return False
        self._changed = self.tally.changed = False
        return True

    def _as_json(self) -> dict[str, Any]:
        places = {
            stem: {
                "below": place.below,
                "at": {str(number): offset for number, offset in place.at.items()},
                "done": sorted(place.done),
                "truncated": place.truncated,
            }
            for stem, place in self._places.items()
        }
        return {
            "version": VERSION,
            "destination": self._destination,
            "processes": places,
            "finished": list(self._finished),
            "refused": {stem: sorted(numbers) for stem, numbers in self._refused.items()},
            "tally": self.tally.as_json(),
        }

    def load(self) -> None:
        """Reads the file; what was noted here and not saved is forgotten."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["version"] != VERSION:
                raise ValueError(f"version {found['version']} is not known here")
            places = {str(stem): _place(one) for stem, one in found["processes"].items()}
            finished = {str(stem): None for stem in found["finished"]}
            refused = {str(stem): {int(n) for n in numbers} for stem, numbers in found.get("refused", {}).items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            if is_interrupt(error):
                raise
            _state.warn_once(
                "relay-cursors-read", "%s cannot be read (%r): the node's spools are sent anew.", self.path, error
            )
            return
        self._places, self._finished, self._refused = places, finished, refused
        tally = found.get("tally")
        self.tally.load(tally if isinstance(tally, dict) else {})


def _place(found: dict[str, Any]) -> _Place:
    return _Place(
        below=int(found["below"]),
        at={int(number): int(offset) for number, offset in found["at"].items()},
        done={int(number) for number in found["done"]},
        truncated=int(found["truncated"]),
    )


class Noted(NamedTuple):
    """What the relays of a node have noted of one signal and destination.

    Attributes:
        signal: ``traces``, ``metrics`` or ``logs``.
        destination: Where it is sent.
        tally: What became of it, as `Tally.as_json` has it.
        current: It is where the signal was sent last.
    """

    signal: str
    destination: str
    tally: dict[str, Any]
    current: bool


def noted(node_dir: str | os.PathLike[str]) -> list[Noted]:
    """Returns what the relays of a node have noted, by signal; empty where there was none. Changes nothing."""
    found: list[Noted] = []
    try:
        names = sorted(path.name for path in (Path(node_dir) / DIRECTORY).iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []
    for name in names:
        read = notes.read(Path(node_dir) / DIRECTORY / name, VERSION)
        if read:
            tally = Tally()
            tally.load(read["tally"] if isinstance(read.get("tally"), dict) else {})
            found.append(Noted(name.partition("-")[0], str(read.get("destination")), tally.as_json(), current=False))
    latest = {one.signal: one for one in sorted(found, key=lambda one: int(one.tally["begun_ns"]))}
    return [one._replace(current=one is latest[one.signal]) for one in found]
