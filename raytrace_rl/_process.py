"""Telemetry of one process: opens its spool and starts its heartbeat, closes both, and begins anew after a fork.

`setup` decides whether, where and as whom; this is how.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace

from raytrace_rl import _clock, _control, _encode, _metrics_pipeline, _prompts, _state, logs, semconv
from raytrace_rl._deadline import run_until
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._provider import SpoolTracerProvider
from raytrace_rl._sinks import ConsoleSink, NoSink, NullSink, Sink
from raytrace_rl._span import RecordingSpan
from raytrace_rl.config import TelemetryConfig, capture_content, limits
from raytrace_rl.relay.asking import Asker
from raytrace_rl.resources import new_instance_id
from raytrace_rl.spool import seal
from raytrace_rl.spool.bound import default_bound
from raytrace_rl.spool.format import Kind
from raytrace_rl.spool.hang import SUFFIX, Watch
from raytrace_rl.spool.heartbeat import Heartbeat
from raytrace_rl.spool.liveness import Liveness
from raytrace_rl.spool.opentable import OpenTable
from raytrace_rl.spool.place import Place, settle
from raytrace_rl.spool.segment import no_segment
from raytrace_rl.spool.writer import SpoolWriter

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue


class Process:
    """What telemetry has started in this process.

    Attributes:
        config: The settings in force.
        resource: Who this process is.
        exporting: Spans really go somewhere.
    """

    def __init__(self, config: TelemetryConfig, resource: Mapping[str, AttributeValue]) -> None:
        """Opens the spool; where that fails, warns, and drops and counts. The gates stay as they are."""
        self.config = config
        self.resource: dict[str, AttributeValue] = dict(resource)
        self.exporting = False
        self.writer: SpoolWriter | None = None
        self._table: OpenTable | None = None
        self._liveness: Liveness | None = None
        self._heartbeat: Heartbeat | None = None
        #: What asks for the node's relay, if it needs one; None without a spool.
        self.asker: Asker | None = None
        self._sink: Sink = NoSink()
        self._open()

    def _open(self) -> None:
        config = self.config
        if sink_override is not None:
            self._sink = sink_override
            self.exporting = True
        elif config.exporter == "none":
            self._sink = NullSink()
        elif config.exporter == "console":
            self._sink = ConsoleSink()
            self.exporting = True
        else:
            try:
                self._open_spool(config)
            except OSError as error:
                self._discard()
                _state.warn_once(
                    f"run-dir:{config.run_dir}",
                    "Run directory %s cannot be used (%s): spans are dropped and counted. "
                    "Set RAYTRACE_RL_RUN_DIR to a directory that can be written.",
                    config.run_dir,
                    error,
                )
        _state.table = self._table
        _state.writer = self.writer if self.writer is not None else self._sink
        _state.segment = self.writer.segment if self.writer is not None else no_segment()
        _state.epoch += 1
        _state.open_spans = {}
        _state.pid = os.getpid()
        if self._heartbeat is not None:
            try:
                self._heartbeat.start()
            except RuntimeError as error:  # no more threads for this process, or the interpreter shuts down
                _state.warn_once("heartbeat-start", "No heartbeat (%s): spans are kept, open ones only by name.", error)

    def _open_spool(self, config: TelemetryConfig) -> None:
        if config.run_dir is None:
            raise OSError("no run directory was settled")
        place = settle(config.run_dir, config.spool_dir)
        said = config.spool_max_mib << 20 if config.spool_max_mib is not None else None
        bound = said if said is not None else default_bound(place.directory)
        self.writer = writer = SpoolWriter(place, _encode.resource(self.resource), bound_bytes=bound)
        path, link = writer.paths(".live")
        self._liveness = Liveness(path)
        _link(path, link)
        writer.open()
        path, link = writer.paths(".open")
        self._table = OpenTable(path, writer.header(0))
        _link(path, link)
        if config.run_id is not None:
            self.asker = Asker(
                place.directory,
                config.run_id,
                idle_s=config.relay_idle_s,
                bound_bytes=bound,
                home_bytes=said,
                sends=config.exporter == "otlp",
                receives=config.otlp_receiver,
                # Such as an engine's process: a child of one of Ray's workers, which is not part of the cluster itself.
                of_worker="RAY_RAYLET_PID" in os.environ and self.resource.get(semconv.RL_ROLE) != semconv.ROLE_DRIVER,
            )
        self._heartbeat = Heartbeat(
            writer,
            self._table,
            interval_s=config.heartbeat_s,
            stack_after_s=config.stack_after_s,
            each_beat=self._companions(config),
            watch=self._watch(writer, config),
        )
        self.exporting = True

    @staticmethod
    def _watch(writer: SpoolWriter, config: TelemetryConfig) -> Watch | None:
        after_s = max(config.stack_after_s, 5 * config.heartbeat_s)  # a busy machine may be late with a beat or two
        try:
            path, link = writer.paths(SUFFIX)
            watch = Watch(path, after_s)
            _link(path, link)
            return watch
        except OSError:  # the full disk, or whatever it is, is warned of where it costs spans
            return None

    def _companions(self, config: TelemetryConfig) -> list[Callable[[], None]]:
        """Returns what the heartbeat does besides: none of it blocks."""
        found: list[Callable[[], None]] = [_metrics_pipeline.tick, logs.ensure]
        if self.asker is not None:
            found.append(self.asker.tick)
        if config.traces_enabled and config.run_dir is not None:
            found.append(_control.Control(config.run_dir, config.span_groups).check)
        return found

    def _discard(self) -> None:
        """Undoes a spool that could be opened only in part."""
        writer, table, liveness = self.writer, self._table, self._liveness
        self.writer = self._table = self._liveness = self._heartbeat = self.asker = None
        self.exporting = False
        if table is not None:
            table.close()
        if writer is not None:
            for suffix in (".open", SUFFIX, ".live", ".0.rts"):
                _remove(writer, suffix)
        if liveness is not None:
            liveness.release()

    def describe(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Completes who this process is: a resource record now, and the header of every segment to come."""
        self.resource.update(attributes)
        encoded = _encode.resource(self.resource)
        writer = self.writer
        if writer is not None and encoded != writer.resource:
            writer.resource = encoded
            writer.append(Kind.RESOURCE, encoded)

    def close(self, deadline: float) -> None:
        """Ends what is open, closes the gates and the spool.

        Args:
            deadline: `time.monotonic` moment to be done by. Spans are safe long before: what may wait for a slow disk
                is only sealing, which a reader can do without.
        """
        # The gates first: a span that another thread opened behind `end_open_spans` would be neither kept nor counted.
        _state.tracing = False
        _state.enabled = frozenset()
        end_open_spans()
        run_until(deadline, lambda: self._close(deadline), "raytrace_rl-close")
        _state.tracing = False  # once more: the last beat may have put a change of the control file into force
        _state.enabled = frozenset()
        _state.epoch += 1
        _state.open_spans = {}
        _state.segment = no_segment()
        _state.writer = None
        _state.table = None

    def _close(self, deadline: float) -> None:
        writer = self.writer
        if writer is None:
            return
        try:
            if self._heartbeat is not None:
                self._heartbeat.stop(max(0.1, (deadline - monotonic()) / 2))
            writer.settle()
            if any(_state.drops.values()):
                writer.append(Kind.DROPS, drops_record())
            if self._table is not None:
                self._table.close()
            writer.close()
            for suffix in (".open", SUFFIX, ".live"):
                _remove(writer, suffix)
            if self._liveness is not None:
                self._liveness.release()
        except Exception as error:
            _state.warn_once("close", "The spool in %s could not be closed cleanly: %r", writer.place.directory, error)

    def adopt_orphans(self, deadline: float) -> None:
        """Brings home what dead processes of this node left in a tmpfs.

        Args:
            deadline: `time.monotonic` moment to be done by; what is not home then stays readable where it is.
        """
        writer = self.writer
        if writer is not None:
            run_until(deadline, lambda: _adopt(writer.place), "raytrace_rl-close")

    def forget_after_fork(self) -> None:
        """In a forked child: lets go of what is the parent's."""
        if self._liveness is not None:
            with contextlib.suppress(OSError):
                self._liveness.forget()
        if self.asker is not None:
            self.asker.forget()


