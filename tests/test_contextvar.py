"""Context variables under a garbage collector whose finalizers set them too."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from contextvars import ContextVar
from typing import Any

import pytest

from raytrace_rl import _contextvar

#: Sets a variable over and over while collections, at ever other moments, run finalizers that set it as well.
STORM = """
import contextvars, gc, random, sys
from raytrace_rl._contextvar import safe
others = [contextvars.ContextVar(str(i)) for i in range(int(sys.argv[1]))]
for other in others:
    other.set(object())
var = safe(contextvars.ContextVar("v", default=None))

class Finalized:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        token = var.set(object())
        if token is not None:
            var.reset(token)

moments = random.Random(1)
junk = []
for i in range(150_000):
    Finalized()
    junk.append([])
    if i % 3 == 0:
        junk.append({})
    if len(junk) > moments.randrange(5, 60):
        junk.clear()
    if i % 50 == 0:
        gc.set_threshold(moments.randrange(3, 40))
    token = var.set([i])
    assert var.get() == [i]
    var.reset(token)
    assert var.get() is None
print("survived")
"""


@pytest.mark.parametrize("others", [0, 1, 2])
def test_finalizers_that_set_the_variable_do_not_crash_the_process(others):
    """Catches a collection inside ``ContextVar.set``: CPython 3.11 then goes on with freed memory, and dies."""
    done = subprocess.run(
        [sys.executable, "-c", STORM, str(others)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "survived"), done.stderr


def test_a_collection_is_neither_switched_on_nor_left_off():
    """Catches a program that has switched collections off (or lives by them) and finds that we have changed it."""
    var: Any = _contextvar.GcSafeVar(ContextVar("v", default=0))
    assert gc.isenabled()
    var.reset(var.set(1))
    assert gc.isenabled()
    with pytest.raises(ValueError, match="created by a different"):
        var.reset(ContextVar("other", default=0).set(1))
    assert gc.isenabled()
    gc.disable()
    try:
        var.reset(var.set(1))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_interrupted_set_leaves_collections_on():
    """Catches a raising signal handler between the two switches, after which nothing is ever collected again."""
    var: Any = _contextvar.GcSafeVar(ContextVar("v", default=0))

    def strike(_signum: int, _frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5)
                for _ in range(100):
                    var.reset(var.set(1))
            except TimeoutError:
                pass
            assert gc.isenabled()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
