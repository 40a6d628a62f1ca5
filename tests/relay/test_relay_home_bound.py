"""The bounds of what other nodes bring home, and a disk that is full there: dropped, counted, or kept where it is."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.relay_counters import relay_counters
from raytrace_rl.relay import home_bound
from raytrace_rl.relay.carry import Carrier
from raytrace_rl.relay.cursors import Cursors
from raytrace_rl.relay.home import DROPPED, HomeFiles, piece
from raytrace_rl.relay.home_note import HomeNote
from raytrace_rl.relay.relay import Relay
from tests import disks, writers
from tests.running import wait_for
from tests.spooling import SECOND, T0, Spool, ended, span

pytest_plugins = ["tests.telemetry_fixtures"]

#: Spans of a segment, and what it takes.
EACH = 100
SIZE = 20_000


@pytest.fixture
def home_dir(tmp_path):
    """The driver's run directory, with a spool of the driver's own."""
    Spool(tmp_path / "home", "node-a").segment(99, b"", sealed=True)
    return tmp_path / "home"


def node(tmp_path, name="node-b"):
    """A node's run directory, that the driver does not see."""
    return Spool(tmp_path / f"far-{name}", name)


def fill(spool, pid, numbers, *, age=0, sealed=True):
    """Writes segments of some 20 kB with a hundred spans each; ``age`` makes them older than others."""
    for number in numbers:
        ids = range((pid * 1000 + number) * EACH + 1, (pid * 1000 + number + 1) * EACH + 1)
        path = spool.segment(
            pid, ended(*[span(n, 0, 1, note="x" * 110) for n in ids]), number, sealed=sealed, span_count=EACH
        )
        os.utime(path, ns=(T0, T0 + (number - age) * SECOND))


def stored(home_dir):
    """Bytes of segments at home, of other nodes."""
    return sum(path.stat().st_size for path in home_dir.glob("spool/node-[b-z]/*.rts"))


def numbers(home_dir, name="node-b"):
    """Numbers of the segments at home of a node."""
    return sorted(int(path.name.split(".")[1]) for path in (home_dir / "spool" / name).glob("*.rts"))


def accounts(home_dir):
    """How many spans are at home, and how many home says it has dropped."""
    run = load_run(home_dir)
    return len(run.spans), sum(process.drops.get("spans", 0) for process in run.processes)


def test_a_node_stays_inside_its_bound_and_the_oldest_go_counted(tmp_path, home_dir):
    """Catches a driver's disk filled by a node that itself keeps its bound, or spans that go without a word."""
    far = node(tmp_path)
    home = HomeFiles(home_dir)
    bound = 5 * SIZE
    most = 0
    for number in range(20):
        fill(far, 1, [number])
        assert Carrier(far.node_dir, home, bound).round()
        most = max(most, stored(home_dir))
        for path in (home_dir / "spool" / "node-b").glob("*.rts"):
            os.utime(path, ns=(T0, T0 + int(path.name.split(".")[1]) * SECOND))
    assert most <= bound
    kept = numbers(home_dir)
    assert kept == list(range(20 - len(kept), 20)), "the newest are kept"
    assert len(kept) >= 3
    assert accounts(home_dir) == (len(kept) * EACH, (20 - len(kept)) * EACH)
    section = relay_counters(str(home_dir))
    assert (section["home_dropped"], section["wrong"]) == ((20 - len(kept)) * EACH, True)


def test_what_was_dropped_does_not_come_again(tmp_path, home_dir):
    """Catches a carrier, or a home, started anew that brings what has no place there, again and again."""
    far = node(tmp_path)
    fill(far, 1, range(10))
    for _ in range(3):
        home = HomeFiles(home_dir)
        carrier = Carrier(far.node_dir, home, 4 * SIZE)
        assert carrier.round()
        before = carrier.standing.carried
        assert carrier.round()
        assert carrier.standing.carried == before
        assert all(carrier.is_done(far.stem(1), number) for number in range(10)), "the node may remove them"
    assert sum(accounts(home_dir)) == 10 * EACH
    sizes = HomeFiles(home_dir).sizes("node-b", 4 * SIZE)
    dropped = [name for name, size in sizes.items() if size == DROPPED]
    assert len(dropped) == 10 - len(numbers(home_dir))
    home = HomeFiles(home_dir)
    home.write("node-b", [piece(dropped[0], 0, b"x" * 1000)])
    assert not (home_dir / "spool" / "node-b" / dropped[0]).exists()