class _ForkedSink:
    """What a forked child has until its first span or record; then it opens a spool of its own, and idle ones none."""

    def __init__(self, parent: Process) -> None:
        self.parent = parent
        self._lock = threading.RLock()

    def open_spool(self) -> Sink | None:
        """Opens the child's spool unless that is done; returns it, or None where there can be none."""
        global current
        with self._lock:
            if _state.writer is self:
                resource = {
                    **self.parent.resource,
                    semconv.RL_ROLE: semconv.ROLE_WORKER,  # a run has one driver, whoever forks from it
                    semconv.PROCESS_PID: os.getpid(),
                    semconv.SERVICE_INSTANCE_ID: new_instance_id(),
                    semconv.PROCESS_PARENT_PID: os.getppid(),
                }
                open_spans, epoch = _state.open_spans, _state.epoch
                current = Process(self.parent.config, resource)
                if _state.handle is not None:
                    _state.handle.moved_to(current)
                # Spans that this child has begun already are of the epoch that the fork began.
                _state.open_spans, _state.epoch = open_spans, epoch
                for span in list(open_spans):
                    if isinstance(span, RecordingSpan):  # another library's has no entry in the table
                        span.enter_table()
        writer: Sink | None = _state.writer
        return writer if writer is not self else None

    def append_record(self, record: bytes) -> bool:
        """Opens the child's spool and places the record in it."""
        sink = self.open_spool()
        return sink is not None and sink.append_record(record)

    def append(self, kind: int, payload: bytes) -> bool:
        """Opens the child's spool and places the record in it."""
        sink = self.open_spool()
        return sink is not None and sink.append(kind, payload)


