from __future__ import annotations

import faulthandler
import sys
import threading
import traceback

from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.monitor.frames import Frame, of_fault, sections, told

TASK = """\
Task Task-1
  File "/srv/rl/train.py", line 5, in main
    await asyncio.gather(
waits for task Task-2
  File "/srv/rl/train.py", line 9, in part
    await event.wait()
    ^^^^^^^^^^^^^^^^^^
"""


def _here() -> str:
    return "".join(traceback.format_stack(sys._getframe()))


def test_pythons_own_format_is_read_back():
    """Catches a reader that loses a frame, a line or the code of it: nobody could say where a thread stands."""
    (section,) = sections(_here())
    assert section.title == ""
    assert section.frames[-1].function == "_here"
    assert section.frames[-2].function == "test_pythons_own_format_is_read_back"
    assert section.frames[-2].code == "(section,) = sections(_here())"
    assert section.frames[-2].file == __file__
    assert len(section.frames) == len(traceback.extract_stack()) + 1


def test_sections_of_tasks_and_threads_are_told_apart():
    """Catches frames of one task or thread that are shown as another's."""
    first, second = sections(TASK)
    assert (first.title, [f.line for f in first.frames]) == ("Task Task-1", [5])
    assert (second.title, second.frames[0].code) == ("waits for task Task-2", "await event.wait()")
    (thread,) = sections('Thread 77 pump (of the user)\n  File "a.py", line 1, in f\n')
    assert (thread.ident, thread.title, thread.frames) == (77, "pump (of the user)", [Frame("a.py", 1, "f")])


def test_a_dump_of_faulthandler_is_read(tmp_path):
    """Catches another order or spelling in the dump, which is all that there is of a process that held the GIL."""
    path = tmp_path / "dump"
    ready, go_on = threading.Event(), threading.Event()

    def stands_here() -> None:
        ready.set()
        go_on.wait(30)

    thread = threading.Thread(target=stands_here)
    thread.start()
    ready.wait(30)
    with path.open("w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
    found = {section.ident: section.frames for section in of_fault(path.read_text())}
    go_on.set()
    thread.join()
    assert "stands_here" in [frame.function for frame in found[thread.ident or 0]]
    assert found[threading.get_ident()][-1].function == "test_a_dump_of_faulthandler_is_read"


@given(st.text())
def test_any_text_is_read(text):
    """Catches a stack of damaged bytes that ends the command."""
    sections(text)
    of_fault(text)


FILES = {"u": "/srv/rl/train.py", "l": "/venv/lib/python3.11/site-packages/ray/worker.py"}


def _drawn(kinds: str, limit: int | None) -> str:
    frames = [Frame(FILES[kind], i, "f") for i, kind in enumerate(kinds)]
    return "".join(str(one) if isinstance(one, int) else kinds[one.line] for one in told(frames, limit))


def test_the_users_code_is_what_is_shown():
    """Catches stacks of which only the library's end, or the thread's beginning, can be seen."""
    assert _drawn("llluull", 8) == "uull", "what leads to the user's code says nothing"
    assert _drawn("luulllll", 8) == "uu3ll"
    assert _drawn("ulu", 8) == "u1u"
    assert _drawn("uuuulllll", 4) == "2uu3ll"
    assert _drawn("lllll", 3) == "lll"
    assert _drawn("uuuuuu", 3) == "3uuu"
    assert _drawn("ululul", 1) == "5l"
    assert _drawn("lulul", None) == "lulul"
    assert _drawn("", 3) == ""


@given(st.text("ul", max_size=30), st.integers(1, 10))
def test_the_innermost_frame_is_always_shown(kinds, limit):
    """Catches a stack without the one line that matters: where the thread stands."""
    frames = [Frame(FILES[kind], i, "f") for i, kind in enumerate(kinds)]
    shown = told(frames, limit)
    assert sum(isinstance(one, Frame) for one in shown) <= limit
    if frames:
        assert shown[-1] == frames[-1]
