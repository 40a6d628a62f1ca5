"""What a driver leaves with the cluster's control store for its run: where OTLP goes, and where home is.

Credentials are among it: what is in a ``runtime_env`` or an environment stands in clear in Ray's logs, this does not.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.relay.cursors import DIRECTORY

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Settings

NAMESPACE: Final = "raytrace_rl"
#: A file in the directory of the driver's node: a node that finds the driver's token in it shares the run directory.
_PROBE: Final = "probe"


@dataclass(frozen=True)
class Published:
    """What is left.

    Attributes:
        settings: Where OTLP goes; None where nothing is sent.
        run_dir: The driver's run directory.
        node_id: Ray's id of the driver's node.
        probe: Path of the probe file within the run directory.
        token: What stands in it; empty where it could not be written.
    """

    settings: Settings | None
    run_dir: str
    node_id: str
    probe: str
    token: str

    def is_shared(self, run_dir: str | os.PathLike[str]) -> bool:
        """Whether ``run_dir``, as this process sees it, is the driver's."""
        try:
            return not self.token or (Path(run_dir) / self.probe).read_text(encoding="ascii") == self.token
        except (OSError, ValueError):
            return False


def publish(run_id: str, settings: Settings | None, node_dir: str | os.PathLike[str]) -> None:
    """On the driver, on a cluster: writes the probe file, and leaves everything where other nodes find it.

    Args:
        run_id: The run.
        settings: Where OTLP goes; None where nothing is sent.
        node_dir: ``RUN_DIR/spool/<node>`` of the driver's node.
    """
    import ray

    token = uuid.uuid4().hex
    probe = Path(node_dir) / DIRECTORY / _PROBE
    run_dir = Path(node_dir).parent.parent
    try:
        probe.parent.mkdir(mode=0o700, exist_ok=True)
        probe.write_text(token, encoding="ascii")
    except OSError:
        token = ""
    node_id = ray.get_runtime_context().get_node_id()
    found = Published(settings, str(run_dir), node_id, str(probe.relative_to(run_dir)), token)
    _kv()._internal_kv_put(_key(run_id), pickle.dumps(found), overwrite=True, namespace=NAMESPACE.encode())


def withdraw(run_id: str) -> None:
    """Takes back what `publish` left, at the end of a run."""
    with contextlib.suppress(Exception):
        _kv()._internal_kv_del(_key(run_id), namespace=NAMESPACE.encode())


def published(run_id: str) -> Published | None:
    """Returns what the driver of a run has left; None where it has left nothing."""
    try:
        found = _kv()._internal_kv_get(_key(run_id), namespace=NAMESPACE.encode())
        loaded: Published | None = pickle.loads(found) if found else None
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("relay-published", "What the driver has left for this run cannot be read: %r", error)
        return None
    return loaded


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


def _key(run_id: str) -> bytes:
    return f"run-{run_id}".encode()
