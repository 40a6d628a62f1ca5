"""Fixtures of the tests of the local receiver; test modules name this one in ``pytest_plugins``."""

from __future__ import annotations

import tempfile

import pytest

from raytrace_rl.relay import address
from raytrace_rl.relay import relay as module
from raytrace_rl.relay.relay import relay_for
from raytrace_rl.relay.work import Work
from raytrace_rl.spool.place import node_name


@pytest.fixture
def root():
    """Where sockets lie: a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield path


@pytest.fixture
def node_dir(tmp_path, root, monkeypatch):
    """The node's directory of a run."""
    monkeypatch.setattr(address, "_ROOT", root)
    monkeypatch.setattr(module, "_TEND_S", 0.05)
    path = tmp_path / "run" / "spool" / node_name()
    path.mkdir(parents=True)
    return path


@pytest.fixture
def relay(node_dir):
    """A relay that listens, and sends nothing."""
    running = relay_for(Work(str(node_dir), "r", receives=True))
    assert running.acquire()
    running.start()
    yield running
    running.stop()
