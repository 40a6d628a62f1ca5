"""A window of the torch profiler: chosen iterations, whose Chrome traces are filed with the run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from raytrace_rl import _process, _state, semconv
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.instrumentation import span_cm
from raytrace_rl.setup import get_telemetry_handle

#: Where the Chrome trace lies, from the run directory.
RL_PROFILE_PATH_ATTR: Final = "rl.profile.path"

#: Span over the writing of a trace, which takes seconds.
_EXPORT_SPAN: Final = "rl.torch.profile_export"
_DIRECTORY: Final = "profiles"


class ProfilerWindow:
    """Profiles chosen iterations with ``torch.profiler``, each into a Chrome trace of its own.

    ::

        window = ProfilerWindow({3, 10})
        for step in range(1, 101):
            with iteration_scope(step), window(step):
                train_step()

    The traces lie in ``RUN_DIR/profiles``, named by iteration, worker and process; the span ``rl.torch.profile_export``
    says where. Without telemetry, without torch, and in all other iterations, the body simply runs.

    Args:
        iterations: The iterations to profile.
        **options: Of ``torch.profiler.profile``, such as ``with_stack`` or ``record_shapes``.
    """

    def __init__(self, iterations: Iterable[int], **options: Any) -> None:
        self._iterations = frozenset(iterations)
        self._options = options

    def __call__(self, iteration: int) -> AbstractContextManager[None]:
        """Returns a context manager around the work of ``iteration``."""
        return _Profiled(iteration if iteration in self._iterations else None, self._options)


class _Profiled:
    """One iteration, profiled or not."""

    def __init__(self, iteration: int | None, options: dict[str, Any]) -> None:
        self._iteration = iteration
        self._options = options
        self._profiler: Any = None

    def __enter__(self) -> None:
        handle = get_telemetry_handle()
        if self._iteration is None or handle is None or handle.run_dir is None:
            return
        try:
            import torch.profiler

            profiler: Any = torch.profiler.profile(**self._options)
            profiler.start()
            self._profiler = profiler
        except Exception as error:  # no torch, an option that it does not know, another profiler that runs
            if is_interrupt(error):
                raise
            _state.warn_once("profiler", "Iteration %s is not profiled: %r", self._iteration, error)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        try:
            profiler.stop()
            self._file(profiler)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("profiler", "The profile of iteration %s is lost: %r", self._iteration, error)

    def _file(self, profiler: Any) -> None:
        handle = get_telemetry_handle()
        if handle is None or handle.run_dir is None:
            return
        directory = Path(handle.run_dir) / _DIRECTORY
        name = f"iteration-{self._iteration}.{_who()}.json.gz"
        attributes = {
            RL_PROFILE_PATH_ATTR: f"{_DIRECTORY}/{name}",
            semconv.RL_BUCKET: "overhead",
            semconv.RL_ITERATION: self._iteration,
        }
        with span_cm(_EXPORT_SPAN, **attributes):
            directory.mkdir(parents=True, exist_ok=True)
            partial = directory / f".{name}"  # the ending says that it is to be compressed
            profiler.export_chrome_trace(str(partial))
            partial.replace(directory / name)


def _who() -> str:
    """Returns what tells this process from the others of the run: group and rank, host, pid."""
    known = _process.current.resource if _process.current is not None else {}
    group, rank = known.get(semconv.RL_WORKER_GROUP), known.get(semconv.NV_DL_RANK)
    worker = f"{group or 'worker'}-{rank}." if rank is not None else ""
    return f"{worker}{socket.gethostname()}.{os.getpid()}".replace("/", "_")
