"""Settings: where they come from, which source wins, and what a bad value does."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.config import (
    ConfigError,
    Limits,
    Projection,
    RankIdentity,
    TelemetryConfig,
    capture_content,
    forwarded_env,
    limits,
    projection,
    rank_identity,
    resolve,
    resource_attributes,
    sdk_disabled,
    to_env,
)

FIELDS = [field.name for field in dataclasses.fields(TelemetryConfig)]

#: For each field: a value that is not its default, and its text in an environment.
OTHER = {
    "enabled": (True, "yes"),
    "service_name": ("trainer", "trainer"),
    "span_groups": ("per_step,generation", " per_step , generation "),
    "traces_enabled": (False, "off"),
    "metrics_enabled": (False, "0"),
    "logs_enabled": (True, "TRUE"),
    "exporter": ("otlp", "OTLP"),
    "run_dir": ("/runs/a", "/runs/a"),
    "run_id": ("exp-7", "exp-7"),
    "vllm_native_tracing": (True, "on"),
    "trace_per": ("step", "Step"),
    "spool_dir": ("/dev/shm/spool", "/dev/shm/spool"),
    "heartbeat_s": (0.25, "0.25"),
    "stack_after_s": (0.0, "0"),
    "spool_max_mib": (512, "512"),
    "otlp_receiver": (True, "on"),
    "relay_idle_s": (2.5, "2.5"),
    "per_prompt_limit": (8, "8"),
}

#: For each field that can be wrong: a value from code and a text from an environment that it must refuse.
BAD = {
    "enabled": (2, "maybe"),
    "service_name": (7, "a\x07b"),
    "span_groups": (["a", 3], "per_step,,"),
    "traces_enabled": (None, "tru"),
    "metrics_enabled": ("", "2"),
    "logs_enabled": (1.0, "enabled"),
    "exporter": ("file", "oltp"),
    "run_dir": (3, "a\0b"),
    "run_id": ("a/b", "../up"),
    "vllm_native_tracing": ([], "nope"),
    "trace_per": (None, "rollout"),
    "spool_dir": (b"/x", "\0"),
    "heartbeat_s": (0, "fast"),
    "stack_after_s": (math.inf, "nan"),
    "spool_max_mib": (0.5, "1_000"),
    "otlp_receiver": ([], "nope"),
    "relay_idle_s": (0, "never"),
    "per_prompt_limit": (-1, "few"),
}


@pytest.fixture(autouse=True)
def _nothing_projected():
    """Takes a test's projections back, so that the next one starts without."""
    yield
    projection.restore()


def test_tables_cover_every_field():
    """Catches a new field that the tests of all fields would silently leave out."""
    assert list(OTHER) == FIELDS
    assert list(BAD) == FIELDS


def test_defaults_are_the_documented_ones():
    """Catches a default that changes by accident: off, to the spool, one heartbeat a second."""
    assert TelemetryConfig() == TelemetryConfig(
        enabled=False,
        service_name="raytrace-rl",
        span_groups="default",
        traces_enabled=True,
        metrics_enabled=True,
        logs_enabled=False,
        exporter="spool",
        run_dir=None,
        run_id=None,
        vllm_native_tracing=False,
        trace_per="auto",
        spool_dir=None,
        heartbeat_s=1.0,
        stack_after_s=60.0,
        spool_max_mib=None,
        otlp_receiver=False,
        relay_idle_s=30.0,
        per_prompt_limit=None,
    )


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("prefix", ["RAYTRACE_RL_", "NEMO_RL_OTEL_"])
def test_environment_beats_code(field, prefix):
    """Catches a field that cannot be set from outside without editing the program."""
    value, text = OTHER[field]
    in_code = TelemetryConfig(span_groups="all", exporter="none", trace_per="run", heartbeat_s=2.0)
    assert getattr(resolve(in_code, strict=True, environ={prefix + field.upper(): text}), field) == value


@pytest.mark.parametrize("field", FIELDS)
def test_code_beats_the_default(field):
    """Catches a field whose value from a YAML file is dropped."""
    value, _ = OTHER[field]
    assert getattr(resolve({field: value}, strict=True, environ={}), field) == value


