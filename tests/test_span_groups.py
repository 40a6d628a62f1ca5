"""Span groups: which there are, who claims them, and which a spec enables, now or when its owner comes."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl import _registry, _state, span_groups
from raytrace_rl.buckets import Bucket
from raytrace_rl.instrumentation import is_span_group_enabled, managed_span, umbrella_span
from raytrace_rl.span_groups import (
    ALL_GROUPS,
    PER_PROMPT_GROUPS,
    PRESETS,
    UMBRELLA_GROUPS,
    RLSpanGroup,
    pending_words,
    register_span_groups,
    resolve,
    split_spec,
)
from tests.disks import warnings_of
from tests.running import Telemetry, attributes, running

pytest_plugins = ["tests.telemetry_fixtures"]
pytestmark = pytest.mark.usefixtures("registrations")

UMBRELLAS = {"job", "step", "rollout", "model_init", "evaluate", "setup", "per_prompt"}
PRODUCTIVE = {"generation", "reward", "policy_update"}
OVERHEAD = {"logprob", "advantage", "data_processing", "data_plane", "checkpoint"}


def test_the_documented_groups():
    """A group of the documentation is missing, or has another string."""
    assert UMBRELLAS | PRODUCTIVE | OVERHEAD | {"efficiency"} == ALL_GROUPS
    assert UMBRELLA_GROUPS == UMBRELLAS
    for name in UMBRELLAS:
        assert getattr(RLSpanGroup, name.upper()) == getattr(RLSpanGroup, f"U_{name.upper()}") == name
    assert {"per_prompt"} == PER_PROMPT_GROUPS


def test_default_buckets():
    """A group's time is counted in the wrong bucket."""
    for group in PRODUCTIVE:
        assert _registry.default_bucket(group) == "productive"
    for group in OVERHEAD:
        assert _registry.default_bucket(group) == "overhead"
    for group in UMBRELLAS:
        assert _registry.default_bucket(group) is None
    assert _registry.default_bucket("somebody's") == "overhead"


def test_presets():
    """A preset enables too much, or too little: without the job carriers start empty."""
    default = {"job", "checkpoint", "evaluate", "setup", "model_init"}
    assert resolve("default") == PRESETS["default"] == default
    assert resolve("per_step") == ALL_GROUPS - PER_PROMPT_GROUPS
    assert resolve("all") >= ALL_GROUPS
    assert resolve("none") == resolve("") == frozenset()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("generation", {"generation"}),
        ("Generation , REWARD", {"generation", "reward"}),
        ("DEFAULT,generation", {"job", "checkpoint", "evaluate", "setup", "model_init", "generation"}),
        ("reward,,reward,", {"reward"}),
        ("none,reward", {"reward"}),
        ("per_prompt", {"per_prompt"}),
    ],
)
def test_specs_are_unions_whatever_their_case(spec: str, expected: set[str]):
    """A comma union, a blank, or an upper-case word has no effect."""
    assert resolve(spec) == expected


@given(st.text(st.sampled_from("aA ,x_-.é"), max_size=30))
def test_any_spec(spec: str):
    """Some text in a spec ends the run."""
    words = split_spec(spec)
    assert len(words) == len(set(words))
    assert all(word == word.strip().lower() for word in words)
    assert resolve(spec) <= _registry.owners.keys()
    assert set(pending_words(spec)) <= set(words)


def test_spec_in_force(telemetry: Telemetry):
    """A group is on or off only for a part of the library."""
    assert is_span_group_enabled("generation")
    assert not is_span_group_enabled("GENERATION")  # groups are their lower-case strings
    assert not is_span_group_enabled("somebody's")
    span_groups.apply_spec("reward")
    assert not is_span_group_enabled("generation")
    with managed_span("generation", "off") as off, managed_span("reward", "on") as on:
        assert off is None
        assert on is not None


def test_all_reaches_what_a_library_registers_later(telemetry: Telemetry):
    """``all`` means what was known when telemetry started."""
    assert not is_span_group_enabled("theirs.decode")
    register_span_groups("theirs", ["theirs.decode"])
    assert is_span_group_enabled("theirs.decode")
    with managed_span("theirs.decode", "s"):
        pass
    assert attributes(telemetry.span("s"))["rl.bucket"] == "overhead"


