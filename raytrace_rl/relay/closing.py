"""The segment that a process proven dead gets at home: the spans that it left open, closed, since nobody can prove the
death there, and the stacks that its heartbeat took in them.
"""

from __future__ import annotations

from raytrace_rl.relay.follow import Follower
from raytrace_rl.relay.raw import span_ids
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool.listing import ProcessFiles
from raytrace_rl.spool.reader import Cursor


def segment(files: ProcessFiles, number: int, spans: list[bytes]) -> bytes:
    """Returns a sealed segment of a process with these spans."""
    follower = Follower(files.segments[max(files.segments)]) if files.segments else None
    resource = (follower.resource() if follower is not None else None) or b""
    known = follower.header if follower is not None else None
    header = fmt.Header(
        size=0,
        heartbeat_ns=known.heartbeat_ns if known is not None else files.start_ns,
        span_count=len(spans),
        dropped_spans=known.dropped_spans if known is not None else 0,
        sealed=True,
        pid=files.pid,
        number=number,
        start_ns=files.start_ns,
        wall_anchor_ns=known.wall_anchor_ns if known is not None else files.start_ns,
        monotonic_anchor_ns=known.monotonic_anchor_ns if known is not None else 0,
        boot_id=known.boot_id if known is not None else bytes(16),
        resource=resource,
    )
    records = [*_stacks(files, spans), *(fmt.pack_record(fmt.Kind.SPAN, span) for span in spans)]
    return fmt.pack_header(header) + b"".join(records)


def _stacks(files: ProcessFiles, spans: list[bytes]) -> list[bytes]:
    """Returns the last STACK record of each span, and of the threads without one."""
    wanted = {fmt.NO_SPAN, *map(span_ids, spans)}
    found: dict[bytes, bytes] = {}
    for _, path in sorted(files.journals.items()):
        with Cursor(path) as cursor:
            for record in cursor.poll(final=True):
                if record.kind == fmt.Kind.STACK and (ids := record.payload[:24]) in wanted:
                    found[ids] = fmt.pack_record(fmt.Kind.STACK, record.payload)
    return list(found.values())
