"""The timeline of the HTML report: every lane's spans as slices, so few that a page can hold them.

Times are integers in microseconds from the run's start. On each row (a track at one depth) slices follow each other as
flat numbers: gap to the one before, length, index of the name, code (`CODES`); a merged one is followed by how many it
stands for. Slices too short for any screen are merged with their neighbours until all of them fit the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.monitor import lanes
from raytrace_rl.monitor.model import BUCKETS
from raytrace_rl.monitor.tracks import depths, tracks
from raytrace_rl.monitor.tree import lane_of
from raytrace_rl.semconv import ROLE_DRIVER

if TYPE_CHECKING:
    from raytrace_rl.monitor.lanes import Owned
    from raytrace_rl.monitor.model import Process, Run, SpanRow

#: Slices of a page: about 16 bytes each.
BUDGET: Final = 300_000
#: Bits of a slice's code: the bucket (its place in `BUCKETS`, from 1; 0 for none), then what it is.
CODES: Final = {"truncated": 8, "open": 16, "error": 32, "merged": 64}
#: Stretches of the run for which a group's buckets are summed up.
BINS: Final = 600

_US: Final = 1000
#: Start, length, index of the name, code, how many it stands for.
Slice = tuple[int, int, int, int, int]


class Names:
    """Gives span names numbers."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def of(self, name: str) -> int:
        """Returns the number of a name."""
        return self.index.setdefault(name, len(self.index))


