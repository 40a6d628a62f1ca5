"""Draws what `stuck` found as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from raytrace_rl.monitor.drawing import cut, seconds
from raytrace_rl.monitor.frames import Frame, told

_WIDTH: Final = 200
#: Frames of a stack that are shown; the JSON has them all.
FRAMES: Final = 8
#: Blocks that are shown at most, and threads without spans a process.
STANDS: Final = 100
THREADS: Final = 8
#: A stack in these stands in wait for another process.
_REMOTE_WAITS: Final = ("/ray/_private/worker.py", "/ray/util/client/")


def render(found: Mapping[str, Any], *, frames: int | None = FRAMES) -> str:
    """Returns the text: what is open, the deepest first, each with where it stands and for whom it waits.

    Args:
        found: What `raytrace_rl.monitor.stuck.stuck` returns.
        frames: Frames to show of each stack; None for all.
    """
    lines = [_head(found)]
    lines += [_late(process) for process in found["late"]]
    for stand in found["stands"][:STANDS]:
        lines += ["", *_stand(stand, found, frames)]
    hidden = len(found["stands"]) - STANDS
    if hidden > 0:
        lines += ["", f"... and {hidden} more threads and tasks (--json has them)"]
    lines += _threads(found["threads"], frames)
    if found["left_behind"]:
        lines += [
            "",
            f"{found['left_behind']} spans of processes that died earlier are left out: nobody waits for them",
        ]
    return "\n".join(lines) + "\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _head(found: Mapping[str, Any]) -> str:
    run = found["run"]
    state = {
        "live": "live",
        "over": "over: what was open when its processes ended",
        "unknown": "of another host, or gone: whether it lives cannot be told from here",
    }[run["state"]]
    head = f"Run {cut(run['id'], 40)} is {state}"
    if not found["stands"]:
        return f"{head}\nNothing is open"
    places = len({stand["process"]["lane"] for stand in found["stands"]})
    where = _count(places, "process") if places == 1 else f"{places} processes"
    return f"{head}\n{_count(found['open'], 'open span')}, {_count(len(found['stands']), 'place')} in {where}"


def _late(process: Mapping[str, Any]) -> str:
    why = "it may be stopped, or hold the GIL in C code"
    if process["stopped"]:
        why = "it is stopped (SIGSTOP, or a debugger)"
    elif process["holds_gil"]:
        why = "its GIL is held"
    return f"  {_process(process)} lives, but has given no sign of life for {seconds(process['late_s'])}: {why}"


def _process(process: Mapping[str, Any]) -> str:
    return f"{cut(process['label'], 80)} on {cut(process['node'] or '?', 60)}"


def _stand(stand: Mapping[str, Any], found: Mapping[str, Any], frames: int | None) -> list[str]:
    front, *enclosing = stand["spans"]
    step = "" if front["iteration"] is None else f" (step {front['iteration']})"
    dead = stand["process"]["state"] in {"dead", "closed"}
    ended = {"dead": "open for {} when its process died", "closed": "open for {} when its process ended"}
    if dead and stand["stack"] and stand["stack_ns"] is None:  # no heartbeat told how long it went on
        # A copy of another node's process is closed for it; one that closes itself takes such a stack away.
        ended = dict.fromkeys(ended, "open for {} or more: its process held the GIL, then died")
    age = ended.get(stand["process"]["state"], "open for {}").format(seconds(front["age_s"]))
    lines = [
        f"{stand['stand']}. {cut(front['name'], 80)}{step}, {age}",
        f"   {_process(stand['process'])}, thread {cut(stand['thread'] or '?', 60)}",
    ]
    lines += _stack(stand["stack"], frames, "   ") or [
        "   no stack: its process died before one was taken (stack_after_s)"
        if dead
        else "   no stack yet: one is taken when it is open for longer than stack_after_s"
    ]
    if stand["stack_ns"] and found["run"]["now_ns"] - stand["stack_ns"] > 5e9 and not dead:
        lines.append(f"   (as of {seconds((found['run']['now_ns'] - stand['stack_ns']) / 1e9)} ago)")
    for waits in stand["waits_for"]:
        gone = ", whose process died" if waits["died"] else ""
        where = cut(waits["process"], 60)
        if waits["process"] == stand["process"]["label"]:
            where = f"thread {cut(waits['thread'] or '?', 60)}"
        lines.append(f"   waits for {waits['stand']}. {cut(waits['span'], 60)} on {where}{gone}")
    if not stand["waits_for"] and _waits_elsewhere(stand["stack"]):
        lines.append("   waits for another process, in which no span is open below this one")
    if enclosing:
        inside = " < ".join(f"{cut(span['name'], 60)} ({seconds(span['age_s'])})" for span in enclosing)
        lines.append(f"   inside {inside}")
    return lines


def _waits_elsewhere(stack: Sequence[Mapping[str, Any]]) -> bool:
    return bool(stack) and any(part in frame["file"] for frame in stack[0]["frames"][-4:] for part in _REMOTE_WAITS)


def _stack(sections: Sequence[Mapping[str, Any]], frames: int | None, indent: str) -> list[str]:
    lines = []
    for section in sections:
        if section["title"]:
            lines.append(f"{indent}{cut(section['title'], 80)}")
        for frame in told([Frame(**one) for one in section["frames"]], frames):
            if isinstance(frame, int):
                lines.append(f"{indent}  ... {_count(frame, 'frame')}")
                continue
            where = f'{indent}  File "{cut(frame.file, _WIDTH)}", line {frame.line}, in {cut(frame.function, 80)}'
            lines.append(where)
            if frame.code:
                lines.append(f"{indent}    {cut(frame.code, _WIDTH)}")
    return lines


def _threads(threads: Sequence[Mapping[str, Any]], frames: int | None) -> list[str]:
    """The threads without a span; of those that stand in a library alone (idle pools) nothing is to be seen."""
    lines: list[str] = []
    shown: dict[str, int] = {}
    for thread in threads:
        stack = [Frame(**one) for section in thread["stack"] for one in section["frames"]]
        lane = thread["process"]["lane"]
        if all(frame.is_library for frame in stack) or shown.get(lane, 0) >= THREADS:
            continue
        shown[lane] = shown.get(lane, 0) + 1
        lines.append(f"   {_process(thread['process'])}, thread {cut(thread['thread'] or '?', 60)}")
        lines += _stack([{**section, "title": ""} for section in thread["stack"]], frames, "   ")
    return ["", "Threads of these processes that have no span open:", *lines] if lines else []