def test_all_nodes_together_stay_inside_a_bound(tmp_path, home_dir):
    """Catches a thousand nodes each inside its bound, and a full disk."""
    far = {name: node(tmp_path, name) for name in ("node-b", "node-c", "node-d")}
    home = HomeFiles(home_dir, total_bytes=9 * SIZE)
    for age, (name, spool) in enumerate(far.items()):
        fill(spool, age + 1, range(5), age=100 * age)
        assert Carrier(spool.node_dir, home, 100 * SIZE).round()
        for path in (home_dir / "spool" / name).glob("*.rts"):
            os.utime(path, ns=(T0, spool.node_dir.joinpath(path.name).stat().st_mtime_ns))
        assert stored(home_dir) <= 9 * SIZE
    assert sum(accounts(home_dir)) == 15 * EACH
    fill(far["node-b"], 7, [50])
    assert Carrier(far["node-b"].node_dir, home, 100 * SIZE).round()
    assert 50 in numbers(home_dir), "what has just come is not what goes"
    assert stored(home_dir) <= 9 * SIZE


def test_what_a_collector_has_goes_first(tmp_path, home_dir):
    """Catches the only copy of a span dropped at home beside others that the collector has as well."""
    far = node(tmp_path)
    fill(far, 1, range(4))
    fill(far, 2, range(4), age=-100)  # younger, and acknowledged
    cursors = Cursors(far.node_dir, "traces", "http://a")
    cursors.finish(far.stem(2))
    assert cursors.save()
    home = HomeFiles(home_dir)
    assert Carrier(far.node_dir, home, 100 * SIZE).round()
    for path in (home_dir / "spool" / "node-b").glob("*.rts"):
        os.utime(path, ns=(T0, (far.node_dir / path.name).stat().st_mtime_ns))
    fill(far, 3, [0], age=-200)
    assert Carrier(far.node_dir, home, 7 * SIZE).round()
    left = Counter(path.name.partition("-")[0] for path in (home_dir / "spool" / "node-b").glob("*.rts"))
    assert (left["1"], left["3"]) == (4, 1)
    assert left["2"] < 4


def test_the_bound_for_all_follows_from_the_room_there_is(tmp_path, home_dir, monkeypatch):
    """Catches a bound that grows smaller with each start, or one that does not know how small the disk is."""
    monkeypatch.setattr(home_bound, "_LEAST", 0)
    with disks.small_disk(tmp_path / "disk", monkeypatch, mib=2) as disk:
        if not disk.real:
            pytest.skip("needs a real file system: this process may not mount")
        far = node(tmp_path)
        fill(far, 1, range(80))
        for _ in range(3):
            assert Carrier(far.node_dir, HomeFiles(disk.path), 100 << 20).round()
            assert 3 << 18 <= stored(disk.path) <= 1 << 20
        assert sum(accounts(disk.path)) == 80 * EACH


def test_what_is_being_written_stays(tmp_path, home_dir):
    """Catches the segment of a living process dropped while it grows: what comes later would have no beginning."""
    far = node(tmp_path)
    live = far.alive(1)
    fill(far, 1, [0, 1, 2], sealed=False)
    home = HomeFiles(home_dir)
    assert Carrier(far.node_dir, home, SIZE).round()
    assert numbers(home_dir) == [0, 1, 2]
    live.release()
    carrier = Carrier(far.node_dir, home, SIZE)
    assert carrier.round()
    fill(far, 2, [7])
    assert carrier.round()
    assert stored(home_dir) <= SIZE
    assert sum(accounts(home_dir)) == 4 * EACH


def test_a_process_of_which_all_is_dropped_is_not_forgotten(tmp_path, home_dir):
    """Catches losses that are gone with the last file of the process which had them, its own drops among them."""
    far = node(tmp_path)
    path = far.segment(1, ended(*[span(n, 0, 1) for n in range(1, 11)]), sealed=True, span_count=10, dropped_spans=5)
    os.utime(path, ns=(T0, T0))
    home = HomeFiles(home_dir)
    carrier = Carrier(far.node_dir, home, SIZE)
    assert carrier.round()
    fill(far, 2, range(2))
    assert carrier.round()
    assert carrier.round()
    run = load_run(home_dir)
    assert {process.pid: process.drops["spans"] for process in run.processes if process.pid == 1} == {1: 15}


