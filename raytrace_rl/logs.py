"""The log bridge: records of the standard library's logging, tied to the current span, in the spool.

A handler on the root logger, so that it respects every logger's level, and is deaf to what telemetry itself logs. It
must not change what a program sees of its own logging: where it is the only handler, what logging would have printed
without it is printed, and ``logging.basicConfig`` works as if it were not there.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any, Final

from opentelemetry import trace

from raytrace_rl import _clock, _encode_logs, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.spool.format import MAX_PAYLOAD, Kind

#: Loggers of telemetry and of what exporters stand on: their records would come back for ever.
DEAF_TO: Final = ("raytrace_rl", "opentelemetry", "grpc", "urllib3", "requests")
_DEAF_PREFIXES: Final = tuple(f"{name}." for name in DEAF_TO)


class _Busy(threading.local):
    inside = False


_busy: Final = _Busy()


class SpoolHandler(logging.Handler):
    """Encodes each record and places it in the spool. Never raises; counts what it drops."""

    def createLock(self) -> None:  # noqa: N802 - logging's own name
        """Makes no lock: placing is safe from every thread and handler, and a lock would be held across forks."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Takes a record, without the lock that the base class holds meanwhile."""
        if not self.filter(record):
            return False
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Places a record in the spool."""
        self._stand_in_for_last_resort(record)
        if record.name in DEAF_TO or record.name.startswith(_DEAF_PREFIXES):
            return
        if _busy.inside:  # an object in the record logs while it is turned into text
            _state.count_drop("logs")
            return
        _busy.inside = True
        try:
            self._place(record)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.count_drop("logs")
            _state.warn_once("logs", "A log record of %r could not be kept: %r", record.name, error)
        finally:
            _busy.inside = False

    def _place(self, record: logging.LogRecord) -> None:
        context = trace.get_current_span().get_span_context()
        span = (context.trace_id, context.span_id, int(context.trace_flags)) if context.is_valid else None
        payload = _encode_logs.scope_logs(record, _clock.now_ns(), span)
        if len(payload) > MAX_PAYLOAD:
            payload = _encode_logs.scope_logs(record, _clock.now_ns(), span, extras=False)
            _state.count_drop("attributes")
        writer = _state.writer
        if writer is None or not writer.append(Kind.LOGS, payload):
            _state.count_drop("logs")
            _state.count_drop("bytes", len(payload))

    def _stand_in_for_last_resort(self, record: logging.LogRecord) -> None:
        """Prints what logging prints where no handler is found, since it now finds this one."""
        last = logging.lastResort
        if last is None or record.levelno < last.level:
            return
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        last.handle(record)


_handler: Final = SpoolHandler()
_active = False
#: ``basicConfig`` runs, and must not see the handler.
_configuring = False
_basic_config: Any = None


def start() -> None:
    """Bridges the root logger to the spool. Again, while it does already, nothing changes. Never raises."""
    global _active
    _active = True
    _attach()
    _wrap_basic_config()


def ensure() -> None:
    """Puts the handler back where a program has configured logging anew (``logging.config.dictConfig`` removes it)."""
    if _active and not _configuring and _handler not in logging.root.handlers:
        _attach()


def stop() -> None:
    """Ends the bridge and leaves no handler behind. Never raises."""
    global _active
    _active = False
    logging.root.removeHandler(_handler)
    _unwrap_basic_config()


def _attach() -> None:
    logging.root.addHandler(_handler)


def _wrap_basic_config() -> None:
    """Has ``logging.basicConfig`` not see our handler: it does nothing where the root logger has any."""
    global _basic_config
    if _basic_config is not None:
        return
    original = logging.basicConfig

    @functools.wraps(original)
    def basic_config(**kwargs: Any) -> None:
        global _configuring
        _configuring = True
        logging.root.removeHandler(_handler)
        try:
            original(**kwargs)
        finally:
            _configuring = False
            ensure()

    _basic_config = original
    logging.basicConfig = basic_config


def _unwrap_basic_config() -> None:
    global _basic_config
    original: Any = _basic_config
    _basic_config = None
    if original is not None and getattr(logging.basicConfig, "__wrapped__", None) is original:
        logging.basicConfig = original  # type: ignore[assignment]
