"""Who converts a run's sources to Parquet: this process, processes of its own, or Ray tasks where a cluster is up."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytrace_rl.monitor import fragments
from raytrace_rl.monitor.load import ALONE_BYTES, file_size
from raytrace_rl.monitor.model import State

if TYPE_CHECKING:
    from raytrace_rl.spool.listing import ProcessFiles
    from raytrace_rl.spool.reader import Damage


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be converted.

    Attributes:
        source: The files of a process, or the path of an OTLP file.
        state: Of the process, found out on its own host.
        base: Path of the Parquet files without their suffixes.
        sign: Kept in them: what tells that the source is the same as before; empty while it may still change.
        scratch: Directory for files that are not whole yet.
        size: Of the source, bytes.
    """

    source: ProcessFiles | str
    state: State
    base: str
    sign: str
    scratch: str
    size: int

    def carry_out(self) -> list[Damage]:
        """Converts it; returns what could not be read."""
        if isinstance(self.source, str):
            return fragments.convert_file(self.source, self.base, self.sign, self.scratch)
        return fragments.convert(self.source, self.base, self.sign, self.scratch, self.state)


def size_of(source: ProcessFiles | str) -> int:
    """Returns how many bytes a source has."""
    paths = [source] if isinstance(source, str) else source.segments.values()
    return sum(map(file_size, paths))


def converted(
    orders: list[Order], token: str, is_there: Callable[[Order], bool]
) -> Iterator[tuple[list[Damage], bool]]:
    """Converts all, and yields for each what could not be read of it, and whether a Ray task did it.

    Args:
        orders: What is to be converted.
        token: Of the scratch directory (`raytrace_rl.monitor.scratch`).
        is_there: Tells whether the files of an order are to be seen from here.
    """
    # The largest first, so that no long one is left for the end.
    left = dict(enumerate(sorted(orders, key=lambda order: -order.size)))
    if len(left) > 1 and sum(order.size for order in orders) >= ALONE_BYTES:
        if _cluster_is_up():
            from raytrace_rl.monitor import ray_conversion

            for number, damage in ray_conversion.converted(left, token):
                if is_there(left[number]):  # a network file system may show it later, which is too late
                    del left[number]
                    yield damage, True
        workers = min(os.cpu_count() or 1, len(left))
        if workers > 1:
            # Started anew rather than forked: this process may have threads, and DuckDB's among them.
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
                for job in as_completed([pool.submit(order.carry_out) for order in left.values()]):
                    yield job.result(), False
            return
    for order in left.values():
        yield order.carry_out(), False


def is_connected() -> bool:
    """Whether this process is connected to Ray; without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def _cluster_is_up() -> bool:
    """Whether this process is connected to Ray, or is told where a cluster is."""
    return is_connected() or os.environ.get("RAY_ADDRESS", "local") not in {"", "local"}  # "local" is for starting one