def test_a_home_killed_before_a_dropped_segment_was_gone(tmp_path, home_dir):
    """Catches a segment counted as dropped that stands in the report all the same, for ever."""
    far = node(tmp_path)
    fill(far, 1, range(3))
    assert Carrier(far.node_dir, HomeFiles(home_dir), 100 * SIZE).round()
    note = HomeNote(home_dir / "spool" / "node-b")
    note.drop(far.stem(1), 0, EACH, SIZE)
    assert note.save()
    assert Carrier(far.node_dir, HomeFiles(home_dir), 100 * SIZE).round()
    assert accounts(home_dir) == (2 * EACH, EACH)


def test_the_note_stays_small_however_much_is_dropped(tmp_path):
    """Catches a note that grows with each segment, and is written anew for each."""
    note = HomeNote(tmp_path)
    for number in range(5000):
        note.drop(f"1-{T0}", number, 10, 100)
    assert note.save()
    assert note.path.stat().st_size < 500
    again = HomeNote(tmp_path)
    assert (again.segments, again.spans, again.bytes) == (5000, 50_000, 500_000)
    assert again.is_dropped(f"1-{T0}", 4999)
    assert not again.is_dropped(f"1-{T0}", 5000)


def test_a_real_writer_and_a_small_bound_leave_nothing_unaccounted(tmp_path, home_dir):
    """Catches a span that is neither at home nor counted when segments are sealed, carried and dropped at once."""
    written = 0
    with writers.worker(tmp_path / "far", spool_max_mib=64) as worker:
        (node_dir,) = (tmp_path / "far" / "spool").iterdir()
        relay = Relay(node_dir, None, home=HomeFiles(home_dir), home_bytes=4 << 20)
        assert relay.acquire()
        relay.start()
        for _ in range(6):
            worker.tell("write 3000")
            written += 3000
            assert relay.drain(30)
            assert stored(home_dir) <= (4 << 20) + (8 << 20), "the bound, and the segment that is being written"
        worker.tell("stop")
        assert relay.drain(30)
        relay.stop()
    there, dropped = accounts(home_dir)
    assert dropped > 0
    assert there + dropped == written


# -- no room ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(tmp_path, monkeypatch):
    """A disk of 2 MiB for the driver's run directory."""
    with disks.small_disk(tmp_path / "disk", monkeypatch, mib=2) as disk:
        if not disk.real:
            pytest.skip("needs a real file system: this process may not mount")
        yield disk


def test_a_full_disk_at_home_costs_time_and_nothing_else(tmp_path, full, caplog):
    """Catches a full disk that loses what was to come home, says so a thousand times, or that all is well."""
    far = node(tmp_path)
    live = far.alive(1)
    fill(far, 1, range(3))
    home = HomeFiles(full.path, total_bytes=100 << 20)
    relay = Relay(far.node_dir, None, home=home, home_bytes=100 << 20)
    carrier = relay.carrier
    assert carrier is not None
    assert carrier.round()
    full.fill()
    fill(far, 1, range(3, 20))
    assert not any(carrier.round() for _ in range(5))
    section = relay_counters(str(full.path))
    assert section["wrong"]
    assert "no room here for what node-b has" in section["summary"][0]
    (found,) = section["nodes"]
    assert found["home"]["refused"] >= 5
    assert found["home"]["failure"] == "No space left on device"
    (process,) = load_run(full.path).processes
    assert process.state == "alive", "not closed, and not dead: there is more of it"
    relay._write_status()
    (far_side,) = relay_counters(str(far.run_dir))["nodes"]
    assert far_side["carried"]["behind_bytes"] > 0
    assert "No space left" in far_side["carried"]["failure"]
    assert len(disks.warnings_of(caplog)) == 2, "one of home, one of the node"
    live.release()
    assert not carrier.round()
    (process,) = load_run(full.path).processes
    assert process.state == "alive", "it has closed, and is not at home yet"
    full.release()
    assert wait_for(carrier.round, "there is room")
    assert accounts(full.path) == (20 * EACH, 0)
    assert carrier.round()
    run = load_run(full.path)
    assert [process.state for process in run.processes] == ["closed"]
    assert not run.damage
    section = relay_counters(str(full.path))
    assert (section["wrong"], section["nodes"][0]["home"]["failure"]) == (False, None)


