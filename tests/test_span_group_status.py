"""What `span_group_status` tells of the groups in a process: enabled, pending, registered, and by whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrace_rl import span_groups
from raytrace_rl.span_groups import ALL_GROUPS, PRESETS, register_span_groups, span_group_status
from tests.running import running

pytest_plugins = ["tests.telemetry_fixtures"]
pytestmark = pytest.mark.usefixtures("registrations")


def test_off():
    """Groups are said to record while telemetry is off, or none to exist."""
    status = span_group_status()
    assert (status.spec, status.enabled, status.pending) == (None, frozenset(), ())
    assert status.registered >= ALL_GROUPS
    assert status.owners["generation"] == "raytrace_rl"


def test_on_then_off(tmp_path: Path):
    """The status is that of the start, or outlives the shutdown."""
    with running(tmp_path / "run", span_groups="default"):
        status = span_group_status()
        assert status.spec == "default"
        assert status.enabled == PRESETS["default"]
        assert status.pending == ()
    assert span_group_status().enabled == frozenset()
    assert span_group_status().spec is None


def test_pending_words_become_enabled_groups(tmp_path: Path):
    """Nobody can find out which word of a spec is misspelt, or waits for a library that is not imported yet."""
    with running(tmp_path / "run", span_groups="job, Theirs,jbo"):
        before = span_group_status()
        assert before.pending == ("theirs", "jbo")
        assert before.enabled == {"job"}
        assert "theirs" not in before.owners
        register_span_groups("their_lib", ["theirs"])
        after = span_group_status()
        assert after.pending == ("jbo",)
        assert after.enabled == {"job", "theirs"}
        assert after.owners["theirs"] == "their_lib"
        assert after.registered - before.registered == {"theirs"}


def test_the_first_claimant_is_the_owner():
    """A second claimant of a group takes it over in the diagnostics, where its bucket and status are the first's."""
    register_span_groups("one", ["shared"])
    register_span_groups("two", ["shared"])
    assert span_group_status().owners["shared"] == "one"


def test_a_status_is_of_its_moment(tmp_path: Path):
    """A status that was kept changes later, or can be used to change the registry."""
    status = span_group_status()
    register_span_groups("one", ["later"])
    assert "later" not in status.registered
    assert "later" not in status.owners
    with pytest.raises(TypeError):
        status.owners["mine"] = "me"  # type: ignore[index]


def test_retuned(tmp_path: Path):
    """The status tells what was configured and not what a retuning has put in force."""
    with running(tmp_path / "run", span_groups="all"):
        span_groups.apply_spec("none")
        assert span_group_status().enabled == frozenset()
        assert span_group_status().spec == "none"
