"""A real headless Chromium for tests of the HTML report, spoken to over a pipe (Chrome DevTools Protocol)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next((found for name in _NAMES if (found := shutil.which(name))), None)
#: Its sandbox wants privileges that containers do not give; the pages are our own.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--mute-audio",
)


class Page:
    """One open page.

    Attributes:
        errors: What was written to the console as an error, and exceptions that nothing caught.
        requests: Addresses that the page asked for, itself left out.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read = os.fdopen(read, "rb", buffering=0)
        self._write = os.fdopen(write, "wb", buffering=0)
        self._pending = b""
        self._last = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command, and returns its answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = self._read.read(1 << 20)
            assert data, "Chromium has ended"
            self._pending += data
        one, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:1000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.errors.append(json.dumps(params["args"])[:1000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if method is not None:
            self._events.append(message)

    def open(self, path: Path, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Loads a file, and waits until it has run."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next()
        self.requests = [url for url in self.requests if url not in {path.as_uri(), "about:blank"}]

    def run(self, script: str) -> Any:
        """Evaluates an expression in the page; it must not fail."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One event of the mouse: ``mousePressed``, ``mouseMoved``, ``mouseWheel``."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float, count: int = 1) -> None:
        """A click, or a double one."""
        for number in range(1, count + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.mouse(kind, x, y, button="left", clickCount=number)

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Starts Chromium with a page."""
    assert EXECUTABLE is not None
    to_child, write = os.pipe()
    read, from_child = os.pipe()
    # The protocol's pipes are descriptors 3 and 4 of the browser; bash, for other shells know ten descriptors only.
    script = f'exec "$0" "$@" 3<&{to_child} 4>&{from_child}'
    flags = [*_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    command = ["bash", "-c", script, EXECUTABLE, *flags, "about:blank"]
    with subprocess.Popen(
        command, pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        os.close(to_child)
        os.close(from_child)
        try:
            yield Page(read, write)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