def test_our_prefix_beats_nemo_rl_s_and_opentelemetry_s():
    """Catches the two prefixes, or the standard variables, being read in the wrong order."""
    environ = {"OTEL_RESOURCE_ATTRIBUTES": "service.name=resource"}
    order = ["OTEL_SERVICE_NAME", "NEMO_RL_OTEL_SERVICE_NAME", "RAYTRACE_RL_SERVICE_NAME"]
    assert resolve({"service_name": "code"}, strict=True, environ=environ).service_name == "resource"
    for variable in order:
        environ[variable] = variable.lower()
        assert resolve({"service_name": "code"}, strict=True, environ=environ).service_name == variable.lower()


def test_an_empty_variable_counts_as_unset():
    """Catches ``RAYTRACE_RL_EXPORTER=`` in a launch script turning into a bad value or hiding NeMo-RL's variable."""
    environ = {"RAYTRACE_RL_EXPORTER": "", "NEMO_RL_OTEL_EXPORTER": "console", "RAYTRACE_RL_HEARTBEAT_S": ""}
    assert resolve(strict=True, environ=environ) == TelemetryConfig(exporter="console")


@pytest.mark.parametrize("field", FIELDS)
def test_bad_value_in_code_is_an_error_that_names_it(field):
    """Catches a bad value that is used as it is, or an error from which a user cannot tell what to change."""
    value, _ = BAD[field]
    with pytest.raises(ConfigError) as raised:
        TelemetryConfig(**{field: value})
    assert field in str(raised.value)
    assert repr(value) in str(raised.value)
    assert "allowed" in str(raised.value)


@pytest.mark.parametrize("field", FIELDS)
def test_bad_variable_is_an_error_on_the_driver(field):
    """Catches a typo in a launch script that only shows when the run has no trace."""
    variable, text = f"RAYTRACE_RL_{field.upper()}", BAD[field][1]
    with pytest.raises(ConfigError) as raised:
        resolve(strict=True, environ={variable: text})
    assert f"{variable}={text!r}" in str(raised.value)
    assert "allowed" in str(raised.value)


@pytest.mark.parametrize("field", FIELDS)
def test_bad_variable_in_a_worker_is_one_warning_and_the_default(field, caplog):
    """Catches a worker that dies of, or says nothing about, a bad variable of its node."""
    variable, text = f"RAYTRACE_RL_{field.upper()}", BAD[field][1]
    given_value, _ = OTHER[field]
    for _ in range(2):
        config = resolve({field: given_value}, strict=False, environ={variable: text})
        assert config == TelemetryConfig(**{field: given_value})
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert variable in caplog.text


def test_bad_configuration_in_a_worker_is_a_warning_and_the_defaults(caplog):
    """Catches ``resolve(strict=False)`` raising for what the program gave."""
    assert resolve({"exporter": "file"}, strict=False, environ={}) == TelemetryConfig()
    assert resolve(42, strict=False, environ={}) == TelemetryConfig()
    assert len(caplog.records) == 2


def test_unknown_key_is_an_error_that_names_the_closest():
    """Catches a misspelt YAML key that is silently ignored."""
    with pytest.raises(ConfigError, match=r"'span_group' is no telemetry setting: did you mean span_groups\?"):
        TelemetryConfig.from_any({"enabled": True, "span_group": "all"})
    with pytest.raises(ConfigError, match="'zzz' is no telemetry setting"):
        TelemetryConfig.from_any({"zzz": 1})


def test_misspelt_variable_is_a_warning(caplog):
    """Catches a variable with our prefix that has no effect and that nobody mentions."""
    environ = {"RAYTRACE_RL_SPANGROUPS": "all", "RAYTRACE_RL_WORKER_GROUP": "g", "RAYTRACE_RL_CAPTURE_CONTENT": "1"}
    assert resolve(strict=True, environ=environ) == TelemetryConfig()
    (record,) = caplog.records
    assert "RAYTRACE_RL_SPANGROUPS" in record.getMessage()
    assert "RAYTRACE_RL_SPAN_GROUPS" in record.getMessage()


@dataclasses.dataclass
class _Section:
    enabled: bool = True
    exporter: str = "console"


class _Slots:
    __slots__ = ("telemetry",)

    def __init__(self, telemetry):
        self.telemetry = telemetry


