"""Span groups: which exist, who owns them, which are umbrellas, and which a spec such as ``per_step,ckpt`` enables.

One flat namespace serves all libraries of a process. A group's registration says its default bucket and whether it is
an umbrella; `resolve` turns a user's comma-separated spec into the set of groups that record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from raytrace_rl import _registry, _state
from raytrace_rl._registry import bucket_value
from raytrace_rl.buckets import Bucket


class RLSpanGroup:
    """The groups of an RL post-training run. Umbrellas span other work and carry no bucket; leaves carry one.

    A span that can overlap another instance of itself is an umbrella; one whose count grows with prompts or samples
    rather than with steps belongs to ``PER_PROMPT``, whatever its phase.
    """

    JOB: Final = "job"
    STEP: Final = "step"
    ROLLOUT: Final = "rollout"
    MODEL_INIT: Final = "model_init"
    EVALUATE: Final = "evaluate"
    SETUP: Final = "setup"
    PER_PROMPT: Final = "per_prompt"

    #: The same umbrellas, spelled so that a reader sees at the call that this span carries no bucket.
    U_JOB: Final = JOB
    U_STEP: Final = STEP
    U_ROLLOUT: Final = ROLLOUT
    U_MODEL_INIT: Final = MODEL_INIT
    U_EVALUATE: Final = EVALUATE
    U_SETUP: Final = SETUP
    U_PER_PROMPT: Final = PER_PROMPT

    GENERATION: Final = "generation"
    REWARD: Final = "reward"
    POLICY_UPDATE: Final = "policy_update"
    LOGPROB: Final = "logprob"
    ADVANTAGE: Final = "advantage"
    DATA_PROCESSING: Final = "data_processing"
    DATA_PLANE: Final = "data_plane"
    CHECKPOINT: Final = "checkpoint"
    EFFICIENCY: Final = "efficiency"


ALL_GROUPS: Final[frozenset[str]] = frozenset(
    value for name, value in vars(RLSpanGroup).items() if name.isupper() and isinstance(value, str)
)
UMBRELLA_GROUPS: Final[frozenset[str]] = frozenset(
    value for name, value in vars(RLSpanGroup).items() if name.startswith("U_")
)
PER_PROMPT_GROUPS: Final[frozenset[str]] = frozenset({RLSpanGroup.PER_PROMPT})

_DEFAULT: Final = frozenset(
    {
        RLSpanGroup.JOB,
        RLSpanGroup.CHECKPOINT,
        RLSpanGroup.EVALUATE,
        RLSpanGroup.SETUP,
        RLSpanGroup.MODEL_INIT,
    }
)
#: ``all`` is no preset but a wildcard over whatever is registered; see `resolve`.
PRESETS: Final[Mapping[str, frozenset[str]]] = {
    "default": _DEFAULT,
    # job included: without it there would be no root, and carriers would start empty
    "per_step": ALL_GROUPS - PER_PROMPT_GROUPS,
}

_BUCKETS: Final[Mapping[str, Bucket]] = {
    RLSpanGroup.GENERATION: Bucket.PRODUCTIVE,
    RLSpanGroup.REWARD: Bucket.PRODUCTIVE,
    RLSpanGroup.POLICY_UPDATE: Bucket.PRODUCTIVE,
    RLSpanGroup.LOGPROB: Bucket.OVERHEAD,
    RLSpanGroup.ADVANTAGE: Bucket.OVERHEAD,
    RLSpanGroup.DATA_PROCESSING: Bucket.OVERHEAD,
    RLSpanGroup.DATA_PLANE: Bucket.OVERHEAD,
    RLSpanGroup.CHECKPOINT: Bucket.OVERHEAD,
    RLSpanGroup.EFFICIENCY: Bucket.OVERHEAD,
}


#: The spec in force, so that a late registration can make its pending words good.
_spec: str | None = None


def register_span_groups(
    namespace: str | None = None,
    groups: Iterable[str] | type | None = None,
    presets: Mapping[str, Iterable[str]] | None = None,
    *,
    buckets: Mapping[str, Bucket | str] | None = None,
    umbrellas: Iterable[str] = (),
) -> None:
    """Declares a library's span groups; without arguments, `RLSpanGroup` (again and again without harm).

    Words of the current spec that were unknown until now take effect at once. A group that another namespace has
    registered is shared, with a warning naming the other claimant; its first bucket and umbrella status hold.

    Args:
        namespace: Who registers, for the warning: the library's name.
        groups: Group names (lower case), or a class whose upper-case string attributes are the groups.
        presets: Preset name to the groups that it adds; a known preset name (``default``, ``per_step``) is extended. A
            group that nobody has registered stays pending, as a word of a spec does.
        buckets: Group to default `Bucket`; a leaf group without one counts as overhead.
        umbrellas: Those of ``groups`` that are umbrellas.
    """
    if namespace is None and groups is None:
        _register("raytrace_rl", ALL_GROUPS, PRESETS, _BUCKETS, UMBRELLA_GROUPS)
    else:
        owner = str(namespace or "unnamed")
        names = (
            {value for name, value in vars(groups).items() if name.isupper() and isinstance(value, str)}
            if isinstance(groups, type)
            else groups
        )
        defaults = {word: bucket for key, bucket in (buckets or {}).items() for word in _words(key, owner)}
        members = {word: _words(of, owner) for key, of in (presets or {}).items() for word in _words(key, owner)}
        _register(owner, _words(names, owner), members, defaults, _words(umbrellas, owner))
    if _spec is not None and _state.tracing:
        _state.enabled = resolve(_spec)


def _words(given: Any, namespace: str) -> frozenset[str]:
    """Returns names in lower case; one string is one name, and what is no text is a warning and left out."""
    words = set()
    for word in [given] if isinstance(given, str) or not isinstance(given, Iterable) else given:
        if isinstance(word, str):
            words.add(word.strip().lower())
        elif word is not None:
            _state.warn_once(f"group:{word!r:.80}", "%.80r, registered by %r, is no span group.", word, namespace)
    return frozenset(words)


#: Words of a spec that are neither groups nor presets.
_RESERVED: Final = frozenset({"all", "none"})


def _register(
    namespace: str,
    groups: Iterable[str],
    presets: Mapping[str, Iterable[str]],
    buckets: Mapping[str, Bucket | str],
    umbrellas: frozenset[str],
) -> None:
    for group in groups:
        if group in _RESERVED or group in _registry.presets or "," in group:
            _state.warn_once(
                f"group:{group}:{namespace}",
                "Span group %r of %r cannot be named in a spec and is left out: choose another name.",
                group,
                namespace,
            )
            continue
        owner = _registry.owners.setdefault(group, namespace)
        if owner != namespace:
            _state.warn_once(
                f"group:{group}:{namespace}",
                "Span group %r of %r was registered by %r before: they share it.",
                group,
                namespace,
                owner,
            )
            continue
        if group in umbrellas:
            _registry.umbrellas.add(group)
        elif group in buckets:
            value = bucket_value(buckets[group])
            if value is not None:
                _registry.buckets[group] = value
    for name, members in presets.items():
        if name in _RESERVED or name in _registry.owners:
            _state.warn_once(
                f"preset:{name}:{namespace}",
                "Preset %r of %r is left out: a spec that says so means %s.",
                name,
                namespace,
                "the wildcard or nothing" if name in _RESERVED else "the span group of that name",
            )
            continue
        claimed = _registry.preset_owners.setdefault(name, namespace)
        if claimed not in (namespace, "raytrace_rl"):  # extending default and per_step is what they are for
            _state.warn_once(
                f"preset:{name}:{namespace}",
                "Preset %r of %r was registered by %r before: it enables what both say.",
                name,
                namespace,
                claimed,
            )
        _registry.presets[name] = _registry.presets.get(name, frozenset()) | frozenset(members)
    _state.static_cache.clear()


def split_spec(spec: str) -> list[str]:
    """Returns the words of a comma-separated spec, lower case, without blanks or repeats, in order."""
    return list(dict.fromkeys(word for part in spec.split(",") if (word := part.strip().lower())))


def resolve(spec: str) -> frozenset[str]:
    """Returns the groups that ``spec`` enables: a comma union of presets, groups and the wildcard ``all``.

    Case-insensitive. An unknown word warns once and stays pending: it takes effect if its owner registers later.
    Only ``all`` reaches `PER_PROMPT_GROUPS` by way of a preset.
    """
    groups: set[str] = set()
    for word in split_spec(spec):
        if word == "all":
            groups |= _registry.owners.keys()
        elif word in _registry.presets:
            groups |= _registry.presets[word] & _registry.owners.keys() - PER_PROMPT_GROUPS
            for group in _pending_members(word):
                _state.warn_once(
                    f"preset:{word}:{group}",
                    "Preset %r names the span group %r, which is not registered. It takes effect if its owner "
                    "registers later.",
                    word,
                    group,
                )
        elif word in _registry.owners:
            groups.add(word)
        elif word != "none":
            _state.warn_once(
                f"spec:{word}",
                "Span group or preset %r is not registered (known: %s). It takes effect if its owner registers later.",
                word,
                ", ".join(["all", "none", *sorted(_registry.presets), *sorted(_registry.owners)]),
            )
    return frozenset(groups)


def pending_words(spec: str) -> list[str]:
    """Returns the words of ``spec``, and of its presets, that no registration has claimed yet."""
    known = {"all", "none", *_registry.owners}
    words: dict[str, None] = {}
    for word in split_spec(spec):
        if word in _registry.presets:
            words |= dict.fromkeys(_pending_members(word))
        elif word not in known:
            words[word] = None
    return list(words)


def _pending_members(preset: str) -> list[str]:
    return sorted(_registry.presets[preset] - _registry.owners.keys())


def apply_spec(spec: str | None) -> None:
    """Makes ``spec`` the one in force in this process (None: none; nothing records)."""
    global _spec
    _spec = spec
    _state.enabled = resolve(spec) if spec is not None else frozenset()


@dataclass(frozen=True)
class SpanGroupStatus:
    """What span groups do in a process at one moment.

    Attributes:
        spec: The spec in force, as configured or as ``raytrace-rl groups`` has it; None while nothing records.
        enabled: Groups that record.
        pending: Words of the spec, and of its presets, that nobody has registered yet, in order: misspelt, or of a
            library to come.
        registered: All groups that there are.
        owners: Group to the namespace that registered it first.
    """

    spec: str | None
    enabled: frozenset[str]
    pending: tuple[str, ...]
    registered: frozenset[str]
    owners: Mapping[str, str]


def span_group_status() -> SpanGroupStatus:
    """Returns what span groups do in this process right now: for a log line at start, or when a span is missing."""
    owners = dict(_registry.owners)
    spec = _spec
    pending = tuple(pending_words(spec)) if spec is not None else ()
    return SpanGroupStatus(spec, _state.enabled, pending, frozenset(owners), MappingProxyType(owners))


def is_span_group_enabled(group: str) -> bool:
    """True if spans of ``group`` record in this process right now; False, with one warning, for what is no group."""
    try:
        return group in _state.enabled
    except TypeError:
        _registry.warn_of_no_group(group)
        return False


register_span_groups()
