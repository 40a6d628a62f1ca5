"""A TCP proxy of the tests: it counts what goes through."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Forwards connections to a port of this machine.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        sent: Bytes from its clients to the other side.
    """

    def __init__(self, target: int) -> None:
        self.sent = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                other = socket.create_connection(("127.0.0.1", self._target))
                for one, two, counted in ((client, other, True), (other, client, False)):
                    threading.Thread(target=self._forward, args=(one, two, counted), daemon=True).start()

    def _forward(self, one: socket.socket, two: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if counted:
                    self.sent += len(data)
                two.sendall(data)
        for end in (one, two):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.close()


@contextlib.contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    """A proxy for the length of a ``with`` statement."""
    running = Proxy(target)
    try:
        yield running
    finally:
        running.close()
