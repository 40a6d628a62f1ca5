"""Clock skew in the report: never a number that is not so, and every one that a run's messages bear out."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.cli import main
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.align import align
from raytrace_rl.monitor.model import Process
from raytrace_rl.monitor.report import report, text
from raytrace_rl.monitor.skew import skew
from raytrace_rl.monitor.skew_messages import Clocks
from raytrace_rl.monitor.text_skew import skew_checks, skew_lines
from tests.clock_runs import MS, Clockwork, both_ways, troubled
from tests.spooling import SECOND, T0, Spool, ended, resource, span

_NODES = "abcd"
_SKEWS = st.integers(-10 * SECOND, 10 * SECOND)
_DELAYS = st.integers(0, SECOND)


@st.composite
def clockworks(draw: st.DrawFn) -> Clockwork:
    """Runs in which calls and trajectories go to and fro, wall clocks are set, and processes start at any time."""
    nodes = _NODES[: draw(st.integers(2, 4))]
    clockwork = Clockwork(**{node: draw(_SKEWS) for node in nodes})
    alive = [clockwork.process(node, rl__role="driver" if node == "a" else "worker") for node in nodes]
    now = 0
    for _ in range(draw(st.integers(0, 25))):
        now += draw(st.integers(0, 3 * SECOND))
        what = draw(st.sampled_from(("call", "call", "call", "trajectory", "set", "start")))
        node = draw(st.sampled_from(nodes))
        if what == "set":
            now += 2 * SECOND  # nothing is under way
            clockwork.set_clock(node, now, draw(_SKEWS))
            now += 2 * SECOND
        elif what == "start":
            alive.append(clockwork.process(node, now))
        else:
            sender, receiver = draw(st.sampled_from(list(permutations(alive, 2))))
            took = draw(_DELAYS)
            if what == "call":
                # Handed on, a call has a parent from further up: a span of whoever called before.
                above = draw(st.sampled_from([None, *clockwork.rows[:1]]))
                clockwork.call(sender, receiver, now, took, opened_ns=draw(_DELAYS), parent=above)
            else:
                clockwork.trajectory(sender, receiver, now, took)
            now += took
    return clockwork


def _true_ahead(clockwork: Clockwork) -> dict[str, int]:
    """By how much each node's times, those of its first process, are ahead of the truth."""
    first: dict[str, int] = {}
    for process in clockwork.processes:
        first.setdefault(process.node, clockwork.began[process.key] - T0)
    return first


@given(clockworks())
def test_skew_of_a_run_is_within_its_bounds_though_clocks_are_set(clockwork):
    """Catches delays that are off by as much as a clock was set, on either end, and before or after."""
    found = skew(clockwork.run())
    assert found.contradictions == []
    true = _true_ahead(clockwork)
    for node in found.nodes:
        low, high = node.interval.lower_ns, node.interval.upper_ns
        ahead = true[node.node] - true[found.reference]
        assert low is None or low <= ahead
        assert high is None or ahead <= high
    at_most = found.at_most_ns
    shown = [true[node.node] for node in found.nodes]
    assert at_most is None or not shown or max(shown) - min(shown) <= at_most


@given(clockworks())
def test_aligned_times_are_off_by_the_bound_at_most(clockwork):
    """Catches a shift the wrong way, one forgotten process, durations that change, a second shift on top."""
    run = clockwork.run()
    before = {id(row): (row.start_ns, row.end_ns) for row in run.spans}
    truth = {id(row): row.start_ns - clockwork.true_ns(row) for row in run.spans}
    found = align(run)
    assert align(run) is found
    bounds = {node.node: node.bound_ns for node in found.nodes}
    # The clock of the driver's node is what all are brought to: that this is off itself nobody can know.
    own = _true_ahead(clockwork)[found.reference] if found.nodes else 0
    for row in run.spans:
        start, end = before[id(row)]
        assert row.end_ns is not None
        assert row.end_ns - row.start_ns == end - start
        bound = bounds[row.process.node]
        if bound is not None:
            assert abs(row.start_ns - truth[id(row)] - own) <= bound
    assert run.spans == sorted(run.spans, key=lambda row: row.start_ns)
    for row in run.spans:
        if row.queued_ns is not None and "rl.queued_from" in row.attributes:
            ends = bounds.get(row.attributes["rl.queued_from"]), bounds[row.process.node]
            assert None in ends or row.queued_ns >= -sum(ends), "a call that arrived before it was sent"


