from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from raytrace_rl.relay import tail as module
from raytrace_rl.relay.cursors import Cursors
from raytrace_rl.relay.tail import Tail
from raytrace_rl.spool import liveness, seal
from raytrace_rl.spool.format import Kind, pack_record
from tests import spooling, writers
from tests.relay.reading import numbers, read_all
from tests.running import attributes, wait_for
from tests.spooling import SECOND, T0, Spool, ended, span

pytest_plugins = ["tests.telemetry_fixtures"]

KINDS = (Kind.SPAN, Kind.SCOPE_SPANS)


@pytest.fixture(autouse=True)
def _asks_at_once(monkeypatch):
    """Whether a writer lives is asked at every look."""
    monkeypatch.setattr(module, "_STATE_S", 0.0)


@pytest.fixture
def spool(tmp_path):
    """A run directory with one node."""
    return Spool(tmp_path / "run")


def tail_of(spool, signal="traces", kinds=KINDS):
    """A tail over the node, with the cursors that are on disk."""
    cursors = Cursors(spool.node_dir, signal, "http://a")
    return Tail(spool.node_dir, kinds, cursors)


def spans_of(batches):
    """The spans in batches, as messages of the official class."""
    return [Span.FromString(one) for batch in batches for p in batch.portions for one in p.payloads[Kind.SPAN]]


def test_every_span_of_every_process_comes_once(spool):
    """Catches a process, or a segment, that is passed over or dealt out twice."""
    for pid in (1, 2, 3):
        for number in range(3):
            begin = pid * 100 + number * 10
            spool.segment(pid, ended(*[span(begin + n, 0, 1) for n in range(10)]), number, sealed=True)
    tail = tail_of(spool)
    found = numbers(read_all(tail, max_records=7))
    assert sorted(found) == [pid * 100 + n for pid in (1, 2, 3) for n in range(30)]
    assert numbers(read_all(tail)) == []
    assert tail.unfinished == 0


