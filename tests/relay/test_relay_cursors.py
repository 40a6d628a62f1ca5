from __future__ import annotations

import json
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.relay.cursors import Cursors


def test_what_was_saved_is_there_for_the_next_relay(tmp_path):
    """Catches a cursor that is lost with its relay: everything would be sent anew."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    cursors.move("1-5", 0, 300)
    cursors.finish_segment("1-5", 1)
    cursors.add_truncated("2-5", 3)
    cursors.finish("3-5")
    assert cursors.save()
    again = Cursors(tmp_path, "traces", "http://a")
    assert (again.offset("1-5", 0), again.offset("1-5", 2)) == (300, 0)
    assert [again.is_done("1-5", n) for n in range(3)] == [False, True, False]
    assert again.truncated("2-5") == 3
    assert again.is_finished("3-5")
    assert again.is_done("3-5", 7)


def test_what_was_not_saved_is_forgotten(tmp_path):
    """Catches a file that is written before the acknowledgement is asked for."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    cursors.move("1-5", 0, 300)
    assert Cursors(tmp_path, "traces", "http://a").offset("1-5", 0) == 0


def test_each_signal_and_destination_has_its_own(tmp_path):
    """Catches a second collector that gets nothing because the first one has got it, and one signal moving another."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    cursors.move("1-5", 0, 300)
    cursors.save()
    assert Cursors(tmp_path, "traces", "http://b").offset("1-5", 0) == 0
    assert Cursors(tmp_path, "logs", "http://a").offset("1-5", 0) == 0


def test_a_cursor_never_moves_back(tmp_path):
    """Catches a batch read before a rewind that takes back what a later one acknowledged."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    cursors.move("1-5", 0, 300)
    cursors.move("1-5", 0, 200)
    assert cursors.offset("1-5", 0) == 300


def test_a_segment_that_turns_up_late_is_not_taken_for_done(tmp_path):
    """Catches segment 1, missed by a listing that saw segment 2, being passed over because segment 2 is done."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    cursors.finish_segment("1-5", 0)
    cursors.finish_segment("1-5", 2)
    assert not cursors.is_done("1-5", 1)
    cursors.finish_segment("1-5", 1)
    assert all(cursors.is_done("1-5", n) for n in range(3))
    assert not cursors.is_done("1-5", 3)


def test_the_file_stays_small_however_many_segments_are_done(tmp_path):
    """Catches an entry a segment that is kept for ever: the file is written anew after every batch."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    for n in range(1000):
        cursors.move("1-5", n, 300)
        cursors.finish_segment("1-5", n)
    cursors.save()
    assert cursors.path.stat().st_size < 800


def test_processes_without_files_are_forgotten(tmp_path):
    """Catches a file that grows with every process there ever was in a run directory that is cleaned up."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    cursors.finish("1-5")
    cursors.move("2-5", 0, 300)
    cursors.move("3-5", 0, 300)
    cursors.forget({"3-5": ()})
    cursors.save()
    found = json.loads(cursors.path.read_text())
    assert (found["finished"], list(found["processes"])) == ([], ["3-5"])


def test_what_was_refused_is_forgotten_with_its_segment(tmp_path):
    """Catches a file that grows with each segment of a run whose collector refuses everything."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    for number in range(3):
        cursors.refuse("1-5", number)
    cursors.finish("1-5")
    cursors.forget({"1-5": (2, 3)})
    cursors.save()
    again = Cursors(tmp_path, "traces", "http://a")
    assert [number for number in range(4) if again.is_refused("1-5", number)] == [2]
    cursors.forget({})
    assert not cursors.is_refused("1-5", 2)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 99, "processes": {}, "finished": []}'])
def test_a_damaged_file_means_sending_anew(tmp_path, text, caplog):
    """Catches a relay that dies of a file that a full disk cut short."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    cursors.path.parent.mkdir()
    cursors.path.write_text(text)
    cursors.load()
    assert cursors.offset("1-5", 0) == 0
    assert "sent anew" in caplog.text
    cursors.move("1-5", 0, 300)
    assert cursors.save()


def test_a_directory_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    """Catches an exception out of the relay's loop when the run directory is deleted under it."""
    cursors = Cursors(tmp_path / "gone", "traces", "http://a")
    cursors.move("1-5", 0, 300)
    assert not cursors.save()
    assert not cursors.save()
    assert caplog.text.count("cannot note") == 1
    assert cursors.offset("1-5", 0) == 300


def test_the_directory_is_private(tmp_path):
    """Catches cursors that everybody on the node can list."""
    cursors = Cursors(tmp_path, "traces", "http://a")
    cursors.move("1-5", 0, 300)
    cursors.save()
    assert stat.S_IMODE(cursors.path.parent.stat().st_mode) == 0o700


def test_the_destination_in_the_file_is_readable_for_a_person(tmp_path):
    """Catches a file of which nobody can tell to which collector it belongs."""
    cursors = Cursors(tmp_path, "traces", "http://collector:4317")
    cursors.finish("1-5")
    cursors.save()
    assert json.loads(cursors.path.read_text())["destination"] == "http://collector:4317"
    assert not list(cursors.path.parent.glob("*.new"))


@given(st.permutations(range(8)))
def test_the_order_in_which_segments_are_done_does_not_matter(order):
    """Catches a floor that passes over what is not done."""
    cursors = Cursors("/nowhere", "traces", "http://a")
    done = set()
    for n in order:
        cursors.finish_segment("1-5", n)
        done.add(n)
        assert {m for m in range(10) if cursors.is_done("1-5", m)} == done
