from __future__ import annotations

import logging
import logging.config
import os
import threading
from contextlib import contextmanager

import pytest

from raytrace_rl import _state, logs, managed_span
from raytrace_rl.monitor import load_run
from tests.running import attributes, child, plain
from tests.signals_running import log_records, signals


@pytest.fixture
def bridged(tmp_path):
    """Telemetry with the log bridge."""
    with signals(tmp_path / "run", logs_enabled=True) as started:
        yield started


@pytest.fixture
def logger():
    """A logger that lets everything through."""
    found = logging.getLogger("my.module")
    found.setLevel(logging.DEBUG)
    yield found
    found.setLevel(logging.NOTSET)


@contextmanager
def bare():
    """Logging as a program finds it that has configured nothing: pytest's own handlers are put aside."""
    ours = [handler for handler in logging.root.handlers if handler is logs._handler]
    before, logging.root.handlers[:] = list(logging.root.handlers), ours
    try:
        yield logging.root
    finally:
        logging.root.handlers[:] = before


def bodies(run_dir):
    """The messages that the bridge kept."""
    return [plain(record.body) for _, record in log_records(run_dir)]


def test_a_record_is_tied_to_the_span_that_is_current(bridged, logger):
    """Catches logs that stand beside the trace, with no way from one to the other."""
    with managed_span("generation", "rl.x.y") as span:
        logger.info("inside")
    logger.info("outside")
    (name, inside), (_, outside) = log_records(bridged.run_dir)
    assert (name, plain(inside.body)) == ("my.module", "inside")
    assert (inside.trace_id, inside.span_id, inside.flags) == (span.trace_id, span.span_id, 1)
    assert outside.trace_id == b""
    assert attributes(inside)["code.function.name"] == "test_a_record_is_tied_to_the_span_that_is_current"


def test_a_record_is_in_the_file_when_the_call_returns(bridged, logger):
    """Catches a queue between the log call and the spool: ``ray.kill`` would lose the last words of a worker."""
    logger.warning("last words")
    assert bodies(bridged.run_dir) == ["last words"]


def test_levels_of_loggers_hold(bridged, logger):
    """Catches a bridge that records what the program has switched off."""
    logger.setLevel(logging.ERROR)
    logger.warning("no")
    logger.error("yes")
    assert bodies(bridged.run_dir) == ["yes"]


@pytest.mark.parametrize("name", ["raytrace_rl", "raytrace_rl.x", "opentelemetry.sdk", "grpc._channel", "urllib3.pool"])
def test_it_is_deaf_to_telemetrys_own_loggers(bridged, name):
    """Catches the loop of an exporter that logs that it failed to export its own log."""
    logging.getLogger(name).error("me")
    logging.getLogger(name.split(".")[0] + "_of_mine").error("you")
    assert bodies(bridged.run_dir) == ["you"]


class Chatty:
    """An object that logs when it is turned into text."""

    def __str__(self):
        logging.getLogger("my.module").info("within")
        return "text"


def test_a_record_that_logs_while_it_is_made_into_text(bridged, logger):
    """Catches endless recursion; what is left out is counted."""
    logger.info("a %s", Chatty())
    found = bodies(bridged.run_dir)
    assert found.count("a text") == 1
    assert _state.drops["logs"] >= 1