@pytest.mark.parametrize(
    "config",
    [
        TelemetryConfig(enabled=True, exporter="console"),
        {"enabled": True, "exporter": "console", "run_dir": None},
        _Section(),
        SimpleNamespace(enabled=True, exporter="console", _private=1),
        {"telemetry": {"enabled": True, "exporter": "console"}, "policy": {"lr": 1}},
        {"telemetry": _Section()},
        SimpleNamespace(telemetry=_Section(), policy=1),
        _Slots({"enabled": True, "exporter": "console"}),
    ],
    ids=["config", "mapping", "dataclass", "namespace", "master mapping", "mixed", "master object", "slots"],
)
def test_every_documented_form_is_understood(config):
    """Catches a form of configuration that a framework uses and that would be refused or read as empty."""
    assert TelemetryConfig.from_any(config) == TelemetryConfig(enabled=True, exporter="console")


def test_pydantic_models_are_understood():
    """Catches pydantic's own attributes being taken for settings: NeMo-RL's configuration is such a model."""
    section = pydantic.create_model("Section", enabled=(bool, True), exporter=(str, "console"))
    master = pydantic.create_model("Master", telemetry=(section, section()), policy=(dict, {}))
    expected = TelemetryConfig(enabled=True, exporter="console")
    assert TelemetryConfig.from_any(section()) == expected
    assert TelemetryConfig.from_any(master()) == expected


@pytest.mark.parametrize(
    "config", [None, {}, {"telemetry": None}, {"policy": {"lr": 1}, "seed": 3}, SimpleNamespace(telemetry=None)]
)
def test_a_configuration_without_settings_has_the_defaults(config):
    """Catches a master configuration without a telemetry section being refused for its other sections."""
    assert TelemetryConfig.from_any(config) == TelemetryConfig()


@pytest.mark.parametrize(
    "config", [None, {}, {"telemetry": None}, {"policy": {"lr": 1}}, SimpleNamespace(telemetry={})]
)
def test_a_caller_s_defaults_fill_what_is_not_named(config):
    """Catches a session that stays off, or refuses a master configuration, because its own defaults do not reach it."""
    defaults = {"enabled": True, "span_groups": "per_step"}
    assert TelemetryConfig.from_any(config, **defaults) == TelemetryConfig(**defaults)
    assert TelemetryConfig.from_any({"enabled": False}, **defaults) == TelemetryConfig(span_groups="per_step")
    assert TelemetryConfig.from_any(TelemetryConfig(), **defaults) == TelemetryConfig()


@pytest.mark.parametrize("config", [42, "per_step", ["enabled"], TelemetryConfig, lambda: None])
def test_what_is_no_configuration_is_an_error(config):
    """Catches a forgotten call or a string in the wrong place that would switch telemetry off without a word."""
    with pytest.raises(ConfigError, match="mapping of its fields"):
        TelemetryConfig.from_any(config)


def test_nemo_rl_s_rank_selection_is_accepted_with_a_warning(caplog):
    """Catches a NeMo-RL configuration that would have to be edited to move over."""
    config = TelemetryConfig.from_any({"enabled": True, "export_strategy": "single_rank", "export_rank": -1})
    assert config == TelemetryConfig(enabled=True)
    assert "export_strategy" in caplog.text
    assert "export_rank" in caplog.text


def test_values_are_brought_into_one_form():
    """Catches YAML's other spellings of a value: a list of groups, a number as run id, a Path, the home directory."""
    config = TelemetryConfig.from_any(
        {"span_groups": ["per_step", "generation"], "run_id": 4711, "run_dir": Path("/a/b"), "spool_dir": "~/spool"}
    )
    assert config.span_groups == "per_step,generation"
    assert config.run_id == "4711"
    assert config.run_dir == "/a/b"
    assert config.spool_dir == str(Path.home() / "spool")


@pytest.mark.parametrize("run_id", ["..", ".hidden", "-rf", "a/b", "a b", "a\nb", "x" * 129, True, 1.5])
def test_a_run_id_that_is_no_directory_name_is_refused(run_id):
    """Catches a run id that would leave the runs directory, hide in it, or be no name at all."""
    with pytest.raises(ConfigError):
        TelemetryConfig(run_id=run_id)


