"""Where the code of open spans stands: the stack of a thread, or of the asyncio task in which a span is parked.

The thread of a parked coroutine stands in the event loop's ``select``, which says nothing. So its span is looked for in
the frames of the tasks: a ``with`` keeps the span's ``__exit__`` on the frame's stack, where the garbage collector, and
we, find it. From there the stack goes on along what each coroutine awaits, through other tasks too.

The text of a stack is Python's own (``File "x.py", line 3, in f``), the innermost frame last; lines without indentation
say whose frames follow. Objects of the user's are asked for nothing here: an attribute may be code of theirs.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import AsyncGeneratorType, BuiltinMethodType, FrameType, GeneratorType, MethodType
from typing import Any, Final

#: Tasks that are looked at in one beat: with more of them, the spans of the rest get the stacks of their threads.
TASKS_MAX: Final = 5000
#: Of what a task waits for: how many other tasks one after the other, and how many at once.
_AWAITED_DEEP: Final = 5
_AWAITED_WIDE: Final = 8
#: Coroutines that await each other; a recursion may be deeper.
_CHAIN_MAX: Final = 200
#: What a context manager that passes on holds the other ones in; and how much of it is looked at.
_PASSED: Final = frozenset({dict, deque, tuple, MethodType, GeneratorType})
_MANAGER_MAX: Final = 100
#: Threads of ours are called so, and of no interest.
_OUR_THREADS: Final = "raytrace_rl-"
#: Where `asyncio` has the tasks that are not done, up to Python 3.13.
_TASK_SETS: Final = ("_all_tasks", "_scheduled_tasks", "_eager_tasks")


def of_thread(frame: FrameType) -> str:
    """Returns the stack of a thread, given its innermost frame."""
    return "".join(traceback.format_stack(frame))


def of_other_threads(frames: dict[int, FrameType], without: Iterable[int]) -> str:
    """Returns the stacks of all threads but those ``without`` (idents) and this one, each under its thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    left = {*without, threading.get_ident()}
    return "".join(
        f"Thread {ident} {names.get(ident, '')}\n{of_thread(frame)}"
        for ident, frame in frames.items()
        if ident not in left and not names.get(ident, "").startswith(_OUR_THREADS)
    )


def of_tasks(spans: Iterable[Any]) -> dict[bytes, str]:
    """Returns the stacks of the tasks in which ``spans`` (open ones of this process) are parked, by the spans' ids.

    A span that is in no task, or in one that runs right now, has none: its thread's stack is the truth.
    """
    asyncio: Any = sys.modules.get("asyncio")
    if asyncio is None:
        return {}
    wanted: dict[int, bytes] = {}
    for span in spans:
        wanted[id(span)] = span.ids
        if (foreign := getattr(span, "_span", None)) is not None:
            wanted[id(foreign)] = span.ids
    found: dict[bytes, str] = {}
    for task in _tasks(asyncio):
        chain = list(_chain(task.get_coro()))
        held = {ids for one in chain for item in _held(one) if (ids := wanted.get(id(item))) is not None}
        if held and not any(getattr(one, name, False) for one in chain[:1] for name in ("cr_running", "gi_running")):
            text = _text(asyncio, task)
            for ids in held:
                found.setdefault(ids, text)
    return found


def _tasks(asyncio: Any) -> list[Any]:
    """Every task that is not done, of all loops."""
    found: dict[int, Any] = {}
    sets = [kept for name in _TASK_SETS if (kept := getattr(asyncio.tasks, name, None)) is not None]
    readers: list[Callable[[], Iterable[Any]]] = [kept.copy for kept in sets]
    if not sets:  # from Python 3.14 on it keeps them by thread, and is to be asked by loop
        readers = [partial(asyncio.all_tasks, loop) for loop in _loops(asyncio)]
    for read in readers:
        for _ in range(20):  # another thread may add one while the set is read
            try:
                tasks = list(read())
            except RuntimeError:
                continue
            found.update((id(task), task) for task in tasks if isinstance(task, asyncio.Task) and not task.done())
            break
    return list(found.values())[:TASKS_MAX]


def _loops(asyncio: Any) -> Iterator[Any]:
    """The event loops that threads run right now. (Locals are a view from Python 3.13 on; no copy of them is made.)"""
    seen: set[int] = set()
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            loop = at.f_locals.get("self") if at.f_globals.get("__name__", "").startswith("asyncio.") else None
            if isinstance(loop, asyncio.AbstractEventLoop) and id(loop) not in seen:
                seen.add(id(loop))
                yield loop
            at = at.f_back


