"""The memory of what this process wrote into its own environment.

A driver writes its settings into ``os.environ`` so that workers inherit them. In the driver itself those values must
not come back as if the user had set them, or starting again with other settings would find the old ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping


class Projection:
    """What this process has written into an environment, and what stood there before.

    A forked child inherits this memory with the values. There they are what its parent told it, and hence honoured:
    the memory holds only in the process (pid) that wrote it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._environ: MutableMapping[str, str] = os.environ
        self._ours: dict[str, str] = {}
        self._before: dict[str, str | None] = {}

    def project(self, environ: MutableMapping[str, str], values: Mapping[str, str]) -> None:
        """Writes ``values`` and remembers what they replace; what an earlier call wrote and this one lacks goes.

        Args:
            environ: Where to write, as a rule ``os.environ``.
            values: Variables and their values, as `raytrace_rl.config.to_env` gives them.
        """
        self.restore()
        self._pid, self._environ = os.getpid(), environ
        for name, value in values.items():
            self._before[name] = environ.get(name)
            environ[name] = value
            self._ours[name] = value

    def restore(self) -> None:
        """Puts back what stood there before, except where someone has written another value since."""
        ours, before = self._ours, self._before
        self._ours, self._before = {}, {}
        if self._pid != os.getpid():
            return
        for name, value in ours.items():
            if self._environ.get(name) != value:
                continue
            if (previous := before[name]) is None:
                del self._environ[name]
            else:
                self._environ[name] = previous

    def user_value(self, environ: Mapping[str, str], name: str) -> str | None:
        """Returns what the user set ``name`` to: what we wrote ourselves is looked through. Empty counts as unset.

        Source: OpenTelemetry specification, "Environment variable specification", parsing of empty values.
        """
        value = environ.get(name)
        if (
            value is not None
            and environ is self._environ
            and self._pid == os.getpid()
            and self._ours.get(name) == value
        ):
            value = self._before.get(name)
        return value or None
