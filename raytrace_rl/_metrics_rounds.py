"""Callbacks of observable instruments: asked in rounds, on a thread of their own, each round under a deadline.

They are the program's code and may hang. A round is then given up: whoever collects goes on without it, and the
callback is left out of later rounds until it has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final, Protocol

from raytrace_rl import _state

#: A round of callbacks that takes longer (seconds) is given up. The SDK's own default for a collection.
CALLBACK_S: Final = 10.0


class Source(Protocol):
    """What has callbacks: an observable instrument of ours, or somebody else's MeterProvider."""

    running: bool

    @property
    def name(self) -> str: ...

    def observe(self, timeout_s: float) -> Any: ...


class Round:
    """One round of callbacks.

    Args:
        sources: What to ask, one after another; those that still hang from an earlier round are left out.
        observed: Takes a source and what it said.
        then: Called at the end, on the round's thread, unless the round has been given up.

    Attributes:
        thread: Runs the round once it is started.
        started: `time.monotonic` moment of its beginning.
    """

    def __init__(
        self, sources: Sequence[Source], observed: Callable[[Any, list[Any]], None], then: Callable[[], object]
    ) -> None:
        self._sources = sources
        self._observed = observed
        self._then = then
        self._current: Source | None = None
        self._abandoned = False
        self.started = monotonic()
        self.thread = threading.Thread(target=self._run, name="raytrace_rl-metrics", daemon=True)

    def _run(self) -> None:
        for source in self._sources:
            if source.running:
                continue
            self._current = source
            source.running = True
            try:
                found = source.observe(CALLBACK_S)
            except Exception as error:
                _state.warn_once(f"observe:{source.name}", "Metrics of %s cannot be collected: %r", source.name, error)
                found = None
            finally:
                source.running = False
            if self._abandoned:
                return
            if found:
                self._observed(source, found)
        self._current = None
        try:
            self._then()
        except Exception as error:  # nobody waits on this thread who could be told
            _state.count_drop("metrics")
            _state.warn_once("metrics-collect", "Metrics could not be collected: %r", error)

    def give_up(self) -> None:
        """Goes on without it. The callback that hangs is named once, and asked again when it has returned."""
        source = self._current
        self._abandoned = True
        _state.count_drop("metrics")
        if source is not None:
            _state.warn_once(
                f"hangs:{source.name}",
                "The callback of metric %s has not returned in time: its values are missing until it does.",
                source.name,
            )


class Installed:
    """The MeterProvider that somebody else installed: it stays in place, and a reader of ours collects from it too."""

    def __init__(self, provider: Any, receive: Callable[[Any], None]) -> None:
        from raytrace_rl._metrics_sdk import SpoolReader

        self.running = False
        self._provider = provider
        self._reader = SpoolReader(receive)

    @property
    def name(self) -> str:
        """For a person."""
        return f"the MeterProvider that is installed ({type(self._provider).__name__})"

    def join(self) -> None:
        """Adds our reader."""
        self._provider.add_metric_reader(self._reader)

    def leave(self) -> None:
        """Takes our reader away."""
        self._provider.remove_metric_reader(self._reader)

    def observe(self, timeout_s: float) -> None:
        """Collects; the SDK calls callbacks, with its own lock held, and hands over the result."""
        self._reader.collect(timeout_millis=timeout_s * 1000)


def within(seconds: float, call: Callable[[], None]) -> bool:
    """Runs ``call``, which may wait for a lock that is held during a callback; False if it takes longer."""
    thread = threading.Thread(target=call, name="raytrace_rl-metrics", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down
        return False
    thread.join(seconds)
    return not thread.is_alive()
