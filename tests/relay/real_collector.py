"""A real OTLP collector for the tests: the ``rotel-agent`` binary that the PyPI package of that name ships."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.running import wait_for

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Collector:
    """A collector that runs.

    Attributes:
        grpc, http: Its URLs.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ports: tuple[int, int]) -> None:
        self._process = process
        self._log = log
        self.grpc, self.http = (f"http://127.0.0.1:{port}" for port in ports)

    @property
    def log(self) -> str:
        """What it has printed."""
        return _ESCAPES.sub("", self._log.read_text(errors="replace"))

    def received(self, what: str = "spans") -> int:
        """How many of ``what`` it says to have received (with ``--debug-log``)."""
        return sum(map(int, re.findall(rf"\b{what}=(\d+)", self.log)))

    def stop(self) -> None:
        """Ends it as a service manager does: its log is then whole."""
        self._process.terminate()
        self._process.wait(30)

    def kill(self) -> None:
        """Ends it as ``kill -9`` does."""
        self._process.kill()
        self._process.wait(30)


def free_ports() -> tuple[int, int]:
    """Two ports of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


@contextmanager
def collector(directory: Path, *options: str, ports: tuple[int, int] | None = None) -> Iterator[Collector]:
    """A collector for the length of a ``with`` statement; it forgets what it gets unless ``options`` say otherwise."""
    spec = importlib.util.find_spec("rotel")
    assert spec is not None
    assert spec.origin is not None
    binary = Path(spec.origin).parent / "rotel-agent"
    ports = ports or free_ports()
    log = directory / f"rotel-{ports[0]}-{len(list(directory.iterdir()))}.log"
    command = [str(binary), "start", "--otlp-grpc-endpoint", f"127.0.0.1:{ports[0]}"]
    command += ["--otlp-http-endpoint", f"127.0.0.1:{ports[1]}", "--pid-file", str(directory / "rotel.pid")]
    command += options or ("--exporter", "blackhole", "--debug-log", "traces")
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        running = Collector(process, log, ports)
        try:
            wait_for(lambda: _listens(ports[0]) or process.poll() is not None, "the collector listens")
            assert process.poll() is None, running.log
            yield running
        finally:
            running.kill()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
