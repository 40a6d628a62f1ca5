"""Datadog's tracer as a peer: the variables that it gets, and a null agent that takes its spans."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What ``ray.init(_tracing_startup_hook=...)`` runs in every process, as Datadog's documentation has it.
HOOK: Final = "ddtrace.contrib.ray:setup_tracing"
#: The keyword that its spans travel under.
KEYWORD: Final = "_dd_ray_trace_ctx"

_AGENT: Final = """
import http.server
class Null(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        print(self.headers.get("X-Datadog-Trace-Count") or 0, flush=True)
        self.send_response(200)
        body = b'{"endpoints": ["/v0.4/traces", "/v0.5/traces"]}' if self.path == "/info" else b"{}"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = do_PUT = answer
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Null)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def agent() -> Iterator[dict[str, str]]:
    """Runs a null agent in a process of its own; yields the environment that sends spans, and nothing else, to it.

    Raises:
        RuntimeError: There came none.
    """
    with subprocess.Popen([sys.executable, "-c", _AGENT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield {
                "DD_TRACE_AGENT_URL": f"http://127.0.0.1:{process.stdout.readline().strip()}",
                "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
                "DD_REMOTE_CONFIGURATION_ENABLED": "false",
                "DD_PATCH_MODULES": "aiohttp:false,grpc:false,requests:false",
            }
        finally:
            process.kill()
        if not any(int(count) for count in process.stdout):
            raise RuntimeError("no span of ddtrace's reached its agent")
