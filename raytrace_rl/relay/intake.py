"""Puts what others send over OTLP into the spool of their run, as if the sender had a spool of its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from raytrace_rl import _clock, _decode, _encode, semconv
from raytrace_rl.relay import redaction, valid
from raytrace_rl.relay.raw import fields
from raytrace_rl.relay.requests import Signal
from raytrace_rl.spool.format import MAX_PAYLOAD, Header
from raytrace_rl.spool.liveness import Liveness
from raytrace_rl.spool.place import settle
from raytrace_rl.spool.writer import SpoolWriter

#: Senders that are told apart at a time; the one that has been silent for longest makes room.
_MOST_SENDERS: Final = 64
_ITEM: Final = 0x12
#: It stands in the header of each of the sender's segments, and in every request that its items go out in.
_LONGEST_RESOURCE: Final = 64 << 10


class Taken(NamedTuple):
    """What came of one request.

    Attributes:
        rejected: Items (spans, metrics, log records) that are too large for a spool.
        stored: The rest is in the spool; False if there was no room, and nothing is promised.
    """

    rejected: int
    stored: bool


class Received:
    """What a receiver has taken and refused; several threads add to it.

    Requests: ``requests`` taken; ``invalid``, no such request or type; ``too_large``, over HTTP (gRPC itself refuses
    them, unseen); ``unauthorised``; ``no_room``, which their sender sends again. Items: ``rejected``, over 1 MiB each.
    """

    _NAMES: Final = ("requests", "rejected", "invalid", "too_large", "unauthorised", "no_room")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(self._NAMES, 0)

    def add(self, name: str, n: int = 1) -> None:
        """Adds ``n`` to a count."""
        with self._lock:
            self._counts[name] += n

    def as_dict(self) -> dict[str, int]:
        """Returns the counts by name."""
        with self._lock:
            return dict(self._counts)


class _Writer(SpoolWriter):
    """A spool that does not say what its process has dropped: the relay does, once for all senders."""

    def header(self, number: int) -> Header:
        return replace(super().header(number), dropped_spans=0)

    def beat(self) -> None:
        with contextlib.suppress(ValueError, IndexError):  # rolled or closed just now
            self.segment.beat(_clock.now_ns(), 0)


class _Sender:
    """The spool of one sender, told apart by its ``Resource``."""

    def __init__(self, writer: SpoolWriter) -> None:
        self.writer = writer
        path, link = writer.paths(".live")
        self.liveness = Liveness(path)
        if path != link:
            Path(link).symlink_to(path)
        writer.open()

    def close(self) -> None:
        self.writer.settle()
        self.writer.close()
        for path in set(self.writer.paths(".live")):
            Path(path).unlink(missing_ok=True)
        self.liveness.release()


class Intake:
    """The spools of everybody who sends to a node's receiver.

    Args:
        run_dir: The run directory.
        run_id: The run.
        bound_bytes: What the node's spools may take together.
        capture_content: String attributes pass that by their key hold content.

    Attributes:
        counts: What was taken and refused.
        stems: Names in the spool that only stand for senders: the relay in which they live does not live on for them.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], run_id: str, bound_bytes: int, *, capture_content: bool = False
    ) -> None:
        self._run_dir = os.fspath(run_dir)
        self._run_id = run_id
        self._bound_bytes = bound_bytes
        self._capture_content = capture_content
        self._senders: OrderedDict[bytes, _Sender] = OrderedDict()
        self._lock = threading.Lock()
        self.counts = Received()
        self.stems: set[str] = set()

    def take(self, signal: Signal, request: bytes) -> Taken:
        """Stores one export request.

        Raises:
            ValueError: The bytes are no such request.
            OSError: A spool cannot be made.
        """
        records: list[tuple[bytes, bytes]] = []
        rejected = 0
        for resource, scope in _scopes(request):
            if len(resource) > _LONGEST_RESOURCE:
                raise ValueError(f"a resource of more than {_LONGEST_RESOURCE} bytes")
            valid.check(resource, valid.RESOURCE)
            valid.check(scope, valid.SCOPES[signal.name])
            if not self._capture_content and signal.name != "metrics":
                scope = redaction.spans(scope) if signal.name == "traces" else redaction.logs(scope)  # noqa: PLW2901
            payloads, lost = _fitting(scope)
            records += [(resource, payload) for payload in payloads]
            rejected += lost
        stored = True
        with self._lock:
            for resource, payload in records:
                stored = self._sender(resource).writer.append(signal.scoped, payload) and stored
        self.counts.add("requests" if stored else "no_room")
        self.counts.add("rejected", rejected)
        return Taken(rejected, stored)

    def tend(self) -> None:
        """What a heartbeat does for a process: to be called about once a second."""
        with self._lock:
            for sender in self._senders.values():
                sender.writer.beat()
                sender.writer.prepare_next()
                sender.writer.seal_full()

    def close(self) -> None:
        """Closes all spools."""
        with self._lock:
            while self._senders:
                self._senders.popitem()[1].close()

    def _sender(self, resource: bytes) -> _Sender:
        sender = self._senders.get(resource)
        if sender is not None:
            self._senders.move_to_end(resource)
            return sender
        if len(self._senders) >= _MOST_SENDERS:
            self._senders.popitem(last=False)[1].close()
        known = _decode.resource(resource)
        missing = {semconv.RL_RUN_ID: self._run_id, semconv.RL_ROLE: semconv.ROLE_WORKER}
        whole = resource + _encode.resource({key: value for key, value in missing.items() if key not in known})
        writer = _Writer(settle(self._run_dir), whole, bound_bytes=self._bound_bytes)
        self.stems.add(writer.stem)
        sender = self._senders[resource] = _Sender(writer)
        return sender


def _scopes(request: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields each scope message of an export request, with its resource."""
    for tag, _, at, stop in fields(request):
        if tag != 0x0A:
            continue
        group = request[at:stop]
        resource: list[bytes] = []
        scopes = []
        for inner, _, start, end in fields(group):
            if inner == 0x0A:
                resource.append(group[start:end])
            elif inner == 0x12:
                scopes.append(group[start:end])
        whole = b"".join(resource)
        for scope in scopes:
            yield whole, scope


def _fitting(scope: bytes) -> tuple[list[bytes], int]:
    """Returns a scope message in pieces that a record holds, and how many of its items none can hold."""
    if len(scope) <= MAX_PAYLOAD:
        return [scope], 0
    head: list[bytes] = []
    items: list[bytes] = []
    for tag, start, _, stop in fields(scope):
        (items if tag == _ITEM else head).append(scope[start:stop])
    room = MAX_PAYLOAD - sum(map(len, head))
    pieces: list[list[bytes]] = []
    size = rejected = 0
    for item in items:
        if len(item) > room:
            rejected += 1
            continue
        if not pieces or size + len(item) > room:
            pieces.append([])
            size = 0
        pieces[-1].append(item)
        size += len(item)
    return [b"".join([*head, *piece]) for piece in pieces], rejected