_texts = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
_valid = st.builds(
    TelemetryConfig,
    enabled=st.booleans(),
    service_name=_texts,
    span_groups=st.lists(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), min_size=1).map(",".join),
    traces_enabled=st.booleans(),
    metrics_enabled=st.booleans(),
    logs_enabled=st.booleans(),
    exporter=st.sampled_from(["spool", "otlp", "console", "none"]),
    run_dir=st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    run_id=st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True),
    vllm_native_tracing=st.booleans(),
    trace_per=st.sampled_from(["auto", "run", "step"]),
    spool_dir=st.none() | st.just("/tmp/caf\udce9"),
    heartbeat_s=st.floats(0.01, 3600),
    stack_after_s=st.floats(0, 1e9),
    spool_max_mib=st.none() | st.integers(1, 2**40),
    otlp_receiver=st.booleans(),
    relay_idle_s=st.floats(1, 1e9),
    per_prompt_limit=st.none() | st.integers(0, 2**40),
)


@given(_valid)
def test_a_worker_reads_back_what_the_driver_projects(config):
    """Catches a value that changes, or is refused, on its way through the environment to a worker."""
    environ = to_env(config)
    assert all(os.fsencode(text) for text in environ.values())
    assert resolve(strict=True, environ=environ) == config


_anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.text())


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), _anything | st.dictionaries(_texts, _anything)))
def test_from_any_gives_a_valid_configuration_or_a_config_error(values):
    """Catches any other exception, and any instance that could not be projected to a worker."""
    try:
        config = TelemetryConfig.from_any(values)
    except ConfigError:
        return
    assert resolve(strict=True, environ=to_env(config)) == config


@given(st.sampled_from(FIELDS), st.text())
def test_no_text_in_a_variable_breaks_a_worker(field, text):
    """Catches a value of the environment that raises out of ``resolve`` where a worker calls it."""
    environ = {f"RAYTRACE_RL_{field.upper()}": text}
    assert isinstance(resolve(strict=False, environ=environ), TelemetryConfig)


def test_projected_values_are_not_read_back_as_the_user_s(monkeypatch):
    """Catches a second start in one process that finds the first one's settings instead of its own."""
    monkeypatch.setenv("RAYTRACE_RL_EXPORTER", "console")
    first = resolve({"span_groups": "all"}, strict=True)
    assert first == TelemetryConfig(span_groups="all", exporter="console")
    projection.project(os.environ, to_env(first))
    assert os.environ["RAYTRACE_RL_SPAN_GROUPS"] == "all"
    assert resolve({"span_groups": "per_step"}, strict=True) == TelemetryConfig(
        span_groups="per_step", exporter="console"
    )


def test_what_the_user_sets_after_the_projection_counts(monkeypatch):
    """Catches a projection that hides a later, deliberate change of the same variable, or undoes it at shutdown."""
    projection.project(os.environ, {"RAYTRACE_RL_SPAN_GROUPS": "all"})
    monkeypatch.setenv("RAYTRACE_RL_SPAN_GROUPS", "per_step")
    assert resolve(strict=True).span_groups == "per_step"
    projection.restore()
    assert os.environ["RAYTRACE_RL_SPAN_GROUPS"] == "per_step"


def test_restore_puts_the_environment_back_exactly(monkeypatch):
    """Catches a variable left behind, or the user's own value lost, after one or several projections."""
    monkeypatch.setenv("RAYTRACE_RL_EXPORTER", "console")
    before = dict(os.environ)
    for groups in ("all", "per_step"):
        projection.project(os.environ, to_env(TelemetryConfig(span_groups=groups, exporter="none", run_dir="/r")))
    projection.project(os.environ, to_env(TelemetryConfig(span_groups="default")))
    assert "RAYTRACE_RL_RUN_DIR" not in os.environ
    projection.restore()
    projection.restore()
    assert dict(os.environ) == before


def test_a_child_process_honours_what_it_inherited():
    """Catches workers that ignore the driver's settings, because they take them for a projection of their own."""
    projection.project(os.environ, to_env(TelemetryConfig(span_groups="all", heartbeat_s=0.5)))
    code = "from raytrace_rl.config import resolve; c = resolve(strict=True); print(c.span_groups, c.heartbeat_s)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["all", "0.5"]


