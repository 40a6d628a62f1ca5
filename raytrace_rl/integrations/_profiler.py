"""A window of the torch profiler: chosen iterations, whose Chrome traces are filed with the run."""

from __future__ import annotations

import os
import socket
import threading
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
#: torch has one profiler a process: a second one beside it, or inside it, ends the process by a segmentation fault.
_alone: Final = threading.Lock()


class ProfilerWindow:
    """Profiles chosen iterations with ``torch.profiler``, each into a Chrome trace of its own.

    ::

        window = ProfilerWindow({3, 10})
        for step in range(1, 101):
            with iteration_scope(step), window(step):
                train_step()

    The traces lie in ``RUN_DIR/profiles``, named by iteration, worker and process; the span ``rl.torch.profile_export``
    says where. Without telemetry, without torch, and in all other iterations, the body simply runs; so it does, with a
    warning, while another window or a profiler of the program's own is open.

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
        if not _alone.acquire(blocking=False):
            _state.warn_once("profiler", "Iteration %s is not profiled: another window is open.", self._iteration)
            return
        try:
            import torch.profiler

            if _runs(torch):
                raise RuntimeError("another profiler runs")
            profiler: Any = torch.profiler.profile(**self._options)
            profiler.start()
            self._profiler = profiler
        except BaseException as error:  # no torch, an option that it does not know
            _alone.release()
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
            import torch

            if _runs(torch) is False:
                raise RuntimeError("another profiler, begun within the window, has ended it")
            profiler.stop()
            self._file(profiler)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("profiler", "The profile of iteration %s is lost: %r", self._iteration, error)
        finally:
            _alone.release()

    def _file(self, profiler: Any) -> None:
        handle = get_telemetry_handle()
        if handle is None or handle.run_dir is None:
            return
        directory = Path(handle.run_dir) / _DIRECTORY
        name = _free_name(directory, f"iteration-{self._iteration}.{_who()}")
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


def _runs(torch: Any) -> bool | None:
    """Returns whether a profiler runs in this thread; None where this version of torch does not say."""
    enabled = getattr(torch.autograd, "_profiler_enabled", None)
    return None if enabled is None else bool(enabled())


def _free_name(directory: Path, stem: str) -> str:
    """Returns a name that no earlier profile of the iteration has: it may come again, in a second epoch."""
    name, number = f"{stem}.json.gz", 1
    while (directory / name).exists():
        number += 1
        name = f"{stem}-{number}.json.gz"
    return name


def _who() -> str:
    """Returns what tells this process from the others of the run: group and rank, host, pid."""
    known = _process.current.resource if _process.current is not None else {}
    group, rank = known.get(semconv.RL_WORKER_GROUP), known.get(semconv.NV_DL_RANK)
    worker = f"{group or 'worker'}-{rank}." if rank is not None else ""
    return f"{worker}{socket.gethostname()}.{os.getpid()}".replace("/", "_")
