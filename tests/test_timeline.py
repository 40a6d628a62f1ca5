"""The timeline of the HTML report: all spans are in it, on rows without overlap, and no more than a page can hold."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.monitor.timeline import CODES, timeline
from tests.made_runs import Made


def _rows(view: dict[str, Any]) -> list[list[tuple[int, int, int, int, int]]]:
    """Start, end, name, code and count of the slices of every row."""
    found = []
    for lane in view["lanes"]:
        for track in lane["tracks"]:
            for flat in track["rows"]:
                row, at, now = [], 0, 0
                while at < len(flat):
                    gap, length, name, code = flat[at : at + 4]
                    merged = bool(code & CODES["merged"])
                    row.append((now + gap, now + gap + length, name, code, flat[at + 4] if merged else 1))
                    now += gap + length
                    at += 5 if merged else 4
                found.append(row)
    return found


def _many(lanes: int, spans: int) -> Made:
    made = Made()
    made.span(made.driver, "job", 0, spans * 2)
    for rank in range(lanes):
        worker = made.rank(rank, node=f"node-{rank // 8}")
        for n in range(spans):
            made.span(worker, f"phase {n % 5}", 2 * n, 2 * n + 1 + (n % 3) / 4, bucket="productive")
    return made


def test_exact_where_everything_fits():
    """Catches a small run whose spans are merged, moved or lost."""
    made = Made()
    step = made.step(0, 10)
    made.span(made.driver, "train", 1, 4, step, bucket="productive", error=True)
    made.span(made.driver, "sync", 5, None, step, bucket="overhead")
    made.driver.last_ns = made.rows[0].end_ns or 0
    view = timeline(made.run())
    assert (view["length"], view["resolution"], view["names"]) == (10_000_000, 0, ["step", "train", "sync"])
    assert _rows(view) == [
        [(0, 10_000_000, 0, 0, 1)],
        [(1_000_000, 4_000_000, 1, 1 | CODES["error"], 1)],
        [(5_000_000, 10_000_000, 2, 2 | CODES["open"], 1)],  # its end is not known: it nests in nothing that has one
    ]


@pytest.mark.parametrize("budget", [100, 1000, 5000])
def test_budget_is_kept_and_no_span_is_forgotten(budget):
    """Catches a page that grows with the run, and merged slices that stand for fewer spans than there were."""
    made = _many(16, 500)
    view = timeline(made.run(), budget)
    rows = _rows(view)
    assert sum(map(len, rows)) <= budget
    assert sum(count for row in rows for *_, count in row) == len(made.rows)
    assert view["resolution"] > 0
    assert max(len(row) for row in rows) > 1, "and lanes can still be told from each other in time"


def test_long_spans_stay_beside_merged_ones():
    """Catches the one long step that drowns in a thousand short ones."""
    made = Made()
    for n in range(2000):
        made.span(made.driver, "short", n, n + 0.5, bucket="idle")
    made.span(made.driver, "long", 3000, 9000, bucket="productive")
    rows = _rows(timeline(made.run(), 50))
    (long,) = [one for row in rows for one in row if one[1] - one[0] == 6_000_000_000]
    assert (long[3], long[4]) == (1, 1)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60), st.integers(1, 2)), max_size=60), st.integers(1, 60))
def test_rows_never_overlap(drawn, budget):
    """Catches slices drawn over each other: what lies below could not be seen or clicked."""
    made = Made()
    for start, length, thread in drawn:
        made.span(made.driver, f"s{length % 7}", start, start + length, thread=thread)
    view = timeline(made.run(), budget)
    rows = _rows(view)
    assert sum(count for row in rows for *_, count in row) == len(drawn)
    for row in rows:
        assert all(start <= end for start, end, *_ in row)
        assert all(one[1] <= two[0] for one, two in pairwise(row))


def test_groups_say_what_their_lanes_did():
    """Catches a collapsed group whose strip shows another share of work than its lanes have."""
    made = Made()
    for rank in range(4):
        made.span(made.rank(rank), "work", 0, 600 if rank < 2 else 300, bucket="productive")
    view = timeline(made.run())
    (group,) = [one for one in view["groups"] if one["group"] == "training"]
    parts = bytes.fromhex(group["parts"])
    assert group["lanes"] == [0, 1, 2, 3]
    assert len(parts) == view["bins"] * 4
    assert parts[0:4] == bytes([255, 0, 0, 0])
    assert parts[-4:] == bytes([128, 0, 0, 0])


def test_nothing():
    """Catches a division by zero where nothing was recorded."""
    view = timeline(Made().run())
    assert (view["lanes"], view["groups"], view["length"]) == ([], [], 1)