def test_one_side_is_said_to_be_one_side():
    """Catches a number made up for a node that only ever gets calls."""
    clockwork = Clockwork(a=0, b=5 * SECOND, c=0)
    driver = clockwork.process("a", rl__role="driver")
    clockwork.call(driver, clockwork.process("b"), SECOND, 3 * MS)
    clockwork.span(clockwork.process("c"), 0, SECOND)
    found = skew(clockwork.run())
    said = found.as_json()
    assert [(node["node"], node["method"]) for node in said["nodes"]] == [
        ("a", "reference"),
        ("b", "one_way"),
        ("c", "none"),
    ]
    b = said["nodes"][1]
    assert (b["estimate_s"], b["bound_s"], b["lower_s"], b["upper_s"]) == (None, None, None, 5.003)
    assert (said["at_most_s"], said["count"]) == (None, 3)
    shown = "\n".join(skew_lines(said))
    assert "Clocks: skew not bounded between 3 nodes" in shown
    assert "+5.00s or less" in shown
    assert [text for _, text in skew_checks(said)][1] == "not bounded both ways: b, c; no call came back from there"
    aligned = clockwork.run()
    align(aligned)
    assert "but for b, c, of which that is not known" in text(aligned)


def test_an_answer_to_the_driver_is_the_other_side():
    """Catches answers that are forgotten, or taken for calls the same way, where workers call nobody."""
    clockwork = Clockwork(a=0, b=5 * SECOND)
    driver = clockwork.process("a", rl__role="driver")
    clockwork.call(driver, clockwork.process("b"), SECOND, 3 * MS)
    driver.peers["b"] = 2 * MS - 5 * SECOND
    (_, b) = skew(clockwork.run()).as_json()["nodes"]
    assert (b["method"], b["lower_s"], b["upper_s"]) == ("both_ways", 4.998, 5.003)


def test_a_call_that_is_handed_on_counts_for_the_node_that_handed_it_on():
    """Catches a delay between two neighbours taken for one from the driver's node: the parent is the driver's span."""
    clockwork = Clockwork(a=0, b=7 * SECOND, c=7 * SECOND)
    driver = clockwork.process("a", rl__role="driver")
    b, c = clockwork.process("b"), clockwork.process("c")
    above = clockwork.span(driver, 0, 10 * SECOND)
    clockwork.call(b, c, SECOND, MS, parent=above)
    clockwork.call(c, b, SECOND, MS, parent=above)
    on_one_node = clockwork.process("b")
    clockwork.call(b, on_one_node, SECOND, MS, parent=above)
    found = {node.node: node.interval for node in skew(clockwork.run()).nodes}
    assert (found["b"].upper_ns, found["c"].upper_ns, found["b"].messages) == (None, None, 2)


def test_a_clock_that_was_set_between_the_starts_of_two_processes():
    """Catches what a later process sent taken for sent by an earlier one's clock, and their spans left apart."""
    clockwork = Clockwork(a=0, b=0)
    driver = clockwork.process("a", rl__role="driver")
    before = clockwork.process("b")
    both_ways(clockwork, driver, before)
    clockwork.set_clock("b", 5 * SECOND, 3 * SECOND, noticed=False)  # nothing of ours runs there
    after = clockwork.process("b", 7 * SECOND)
    clockwork.trajectory(after, driver, 10 * SECOND, MS)
    clockwork.call(after, driver, 10 * SECOND, MS, parent=clockwork.span(driver, 0, 20 * SECOND))
    clockwork.call(driver, after, 10 * SECOND, MS)
    run = clockwork.run()
    found = skew(run)
    assert [(step.node, step.by_ns) for step in found.steps] == [("b", 3 * SECOND)]
    assert (found.nodes[1].interval.lower_ns, found.nodes[1].interval.upper_ns) == (-MS, MS)
    align(run)
    (first,) = [row for row in run.spans if row.process is after and row.queued_ns is not None]
    assert abs(first.start_ns - T0 - 10 * SECOND - MS) <= MS
    assert first.queued_ns == pytest.approx(MS, abs=MS)


