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

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Settings

NAMESPACE: Final = "raytrace_rl"
#: A file beside the nodes' directories: a node that finds the driver's token in it shares the run directory.
_PROBE: Final = "probe"


@dataclass(frozen=True)
class Published:
    """What is left.

    Attributes:
        settings: Where OTLP goes; None where nothing is sent.
        run_dir: The driver's run directory.
        node_id: Ray's id of the driver's node.
        token: What stands in the probe file of the driver's run directory; empty where it could not be written.
    """

    settings: Settings | None
    run_dir: str
    node_id: str
    token: str

    def is_shared(self, run_dir: str | os.PathLike[str]) -> bool:
        """Whether ``run_dir``, as this process sees it, is the driver's."""
        try:
            return not self.token or (Path(run_dir) / "spool" / _PROBE).read_text(encoding="ascii") == self.token
        except (OSError, ValueError):
            return False


def publish(run_id: str, settings: Settings | None, run_dir: str | os.PathLike[str]) -> None:
    """On the driver, on a cluster: writes the probe file, and leaves everything where other nodes find it."""
    import ray

    token = uuid.uuid4().hex
    try:
        (Path(run_dir) / "spool" / _PROBE).write_text(token, encoding="ascii")
    except OSError:
        token = ""
    node_id = ray.get_runtime_context().get_node_id()
    found = Published(settings, os.fspath(run_dir), node_id, token)
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
