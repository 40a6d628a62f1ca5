"""Which attribute keys name content or secrets: their *string* values leave the process only when asked to."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Final

REDACTED: Final = "[redacted]"

_SECRET: Final = frozenset({"password", "secret", "token", "authorization"})
_CONTENT: Final = frozenset({"prompt", "completion", "response", "message", "content", "argument"})
_BODY: Final = frozenset({"body", "bodie"})
_TEXT: Final = frozenset({"text", "value", "message"})


@lru_cache(maxsize=4096)
def is_sensitive(key: str) -> bool:
    """True if a string (or list of strings) under ``key`` is content or a secret.

    The key is split on ``.`` and ``_``; a plural counts as its singular. ``gen_ai.response.*`` (model, id, finish
    reasons), ``http.*`` metadata other than bodies and secrets, and ``exception.*`` pass.
    """
    lowered = key.lower()
    words = [word.rstrip("s") if len(word) > 2 else word for word in lowered.replace("_", ".").split(".")]
    # rstrip("s") leaves nothing of "s" itself and turns "access" to "acce": neither is looked for
    found = set(words)
    if lowered.startswith(("gen_ai.response.", "exception.")):
        return False
    if _SECRET & found or _pair(words, "api", frozenset({"key"})):
        return True
    if lowered.startswith("http."):
        return bool(_BODY & found)
    if _CONTENT & found:
        return True
    return _pair(words, "input", _TEXT) or _pair(words, "output", _TEXT)


def _pair(words: list[str], first: str, seconds: frozenset[str]) -> bool:
    """True if ``first`` is directly followed by one of ``seconds``."""
    return any(word == first and following in seconds for word, following in pairwise(words))