def test_a_drain_into_a_full_disk_is_not_done(tmp_path, full):
    """Catches a driver that is told at its end that everything is at home."""
    far = node(tmp_path)
    fill(far, 1, range(3))
    home = HomeFiles(full.path)
    full.fill()
    relay = Relay(far.node_dir, None, home=home)
    assert relay.acquire()
    relay.start()
    assert not relay.drain(2)
    full.release()
    wait_for(lambda: relay.drain(5), "there is room")
    relay.stop()
    assert accounts(full.path) == (3 * EACH, 0)


def test_a_directory_that_cannot_be_written_is_like_a_full_one(tmp_path):
    """Catches a home that dies, or says nothing, where its run directory is read-only."""
    far = node(tmp_path)
    fill(far, 1, [0])
    with disks.read_only(tmp_path / "ro") as place:
        carrier = Carrier(far.node_dir, HomeFiles(place))
        assert not carrier.round()
        assert not carrier.round()
        assert carrier.standing.failures == 2
        assert carrier.standing.failure


# -- who lives --------------------------------------------------------------------------------------------------------


def test_a_copy_proves_no_death(tmp_path, home_dir):
    """Catches open spans closed at home since who held their process's lock there has gone, or given the node up."""
    far = node(tmp_path)
    live = far.alive(1)
    far.segment(1, ended(span(1, 0, 1)), pad=100)
    far.slots(1, [span(2, 0, None, name="open")])
    home = HomeFiles(home_dir)
    carrier = Carrier(far.node_dir, home)
    assert carrier.round()

    def state():
        (process,) = [process for process in load_run(home_dir).processes if process.pid == 1]
        return process.state, [row.name for row in load_run(home_dir).spans if row.end_ns is None]

    assert state() == ("alive", ["open"])
    home.lose("node-b")
    assert state() == ("unknown", ["open"])
    carrier._living_at -= 60  # home is told once more, some time later
    assert carrier.round()
    assert state() == ("alive", ["open"])
    live.release()
    far.live_file(1)
    assert carrier.round()
    run = load_run(home_dir)
    assert [process.state for process in run.processes if process.pid == 1] == ["closed"]
    assert [row.name for row in run.spans if row.truncated] == ["open"]


def test_notes_of_the_relay_come_home_with_the_spools(tmp_path, home_dir):
    """Catches a report on the driver that knows nothing of what a relay elsewhere has lost or not sent."""
    from tests.relay.noted_runs import note, note_all

    far = node(tmp_path)
    fill(far, 1, [0])
    note(far, sent=90, dropped=10, last_error="INVALID_ARGUMENT: no such tenant")
    note_all(far)
    (far.node_dir / "relay" / "home.json").unlink()
    carrier = Carrier(far.node_dir, HomeFiles(home_dir))
    assert carrier.round()
    section = relay_counters(str(home_dir))
    assert (section["sent"], section["dropped"]) == (90, 10)
    assert section["nodes"][0]["receiver"]["requests"] == 2
    assert "no such tenant" in section["summary"][1]
    before = (home_dir / "spool" / "node-b" / "relay").stat().st_mtime_ns
    assert carrier.round()
    assert (home_dir / "spool" / "node-b" / "relay").stat().st_mtime_ns == before, "and only when they change"


@pytest.mark.parametrize("name", ["relay/home.json", "relay/../x.json", "relay/x-01234567.json", "relay/lock"])
def test_no_note_takes_the_place_of_homes_own(home_dir, name):
    """Catches a node that writes what home says of it, or anything else."""
    with pytest.raises(ValueError, match="names no"):
        HomeFiles(home_dir).write("node-b", [piece(name, 0, b"{}", whole=True)])


def test_bounds_are_looked_at_seldom(tmp_path, home_dir, monkeypatch):
    """Catches a listing of all nodes' files for each heartbeat that comes home, once nothing more can go."""
    far = node(tmp_path)
    lives = [far.alive(pid) for pid in range(1, 4)]
    for pid in range(1, 4):
        fill(far, pid, [0], sealed=False)
    home = HomeFiles(home_dir, total_bytes=SIZE)
    assert Carrier(far.node_dir, home, SIZE).round()
    looks = []
    real = home_bound.HomeBound._shrink

    def look(self, nodes, bound):
        looks.append(nodes)
        real(self, nodes, bound)

    monkeypatch.setattr(home_bound.HomeBound, "_shrink", look)
    for n in range(100):
        home.write("node-b", [piece(f"1-{T0}.0.rts", 24, n.to_bytes(8, "little"))])
    assert len(looks) <= 2
    for live in lives:
        live.release()
