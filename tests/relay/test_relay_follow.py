from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.relay import follow
from raytrace_rl.relay.follow import Basket, Follower, Reading, baskets
from raytrace_rl.spool.format import SEALED_OFFSET, Kind, pack_header, pack_record
from tests import spooling

KINDS = (Kind.SPAN,)


def take(follower, *, room=1 << 30, count=1 << 30, final=False, kinds=KINDS):
    """One look: how it ended, and the payloads."""
    into = baskets(kinds)
    reading = follower.read(into, Basket(room, count), final=final)
    return reading, [payload for kind in kinds for payload in into[kind]]


def write(path, *records, pad=0, **fields):
    """A segment with ``records``, and room behind them."""
    path.write_bytes(pack_header(spooling.header(**fields)) + b"".join(records) + bytes(pad))
    return path


def records(*sizes):
    """Records of spans with payloads of the given sizes: the first of ones, the second of twos."""
    return [pack_record(Kind.SPAN, bytes([n + 1]) * size) for n, size in enumerate(sizes)]


def test_what_comes_is_taken_once(tmp_path):
    """Catches a record that is sent twice, or never, when a live segment is looked at again and again."""
    path = write(tmp_path / "1-1.0.rts", pad=10_000)
    follower = Follower(str(path))
    assert take(follower) == (Reading.WAITING, [])
    with path.open("r+b") as file:
        file.seek(follower.offset)
        for size in (10, 200, 3):
            file.write(pack_record(Kind.SPAN, b"x" * size))
            file.flush()
            assert take(follower) == (Reading.WAITING, [b"x" * size])


@pytest.mark.parametrize("size", [64, 256, 4096, 1 << 16])
def test_a_piece_that_ends_where_a_record_does_is_not_the_end_of_what_is_there(tmp_path, size):
    """Catches a live process of which a look sees 64 KiB: a push is "complete", and the rest unsent and uncounted."""
    count = 5 * (1 << 16) // size
    one = pack_record(Kind.SPAN, b"x" * (size - len(pack_record(Kind.SPAN, b""))))
    follower = Follower(str(write(tmp_path / "1-1.0.rts", *[one] * count, pad=10_000)))
    reading, payloads = take(follower)
    assert (reading, len(payloads)) == (Reading.WAITING, count)


def test_a_sealed_segment_is_done_behind_its_last_record(tmp_path):
    """Catches a finished segment that is looked at for ever."""
    follower = Follower(str(write(tmp_path / "1-1.0.rts", *records(5, 6), sealed=True)))
    reading, payloads = take(follower)
    assert (reading, len(payloads)) == (Reading.DONE, 2)


def test_sealing_by_another_file_in_its_place_is_followed(tmp_path):
    """Catches a follower that goes on reading the memory file which sealing has replaced."""
    active = write(tmp_path / "active", *records(5, 6), pad=4096)
    link = tmp_path / "1-1.0.rts"
    link.symlink_to(active)
    follower = Follower(str(link))
    assert len(take(follower)[1]) == 2
    sealed = write(tmp_path / "sealed", *records(5, 6, 7), sealed=True)
    sealed.replace(link)
    active.unlink()
    reading, payloads = take(follower)
    assert (reading, payloads) == (Reading.DONE, [b"\3" * 7])


def test_a_full_basket_stops_before_the_record_that_does_not_fit(tmp_path):
    """Catches a request beyond what the receiver takes, and a record lost at its edge."""
    follower = Follower(str(write(tmp_path / "1-1.0.rts", *records(100, 100, 100), sealed=True)))
    reading, payloads = take(follower, room=250)
    assert (reading, len(payloads)) == (Reading.FULL, 2)
    assert take(follower) == (Reading.DONE, [b"\3" * 100])


