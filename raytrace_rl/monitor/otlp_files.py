"""Adds an OTLP traces file to a run: JSON lines, or protobuf as a collector's file exporter or our export writes it.

The JSON form is that of the OTLP specification ("JSON Protobuf Encoding"): ids are hexadecimal, other bytes base64,
64-bit integers strings; names in lowerCamelCase, and snake_case is taken too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING, Final

from raytrace_rl import _decode, semconv
from raytrace_rl.monitor import otlp_frames, otlp_json, otlp_parts, otlp_torn
from raytrace_rl.monitor.builder import identify
from raytrace_rl.monitor.model import SCOPE_NAME, UnreadableRunError
from raytrace_rl.spool.reader import MAX_DAMAGES, Damage

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
                _File(builder, str(path)).add_json(file)
            elif path.stat().st_size <= _TRIED or _may_be_protobuf(file.read(16)):
                file.seek(0)
                _File(builder, str(path)).add_protobuf(file.read())
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


class _File:
    """A file that is being added."""

    def __init__(self, builder: Builder, path: str) -> None:
        self.builder = builder
        self.path = path
        self._damaged = 0

    def damage(self, offset: int, size: int, reason: object, kind: str = "payload") -> None:
        """Notes what cannot be read; of very many, the later ones are summed up in the last."""
        self._damaged += 1
        if self._damaged <= MAX_DAMAGES:
            self.builder.damage(Damage(self.path, offset, size, str(reason), kind))
            return
        last = self.builder.run.damage[-1]
        reason = f"and {self._damaged - MAX_DAMAGES + 1} more damages from here on"
        count, skipped = last.count + 1, last.skipped + size
        self.builder.run.damage[-1] = replace(last, skipped=skipped, reason=reason, count=count)

    def add_json(self, file: IO[bytes]) -> None:
        """Adds lines of JSON, or one document that is spread over lines."""
        offset = 0
        first = True
        while line := file.readline(MAX_MESSAGE):
            size = len(line)
            if not line.endswith(b"\n") and size == MAX_MESSAGE:
                while (more := file.readline(MAX_MESSAGE)) and not more.endswith(b"\n"):
                    size += len(more)
                size += len(more)
                self.damage(offset, size, f"line of more than {MAX_MESSAGE} bytes", "record")
            elif line.strip():
                text = _text(line)
                try:
                    message = _parsed(text)
                except (ValueError, RecursionError) as error:
                    if first and self._add_document(file):
                        return
                    self._add_torn(offset, text, error)
                else:
                    self._add_message(offset, size, message)
                first = False
            offset += size

    def _add_document(self, file: IO[bytes]) -> bool:
        """Adds a file that is one JSON document, whole or not; leaves it where it was if it is none."""
        at = file.tell()
        file.seek(0)
        data = file.read(MAX_MESSAGE + 1)
        file.seek(at)
        if len(data) > MAX_MESSAGE:
            return False
        text = _text(data)
        try:
            message = _parsed(text)
        except (ValueError, RecursionError) as error:
            # Its first line alone, or, in a file of lines, the first one of them.
            begun = _text(data[:at])
            if "spanId" in begun or "span_id" in begun or not _a_document(text):
                return False
            self._add_torn(0, text, error)
        else:
            self._add_message(0, len(data), message)
        return True

    def _add_message(self, offset: int, size: int, message: object) -> None:
        def wrong(place: str, why: object) -> None:
            self.damage(offset, 0, f"{place}: {why}")

        try:
            batches = otlp_json.resource_spans(message, wrong)
        except (ValueError, RecursionError) as error:
            self.damage(offset, size, f"not an OTLP message: {error}")
            return
        self.builder.requests += 1
        for batch in batches:
            self._add_batch(batch)

    def _add_torn(self, offset: int, text: str, why: object) -> None:
        """Adds what is whole of a message that is no JSON."""
        noted = self._damaged
        place = _Place(text)

        def wrong(start: int, end: int, reason: object) -> None:
            self.damage(offset + place.of(start), place.length(start, end), f"not JSON: {reason}")

        batches = otlp_torn.spans_in(text, wrong)
        self.builder.requests += bool(batches)
        for batch in batches:
            self._add_batch(batch)
        if self._damaged == noted:
            self.damage(offset, 0 if batches else place.length(0, len(text)), f"not JSON: {why}", "record")

    def _add_batch(self, batch: _decode.ResourceSpans) -> None:
        process = self.builder.process(_lane(batch.resource))
        identify(process, {**process.resource, **batch.resource})
        for scope, spans in batch.scopes:
            kept_scope = None if scope.name == SCOPE_NAME else scope
            for span in spans:
                self.builder.add(span, process, kept_scope)

    def add_protobuf(self, data: bytes) -> None:
        """Adds requests, each behind its length, or one alone."""
        for start, stop, good, torn in otlp_frames.frames(data):
            if good and stop - start <= _EMPTY:
                self.builder.requests += stop > start
                continue
            wrong = otlp_parts.Wrong(partial(self.damage, kind="payload" if good else "record"))
            batches = (otlp_parts.request if good or torn else otlp_parts.among)(data, start, stop, wrong)
            # Other files of messages (Perfetto's) have the same framing, and in them none of the fields.
            told = [batch for batch in batches if batch.resource or batch.scopes]
            if not wrong.count and (not good or (batches and not told)):
                wrong(start, stop - start, "not an OTLP traces message")
            self.builder.requests += bool(told)
            for batch in told:
                self._add_batch(batch)


class _Place:
    """Where a character of a text lies, in bytes; asked from front to back."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ascii = text.isascii()
        self._last = 0, 0

    def of(self, at: int) -> int:
        """Returns it."""
        if self._ascii:
            return at
        character, byte = self._last if self._last[0] <= at else (0, 0)
        self._last = at, byte + self.length(character, at)
        return self._last[1]

    def length(self, start: int, end: int) -> int:
        """Returns how many bytes lie between two characters."""
        return end - start if self._ascii else len(self._text[start:end].encode("utf-8", "surrogateescape"))


def _text(data: bytes) -> str:
    """As text; what is no UTF-8 in it is refused where it stands (`otlp_json`)."""
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")


def _parsed(text: str) -> object:
    return json.loads(text, object_pairs_hook=otlp_json.object_of)


def _a_document(text: str) -> bool:
    """Whether no line of it is JSON by itself."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(line), dict):
                return False
    return True


def _lane(resource: _decode.Attributes) -> str:
    """Which process sent it: its instance id, else everything that its resource says."""
    instance = resource.get(semconv.SERVICE_INSTANCE_ID)
    if isinstance(instance, str) and instance:
        return instance
    text = json.dumps(resource, sort_keys=True, default=repr)
    return "resource-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
