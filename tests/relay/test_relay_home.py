from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from raytrace_rl.monitor import load_run
from raytrace_rl.relay import carry
from raytrace_rl.relay.carry import Carrier
from raytrace_rl.relay.home import HomeFiles, piece
from raytrace_rl.relay.relay import Relay
from raytrace_rl.spool.format import Kind, pack_record
from tests import spooling, writers
from tests.running import wait_for
from tests.spooling import SECOND, T0, ended, span

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.home_fixtures"]


def names(tmp_path):
    """How many spans of each name a reader finds at home."""
    return Counter(row.name for row in load_run(tmp_path / "home").spans)


def test_a_closed_process_comes_home_byte_for_byte(tmp_path, far, home):
    """Catches a span, a metric, a header that is another at home, and files made for nothing."""
    records = ended(*[span(n, 0, 1) for n in range(100)]) + pack_record(Kind.METRICS, b"m") + b"rubbish"
    for number in range(3):
        far.segment(1, records, number, sealed=True, span_count=100, resource=spooling.resource(rank=1))
    assert Carrier(far.node_dir, home).round()
    there = tmp_path / "home" / "spool" / far.node_dir.name
    assert sorted(path.name for path in there.iterdir() if path.is_file()) == sorted(os.listdir(far.node_dir))  # noqa: PTH208
    for path in far.node_dir.iterdir():
        assert (there / path.name).read_bytes() == path.read_bytes()


def test_what_comes_later_is_appended_and_nothing_twice(tmp_path, far, home):
    """Catches a round that carries everything anew, and a carrier started anew that does."""
    far.alive(1)
    far.segment(1, ended(span(1, 0, 1)), pad=10_000)
    first = Carrier(far.node_dir, home)
    assert first.round()
    far.segment(1, ended(*[span(n, 0, 1) for n in range(1, 500)]), pad=10_000)
    before = first.standing.carried
    assert first.round()
    assert names(tmp_path).total() == 499
    again = Carrier(far.node_dir, home)
    assert again.round()
    assert names(tmp_path).total() == 499
    assert again.standing.carried < before


def test_open_spans_of_a_living_process_are_seen_and_left_open(tmp_path, far, home):
    """Catches a process on another node whose open spans are invisible at home, or look truncated."""
    live = far.alive(1)
    far.segment(1, ended(span(1, 0, 1)), pad=100, heartbeat_ns=T0 + 5 * SECOND)
    far.journal(1, pack_record(Kind.OPEN_SPAN, span(2, 0, None, name="journal")))
    far.slots(1, [span(3, 0, None, name="slot")])
    carrier = Carrier(far.node_dir, home)
    assert carrier.round()
    run = load_run(tmp_path / "home")
    assert {row.name: row.end_ns for row in run.spans if row.end_ns is None} == {"journal": None, "slot": None}
    far.slots(1, [])
    far.journal(
        1, pack_record(Kind.OPEN_SPAN, span(2, 0, None)) + pack_record(Kind.SPAN_GONE, spooling.TRACE + span_id(2))
    )
    far.segment(1, ended(span(1, 0, 1), span(2, 0, 3)), pad=100, heartbeat_ns=T0 + 9 * SECOND)
    assert carrier.round()
    run = load_run(tmp_path / "home")
    assert [row for row in run.spans if row.end_ns is None] == []
    assert run.processes[0].heartbeat_ns == T0 + 9 * SECOND
    live.release()


def span_id(n):
    """The bytes of a span's number."""
    return spooling.span_id(n)


def test_a_dead_process_is_closed_at_home_once(tmp_path, far, home):
    """Catches open spans that stay open at home since nobody there can prove the death, or come twice."""
    far.segment(1, ended(span(1, 0, 1)), heartbeat_ns=T0 + 5 * SECOND, resource=spooling.resource(rank=3))
    far.slots(1, [span(2, 0, None, name="open")])
    far.live_file(1)
    for _ in range(2):
        carrier = Carrier(far.node_dir, home)
        assert carrier.round()
        assert carrier.round()
    run = load_run(tmp_path / "home")
    (row,) = [row for row in run.spans if row.truncated]
    assert (row.name, row.end_ns) == ("open", T0 + 5 * SECOND)
    assert len(run.spans) == 2
    (process,) = run.processes
    assert process.state == "closed"
    assert process.resource["rank"] == 3
    assert not run.damage


def test_a_process_that_dies_while_it_is_carried(tmp_path, home):
    """Catches a kill between two rounds that leaves something open, living, or behind."""
    with writers.worker(tmp_path / "far") as worker:
        worker.tell("write 50")
        worker.tell("open")
        (node_dir,) = (tmp_path / "far" / "spool").iterdir()
        carrier = Carrier(node_dir, home)
        assert carrier.round()
        assert names(tmp_path) == {"s": 50, "open": 1}
        assert load_run(tmp_path / "home").processes[0].state == "alive", "as it is said to be"
        worker.tell("write 20")
        worker.kill()
        assert carrier.round()
    assert names(tmp_path) == {"s": 70, "open": 1}
    run = load_run(tmp_path / "home")
    assert run.processes[0].state == "closed"
    assert sum(row.truncated for row in run.spans) == 1
    left = {path.suffix for path in (tmp_path / "home" / "spool" / node_dir.name).iterdir() if path.is_file()}
    assert left == {".rts"}