def test_the_count_of_a_basket_holds_too(tmp_path):
    """Catches requests of many small records beyond their bound."""
    follower = Follower(str(write(tmp_path / "1-1.0.rts", *records(1, 1, 1), sealed=True)))
    assert take(follower, count=2)[0] is Reading.FULL
    assert take(follower)[1] == [b"\3"]


def test_a_record_larger_than_the_room_goes_alone(tmp_path):
    """Catches a relay that waits for ever for room for a record which is larger than a whole request."""
    follower = Follower(str(write(tmp_path / "1-1.0.rts", *records(5000, 10), sealed=True)))
    assert [len(payload) for payload in take(follower, room=100)[1]] == [5000]
    assert [len(payload) for payload in take(follower, room=100)[1]] == [10]


def test_other_kinds_are_passed_over(tmp_path):
    """Catches a lane of logs that sends spans, or is held up by them."""
    mixed = [pack_record(Kind.SPAN, b"s"), pack_record(99, b"new"), pack_record(Kind.LOGS, b"l")]
    follower = Follower(str(write(tmp_path / "1-1.0.rts", *mixed, sealed=True)))
    assert take(follower, kinds=(Kind.LOGS,)) == (Reading.DONE, [b"l"])


def test_a_look_over_much_that_is_not_wanted_ends(tmp_path):
    """Catches a lane of logs that reads gigabytes of spans in one go, deaf to being stopped."""
    follower = Follower(str(write(tmp_path / "1-1.0.rts", *records(*[60_000] * 100), sealed=True)))
    basket = Basket(1 << 30, 1 << 30, sight=100_000)
    assert follower.read(baskets((Kind.LOGS,)), basket) is Reading.FULL
    assert follower.offset < 3_000_000


def test_long_records_are_read_whole(tmp_path):
    """Catches a record longer than the piece that is read first being taken for damage."""
    sizes = [1 << 20, 5, 70_000, 1 << 20]
    follower = Follower(str(write(tmp_path / "1-1.0.rts", *records(*sizes), sealed=True)))
    reading, payloads = take(follower)
    assert (reading, [len(one) for one in payloads], follower.damaged) == (Reading.DONE, sizes, 0)


def test_damage_is_passed_over_and_counted(tmp_path):
    """Catches a relay that stops for ever at a damaged record, or sends it."""
    damaged = bytearray(records(50)[0])
    damaged[30] ^= 1
    follower = Follower(str(write(tmp_path / "1-1.0.rts", *records(5), bytes(damaged), *records(6, 7), sealed=True)))
    reading, payloads = take(follower)
    assert (reading, [len(one) for one in payloads], follower.damaged) == (Reading.DONE, [5, 6, 7], 1)


def test_a_record_that_is_being_placed_is_waited_for(tmp_path):
    """Catches a record half written at the moment of the look being given up as damage."""
    whole = records(500)[0]
    path = write(tmp_path / "1-1.0.rts", whole[:200], pad=2000)
    follower = Follower(str(path))
    for _ in range(3):
        assert take(follower) == (Reading.WAITING, [])
    with path.open("r+b") as file:
        file.seek(follower.offset)
        file.write(whole)
    assert take(follower) == (Reading.WAITING, [b"\1" * 500])
    assert follower.damaged == 0


def test_a_gap_in_a_live_file_is_given_time_and_then_passed_over(tmp_path, monkeypatch):
    """Catches one torn record that holds up everything a process writes from then on."""
    path = write(tmp_path / "1-1.0.rts", records(500)[0][:100], bytes(412), *records(6), pad=2000)
    follower = Follower(str(path))
    assert take(follower) == (Reading.WAITING, [])
    assert take(follower) == (Reading.WAITING, [])
    follower.close()
    monkeypatch.setattr(follow, "_GAP_GRACE_S", 0.0)
    assert take(follower) == (Reading.WAITING, [b"\1" * 6])
    assert follower.damaged == 1


