"""Plants a fault in the demo, where telemetry cannot see it: on the path of every process of a test's run.

Python imports a module of this name at its start. ``DEMO_FAULT`` says what goes wrong; the demo knows nothing of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

FAULT = os.environ.get("DEMO_FAULT", "")


def _slowly(seconds: float, function: Callable[..., Any], when: Callable[[], bool] = lambda: True) -> Any:
    """``function``, after a sleep."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        if when():
            time.sleep(seconds)
        return function(*args, **kwargs)

    return slow


def _slow_rank(module: Any) -> None:
    """Rank 1 takes longer over its loss."""
    module.clipped_policy_loss = _slowly(0.15, module.clipped_policy_loss, lambda: os.environ.get("RANK") == "1")


def _starved_trainer(module: Any) -> None:
    """Every generation worker takes long over its samples."""
    module.Policy.sample = _slowly(0.4, module.Policy.sample)


def _refit_bubble(module: Any) -> None:
    """Every generation worker takes long to load new weights."""
    module.Policy.load_state_dict = _slowly(0.3, module.Policy.load_state_dict)


def _stuck_thread(module: Any) -> None:
    """One rollout's reward never comes."""
    scored = module._score

    def hangs(*args: Any) -> Any:
        if threading.current_thread().name == "rollout-9":
            threading.Event().wait()
        return scored(*args)

    module._score = hangs


#: Modules that the actors' classes, which Ray sends by value, refer to by name.
PLANTED = {
    "slow_rank": ("examples.async_grpo.loss", _slow_rank),
    "starved_trainer": ("examples.async_grpo.model", _starved_trainer),
    "refit_bubble": ("examples.async_grpo.model", _refit_bubble),
    "stuck_thread": ("examples.async_grpo.collector", _stuck_thread),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes one module right after its import."""

    def __init__(self, name: str, plant: Callable[[Any], None]) -> None:
        self._name = name
        self._plant = plant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Finds the module as others would, with a loader that plants the fault."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            executed, plant = spec.loader.exec_module, self._plant

            def execute(module: Any) -> None:
                executed(module)
                plant(module)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


if FAULT in PLANTED:
    sys.meta_path.insert(0, _Finder(*PLANTED[FAULT]))
