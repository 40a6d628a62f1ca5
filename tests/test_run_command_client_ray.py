"""`raytrace-rl run` around a Ray Client (``ray.init("ray://...")``): left alone, which it says once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.relay.real_collector import free_ports
from tests.running import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ENV = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

CLIENT = """
import asyncio, os, sys
import ray
ray.init(f"ray://{sys.argv[1]}", runtime_env={"env_vars": {"THEIRS": "1"}}, logging_level="ERROR")

@ray.remote
class Worker:
    def __init__(self, scale):
        self.scale = scale
    def plain(self, x, y=0):
        return x * self.scale + y
    def ask(self, peer, x):
        return ray.get(peer.plain.remote(x))
    async def later(self, x):
        await asyncio.sleep(0)
        return x

@ray.remote
def theirs():
    return os.environ["THEIRS"], "raytrace_rl" in sys.modules

worker = Worker.options(name="worker").remote(3)
assert ray.get(worker.plain.remote(2, y=1)) == 7
assert ray.get(worker.plain.options(name="renamed").remote(2)) == 6
assert ray.get(worker.ask.remote(Worker.remote(2), 5)) == 10
assert ray.get(ray.get_actor("worker").later.remote(1)) == 1
assert ray.get(theirs.remote()) == ("1", False)
try:
    worker.plain.remote(1, 2, 3)
except TypeError:
    print("done")
sys.exit(3)
"""


@contextmanager
def client_server(tmp_path: Path) -> Iterator[str]:
    """A Ray head with a client server, in processes of its own; yields the server's address."""
    _, port = free_ports()
    log = tmp_path / "head.log"
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--port=0", "--num-cpus=4"]
    command += ["--include-dashboard=false", f"--ray-client-server-port={port}", "--node-ip-address=127.0.0.1"]
    # Ray notes in its directory which cluster this machine is a part of: the next `ray.init()` would join it. That path
    # has to be short, for sockets.
    with tempfile.TemporaryDirectory(prefix="ray") as own:
        with log.open("w") as told:
            env = {**os.environ, **ENV, "RAY_TMPDIR": own}
            head = subprocess.Popen(command, env=env, stdout=told, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: "Ray runtime started" in log.read_text() or head.poll() is not None, "the head", 90)
            assert head.poll() is None, log.read_text()
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait(30)


def test_a_ray_client_runs_untraced_and_is_told_so_once(tmp_path):
    """A client's program breaks under ``run``, or an empty run directory is all that tells that nothing was traced."""
    script = tmp_path / "client.py"
    script.write_text(textwrap.dedent(CLIENT))
    command = [sys.executable, "-m", "raytrace_rl.cli", "run", "--dir", str(tmp_path / "run"), "--"]
    with client_server(tmp_path) as address:
        done = subprocess.run(
            [*command, sys.executable, str(script), address],
            env={**os.environ, **ENV},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stdout) == (3, "done\n"), done.stderr
    assert done.stderr.count("are not traced") == 1
    assert "ray job submit -- raytrace-rl run" in done.stderr
    assert "nothing was recorded in" in done.stderr
    assert not list((tmp_path / "run").glob("spool/*/*.rts"))
