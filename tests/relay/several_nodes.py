"""Further nodes of a Ray cluster on this machine: each has a host name of its own and, if asked, a run directory.

Namespaces make them: what two hosts do not share, these do not either, but for memory (`/dev/shm`) and the kernel.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path

import pytest
import ray

from tests.running import wait_for


@lru_cache(maxsize=1)
def can_unshare() -> bool:
    """Whether this machine lets us make namespaces (it asks for root)."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="namespaces cannot be made here: root is needed")


class Node:
    """A node that runs; tasks and actors reach it by the resource of its name."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.process = process

    def kill(self) -> None:
        """The node is lost: everything on it is killed at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def node(name: str, own: Path | None = None) -> Iterator[Node]:
    """A further node for the length of a ``with`` statement.

    Args:
        name: Its host name.
        own: A directory of which it sees an empty one of its own.
    """
    ray_program = Path(sys.executable).parent / "ray"
    address = ray.get_runtime_context().gcs_address
    # Ray notes in its temporary directory which cluster this machine is a part of: the next `ray.init()` would join it.
    script = f"hostname {name}; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; "
    if own is not None:
        script += f"mount -t tmpfs tmpfs {own}; "
    script += f"exec {ray_program} start --address={address} --num-cpus=2 --resources='{{\"{name}\": 100}}' --block"
    command = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as one:
        running = Node(name, one)
        try:
            wait_for(lambda: name in ray.cluster_resources(), f"{name} has joined", timeout_s=60)
            yield running
        finally:
            if one.poll() is None:
                running.kill()


@contextmanager
def nodes(names: list[str], own: Path | None = None) -> Iterator[dict[str, Node]]:
    """Several further nodes."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(node(name, own)) for name in names}
