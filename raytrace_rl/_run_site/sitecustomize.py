"""Found first by every Python under ``raytrace-rl run``, through ``PYTHONPATH``: has `auto_ray` look after Ray.

Only the standard library, and next to nothing until somebody imports ``ray``: most of these processes never do. In the
way of no other ``sitecustomize``, which runs as it would without this one.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

TYPE_CHECKING = False  # without importing typing, in each Python process that there is
if TYPE_CHECKING:
    from typing import Any

_BEGAN_NS = time.time_ns()
#: Where the programs lie that Ray starts itself. Its workers are among them: there, the first traced call installs.
_RAYS_OWN = ("/ray/_private/", "/ray/dashboard/", "/ray/autoscaler/", "/ray/util/client/server")


class _RayFinder:
    """Waits for ``import ray``, lets it come to its end, and then calls `auto_ray.install`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 - as finders are called
        if name != "ray":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = getattr(spec, "loader", None)
        load = getattr(loader, "exec_module", None)
        if load is not None:

            def exec_module(module: Any) -> None:
                load(module)
                _install()

            loader.exec_module = exec_module
        return spec


def _install() -> None:
    try:
        from raytrace_rl.integrations import auto_ray
    except ImportError as error:
        print(f"raytrace-rl run: nothing is traced by {sys.executable}: {error}", file=sys.stderr)
        return
    auto_ray.install(_BEGAN_NS)


def _make_way() -> None:
    """Imports what else is named sitecustomize, further down the path."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs each process 5 ms
    sys.path[:] = [entry for entry in sys.path if entry != here]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


if os.environ.get("RAYTRACE_RL_AUTO_RAY") and not any(part in arg for arg in sys.orig_argv for part in _RAYS_OWN):
    sys.meta_path.insert(0, _RayFinder())
_make_way()