def test_pending_word_takes_effect_when_its_owner_comes(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A library that is imported after telemetry has started never records, or nobody learns of a misspelt word."""
    with running(tmp_path / "run", span_groups="job, Theirs, theirs_preset, jbo"):
        assert len([message for message in warnings_of(caplog) if "'theirs'" in message]) == 1
        assert pending_words("job, Theirs, theirs_preset, jbo") == ["theirs", "theirs_preset", "jbo"]
        assert _state.enabled == {"job"}
        register_span_groups("lib", ["theirs", "one", "two"], {"theirs_preset": ["one", "two"]})
        assert _state.enabled == {"job", "theirs", "one", "two"}
        assert pending_words("job, Theirs, theirs_preset, jbo") == ["jbo"]
        register_span_groups("other", ["three"])
        assert len(warnings_of(caplog)) == 3  # each word once
    assert _state.enabled == frozenset()


def test_registration_while_telemetry_is_off_switches_nothing_on(tmp_path: Path):
    """An import after the shutdown opens the gates again."""
    with running(tmp_path / "run"):
        pass
    register_span_groups("lib", ["theirs"])
    register_span_groups()
    assert _state.enabled == frozenset()


def test_registration_with_traces_off(tmp_path: Path):
    """``traces_enabled=False`` records spans of libraries that register late."""
    with running(tmp_path / "run", traces_enabled=False) as telemetry:
        register_span_groups("lib", ["theirs"])
        assert _state.enabled == frozenset()
        with managed_span("theirs", "s") as span:
            assert span is None
        assert telemetry.spans() == []


def test_group_of_a_library(telemetry: Telemetry):
    """A library's own buckets and umbrellas have no effect, in whatever case they are written."""
    register_span_groups(
        "lib",
        ["Lib.Decode", "lib.wait", "lib.round", "lib.odd"],
        buckets={"lib.decode": Bucket.PRODUCTIVE, "LIB.WAIT": "Idle", "lib.odd": "no bucket"},
        umbrellas=["LIB.ROUND"],
    )
    with umbrella_span("lib.round", "round"), managed_span("lib.decode", "decode"), managed_span("lib.wait", "wait"):
        pass
    with managed_span("lib.odd", "odd"):
        pass
    found = {span.name: attributes(span).get("rl.bucket") for span in telemetry.spans()}
    assert found == {"round": None, "decode": "productive", "wait": "idle", "odd": "overhead"}


def test_groups_of_a_class(telemetry: Telemetry):
    """A class of constants, as `RLSpanGroup` is one, registers its methods, or nothing."""

    class Groups:
        DECODE = "lib.decode"
        U_ROUND = ROUND = "lib.round"
        SIZE = 3
        lower = "not one"

        def METHOD(self) -> None:  # noqa: N802 - to be mistaken for a constant
            pass

    register_span_groups("lib", Groups, umbrellas=[Groups.ROUND])
    assert {group for group, owner in _registry.owners.items() if owner == "lib"} == {"lib.decode", "lib.round"}
    assert _registry.is_umbrella("lib.round")


def test_enumeration_of_groups():
    """Members of an enumeration of strings are registered by another string than the one that spans use."""

    class Groups(str, enum.Enum):
        DECODE = "lib.decode"

    register_span_groups("lib", list(Groups))
    assert _registry.owners.get("lib.decode") == "lib"


def test_one_string_is_one_group(caplog: pytest.LogCaptureFixture):
    """``groups="decode"`` registers the six letters."""
    register_span_groups("lib", "decode", {"mine": "decode"}, umbrellas="decode")
    assert {group for group, owner in _registry.owners.items() if owner == "lib"} == {"decode"}
    assert resolve("mine") == {"decode"}
    assert _registry.is_umbrella("decode")
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    "given_wrong",
    [
        {"groups": [1, None, "good"]},
        {"groups": 5},
        {"groups": ["good"], "presets": {"p": [2, "good"], 7: ["good"]}},
        {"groups": ["good"], "buckets": {3: "idle", "good": object()}},
        {"groups": ["good"], "umbrellas": [object()]},
        {"namespace": 3, "groups": ["good"]},
    ],
)
def test_rubbish_is_a_warning(given_wrong: dict[str, Any], caplog: pytest.LogCaptureFixture):
    """A mistake in one library's registration, at its import, ends the run."""
    register_span_groups(**{"namespace": "lib", **given_wrong})
    assert given_wrong["groups"] == 5 or "good" in _registry.owners
    assert len(warnings_of(caplog)) <= 2
    assert caplog.records or given_wrong.get("namespace") == 3


def test_a_presets_member_that_nobody_registered_waits_for_its_owner(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
):
    """A preset names a group that does not exist: spans of it record all the same, with whatever bucket, in silence."""
    register_span_groups(
        "lib", ["lib.decode"], {"mine": ["lib.decode", "lib.later", "generation"], "default": ["lib.x"]}
    )
    span_groups.apply_spec("mine")
    assert resolve("mine") == {"lib.decode", "generation"}
    with managed_span("lib.later", "too early"), managed_span("lib.decode", "decode"):
        pass
    (warning,) = warnings_of(caplog)
    assert "'mine'" in warning
    assert "'lib.later'" in warning
    assert span_groups.span_group_status().pending == ("lib.later",)
    assert span_groups.pending_words("default,lib.x,mine") == ["lib.x", "lib.later"]
    register_span_groups("other", ["lib.later"], buckets={"lib.later": "idle"})
    assert span_groups.span_group_status().pending == ()
    with managed_span("lib.later", "in time"):
        pass
    assert [span.name for span in telemetry.spans()] == ["decode", "in time"]
    assert attributes(telemetry.span("in time"))["rl.bucket"] == "idle"


