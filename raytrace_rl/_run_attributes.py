"""What a program says of its run (model, algorithm, backends, sizes): checked, and passed on to every worker.

What is known to hold for the whole run travels in an environment variable in the form of ``OTEL_RESOURCE_ATTRIBUTES``;
everything else describes the process that says it and stays there. In a worker it stands below that standard variable,
which may be the worker's own (a worker group's axes), except where the driver has overruled it (``key!=value``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from raytrace_rl import _encode, _numbers, _state, semconv
from raytrace_rl._env import parse_int, parse_resource_attributes
from raytrace_rl._interrupts import is_interrupt

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

#: A launch script may set it too; it then beats what the program says.
VARIABLE: Final = "RAYTRACE_RL_RESOURCE_ATTRIBUTES"

#: Ends a key whose value beats ``OTEL_RESOURCE_ATTRIBUTES``.
_STRONG: Final = "!"

_NAMES: Final = frozenset(
    {
        semconv.RL_MODEL,
        semconv.RL_ALGORITHM,
        semconv.RL_BACKEND,
        semconv.RL_GENERATION_BACKEND,
        semconv.RL_REWARD,
    }
)
#: Those of them that are whole numbers.
SIZES: Final = frozenset(
    {
        semconv.RL_NUM_ROLLOUTS,
        semconv.RL_NUM_PROMPT_GROUPS,
        semconv.RL_NUM_GENERATIONS_PER_PROMPT,
        semconv.NV_DL_TOPOLOGY_SIZE_TP,
        semconv.NV_DL_TOPOLOGY_SIZE_PP,
        semconv.NV_DL_TOPOLOGY_SIZE_DP,
        semconv.NV_DL_TOPOLOGY_SIZE_CP,
        semconv.NV_DL_TOPOLOGY_SIZE_EP,
    }
)
#: What holds for the whole run when the driver says it. (A worker's own word for itself still wins.)
RUN_WIDE: Final = _NAMES | SIZES


def checked(attributes: Any) -> dict[str, AttributeValue]:
    """Returns the usable ones of ``attributes``; each other one is left out with a warning. Never raises.

    Args:
        attributes: A mapping, or None. Sizes are whole numbers from 0 up, names are text (an enumeration's value, a
            path), any other attribute is what a span's may be. None is left out in silence.
    """
    found: dict[str, AttributeValue] = {}
    if attributes is None:
        return found
    try:
        if not isinstance(attributes, Mapping):
            raise TypeError(f"a {type(attributes).__name__} is no mapping of attributes")
        given = list(attributes.items())
    except Exception as error:  # a mapping of the user's that fails
        if is_interrupt(error):
            raise
        _state.warn_once("resource-attributes", "Resource attributes are left out: %r", error)
        return found
    for key, value in given:
        if value is None:
            continue
        try:
            found[_key(key)] = _value(key, value)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once(f"resource:{key!r:.80}", "Resource attribute %.80r is left out: %s", key, error)
    return found


def _key(key: Any) -> str:
    if isinstance(key, str) and key.strip():
        return key.strip()
    raise ValueError("a key is text that is not empty")


def _value(key: str, value: Any) -> Any:
    if isinstance(value, Enum):
        value = value.value
    if key in SIZES:
        number = parse_int(value) if isinstance(value, str) else _numbers.number(value)
        if number is None or number != int(number) or not 0 <= number < 1 << 63:
            raise ValueError("allowed is a whole number from 0 up")
        return int(number)
    if key in _NAMES:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(text, str) and text.strip() and text.isprintable():
            return text.strip()
        raise ValueError("allowed is printable text that is not empty")
    _encode.any_value(key, value)  # asked now and not at the encoding, which would only count it
    return value


class OfRun(NamedTuple):
    """What the variable says of the run.

    Attributes:
        weak: Below ``OTEL_RESOURCE_ATTRIBUTES``.
        strong: Above it: the driver knew it, and said otherwise.
    """

    weak: dict[str, AttributeValue]
    strong: dict[str, AttributeValue]

    @property
    def all(self) -> dict[str, AttributeValue]:
        """Both."""
        return {**self.weak, **self.strong}


def of_environment(environ: Mapping[str, str], text: str | None = None) -> OfRun:
    """Returns what the variable says, as the driver wrote it or the user; unreadable, it is a warning and discarded.

    Args:
        environ: Where to look.
        text: The variable's value, where it is known already.
    """
    text = environ.get(VARIABLE, "") if text is None else text
    try:
        found = parse_resource_attributes(text)
    except ValueError as error:
        _state.warn_once(f"config:{VARIABLE}={text}", "%s is ignored: %s.", VARIABLE, error)
        found = {}
    strong = {key[:-1]: value for key, value in found.items() if key.endswith(_STRONG)}
    weak = {key: value for key, value in found.items() if not key.endswith(_STRONG) and key not in strong}
    return OfRun(checked(weak), checked(strong))


def to_text(attributes: Mapping[str, AttributeValue], also: Iterable[str] = (), overruled: Iterable[str] = ()) -> str:
    """Returns the variable's value for what holds for the whole run; empty if nothing does.

    Args:
        attributes: Checked attributes.
        also: Further keys that are passed on: those that the user's own variable names.
        overruled: Keys that ``OTEL_RESOURCE_ATTRIBUTES`` has here too.
    """
    chosen = RUN_WIDE | frozenset(also)
    marks = dict.fromkeys(overruled, _STRONG)
    return ",".join(
        f"{quote(key, safe='.')}{marks.get(key, '')}={quote(str(value), safe='')}"
        for key, value in attributes.items()
        if key in chosen
    )