def _chain(awaited: Any) -> Iterator[Any]:
    """Yields a coroutine, what it awaits, what that awaits, and so on: coroutines, generators, async generators."""
    for _ in range(_CHAIN_MAX):
        kind = type(awaited)
        if hasattr(kind, "cr_await"):  # a CoroutineType, or Cython's
            yield awaited
            awaited = awaited.cr_await
        elif kind is GeneratorType:
            yield awaited
            awaited = awaited.gi_yieldfrom or _driven(awaited)
        elif kind is AsyncGeneratorType:
            yield awaited
            awaited = awaited.ag_await
        elif kind.__module__ == "builtins":
            # What steps an async generator, or wraps a coroutine, tells nobody but the garbage collector.
            hidden = [one for one in gc.get_referents(awaited) if _frame(one) is not None]
            if len(hidden) != 1:
                return
            awaited = hidden[0]
        else:
            return


def _driven(generator: Any) -> Any:
    """What a generator steps by hand, inside a context of its own (`raytrace_rl._invocation.drive`)."""
    frame = generator.gi_frame
    if frame is not None and frame.f_globals.get("__name__") == "raytrace_rl._invocation":
        return frame.f_locals.get("steps")
    return None


def _frame(awaited: Any) -> FrameType | None:
    kind = type(awaited)
    frame = None
    if hasattr(kind, "cr_frame"):
        frame = awaited.cr_frame
    elif kind is GeneratorType:
        frame = awaited.gi_frame
    elif kind is AsyncGeneratorType:
        frame = awaited.ag_frame
    return frame if isinstance(frame, FrameType) else None


def _held(awaited: Any) -> Iterator[Any]:
    """Yields what the frame of a coroutine holds: its variables, and what its ``with`` statements will leave."""
    for item in gc.get_referents(awaited):
        yield item
        if type(item) in {MethodType, BuiltinMethodType} and item.__name__ in {"__exit__", "__aexit__"}:
            yield from _inside(item.__self__)


def _inside(manager: Any) -> Iterator[Any]:
    """Yields a context manager, and what it holds if it is one that passes on (`contextlib`'s, a timer's)."""
    ahead = [manager]
    for _ in range(_MANAGER_MAX):
        if not ahead:
            return
        item = ahead.pop(0)
        yield item
        kind = type(item)
        known = kind.__module__.startswith(("raytrace_rl.", "opentelemetry.")) and not hasattr(kind, "get_span_context")
        if known or kind.__module__ in {"builtins", "collections", "contextlib"}:
            ahead += [one for one in gc.get_referents(item) if type(one) in _PASSED or hasattr(type(one), "__exit__")]


def _text(asyncio: Any, task: Any, deep: int = 0, seen: frozenset[int] = frozenset()) -> str:
    """The stack of a task, and below it those of the tasks that it waits for."""
    chain = list(_chain(task.get_coro()))
    frames = [(frame, frame.f_lineno) for frame in map(_frame, chain) if frame is not None]
    lines = [f"{'waits for task' if deep else 'Task'} {task.get_name()}\n"]
    lines += traceback.StackSummary.extract(iter(frames)).format()
    if deep < _AWAITED_DEEP:
        seen |= {id(task)}
        awaited = [one for one in _awaited(asyncio, task, chain) if id(one) not in seen and not one.done()]
        lines += [_text(asyncio, one, deep + 1, seen) for one in awaited[:_AWAITED_WIDE]]
        if len(awaited) > _AWAITED_WIDE:
            lines.append(f"waits for {len(awaited) - _AWAITED_WIDE} more tasks\n")
    return "".join(lines)


def _awaited(asyncio: Any, task: Any, chain: Sequence[Any]) -> list[Any]:
    """The tasks that a task waits for, as far as it can be told."""
    waiter: Any = getattr(task, "_fut_waiter", None)
    if isinstance(waiter, asyncio.Task):
        return [waiter]
    if type(waiter).__name__ == "_GatheringFuture":
        candidates = list(waiter._children)
    else:
        # asyncio.wait, wait_for and TaskGroup have them among the variables of their frame, which is the last.
        frame = _frame(chain[-1]) if chain else None
        if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] != "asyncio":
            return []
        candidates = []
        for value in list(frame.f_locals.values()):
            tasks = value._tasks if type(value).__name__ == "TaskGroup" else value
            candidates += list(tasks) if type(tasks) in {list, set, tuple} else [tasks]
    return list({id(one): one for one in candidates if isinstance(one, asyncio.Task)}.values())
