"""The actors that this process has dispatched to, held weakly: who has to be flushed at the end of a session."""

from __future__ import annotations

import weakref
from typing import Any

# By the identity of the handle and not the actor's id: of two handles of one actor either may be dropped first.
_handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(actor: Any) -> None:
    """Remembers an actor's handle for as long as someone else holds it."""
    if _handles.get(id(actor)) is not actor:
        try:
            _handles[id(actor)] = actor
        except TypeError:  # cannot be referred to weakly: no handle of Ray's
            return


def registered() -> list[Any]:
    """Returns one live handle for each actor registered."""
    return list({actor_id(handle): handle for handle in list(_handles.values())}.values())


def actor_id(handle: Any) -> Any:
    """Returns what is equal for two handles of one actor."""
    return getattr(handle, "_actor_id", None) or id(handle)