def test_a_forked_child_honours_what_it_inherited_and_restores_nothing():
    """Catches a forked child that takes its parent's projection for its own, or undoes it for its own children."""
    projection.project(os.environ, {"RAYTRACE_RL_SPAN_GROUPS": "all"})
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            seen = resolve(strict=True).span_groups
            projection.restore()
            os.write(writer, f"{seen} {os.environ.get('RAYTRACE_RL_SPAN_GROUPS')}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "all all"


def test_a_projection_into_another_mapping_leaves_the_process_alone():
    """Catches a runtime_env being built through ``os.environ``."""
    environ: dict[str, str] = {"RAYTRACE_RL_EXPORTER": "none"}
    mine = Projection()
    mine.project(environ, {"RAYTRACE_RL_EXPORTER": "otlp"})
    assert mine.user_value(environ, "RAYTRACE_RL_EXPORTER") == "none"
    assert "RAYTRACE_RL_EXPORTER" not in os.environ
    mine.restore()
    assert environ == {"RAYTRACE_RL_EXPORTER": "none"}


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), (" TRUE ", True), ("1", False), ("yes", False), ("", False)]
)
def test_sdk_disabled_follows_the_specification(text, expected):
    """Catches ``OTEL_SDK_DISABLED`` read by our own rules: only 'true' is true there."""
    assert sdk_disabled({"OTEL_SDK_DISABLED": text}) is expected
    assert sdk_disabled({}) is False


def test_capture_content_is_off_unless_clearly_on(caplog):
    """Catches prompts that are recorded because of a value that nobody meant as yes."""
    assert capture_content({"RAYTRACE_RL_CAPTURE_CONTENT": "1"})
    assert not capture_content({})
    assert not capture_content({"RAYTRACE_RL_CAPTURE_CONTENT": "0"})
    assert not capture_content({"RAYTRACE_RL_CAPTURE_CONTENT": "prompts"})
    assert "prompts" in caplog.text


def test_limits_take_the_span_s_own_variable_first(caplog):
    """Catches the standard limits ignored, read in the wrong order, or a bad one that ends the run."""
    assert limits({}) == Limits()
    environ = {
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "100",
        "OTEL_ATTRIBUTE_COUNT_LIMIT": "7",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "5",
        "OTEL_SPAN_EVENT_COUNT_LIMIT": "-1",
    }
    expected = Limits(value_length=100, attributes=5, event_attributes=7, link_attributes=7)
    assert limits(environ) == expected
    assert "OTEL_SPAN_EVENT_COUNT_LIMIT" in caplog.text
    assert limits({**environ, "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "50"}).value_length == 50


def test_rank_identity_reads_torchrun_s_variables_and_both_group_names(caplog):
    """Catches a rank that is lost, or a broken one that is believed."""
    environ = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "NRL_WORKER_GROUP": "policy"}
    assert rank_identity(environ) == RankIdentity(3, 1, 8, "policy")
    assert rank_identity({**environ, "RAYTRACE_RL_WORKER_GROUP": "actor"}).worker_group == "actor"
    assert rank_identity({}) == RankIdentity()
    assert rank_identity({"RANK": "-1", "LOCAL_RANK": "one", "WORLD_SIZE": str(2**63)}) == RankIdentity()
    assert len(caplog.records) == 3


def test_resource_attributes_are_read_as_specified(caplog):
    """Catches a percent-encoded comma that splits a value, and a half-read list: a broken one is discarded whole."""
    assert resource_attributes({"OTEL_RESOURCE_ATTRIBUTES": "a=1, b = x%2Cy%3Dz ,,c=d=e,"}) == {
        "a": "1",
        "b": "x,y=z",
        "c": "d=e",
    }
    assert resource_attributes({}) == {}
    assert resource_attributes({"OTEL_RESOURCE_ATTRIBUTES": "a=1,broken"}) == {}
    assert "broken" in caplog.text


@given(st.text())
def test_no_resource_attributes_break_a_process(text):
    """Catches text that raises out of the reader."""
    assert isinstance(resource_attributes({"OTEL_RESOURCE_ATTRIBUTES": text}), dict)


def test_forwarded_variables_hold_no_credentials():
    """Catches an API key that would stand in clear in Ray's logs of the runtime_env."""
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=secret",
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": "secret",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://user:secret@host",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317",
        "OTEL_RESOURCE_ATTRIBUTES": "team=rl",
        "RAYTRACE_RL_CAPTURE_CONTENT": "1",
        "OTEL_SERVICE_NAME": "",
        "PATH": "/bin",
    }
    assert forwarded_env(environ) == {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317",
        "OTEL_RESOURCE_ATTRIBUTES": "team=rl",
        "RAYTRACE_RL_CAPTURE_CONTENT": "1",
    }
