"""What a report and `doctor` say of a run's relays: nothing lost only where nothing is."""

from __future__ import annotations

import json

import pytest

from raytrace_rl.cli import main
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.relay_counters import relay_counters
from raytrace_rl.monitor.report import report, summary, text
from raytrace_rl.relay import refusal, status
from raytrace_rl.relay.home_note import HomeNote
from raytrace_rl.relay.lock import NodeLock
from raytrace_rl.relay.standing import Standing
from tests.relay.noted_runs import note, note_all, noted_run
from tests.spooling import Spool, ended, span

#: Each kind of loss and hindrance: what makes it, and what a person has to be told.
WRONG = {
    "unsent": (lambda spool: note(spool, finished=False), "10 records unsent", "'raytrace-rl push' sends the rest"),
    "refused": (
        lambda spool: note(spool, sent=7, dropped=3, last_error="UNAUTHENTICATED: no such token"),
        "3 records refused for good",
        "no such token",
    ),
    "rejected": (lambda spool: note(spool, sent=10, rejected=4, last_error="too old"), "4 items rejected", "too old"),
    "metrics": (
        lambda spool: note(spool, "metrics", dropped=2, last_error="UNIMPLEMENTED"),
        "2 records refused for good",
        "metrics: UNIMPLEMENTED",
    ),
    "home": (lambda spool: dropped_at_home(spool), "33 spans of other nodes dropped here", ""),
    "no room at home": (
        lambda spool: note_all(spool, refused=2, failure="No space left on device"),
        "no room here for what node-a has",
        "No space left on device",
    ),
    "behind": (
        lambda spool: status.Status(spool.node_dir).write({status.CARRIED: carried("OSError: disk quota", 3 << 20)}),
        "node-a is up to 3.0 MiB behind",
        "disk quota",
    ),
    "receiver": (lambda spool: received(spool, rejected=5, invalid=1), "6 requests or items refused by the local", ""),
    "receiver's bound": (
        lambda spool: received(spool, dropped_spans=8),
        "8 spans dropped beyond the bound by the local receiver",
        "",
    ),
    "no relay": (lambda spool: refusal.note(spool.node_dir, "No module named 'grpc'"), "no relay on node-a", "'grpc'"),
}


def dropped_at_home(spool):
    """Notes that home has dropped a segment of a process that is still there."""
    found = HomeNote(spool.node_dir)
    found.drop(spool.stem(1), 7, 33, 1000)
    assert found.save()


def carried(failure, behind_bytes):
    """How a node stands that cannot bring its spools home."""
    standing = Standing(behind_bytes=behind_bytes, failure=failure)
    return status.Section(standing.counts(), standing.now())


def received(spool, **counts):
    """Notes what a receiver has counted."""
    status.Status(spool.node_dir).write({status.RECEIVER: status.Section(counts)})


@pytest.fixture
def spool(tmp_path):
    """A run of one process that closed, with ten spans, and no relay."""
    found = Spool(tmp_path / "run")
    found.segment(1, ended(*[span(n, 0, 1) for n in range(1, 11)]), sealed=True, span_count=10)
    return found


def lines(spool):
    """The lines of the text report about relays, and of the summary."""
    run = load_run(spool.run_dir)
    found = []
    for shown in (text(run), summary(run)):
        every = shown.splitlines()
        at = next((n for n, line in enumerate(every) if line.startswith("Relay: ")), None)
        following = [] if at is None else every[at + 1 : at + 2]
        found.append([] if at is None else [every[at], *(line for line in following if line.startswith("  "))])
    return found


def test_a_run_without_relays_says_nothing_of_them(spool):
    """Catches a line about something that the run never had."""
    section = report(load_run(spool.run_dir))["relay"]
    assert (section["nodes"], section["summary"], section["wrong"]) == ([], [], False)
    assert lines(spool) == [[], []]


def test_all_is_well_in_one_short_line(tmp_path, capsys):
    """Catches a healthy run about which there is much to read, or a problem cried where there is none."""
    spool = noted_run(tmp_path / "run", sent=10, acknowledged_ns=1_785_000_000 * 10**9)
    (line,), short = lines(spool)
    assert line == "Relay: all 10 records acknowledged, last 2026-07-25 17:20:00 UTC"
    assert short == [line]
    main(["doctor", "--json", str(spool.run_dir)])
    checks = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["area"] == "relay"]
    assert [check["state"] for check in checks] == ["ok"]
    note_all(spool)
    assert "spools of 1 node brought home" in lines(spool)[0][0]
    note(spool, sampled_out=4, sent=6)
    assert "4 left out by the sampler" in lines(spool)[0][0]


@pytest.mark.parametrize("kind", WRONG)
def test_whatever_is_lost_is_said_and_is_a_problem(spool, capsys, kind):
    """Catches a loss that the relay counted, and a report, summary or `doctor` that says that all is well."""
    make, first, second = WRONG[kind]
    make(spool)
    section = relay_counters(str(spool.run_dir))
    assert section["wrong"]
    assert len(section["summary"]) <= 2
    assert first in section["summary"][0]
    assert second in "".join(section["summary"][1:])
    full, short = lines(spool)
    assert full == section["summary"]
    assert short[0][:79] == full[0][:79]
    main(["doctor", "--json", str(spool.run_dir)])
    told = json.loads(capsys.readouterr().out)
    problems = [check for check in told["checks"] if check["area"] == "relay" and check["state"] == "problem"]
    assert problems, told
    assert all(len(line) <= 100 for line in full)


def test_what_home_dropped_is_among_what_the_processes_lost(spool):
    """Catches a goodput, or a table of processes, that takes a process for whole of which home has dropped much."""
    dropped_at_home(spool)
    found = HomeNote(spool.node_dir)
    found.drop(spool.stem(2), 0, 4, 100)  # a process of which nothing else is left
    assert found.save()
    told = report(load_run(spool.run_dir))
    assert told["loss"]["dropped"] == 37
    assert {process["pid"]: process["drops"] for process in told["processes"]} == {1: {"spans": 33}, 2: {"spans": 4}}
    assert told["goodput"]["sum"]["dropped"] == 37


def test_what_is_on_its_way_is_no_problem(spool):
    """Catches a live run that is said to lose what its relay is about to send, and one that is not when it cannot."""
    note(spool, finished=False, sent=90)
    lock = NodeLock(spool.node_dir)
    assert lock.acquire()
    section = relay_counters(str(spool.run_dir))
    assert (section["wrong"], section["nodes"][0]["running"]) == (False, True)
    assert section["summary"] == ["Relay: 90 records acknowledged, 10 on their way"]
    note(spool, finished=False, failure="UNAVAILABLE", last_error="UNAVAILABLE")
    assert relay_counters(str(spool.run_dir))["wrong"]
    lock.release()


@pytest.mark.parametrize("part", ["", "spool", "spool/node-a"])
def test_the_ways_to_name_a_run(spool, part):
    """Catches counters that are there only for one spelling of the run."""
    note(spool, sent=10)
    section = relay_counters(str(spool.run_dir / part))
    assert [node["node"] for node in section["nodes"]] == ["node-a"]
    assert section["sent"] == 10


def test_what_is_no_directory_has_none(tmp_path):
    """Catches a report of an OTLP file that dies for want of relays."""
    (tmp_path / "traces.json").write_text("")
    for path in (tmp_path / "traces.json", tmp_path / "none"):
        assert relay_counters(str(path))["nodes"] == []
