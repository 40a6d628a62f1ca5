"""The registry of metric series: groups of `MetricSpec`, and `record_metrics`, which records against one.

Names and behaviour follow the registry that NeMo-RL's telemetry stands on.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl import _cardinality, _numbers, _state, semconv
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.setup import get_telemetry_handle
from raytrace_rl.vocabulary import METRIC_KINDS, RL_METRIC_GROUP, claim

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

#: OpenTelemetry specification, "Metrics API", "Instrument name syntax"; names compare without regard to case there, so
#: one spelling for a series.
_NAME: Final = re.compile(r"[a-z][a-z0-9_./-]{0,254}")
#: What records a value of each kind.
_EMIT: Final = {"gauge": "set", "counter": "add", "up_down_counter": "add", "histogram": "record"}


@dataclass(frozen=True)
class MetricSpec:
    """One series of a group.

    Attributes:
        key: What `record_metrics` calls it.
        name: The series, ``<owner>.<subsystem>.<metric>``.
        kind: ``gauge``, ``counter``, ``histogram`` or ``up_down_counter``.
        unit: UCUM unit.
        description: One sentence.

    Raises:
        ValueError: The key is empty, the name is none that an instrument can have or one of ``dl.*`` and ``nv.dl.*``
            (NeMo's own), or the kind does not exist.
    """

    key: str
    name: str
    kind: str = "gauge"
    unit: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        if not self.key or not self.name:
            raise ValueError(f"a metric needs a key and a name: {self.key!r}, {self.name!r}")
        if self.name.startswith(("dl.", "nv.dl.")):
            raise ValueError(f"series {self.name!r}: dl.* and nv.dl.* belong to NeMo; rl.<subsystem>.<metric> is ours")
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"series {self.name!r:.80}: a lower-case letter, then at most 254 more, digits, '_', '.', '-' and '/'"
            )
        if self.kind not in METRIC_KINDS:
            raise ValueError(f"kind {self.kind!r} of series {self.name!r}: one of {', '.join(sorted(METRIC_KINDS))}")


class _Group:
    """The series of a group, and the instruments made for them on each meter."""

    __slots__ = ("instruments", "specs")

    def __init__(self) -> None:
        self.specs: dict[str, MetricSpec] = {}
        self.instruments: weakref.WeakKeyDictionary[Any, dict[MetricSpec, Callable[..., None]]] = (
            weakref.WeakKeyDictionary()
        )


_groups: Final[dict[str, _Group]] = {}


def register_metric_group(group: str, specs: Iterable[MetricSpec], *, allow_override: bool = False) -> None:
    """Adds series to a group. All of them or, on a clash, none; the same series again is no clash.

    Args:
        group: Name of the group, which begins to exist with its first series.
        specs: The series.
        allow_override: A series replaces the one that has its key or name.

    Raises:
        ValueError: The group has no name, two different series have the same key or the same name, or another group
            has a series of the name with another kind or unit. One with the same is shared, with a warning.
    """
    if not group:
        raise ValueError("a metric group needs a name")
    entry = _groups.get(group) or _Group()
    known = dict(entry.specs)
    for spec in specs:
        for other in [other for other in known.values() if spec.key == other.key or spec.name == other.name]:
            if other == spec:
                continue
            if not allow_override:
                raise ValueError(f"metric group {group!r}: {spec} clashes with {other}")
            del known[other.key]
        known[spec.key] = spec
    claim(((spec.name, spec.kind, spec.unit) for spec in known.values()), group)
    entry.specs = known
    _groups.setdefault(group, entry)


def registered_metric_groups() -> dict[str, tuple[MetricSpec, ...]]:
    """Returns the series of every group."""
    return {name: tuple(entry.specs.values()) for name, entry in list(_groups.items())}


def record_metrics(
    meter: Meter,
    group: str,
    values: Mapping[str, Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    """Records values against a group. Never raises; what cannot be recorded is named in one warning.

    ``rl.*`` series come from the driver: in a worker the group ``rl`` is not recorded.

    Args:
        meter: An OpenTelemetry meter, such as ``get_telemetry_handle().meter``. Instruments are made once for each.
        group: Name of the group.
        values: By the keys of its series. None is left out, as is what is no number.
        attributes: Labels of every point. A label with over 256 values is cut to ``other``.
        more: Further values by key.
    """
    try:
        entry = _groups.get(group)
        if entry is None:
            _state.warn_once(
                f"group:{group}", "Metric group %r is not registered: register_metric_group declares it.", group
            )
            return
        if group == RL_METRIC_GROUP and _in_worker():
            _state.warn_once("rl-worker", "rl.* metrics come from the driver; this worker's are not recorded.")
            return
        for key, value in {**(values or {}), **more}.items():
            if value is not None:
                _record(meter, group, entry, key, value, attributes)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.count_drop("metrics")
        _state.warn_once(f"record:{group}", "Metrics of group %r could not be recorded: %r", group, error)


def _record(meter: Any, group: str, entry: _Group, key: str, value: Any, attributes: Mapping[str, Any] | None) -> None:
    spec = entry.specs.get(key)
    if spec is None:
        _state.warn_once(f"key:{group}:{key}", "Metric group %r has no series %r.", group, key)
        return
    number = _numbers.number(value)
    if number is None:
        _state.warn_once(
            f"value:{group}:{key}", "Metric %s: a %s is no number and is left out.", spec.name, type(value).__name__
        )
        return
    try:
        made = entry.instruments.get(meter)
        if made is None:
            made = entry.instruments[meter] = {}
        emit = made.get(spec)
        if emit is None:
            create = getattr(meter, f"create_{spec.kind}")
            instrument = create(spec.name, unit=spec.unit, description=spec.description)
            emit = made[spec] = getattr(instrument, _EMIT[spec.kind])
        labels = _cardinality.bounded(spec.name, attributes)
        if labels:
            emit(number, labels)
        else:
            emit(number)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.count_drop("metrics")
        _state.warn_once(f"record:{group}:{key}", "Metric %s could not be recorded: %r", spec.name, error)


def _in_worker() -> bool:
    handle = get_telemetry_handle()
    return handle is not None and handle.role != semconv.ROLE_DRIVER