def test_the_sender_is_found_by_its_directory_and_in_an_otlp_file_by_its_host():
    """Catches messages of a collector's file that nobody sent, and those of another boot taken for this one's."""
    spool = Clocks([Process("1", "host-b-1234abcd"), Process("2", "host-b-99999999")])
    assert spool.named("host-b-1234abcd") == "host-b-1234abcd"
    assert spool.named("host-b-deadbeef") is None
    otlp = Clocks([Process("1", "host-b"), Process("2", "host b"), Process("3", "host_b"), Process("4", "")])
    assert otlp.named("host-b-1234abcd") == "host-b"
    assert otlp.named("host_b-1234abcd") is None, "either of two"
    assert otlp.named("nowhere") is None


def test_containers_of_one_host_have_one_clock():
    """Catches a skew between two containers, which their kernel rules out; and two clocks of one boot taken for one."""
    clockwork = Clockwork(a=0, b=0, c=SECOND)
    driver = clockwork.process("a", rl__role="driver")
    for process in (clockwork.process("b"), clockwork.process("c")):
        clockwork.span(process, 0, SECOND)
        process.boot_id = driver.boot_id
        process.anchors = [(wall, monotonic % (1000 * SECOND) + 1000 * SECOND) for wall, monotonic in process.anchors]
    clockwork.span(driver, 0, SECOND)
    said = skew(clockwork.run()).as_json()["nodes"]
    assert [(node["node"], node["method"], node["bound_s"]) for node in said] == [
        ("a", "reference", 0),
        ("b", "one_kernel", 0),
        ("c", "none", None),
    ]


def test_everything_is_said_of_a_run_with_troubled_clocks():
    """Catches a clock that was set, two that moved against each other and children before parents, all in silence."""
    run = troubled()
    said = report(run)["skew"]
    assert [(step["node"], step["by_s"]) for step in said["steps"]] == [("b", 1.0)]
    (one,) = said["contradictions"]
    assert (one["nodes"], one["moved_s"]) == (["a", "c"], pytest.approx(1 - 0.004))
    moved = said["nodes"][2]
    assert (moved["method"], moved["estimate_s"], moved["lower_s"], moved["upper_s"]) == ("moved", None, None, None)
    assert said["nodes"][1]["estimate_s"] == pytest.approx(5)
    assert said["early_children"] == {"count": 4, "worst_s": pytest.approx(5, abs=0.01)}
    shown = text(run)
    assert "the wall clock of b was set forward by 1.00s at 2023-11-14 22:13:36 UTC" in shown
    assert "the clocks of a, c moved against each other by 996.0ms or more during the run" in shown
    assert "4 spans start before their parents on another node, by up to 5.00s" in shown
    assert "times are as each node's clock had them" in shown
    assert [wrong for wrong, _ in skew_checks(said)] == [True, True, True, False]


def test_one_node_has_nothing_to_be_said_of(tmp_path):
    """Catches words about clocks where there is one, and a report that has none where one is asked for."""
    spool = Spool(tmp_path / "run")
    spool.segment(10, ended(span(1, 0, 9)), resource=resource(rl__role="driver"))
    for align_it in (False, True):
        run = load_run(spool.run_dir, align=align_it)
        said = report(run)["skew"]
        assert (said["count"], said["at_most_s"], said["aligned"]) == (1, 0, align_it)
        assert "Clocks" not in text(run)
        assert "skew" not in text(run)


def test_the_clock_of_one_node_that_is_set():
    """Catches spans of two processes of one node that disagree by as much as its clock was set, and nobody says it."""
    clockwork = Clockwork(a=0)
    for at_ns in (0, 20 * SECOND):
        process = clockwork.process("a", at_ns, rl__role="driver")
        clockwork.span(process, at_ns, at_ns + SECOND)
        if not at_ns:
            clockwork.set_clock("a", 10 * SECOND, -4 * SECOND)
    run = clockwork.run()
    shown = text(run)
    assert "Clocks: one node\n  times are as each node's clock had them" in shown
    assert "the wall clock of a was set back by 4.00s" in shown
    align(run)
    assert [row.start_ns - T0 for row in run.spans] == [0, 20 * SECOND]
    assert "times are shifted to the clock of a" in text(run)