#: What runs in this process; None while telemetry is off.
current: Process | None = None
#: Takes every record instead of what the configuration names; `raytrace_rl.testing` alone sets it.
sink_override: Sink | None = None


def start(config: TelemetryConfig, resource: Mapping[str, AttributeValue]) -> Process:
    """Starts telemetry in this process and makes it the current one."""
    global current
    for kind in _state.DROP_KINDS:
        _state.drops[kind] = 0
    found = limits()
    _encode.value_length_limit = found.value_length
    _encode.attribute_count_limit = found.attributes
    _encode.event_count_limit = found.events
    _encode.link_count_limit = found.links
    _state.capture_content = capture_content()
    _encode.clear_caches()
    _state.static_cache.clear()
    _state.config = config
    _prompts.forget()
    current = Process(config, resource)
    if config.traces_enabled:
        install_provider(current.resource)
    _metrics_pipeline.start(config)
    if config.logs_enabled and config.exporter != "none":
        logs.start()
    return current


def stop(deadline: float) -> None:
    """Stops telemetry in this process, by the `time.monotonic` moment ``deadline``; nothing happens if it is off."""
    global current
    process, current = current, None
    if process is not None:
        logs.stop()
        _metrics_pipeline.stop((monotonic() + deadline) / 2)
        process.close(deadline)


def install_provider(resource: Mapping[str, Any]) -> None:
    """Sees to it that SDK spans reach the spool: through the provider that is installed, else through one of ours."""
    try:
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            trace.set_tracer_provider(SpoolTracerProvider(resource))
            return
        if isinstance(provider, SpoolTracerProvider):
            return
        add = getattr(provider, "add_span_processor", None)
        if add is None:
            _state.warn_once(
                "provider",
                "The TracerProvider that is installed (%s) takes no span processor: its spans stay out of the spool.",
                type(provider).__name__,
            )
        elif id(provider) not in _joined:
            from raytrace_rl import _foreign

            add(_foreign.SpoolSpanProcessor())
            _joined[id(provider)] = provider
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("provider", "Spans of other instrumentation cannot be kept: %r", error)


#: Providers that have our processor, by id; held, so that an id is not reused.
_joined: Final[dict[int, Any]] = {}


def end_open_spans() -> None:
    """Ends every open span of this process, innermost first, marked truncated."""
    now = _clock.now_ns()
    for span in reversed(list(_state.open_spans)):
        try:
            span.truncate(now)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.count_drop("spans")


def drops_record() -> bytes:
    """Returns the payload of a DROPS record."""
    import json

    return json.dumps(_state.drops).encode()


def _adopt(place: Place) -> None:
    try:
        seal.adopt_orphans(place.directory)
        seal.remove_leftovers(place)
    except Exception as error:
        _state.warn_once("adopt", "What killed processes left in %s stays there: %r", place.active, error)


def _link(path: str, link: str) -> None:
    if path != link:
        Path(link).symlink_to(path)


def _remove(writer: SpoolWriter, suffix: str) -> None:
    for path in set(writer.paths(suffix)):
        with contextlib.suppress(OSError):
            Path(path).unlink()


def _after_fork_in_child() -> None:
    global current
    process, current = current, None
    if process is not None:
        process.forget_after_fork()
    elif isinstance(_state.writer, _ForkedSink):
        process = _state.writer.parent  # a child without a spool of its own yet has forked in its turn
    else:
        return
    _state.epoch += 1
    _state.open_spans = {}
    _state.segment = no_segment()
    _state.table = None
    for kind in _state.DROP_KINDS:
        _state.drops[kind] = 0
    _state.writer = _ForkedSink(process)


os.register_at_fork(after_in_child=_after_fork_in_child)