def timeline(run: Run, budget: int = BUDGET) -> dict[str, Any]:
    """Returns the timeline of a run as plain JSON values.

    Args:
        run: The run.
        budget: Slices at most (if rows alone are not more).
    """
    start = min((row.start_ns for row in run.spans), default=0)
    end = max((row.until_ns for row in run.spans), default=start)
    names = Names()
    by_process: dict[str, list[SpanRow]] = {}
    for row in run.spans:
        by_process.setdefault(row.process.key, []).append(row)
    processes = [process for process in run.processes if process.key in by_process]
    rows = [_rows(by_process[process.key], start, names) for process in processes]
    length = max(1, (end - start) // _US)
    resolution = _resolution([slices for own in rows for _, of_track in own for slices in of_track], length, budget)
    listed = [
        {
            **about(process),
            "spans": len(by_process[process.key]),
            "tracks": [
                {"name": name, "rows": [flat(_merged(slices, resolution)) for slices in of_track]}
                for name, of_track in own
            ],
        }
        for process, own in zip(processes, rows, strict=True)
    ]
    return {
        "start_ms": start / 1e6,
        "length": length,
        "resolution": resolution,
        "names": list(names.index),
        "lanes": listed,
        "bins": BINS,
        "groups": groups(processes, lambda number: _sums(by_process[processes[number].key], start, end), end - start),
    }


def about(process: Process) -> dict[str, Any]:
    """Returns what the page says of a lane."""
    lane = lane_of(process)
    return {
        "label": process.label,
        "node": process.node,
        "group": lane.group,
        "rank": lane.rank,
        "state": process.state,
        "attempt": process.attempt,
    }


def _rows(spans: Sequence[SpanRow], start: int, names: Names) -> list[tuple[str, list[list[Slice]]]]:
    """The slices of one process by track and depth."""
    found: list[tuple[str, list[list[Slice]]]] = []
    for track in tracks(spans):
        levels: list[list[Slice]] = []
        for row, depth in zip(track.rows, depths(track), strict=True):
            while len(levels) <= depth:
                levels.append([])
            begin = (row.start_ns - start) // _US
            length = max(0, (row.until_ns - start) // _US - begin)
            levels[depth].append((begin, length, names.of(row.name), code_of(row), 1))
        found.append((track.name, levels))
    return found


def code_of(row: SpanRow) -> int:
    """Returns the code of a span's slice."""
    code = BUCKETS.index(row.bucket) + 1 if row.bucket else 0
    if row.truncated:
        code |= CODES["truncated"]
    if row.end_ns is None:
        code |= CODES["open"]
    if row.status == "ERROR":
        code |= CODES["error"]
    return code


def _resolution(rows: Sequence[Sequence[Slice]], length: int, budget: int) -> int:
    """The shortest slice (us) that need not be merged; 0 where all of them fit the budget."""
    whole = sum(map(len, rows))
    if whole <= budget:
        return 0
    resolution = max(1, length * len(rows) // (budget * 4))
    while resolution < length and sum(_count(slices, resolution) for slices in rows) > budget:
        resolution *= 2
    return resolution


def _count(slices: Sequence[Slice], resolution: int) -> int:
    count = 0
    block = -resolution
    for start, length, *_ in slices:
        if length >= resolution:
            count += 1
            block = -resolution
        elif start - block >= resolution:
            count += 1
            block = start
    return count


def _merged(slices: Sequence[Slice], resolution: int) -> Iterator[Slice]:
    """Yields slices, short ones that begin close to each other as one: the name and bucket that take longest in it."""
    block: list[Slice] = []

    def close() -> Iterator[Slice]:
        if len(block) == 1:
            yield block[0]
        elif block:
            weights: dict[tuple[int, int], int] = {}
            flags = CODES["merged"]
            for _, length, name, code, _ in block:
                weights[name, code & 7] = weights.get((name, code & 7), 0) + length + 1
                flags |= code & (CODES["truncated"] | CODES["error"])
            name, bucket = max(weights, key=weights.__getitem__)
            start = block[0][0]
            yield start, block[-1][0] + block[-1][1] - start, name, bucket | flags, len(block)
        block.clear()

    for one in slices:
        start, length, *_ = one
        if length >= resolution or (block and start - block[0][0] >= resolution):
            yield from close()
        if length >= resolution:
            yield one
        else:
            block.append(one)
    yield from close()


def flat(slices: Iterable[Slice]) -> list[int]:
    """Returns the slices of one row as the page takes them."""
    numbers: list[int] = []
    before = 0
    for start, length, name, code, count in slices:
        numbers += [start - before, length, name, code]
        if code & CODES["merged"]:
            numbers.append(count)
        before = start + length
    return numbers


def groups(
    processes: Sequence[Process], sums_of: Callable[[int], Sequence[Sequence[int]]], length: int
) -> list[dict[str, Any]]:
    """Returns the worker groups of each node: their lanes, and what part of their time each bucket had, by stretch.

    Args:
        processes: Of the lanes, in their order.
        sums_of: Gives for the number of a lane the time (ns) of each bucket in each stretch.
        length: Of the run (ns).
    """
    members: dict[tuple[str, str], list[int]] = {}
    for number, process in enumerate(processes):
        members.setdefault((process.node, lane_of(process).group), []).append(number)
    listed = []
    for (node, name), numbers in sorted(members.items(), key=lambda item: (item[0][1] != ROLE_DRIVER, item[0])):
        numbers.sort(key=lambda number: (lane_of(processes[number]).rank or 0, processes[number].start_ns))
        sums = [[0] * BINS for _ in BUCKETS]
        for number in numbers:
            for row, own in zip(sums, sums_of(number), strict=True):
                for n, value in enumerate(own):
                    row[n] += value
        whole = max(1, length) / BINS * len(numbers)
        parts = [min(255, round(255 * sums[at][n] / whole)) for n in range(BINS) for at in range(len(BUCKETS))]
        listed.append({"node": node, "group": name, "lanes": numbers, "parts": bytes(parts).hex()})
    return listed


def _sums(rows: Sequence[SpanRow], start: int, end: int) -> list[list[int]]:
    sums = [[0] * BINS for _ in BUCKETS]
    _add(sums, lanes.timeline(rows), start, end)
    return sums


def _add(sums: Sequence[list[int]], owned: Sequence[Owned], start: int, end: int) -> None:
    width = max(1, end - start) / BINS
    for begin, until, bucket in owned:
        row = sums[BUCKETS.index(bucket)]
        first = min(BINS - 1, int((begin - start) / width))
        last = min(BINS - 1, int((until - start) / width))
        for n in range(first, last + 1):
            left, right = start + n * width, start + (n + 1) * width
            row[n] += max(0, int(min(until, right) - max(begin, left)))
