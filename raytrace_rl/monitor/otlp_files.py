"""Adds an OTLP traces file to a run: JSON lines, or protobuf as a collector's file exporter or our export writes it.

The JSON form is that of the OTLP specification ("JSON Protobuf Encoding"): ids are hexadecimal, other bytes base64,
64-bit integers strings; names in lowerCamelCase, and snake_case is taken too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Final

from raytrace_rl import _decode, semconv
from raytrace_rl.monitor import otlp_json
from raytrace_rl.monitor.builder import identify
from raytrace_rl.monitor.model import SCOPE_NAME, UnreadableRunError
from raytrace_rl.spool.reader import Damage

if TYPE_CHECKING:
    from pathlib import Path

    from raytrace_rl.monitor.builder import Builder

#: How a compressed file begins, or, behind its length, a message of a collector's file exporter.
_PACKED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
#: The longest line or message taken; anything longer is reported as damage.
MAX_MESSAGE: Final = 256 << 20


def add_file(builder: Builder, path: Path) -> None:
    """Adds the file at ``path``. What cannot be read becomes damage.

    Raises:
        UnreadableRunError: It cannot be opened.
    """
    try:
        if not path.is_file():  # a pipe would hang
            raise UnreadableRunError(f"{path}: not a regular file")
        with path.open("rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()  # a byte order mark, which JSON may have
            file.seek(0)
            for magic, packer in _PACKED.items():
                if head.startswith(magic) or head.startswith(magic, 4):
                    raise UnreadableRunError(f"{path}: is compressed ({packer}): unpack it first")
            if head[:1] == b"{" and head[1:].lstrip()[:1] in (b'"', b"}"):
                _add_json(builder, str(path), file)
            elif path.stat().st_size <= _TRIED or _may_be_protobuf(file.read(16)):
                file.seek(0)
                _add_protobuf(builder, str(path), file.read())
            else:
                raise UnreadableRunError(f"{path}: neither a spool file nor OTLP, as JSON lines or protobuf")
            if not builder.has_spans and builder.run.damage:
                builder.requests = 0  # what it may hold besides is no trace
    except OSError as error:
        raise UnreadableRunError(f"{path}: cannot be read: {error.strerror or error}") from None


#: A message of so many bytes may say nothing at all: a batch without a field.
_EMPTY: Final = 2
#: A file of at most this many bytes is read whatever it begins with.
_TRIED: Final = 64 << 20


def _may_be_protobuf(head: bytes) -> bool:
    """True if a file may be a request, or one behind its length: field 1 comes first. Looked at before it is read."""
    if head[:1] == b"\x0a" or not head:
        return True
    at = next((n for n, byte in enumerate(head[:10]) if byte < 0x80), None)
    return at is not None and head[at + 1 : at + 2] in (b"\x0a", b"")


def _add_json(builder: Builder, path: str, file: IO[bytes]) -> None:
    offset = 0
    first = True
    while line := file.readline(MAX_MESSAGE):
        size = len(line)
        if not line.endswith(b"\n") and size == MAX_MESSAGE:
            while (more := file.readline(MAX_MESSAGE)) and not more.endswith(b"\n"):
                size += len(more)
            size += len(more)
            builder.damage(Damage(path, offset, size, f"line of more than {MAX_MESSAGE} bytes"))
        elif line.strip():
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                if first and (message := _whole_document(file)) is not None:
                    _add_message(builder, path, 0, size, message)
                    return
                builder.damage(Damage(path, offset, size, f"not JSON: {error}"))
            else:
                _add_message(builder, path, offset, size, message)
            first = False
        offset += size


def _whole_document(file: IO[bytes]) -> object | None:
    """A file that is one JSON document spread over lines; leaves the file where it was if it is not."""
    at = file.tell()
    file.seek(0)
    data = file.read(MAX_MESSAGE + 1)
    file.seek(at)
    if len(data) > MAX_MESSAGE:
        return None
    try:
        return json.loads(data)  # type: ignore[no-any-return]
    except (ValueError, RecursionError):
        return None


def _add_message(builder: Builder, path: str, offset: int, size: int, message: object) -> None:
    try:
        batches = otlp_json.resource_spans(message)
    except (ValueError, TypeError, RecursionError) as error:
        builder.damage(Damage(path, offset, size, f"not an OTLP message: {error}", "payload"))
        return
    builder.requests += 1
    for batch in batches:
        _add_batch(builder, path, offset, batch)


def _add_batch(builder: Builder, path: str, offset: int, batch: _decode.ResourceSpans) -> None:
    process = builder.process(_lane(batch.resource))
    identify(process, {**process.resource, **batch.resource})
    for scope, spans in batch.scopes:
        kept_scope = None if scope.name == SCOPE_NAME else scope
        for span in spans:
            try:
                builder.add(span, process, kept_scope)
            except ValueError as error:
                builder.damage(Damage(path, offset, 0, str(error), "payload"))


def _lane(resource: _decode.Attributes) -> str:
    """Which process sent it: its instance id, else everything that its resource says."""
    instance = resource.get(semconv.SERVICE_INSTANCE_ID)
    if isinstance(instance, str) and instance:
        return instance
    text = json.dumps(resource, sort_keys=True, default=repr)
    return "resource-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _add_protobuf(builder: Builder, path: str, data: bytes) -> None:
    """Takes the framing under which most of the file makes sense: none, a varint, or four bytes big-endian."""
    framings = (list(_fields(data)), list(_delimited(data)), list(_prefixed(data)))
    frames = max(framings, key=lambda frames: frames[-1][1] if frames else 0)
    end = 0
    for start, stop in frames:
        end = stop
        try:
            batches = _decode.request(data[start:stop])
        except (ValueError, RecursionError) as error:
            builder.damage(Damage(path, start, stop - start, f"not an OTLP message: {error}", "payload"))
            continue
        # Other files of messages (Perfetto's) have the same framing, and in them none of the fields.
        told = [batch for batch in batches if batch.resource or batch.scopes]
        if batches and not told and stop - start > _EMPTY:
            builder.damage(Damage(path, start, stop - start, "not an OTLP traces message", "payload"))
            continue
        builder.requests += bool(batches)
        for batch in told:
            _add_batch(builder, path, start, batch)
    if end < len(data):
        builder.damage(Damage(path, end, len(data) - end, "not an OTLP traces message"))


def _varint(data: bytes, at: int) -> tuple[int, int] | None:
    value = shift = 0
    for pos in range(at, min(at + 5, len(data))):
        value |= (data[pos] & 0x7F) << shift
        if data[pos] < 128:
            return value, pos + 1
        shift += 7
    return None


def _is_request(data: bytes, start: int, stop: int) -> bool:
    """Whether the bytes are a sequence of length-delimited fields number 1, which is all that a request has."""
    while start < stop:
        if data[start] != 0x0A or (length := _varint(data, start + 1)) is None:
            return False
        start = length[1] + length[0]
    return start == stop


def _fields(data: bytes) -> Iterator[tuple[int, int]]:
    """One request without a length: each ResourceSpans is taken by itself, so that a torn end costs only the last."""
    at = 0
    while at < len(data) and data[at] == 0x0A and (length := _varint(data, at + 1)) is not None:
        stop = length[1] + length[0]
        if stop > len(data):
            return
        yield at, stop
        at = stop


def _delimited(data: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(data) and (length := _varint(data, at)) is not None:
        start, stop = length[1], length[1] + length[0]
        if stop > len(data) or not _is_request(data, start, stop):
            return
        yield start, stop
        at = stop


def _prefixed(data: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + 4 <= len(data):
        start = at + 4
        stop = start + int.from_bytes(data[at:start], "big")
        if stop > len(data) or not _is_request(data, start, stop):
            return
        yield start, stop
        at = stop
