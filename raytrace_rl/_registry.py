"""What is known of span groups in this process: their owners, umbrella status and default buckets. Data only.

`span_groups` fills it and gives it meaning; it lies here, below the span path, so that a span can ask for its bucket.
"""

from __future__ import annotations

from typing import Final

from raytrace_rl import _state

OVERHEAD: Final = "overhead"
BUCKET_VALUES: Final = frozenset({"productive", "overhead", "wasted", "idle"})

#: Group to the namespace that registered it first.
owners: Final[dict[str, str]] = {}
umbrellas: Final[set[str]] = set()
#: Leaf group to its default bucket.
buckets: Final[dict[str, str]] = {}
presets: Final[dict[str, frozenset[str]]] = {}
#: Preset to the namespace that registered it first.
preset_owners: Final[dict[str, str]] = {}


def is_umbrella(group: str | None) -> bool:
    """True if spans of ``group`` are umbrellas (None, a span without a group, counts as one: it carries no bucket)."""
    return group is None or group in umbrellas


def default_bucket(group: str | None) -> str | None:
    """Returns the bucket of a leaf group (unknown ones are overhead), None for an umbrella."""
    if group is None or group in umbrellas:
        return None
    return buckets.get(group, OVERHEAD)


def bucket_value(bucket: object) -> str | None:
    """Returns a bucket's string; None for None, and (with one warning naming the value) for what is no bucket."""
    if bucket is None:
        return None
    value = getattr(bucket, "value", bucket)
    if isinstance(value, str) and value.lower() in BUCKET_VALUES:
        return value.lower()
    _state.warn_once(
        f"bucket:{value!r:.80}",
        "%r is no goodput bucket and is ignored; use one of %s.",
        value,
        ", ".join(sorted(BUCKET_VALUES)),
    )
    return None


def warn_of_no_group(group: object, name: object = None) -> None:
    """Says once that something was given for a span group that cannot be one (it cannot be hashed)."""
    about = "" if name is None else f": span {name!r:.80} is left out"
    _state.warn_once("no-group", "A %s is no span group%s.", type(group).__name__, about)