def test_a_run_without_nodes():
    """Catches a report that ends because nothing says where a span ran."""
    assert skew(Clockwork(a=0).run()).as_json()["count"] == 0
    clockwork = Clockwork(a=0)
    clockwork.span(clockwork.process("a"), 0, SECOND)
    run = clockwork.run()
    run.processes[0].node = ""
    assert align(run).as_json()["reference"] is None


def _two_nodes(tmp_path):
    """A run on disk: b's clock is 2 s ahead, a call each way takes 10 ms."""
    for node, pid, rows, role in (
        ("node-a", 10, [span(1, 0, 9), span(2, 4.02, 5, parent=3, **_queued("node-b", -1990))], "driver"),
        ("node-b", 11, [span(3, 3.01, 6, parent=1, **_queued("node-a", 2010))], "worker"),
    ):
        ahead = 2 * SECOND * (node == "node-b")
        spool = Spool(tmp_path / "run", node)
        spool.segment(
            pid,
            ended(*rows),
            resource=resource(rl__role=role),
            wall_anchor_ns=T0 + ahead,
            boot_id=node.encode().ljust(16, b"\0"),
            heartbeat_ns=T0 + ahead + 9 * SECOND,
        )
    return tmp_path / "run"


def _queued(node: str, ms: int) -> dict[str, Any]:
    return {"rl__queued_from": node, "rl__queued_ns": ms * MS}


@pytest.mark.parametrize("form", ["text", "json", "html"])
def test_report_aligns_when_it_is_told_to_and_says_so(form, tmp_path, capsys):
    """Catches times that are shifted in silence, or not at all, in any form of the report."""
    run_dir = _two_nodes(tmp_path)
    page = tmp_path / "page.html"
    arguments = {"text": [], "json": ["--json"], "html": ["--html", str(page)]}[form]

    def shown(*more: str) -> str:
        assert main(["report", *arguments, *more, str(run_dir)]) == 0
        return page.read_text() if form == "html" else str(capsys.readouterr().out)

    plain, aligned = shown(), shown("--align")
    if form == "json":
        before, after = json.loads(plain), json.loads(aligned)
        assert before["skew"]["at_most_s"] == pytest.approx(2.01)
        assert after["skew"]["at_most_s"] == pytest.approx(0.01)
        assert (before["skew"]["aligned"], after["skew"]["aligned"]) == (False, True)
        assert after["queueing"]["ranks"][0]["max_s"] == pytest.approx(0.01)
        assert (before["queueing"]["corrected"], after["queueing"]["corrected"]) == (0, 2)
        assert before["queueing"]["below_zero"] == 1
        assert after["queueing"]["below_zero"] == 0
        assert before["run"]["end_ns"] == after["run"]["end_ns"] == T0 + 9 * SECOND
    else:
        assert "as each node's clock had them" in plain
        assert "shifted to the clock of node-a" in aligned
    if form == "text":
        assert plain.count("clock skew <= 2.01s between 2 nodes") == 3  # beside each figure
        assert aligned.count("clock skew <= 10.0ms between 2 nodes (aligned)") == 3


def test_the_doctor_names_a_clock_that_is_far_off(tmp_path, capsys):
    """Catches a doctor that says what this host's clock is like, and nothing of those that the run had."""
    assert main(["doctor", "--timeout", "1s", str(_two_nodes(tmp_path))]) == 1
    assert "!! clock skew <= 2.01s between 2 nodes: far off is node-b" in capsys.readouterr().out


def test_aligned_rows_move_with_all_that_has_a_time(tmp_path):
    """Catches spans that are shifted away from their events, their stacks, their metrics, their process's life."""
    run_dir = _two_nodes(tmp_path)
    apart, together = load_run(run_dir), load_run(run_dir, align=True)
    by_ns = {}
    for before, after in zip(apart.processes, together.processes, strict=True):
        by_ns[before.key] = after.start_ns - before.start_ns
        assert after.last_ns - before.last_ns == after.heartbeat_ns - before.heartbeat_ns == by_ns[before.key]
    assert sorted(by_ns.values()) == [-2 * SECOND, 0]
    moved = {row.span_id: row.start_ns for row in together.spans}
    for row in apart.spans:
        assert moved[row.span_id] == row.start_ns + by_ns[row.process.key]