def test_a_dead_writers_file_is_done_behind_its_last_whole_record(tmp_path):
    """Catches a killed process whose spool, with a torn record and zeros behind it, never comes to an end."""
    path = write(tmp_path / "1-1.0.rts", *records(5), records(500)[0][:100], pad=100_000)
    follower = Follower(str(path))
    assert take(follower)[0] is Reading.WAITING
    reading, payloads = take(follower, final=True)
    assert (reading, payloads, follower.damaged) == (Reading.DONE, [], 1)


@pytest.mark.parametrize("final", [False, True])
def test_a_file_that_vanished_is_done(tmp_path, final):
    """Catches a relay that waits for a segment which the bound of the spool has dropped."""
    assert take(Follower(str(tmp_path / "1-1.0.rts"), 200), final=final) == (Reading.DONE, [])


def test_a_link_that_leads_nowhere_is_waited_for_only_while_its_writer_may_live(tmp_path):
    """Catches a dead process of another container, whose memory nobody here can see, keeping a relay up for ever."""
    link = tmp_path / "1-1.0.rts"
    link.symlink_to(tmp_path / "nowhere")
    assert take(Follower(str(link)))[0] is Reading.WAITING
    assert take(Follower(str(link)), final=True)[0] is Reading.DONE


def test_it_goes_on_at_an_offset(tmp_path):
    """Catches a relay started anew that sends what was acknowledged."""
    path = write(tmp_path / "1-1.0.rts", *records(5, 6), sealed=True)
    first = Follower(str(path))
    take(first, count=1)
    assert take(Follower(str(path), first.offset)) == (Reading.DONE, [b"\2" * 6])


def test_the_resource_is_the_last_one_before_the_offset(tmp_path):
    """Catches a relay started anew that names the process as it was at its very start, before its rank was known."""
    named = [pack_record(Kind.RESOURCE, b"second"), *records(5), pack_record(Kind.RESOURCE, b"third")]
    path = write(tmp_path / "1-1.0.rts", *named, sealed=True, resource=b"first")
    size = Follower(str(path))
    size.resource()
    at = size.offset
    assert Follower(str(path)).resource() == b"first"
    assert Follower(str(path), at + len(named[0])).resource() == b"second"
    assert Follower(str(path), at + len(named[0]) + len(named[1])).resource() == b"second"
    assert Follower(str(path), at + sum(map(len, named))).resource() == b"third"


def test_a_header_that_is_damaged_costs_no_record(tmp_path):
    """Catches a flipped bit in a header that hides a whole segment."""
    path = write(tmp_path / "1-1.0.rts", *records(5, 6))
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    reading, payloads = take(Follower(str(path)), final=True)
    assert (reading, [len(one) for one in payloads]) == (Reading.DONE, [5, 6])


def test_sealed_in_place_is_noticed(tmp_path):
    """Catches a segment mapped in the run directory itself, whose sealing no rename shows."""
    path = write(tmp_path / "1-1.0.rts", *records(5))
    follower = Follower(str(path))
    assert take(follower)[0] is Reading.WAITING
    with path.open("r+b") as file:
        file.seek(SEALED_OFFSET)
        file.write(b"\1\0\0\0")
    assert take(follower)[0] is Reading.DONE


@given(st.binary(max_size=4000), st.integers(0, 2**32), st.booleans())
def test_any_bytes_come_to_an_end(tmp_path_factory, noise, seed, header):
    """Catches a hang, or a crash, over bytes that nobody would write."""
    path = tmp_path_factory.mktemp("noise") / "1-1.0.rts"
    chosen = random.Random(seed)
    data = bytearray(pack_header(spooling.header()) if header else b"") + noise + b"".join(records(5, 6, 7))
    for _ in range(chosen.randrange(4)):
        data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    path.write_bytes(data)
    follower = Follower(str(path))
    for _ in range(100):
        reading, _ = take(follower, room=chosen.randrange(1, 100), final=True)
        if reading is Reading.DONE:
            break
    assert reading is Reading.DONE
