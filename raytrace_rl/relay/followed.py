"""One process that is being followed: its files, how far they are read, and whether it lives."""

from __future__ import annotations

from raytrace_rl.relay.follow import Follower
from raytrace_rl.spool import liveness
from raytrace_rl.spool.format import MAX_HEADER_SIZE, parse_header
from raytrace_rl.spool.listing import ProcessFiles
from raytrace_rl.spool.reader import UnreadableFileError, read_whole


class FollowedProcess:
    """One process that is being followed."""

    __slots__ = ("_boot_id", "closed", "files", "final_listing", "followers", "over", "resource", "state")

    def __init__(self, files: ProcessFiles) -> None:
        self.files = files
        self.followers: dict[int, Follower] = {}
        self.resource = b""
        self.state: liveness.State = "unknown"
        self.over = False
        #: The listing from which on no segment of it can be missing: the first one made after its death.
        self.final_listing = 0
        #: Its open spans, closed for it; None as long as it lives.
        self.closed: list[bytes] | None = None
        self._boot_id = b""

    def boot_id(self) -> bytes:
        """The boot id in the first header that can be read, zeros as long as there is none."""
        files = self.files
        for path in [*files.segments.values(), *files.journals.values(), files.slots] if not self._boot_id else []:
            if path is None:
                continue
            try:
                self._boot_id = parse_header(read_whole(path, MAX_HEADER_SIZE)).boot_id
                break
            except (UnreadableFileError, ValueError):
                continue
        return self._boot_id or bytes(16)

    def close(self) -> None:
        """Closes what is open."""
        for follower in self.followers.values():
            follower.close()
