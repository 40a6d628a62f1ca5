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
        if not any(self._boot_id):
            self._boot_id = boot_id(self.files)
        return self._boot_id

    def close(self) -> None:
        """Closes what is open."""
        for follower in self.followers.values():
            follower.close()


def boot_id(files: ProcessFiles) -> bytes:
    """Returns the boot id in the first header of a process that can be read, zeros where there is none."""
    for path in [*files.segments.values(), *files.journals.values(), files.slots]:
        if path is not None:
            try:
                return parse_header(read_whole(path, MAX_HEADER_SIZE)).boot_id
            except (UnreadableFileError, ValueError):
                continue
    return bytes(16)