def test_two_claimants_share_and_are_named(telemetry: Telemetry, caplog: pytest.LogCaptureFixture):
    """Two libraries use one name and nobody learns of it; or the second changes what the first's spans mean."""
    register_span_groups("first", ["shared"], buckets={"shared": "productive"})
    register_span_groups("second", ["shared", "own"], buckets={"shared": "idle"}, umbrellas=["shared"])
    register_span_groups("second", ["shared"])
    (warning,) = warnings_of(caplog)
    assert "'shared'" in warning
    assert "'first'" in warning
    assert "'second'" in warning
    assert is_span_group_enabled("own")
    with managed_span("shared", "s"):
        pass
    assert attributes(telemetry.span("s"))["rl.bucket"] == "productive"
    register_span_groups("third", ["generation"])
    assert "'raytrace_rl'" in warnings_of(caplog)[-1]


def test_registering_again_is_harmless(caplog: pytest.LogCaptureFixture):
    """Each import of a module that registers warns, or doubles something."""
    before = (dict(_registry.owners), set(_registry.umbrellas), dict(_registry.buckets), dict(_registry.presets))
    for _ in range(3):
        register_span_groups()
        register_span_groups("lib", ["theirs"], {"default": ["theirs"]})
        register_span_groups("lib", ["theirs"], {"default": ["theirs"]})
    assert warnings_of(caplog) == []
    assert _registry.owners == {**before[0], "theirs": "lib"}
    assert (_registry.umbrellas, _registry.buckets) == before[1:3]
    assert _registry.presets == {**before[3], "default": before[3]["default"] | {"theirs"}}


def test_a_library_extends_a_preset(tmp_path: Path):
    """A library's groups cannot be had with ``per_step``."""
    register_span_groups("lib", ["lib.decode"], {"Per_Step": ["LIB.decode"]})
    assert resolve("per_step") == ALL_GROUPS - PER_PROMPT_GROUPS | {"lib.decode"}
    assert resolve("default") == PRESETS["default"]


def test_only_all_reaches_per_prompt_groups():
    """A preset enables spans whose count grows with the prompts."""
    register_span_groups("lib", ["x"], {"default": ["per_prompt", "x"], "mine": ["per_prompt"]})
    assert "per_prompt" not in resolve("default,per_step,mine")
    assert "per_prompt" in resolve("all")
    assert "per_prompt" in resolve("default,per_prompt")  # asked for by name


def test_registration_changes_the_bucket_of_spans_to_come(telemetry: Telemetry):
    """A name seen before its group was registered keeps the bucket of an unknown group."""
    span_groups.apply_spec("all,lib.decode")
    _state.enabled = _state.enabled | {"lib.decode"}
    with managed_span("lib.decode", "s"):
        pass
    register_span_groups("lib", ["lib.decode"], buckets={"lib.decode": Bucket.PRODUCTIVE})
    with managed_span("lib.decode", "s"):
        pass
    assert [attributes(span)["rl.bucket"] for span in telemetry.spans()] == ["overhead", "productive"]


def test_umbrella_on_a_leaf_group(telemetry: Telemetry, caplog: pytest.LogCaptureFixture):
    """A leaf opened as an umbrella has no bucket, and its time is in no account; or ``managed_span`` gives one to an
    umbrella, and its time counts twice.
    """
    for _ in range(3):
        with umbrella_span("generation", "leaf"):
            pass
    with managed_span("evaluate", "umbrella"):
        pass
    assert [attributes(span).get("rl.bucket") for span in telemetry.spans()] == ["productive"] * 3 + [None]
    assert len([message for message in warnings_of(caplog) if "umbrella_span" in message]) == 1


@pytest.mark.parametrize("name", ["all", "none", "generation"])
def test_a_preset_that_a_spec_cannot_mean_is_left_out_with_a_warning(name, caplog):
    """Catches a library's preset that takes the place of a core group, so that asking for it switches the group off."""
    register_span_groups("lib", ["own"], {name: ["own"]})
    assert resolve("generation") == {"generation"}
    assert f"Preset {name!r} of 'lib' is left out" in caplog.text


@pytest.mark.parametrize("name", ["all", "none", "default", "a,b"])
def test_a_group_that_a_spec_cannot_name_is_left_out_with_a_warning(name, caplog):
    """Catches a group that no spec can switch on."""
    register_span_groups("lib", [name])
    assert "cannot be named in a spec" in caplog.text
    assert name not in resolve("all")


def test_two_libraries_share_a_preset_with_a_warning(caplog):
    """Catches one library's preset that silently switches on another's spans."""
    register_span_groups("one", ["a1"], {"mine": ["a1"]})
    register_span_groups("two", ["b1"], {"mine": ["b1"], "per_step": ["b1"]})
    assert resolve("mine") == {"a1", "b1"}
    assert "was registered by 'one' before" in caplog.text
    assert "per_step" not in caplog.text
