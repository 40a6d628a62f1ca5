"""Reads the text of stacks: Python's own, as the heartbeat notes them, and ``faulthandler``'s.

Lines without indentation name what the frames that follow are of: ``Task x``, ``waits for task y``, ``Thread 123 x``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d{1,9})(?:,)? in (?P<function>.*)')
_FAULT: Final = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-fA-F]{1,16})(?: \[(?P<name>.*)\])?.* \(most")
_THREAD: Final = re.compile(r"Thread (?P<ident>\d{1,20}) ?(?P<name>.*)")
#: Code of these lies between the user's and the place where it stands.
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python3[.\d]*/|^<frozen |/raytrace_rl/(?!.*/test)")

#: Library frames that are shown of those in which the user's code stands.
_TAIL: Final = 2


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: where it stands, in which function, and the line of code, empty where it is not known."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def is_library(self) -> bool:
        """Whether it is of an installed package or the standard library."""
        return _LIBRARY.search(self.file) is not None


@dataclass(slots=True)
class Section:
    """Frames of one thread or task, the innermost last.

    Attributes:
        title: What they are of, empty where the record's span says it.
        ident: ``threading.get_ident()`` of the thread, 0 where that is not said.
        frames: The frames.
    """

    title: str
    ident: int = 0
    frames: list[Frame] = field(default_factory=list)


def sections(text: str) -> list[Section]:
    """Returns the stacks that a STACK record's text holds."""
    found: list[Section] = []
    for line in text.split("\n"):
        frame = _FRAME.fullmatch(line)
        if frame is not None:
            if not found:
                found.append(Section(""))
            found[-1].frames.append(Frame(frame["file"], int(frame["line"]), frame["function"]))
        elif line.startswith("    ") and found and found[-1].frames:
            last = found[-1].frames[-1]
            if not last.code:  # lines of carets, and the rest of a statement, follow
                found[-1].frames[-1] = Frame(last.file, last.line, last.function, line.strip())
        elif line and not line.startswith(" "):
            thread = _THREAD.fullmatch(line)
            found.append(Section(thread["name"], int(thread["ident"])) if thread else Section(line.rstrip(":")))
    return [section for section in found if section.frames or section.title]


def of_fault(text: str) -> list[Section]:
    """Returns the stacks of a dump of `faulthandler`, which has the innermost frame first and no code."""
    found: list[Section] = []
    for line in text.split("\n"):
        thread = _FAULT.match(line)
        if thread is not None:
            found.append(Section(thread["name"] or "", int(thread["ident"], 16)))
        elif found and (frame := _FRAME.fullmatch(line)) is not None:
            found[-1].frames.insert(0, Frame(frame["file"], int(frame["line"]), frame["function"]))
    return found


def told(frames: Sequence[Frame], limit: int | None) -> list[Frame | int]:
    """Returns the frames to show, at most ``limit`` and the innermost among them; a number stands for others left out.

    What leads to the user's code (how a thread begins, what wraps a call) goes without a word. Then come the innermost
    frames of the user's code and of the library that it stands in. None as ``limit`` leaves all as they are.
    """
    if limit is None or not frames:
        return list(frames)
    last = len(frames) - 1
    users = [i for i, frame in enumerate(frames) if not frame.is_library]
    if not users:
        return list(frames[-limit:])
    tail = range(max(users[-1] + 1, last + 1 - _TAIL), last + 1)
    room = max(0, limit - len(tail))
    chosen = [*users[-room:], *tail] if room else [last]
    shown: list[Frame | int] = []
    before = users[0] - 1
    for i in chosen:
        if i > before + 1:
            shown.append(i - before - 1)
        shown.append(frames[i])
        before = i
    return shown