def test_a_home_that_cannot_be_reached_is_tried_again(tmp_path, far, monkeypatch):
    """Catches a home that was restarted, or full, for a moment, and a piece that is lost with it."""
    monkeypatch.setattr(carry, "_MOST_BYTES", 10_000)
    far.segment(1, ended(*[span(n, 0, 1) for n in range(1, 20_001)]), sealed=True, span_count=20_000)

    class Failing(HomeFiles):
        calls = 0

        def write(self, node, pieces):
            Failing.calls += 1
            if Failing.calls == 2:
                raise OSError("no room")
            super().write(node, pieces)
            if Failing.calls == 4:
                raise ConnectionError("the answer is lost")

    carrier = Carrier(far.node_dir, Failing(tmp_path / "home"))
    assert [carrier.round() for _ in range(3)] == [False, False, True]
    assert carrier.standing.failure == ""
    assert names(tmp_path).total() == 20_000
    assert not load_run(tmp_path / "home").damage


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("..", "1-1.0.rts"),
        ("a/b", "1-1.0.rts"),
        ("", "1-1.0.rts"),
        ("n", "../1-1.0.rts"),
        ("n", "x"),
        ("n", "1-1.live"),
    ],
)
def test_no_name_reaches_another_directory(tmp_path, home, node, name):
    """Catches a call over the network that writes wherever it likes."""
    with pytest.raises(ValueError, match="names no"):
        home.write(node, [piece(name, 0, b"x")])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_link_at_home_is_not_followed(tmp_path, home):
    """Catches a file elsewhere that is overwritten through a link in the run directory."""
    directory = tmp_path / "home" / "spool" / "n"
    directory.mkdir(parents=True)
    (directory / "1-1.0.rts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        home.write("n", [piece("1-1.0.rts", 0, b"x")])
    assert not (tmp_path / "elsewhere").exists()


def test_a_relay_brings_home_and_drains(tmp_path, home, monkeypatch):
    """Catches a drain that does not wait for what is still on its way home."""
    monkeypatch.setattr(carry, "INTERVAL_S", 30.0)
    with writers.worker(tmp_path / "far") as worker:
        (node_dir,) = (tmp_path / "far" / "spool").iterdir()
        relay = Relay(node_dir, None, home=home)
        assert relay.acquire()
        relay.start()
        for number in range(1, 4):
            worker.tell("write 100")
            assert relay.drain(20)
            assert names(tmp_path) == {"s": number * 100}
        worker.tell("stop")
        assert relay.drain(20)
        relay.stop()
    assert load_run(tmp_path / "home").processes[0].state == "closed"


def test_nothing_is_removed_before_it_is_home(tmp_path, far, home):
    """Catches a full spool by which a segment goes that home does not have yet."""
    for number in range(3):
        numbers = range(number * 100 + 1, number * 100 + 101)
        far.segment(1, ended(*[span(n, 0, 1) for n in numbers]), number, sealed=True, span_count=100)
    relay = Relay(far.node_dir, None, home=home, bound_bytes=1000)
    relay._free()
    assert len(list(far.node_dir.glob("*.rts"))) == 3
    assert relay.carrier is not None
    assert relay.carrier.round()
    relay._free()
    assert len(list(far.node_dir.glob("*.rts"))) == 1
    assert names(tmp_path).total() == 300


def test_a_lost_node_no_longer_counts_as_living(tmp_path, home):
    """Catches a home that waits for ever for a node which has burnt down."""
    home.living("n", ["1-1", "2-1"])
    assert home.has_living
    home.living("n", ["2-1"])
    assert [path.name for path in Path(tmp_path / "home" / "spool" / "n").iterdir()] == ["2-1.live"]
    home.lose("n")
    assert not home.has_living


def test_stopping_ends_a_long_round(far, home):
    """Catches a relay that cannot be stopped while it carries a large backlog."""
    for number in range(20):
        far.segment(1, ended(*[span(n, 0, 1, note="x" * 200) for n in range(2000)]), number, sealed=True)
    begun = threading.Event()

    class Slow(HomeFiles):
        def write(self, node, pieces):
            begun.set()
            time.sleep(0.3)

    carrier = Carrier(far.node_dir, Slow(far.run_dir))
    thread = threading.Thread(target=carrier.run)
    thread.start()
    assert begun.wait(20)
    carrier.stop()
    thread.join(3)
    assert not thread.is_alive()
    wait_for(lambda: carrier.clear_at < 0, "it does not count as clear")
