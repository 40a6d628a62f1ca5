"""The segment that a process proven dead gets at home: the spans that it left open, closed, since nobody can prove the
death there.
"""

from __future__ import annotations

from raytrace_rl.relay.follow import Follower
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool.listing import ProcessFiles


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
    return fmt.pack_header(header) + b"".join(fmt.pack_record(fmt.Kind.SPAN, span) for span in spans)