def test_a_process_that_writes_much_starves_nobody(spool):
    """Catches one busy process whose backlog is sent before anything of the others."""
    for pid in (1, 2, 3):
        spool.segment(pid, ended(*[span(pid * 100 + n, 0, 1) for n in range(50)]), pad=1000)
        spool.alive(pid)
    tail = tail_of(spool)
    first = [{n // 100 for n in numbers([tail.read(1 << 20, 10)])} for _ in range(3)]
    assert first == [{1}, {2}, {3}]


def test_what_is_not_acknowledged_comes_again(spool):
    """Catches a batch that is lost because the receiver did not take it."""
    spool.segment(1, ended(*[span(n, 0, 1) for n in range(10)]), pad=1000)
    live = spool.alive(1)
    tail = tail_of(spool)
    batch = tail.read(1 << 20, 4)
    tail.acknowledge(batch)
    assert numbers([tail.read(1 << 20, 4)]) == [4, 5, 6, 7]
    tail.rewind()
    assert numbers(read_all(tail)) == [4, 5, 6, 7, 8, 9]
    live.release()


def test_another_relay_goes_on_where_the_first_one_was_killed(spool):
    """Catches a relay started anew that sends more than the batch which was on its way."""
    spool.segment(1, ended(*[span(n, 0, 1) for n in range(10)]), pad=1000)
    spool.alive(1)
    tail = tail_of(spool)
    tail.acknowledge(tail.read(1 << 20, 4))
    tail._cursors.save()
    tail.read(1 << 20, 4)  # on its way
    assert numbers(read_all(tail_of(spool))) == [4, 5, 6, 7, 8, 9]


def test_a_live_segment_does_not_hold_up_the_next_one(spool):
    """Catches a segment that cannot be sealed (the disk is full) behind which nothing is sent any more."""
    spool.segment(1, ended(span(1, 0, 1)), 0, pad=100)
    spool.segment(1, ended(span(2, 0, 1)), 1, pad=100)
    spool.alive(1)
    assert numbers(read_all(tail_of(spool))) == [1, 2]


def test_processes_and_segments_that_come_later_are_found(spool):
    """Catches a listing that is made once."""
    tail = tail_of(spool)
    assert numbers(read_all(tail)) == []
    spool.alive(1)
    spool.segment(1, ended(span(1, 0, 1)), pad=100)
    assert wait_for(lambda: numbers(read_all(tail)), "the process is found") == [1]
    spool.segment(1, ended(span(2, 0, 1)), 1, pad=100)
    assert wait_for(lambda: numbers(read_all(tail)), "the segment is found") == [2]


def test_resources_are_the_newest_known(spool):
    """Catches spans that are sent under the identity a process had before it knew its rank."""
    records = [ended(span(1, 0, 1)), pack_record(Kind.RESOURCE, spooling.resource(rank=3)), ended(span(2, 0, 1))]
    spool.segment(1, b"".join(records), resource=spooling.resource(rank=0), sealed=True)
    (portion,) = tail_of(spool).read(1 << 20, 100).portions
    assert portion.resource == spooling.resource(rank=3)


def test_open_spans_of_a_living_process_are_left_alone(spool):
    """Catches a span closed as truncated while it runs."""
    spool.segment(1, ended(span(1, 0, 1)), pad=100)
    spool.slots(1, [span(2, 0, None)])
    spool.alive(1)
    tail = tail_of(spool)
    assert numbers(read_all(tail)) == [1]
    assert tail.unfinished == 1


def test_open_spans_of_a_dead_process_are_closed_once(spool):
    """Catches open spans that never arrive, arrive twice, or arrive again with the next relay."""
    spool.segment(1, ended(span(1, 0, 1), span(4, 2, 8)), heartbeat_ns=T0 + 5 * SECOND)
    spool.journal(1, b"".join(pack_record(Kind.OPEN_SPAN, span(n, 3, None, name="open", number=n)) for n in (2, 3, 4)))
    spool.slots(1, [span(2, 3, None, name="open"), span(5, 3, None, name="slot")])
    spool.live_file(1)
    tail = tail_of(spool)
    batches = list(read_all(tail))
    found = {int.from_bytes(one.span_id, "big"): one for one in spans_of(batches)}
    assert sorted(found) == [1, 2, 3, 4, 5]
    for n in (2, 3, 5):
        assert attributes(found[n])["rl.truncated"] is True
        assert found[n].end_time_unix_nano == T0 + 8 * SECOND, "its last sign of life"
    assert attributes(found[2])["number"] == 2, "the journal knows more than the table"
    assert "rl.truncated" not in attributes(found[4]), "it had ended"
    assert tail.unfinished == 0
    tail._cursors.save()
    assert numbers(read_all(tail_of(spool))) == []


def test_a_span_struck_out_of_the_journal_is_not_closed(spool):
    """Catches a span whose end was dropped (no room) turning up as truncated at the death of its process."""
    journal = pack_record(Kind.OPEN_SPAN, span(2, 0, None)) + pack_record(
        Kind.SPAN_GONE, spooling.TRACE + b"\0" * 7 + b"\2"
    )
    spool.segment(1, ended(span(1, 0, 1)))
    spool.journal(1, journal)
    spool.live_file(1)
    assert numbers(read_all(tail_of(spool))) == [1]


def test_many_open_spans_go_in_several_requests_and_each_once(spool):
    """Catches a dead process with more open spans than a request holds, interrupted between two of them."""
    spool.segment(1, b"")
    spool.journal(1, b"".join(pack_record(Kind.OPEN_SPAN, span(n, 0, None)) for n in range(1, 26)))
    spool.live_file(1)
    tail = tail_of(spool)
    batch = tail.read(1 << 20, 10)
    assert batch.full
    tail.acknowledge(batch)
    tail._cursors.save()
    rest = numbers(read_all(tail_of(spool), max_records=10))
    assert sorted(numbers([batch]) + rest) == list(range(1, 26))


def test_spans_of_a_process_that_dies_between_two_looks_are_not_lost(spool):
    """Catches a segment written just before the death, and not listed yet, being left behind."""
    live = spool.alive(1)
    spool.segment(1, ended(span(1, 0, 1)), pad=100)
    tail = tail_of(spool)
    assert numbers(read_all(tail)) == [1]
    spool.segment(1, ended(span(2, 0, 1)), 1)
    live.release()
    spool.live_file(1)
    tail._listed_at = spool.node_dir.stat().st_mtime_ns  # as if the change had come too late to be seen
    assert numbers(read_all(tail)) == [2]
    assert tail.unfinished == 0


def test_a_process_that_closed_its_spool_is_finished(spool):
    """Catches a clean end being waited upon for ever."""
    spool.segment(1, ended(span(1, 0, 1)), sealed=True)
    tail = tail_of(spool)
    assert numbers(read_all(tail)) == [1]
    assert tail.unfinished == 0


def test_a_process_of_another_host_is_never_closed(spool):
    """Catches open spans closed for a process of which nothing is proven."""
    spool.segment(1, ended(span(1, 0, 1)), boot_id=b"x" * 16)
    spool.slots(1, [span(2, 0, None)])
    spool.live_file(1)
    tail = tail_of(spool)
    assert numbers(read_all(tail)) == [1]
    assert tail.unfinished == 1


def test_another_signal_closes_no_span(spool):
    """Catches the lanes of metrics and logs each looking through a dead process's spans, or sending them."""
    spool.segment(1, ended(span(1, 0, 1)) + pack_record(Kind.LOGS, b"log"))
    spool.slots(1, [span(2, 0, None)])
    spool.live_file(1)
    tail = tail_of(spool, "logs", (Kind.LOGS,))
    (portion,) = tail.read(1 << 20, 100).portions
    assert portion.payloads == {Kind.LOGS: [b"log"]}
    assert portion.finished


def test_a_directory_that_is_not_there_is_no_error(tmp_path):
    """Catches a relay that dies because the run directory was deleted."""
    cursors = Cursors(tmp_path / "gone", "traces", "http://a")
    tail = Tail(tmp_path / "gone", KINDS, cursors)
    assert tail.read(1 << 20, 10).empty


def test_files_that_go_are_let_go(spool):
    """Catches a deleted run whose processes keep the relay busy."""
    path = spool.segment(1, ended(span(1, 0, 1)), pad=100)
    live = spool.alive(1)
    tail = tail_of(spool)
    read_all(tail)
    path.unlink()
    live.release()
    wait_for(lambda: not read_all(tail) and not tail.unfinished, "the process is let go")


@pytest.mark.parametrize("mode", ["tmpfs", "direct"])
def test_a_real_writer_is_followed_through_its_segments(tmp_path, mode, monkeypatch):
    """Catches a span lost or doubled where a segment is full, sealed, and replaced by a file."""
    directory = tmp_path / "spool" / "node"
    directory.mkdir(parents=True)
    found = []
    with writers.writing(tmp_path, mode, monkeypatch) as writer:
        tail = Tail(directory, KINDS, Cursors(directory, "traces", "http://a"))
        for n in range(1000):
            writer.append_record(writers.record(n))
            if n % 50 == 0:
                found += numbers(read_all(tail, max_records=30))
            if n % 170 == 0:
                writer.prepare_next()
                writer.seal_full()
    found += wait_for(lambda: numbers(read_all(tail, max_records=30)), "the rest")
    wait_for(lambda: not read_all(tail) and not tail.unfinished, "it is finished")
    assert found == list(range(1000))
    assert tail.damaged == 0


def test_adopting_a_dead_process_under_the_relay_changes_nothing(tmp_path):
    """Catches a span lost or doubled when a killed process's memory files are brought home while they are followed."""
    with writers.worker(tmp_path / "run") as worker:
        worker.tell("write 20")
        worker.tell("open")
        (node_dir,) = (tmp_path / "run" / "spool").iterdir()
        tail = Tail(node_dir, KINDS, Cursors(node_dir, "traces", "http://a"))
        assert len(spans_of(read_all(tail))) == 20
        worker.tell("write 5")
        worker.kill()
        batch = tail.read(1 << 20, 3)
        assert seal.adopt_orphans(str(node_dir)) > 0
        tail.acknowledge(batch)
        rest = spans_of([batch]) + spans_of(wait_for(lambda: read_all(tail), "the rest"))
    assert [one.name for one in rest] == ["s"] * 5 + ["open"]
    assert tail.unfinished == 0
    assert liveness.state(node_dir / "none", liveness.boot_id()) == "closed"