class Hostile:
    """An object without a text."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def test_a_record_that_cannot_be_encoded_is_counted_and_the_program_goes_on(bridged, logger):
    """Catches telemetry that raises at a log call."""
    with bare():
        logger.info(Hostile())
        logger.info("after")
    assert bodies(bridged.run_dir) == ["after"]
    assert bridged.drops == {"logs": 1}


def test_a_record_too_large_for_the_spool_loses_its_extras(bridged, logger):
    """Catches a record that is lost for a few huge ``extra=`` values."""
    logger.info("kept", extra={f"x{i}": "y" * 60_000 for i in range(30)})
    assert bodies(bridged.run_dir) == ["kept"]
    assert bridged.drops == {"attributes": 1}


def test_what_the_spool_refuses_is_counted(bridged, logger, monkeypatch):
    """Catches logs that vanish without a count when the disk is full."""
    monkeypatch.setattr(_state, "writer", None)
    logger.info("lost")
    assert _state.drops["logs"] == 1
    assert _state.drops["bytes"] > 0


def test_the_handler_goes_with_telemetry(tmp_path, logger):
    """Catches a handler, or a patched function, that stays behind after the shutdown."""
    handlers, basic_config = list(logging.root.handlers), logging.basicConfig
    for attempt in range(2):  # starting again works
        with signals(tmp_path / str(attempt), logs_enabled=True) as started:
            logs.start()  # once more changes nothing
            assert len(logging.root.handlers) == len(handlers) + 1
            logger.info("run %d", attempt)
        assert logging.root.handlers == handlers
        assert logging.basicConfig is basic_config
        assert bodies(started.run_dir) == [f"run {attempt}"]
    logger.info("nobody hears")


def test_without_logs_enabled_nothing_is_touched(tmp_path, logger):
    """Catches a bridge that is on without being asked for."""
    handlers = list(logging.root.handlers)
    with signals(tmp_path / "run") as started:
        assert logging.root.handlers == handlers
        logger.info("x")
    assert log_records(started.run_dir) == []


def test_warnings_of_a_program_without_handlers_are_still_printed(bridged, capsys):
    """Catches a program whose warnings are no longer on the terminal because logging finds our handler."""
    silent = logging.getLogger("silent")
    own = logging.StreamHandler()
    with bare():
        silent.warning("look out")
        silent.info("not this")
        silent.addHandler(own)
        silent.warning("once")
        silent.removeHandler(own)
    assert capsys.readouterr().err.splitlines() == ["look out", "once"]


def test_basic_config_works_as_without_telemetry(bridged, capsys):
    """Catches ``logging.basicConfig`` doing nothing, or closing our handler, since the root logger has one."""
    with bare() as root:
        for force in (False, True):
            logging.basicConfig(format="<%(message)s>", force=force)
            assert len(root.handlers) == 2
            assert logs._handler in root.handlers
            logging.getLogger("x").warning("said")
    assert capsys.readouterr().err.splitlines() == ["<said>", "<said>"]
    assert bodies(bridged.run_dir) == ["said", "said"]


def test_it_comes_back_after_a_program_configures_logging_anew(bridged, logger):
    """Catches ``dictConfig`` silently ending the bridge."""
    with bare() as root:
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "root": {"level": "WARNING"}})
        assert logs._handler not in root.handlers
        logs.ensure()
        logs.ensure()
        assert root.handlers == [logs._handler]
        logger.info("again")
    assert bodies(bridged.run_dir) == ["again"]


def test_ensure_does_nothing_while_it_is_off():
    """Catches a beat after the shutdown that puts the handler back."""
    with bare() as root:
        logs.ensure()
        assert root.handlers == []


def test_many_threads(bridged, logger):
    """Catches records of threads that overwrite each other."""

    def work(n):
        for i in range(50):
            logger.info("%d.%d", n, i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(bodies(bridged.run_dir)) == sorted(f"{n}.{i}" for n in range(4) for i in range(50))


def test_a_forked_child_logs_under_its_own_process(tmp_path):
    """Catches a child whose logs are lost, written into the parent's file, or that hangs on a lock it inherited."""
    child(
        """
        import logging, os, sys
        from raytrace_rl import logs, setup
        setup.init_telemetry_driver({"enabled": True, "run_dir": sys.argv[1], "logs_enabled": True})
        logs.start()
        logging.getLogger("x").warning("parent")
        pid = os.fork()
        logging.getLogger("x").warning("child" if pid == 0 else "after")
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        """,
        tmp_path / "run",
    )
    found = {(row.body, row.process.pid) for row in load_run(tmp_path / "run").logs}
    assert {body for body, _ in found} == {"parent", "child", "after"}
    by_body = dict(found)
    assert by_body["parent"] == by_body["after"] != by_body["child"]
    assert os.getpid() not in by_body.values()
