"""Makes the spool of a long run of the demo, of any size: short steps of 56 spans, trained on linked rollouts.

Lanes, phases, attributes, links and proportions are those of ``python -m examples.async_grpo`` (docs/performance.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.made_spool import T0, write
from raytrace_rl import semconv
from raytrace_rl.spool.format import Kind, pack_record

#: What an attribute may be; one of None is none.
_Value = str | bool | int | float | None
_US: Final = 1000
_MS: Final = 1_000_000
_STEP_NS: Final = 200 * _MS
_TRACE: Final = bytes.fromhex("f38a9bfc4c7635db58438dfdef29ce32")
_NODE: Final = "node-a"
_ROLLOUTS: Final = 5
_LINKS: Final = 4
_EPOCHS: Final = 3
_EVALUATED: Final = 10
SPANS_A_STEP: Final = 56
_MAIN: Final = 140_319_867_870_080


def _id(kind: int, number: int) -> bytes:
    """An id that looks as drawn, another for each kind and number."""
    return (((kind << 48) + number + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1).to_bytes(8, "big")


def _some(step: int, salt: int, most: int) -> int:
    """A number below ``most`` that looks as drawn."""
    return ((step * 64 + salt) * 2_654_435_761 & 0xFFFFFFFF) * most >> 32


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def _field(tag: int, content: bytes) -> bytes:
    return bytes((tag,)) + _varint(len(content)) + content


@cache
def _key(key: str) -> bytes:
    return _field(0x0A, key.encode())


def _attributes(values: Mapping[str, _Value], tag: int = 0x4A) -> bytes:
    """Encoded attributes, of a span or (tag 0x22) of a link; made by hand, for there are tens of millions."""
    parts = []
    for key, value in values.items():
        if isinstance(value, str):
            held = _field(0x0A, value.encode())
        elif isinstance(value, bool):
            held = bytes((0x10, value))
        elif isinstance(value, int):
            held = b"\x18" + _varint(value)
        elif isinstance(value, float):
            held = struct.pack("<Bd", 0x21, value)
        else:
            continue
        parts.append(_field(tag, _key(key) + _field(0x12, held)))
    return b"".join(parts)


def _values(**values: _Value) -> bytes:
    """Encoded attributes of a span; ``rl__bucket`` for ``rl.bucket``."""
    return _attributes({key.replace("__", "."): value for key, value in values.items()})


def _thread(number: int, name: str) -> bytes:
    return _values(thread__id=_MAIN + number, thread__name=name)


class _Named:
    """Spans of one name on one thread, with what they all have in common."""

    def __init__(self, name: str, group: str, bucket: str | None = None, thread: bytes = b"", remote: int = 0) -> None:
        self._flags = b"\x85\x01" + (0x101 | remote).to_bytes(4, "little")
        self._static = _field(0x2A, name.encode()) + b"\x30\x01"
        self._static += _values(rl__span_group=group, rl__bucket=bucket)
        self._thread = thread

    def at(
        self, own: bytes, parent: bytes, start: int, end: int, scopes: bytes = b"", rest: bytes = b"", by: bytes = b""
    ) -> bytes:
        """Returns the record of one of them; ``by`` is its thread where each has another."""
        payload = (
            b"\x0a\x10" + _TRACE + (b'"\x08' + parent if parent else b"") + self._flags + b"\x12\x08" + own
            + b"\x39" + (T0 + start).to_bytes(8, "little") + self._static + scopes + (by or self._thread)
            + b"\x41" + (T0 + end).to_bytes(8, "little") + rest
        )  # fmt: skip
        return pack_record(Kind.SPAN, payload)


_THREAD: Final = _thread(0, "MainThread")
_REMOTE: Final = 0x200
(
    _JOB, _STEP, _STARVED, _ADVANTAGE, _LOGPROBS, _TRAINING, _SYNC, _BUBBLE, _EVALUATE, _SAMPLE, _PUSH, _EXPORT,
    _ROLLOUT, _REWARD, _BACKOFF, _PROCESSING, _PAUSE, _GENERATION, _TAKEN, _RANK_LOGPROBS, _RANK_TRAINING, _REDUCE,
) = range(22)  # fmt: skip
_JOB_ID: Final = _id(_JOB, 0)


def _iteration(step: int) -> bytes:
    return _values(rl__iteration=step + 1)


def _queued(step: int, salt: int) -> bytes:
    return _values(rl__queued_ns=900 * _US + _some(step, salt, 4 * _MS))


def _link(step: int, number: int) -> bytes:
    """To a rollout of the step before."""
    rollout = _ROLLOUTS * (step - 1) + number
    made = _rollout_times(rollout)[1]
    about: dict[str, _Value] = {
        "rl.trajectory.count": 1,
        "rl.trajectory.age_s": (step * _STEP_NS + 36 * _MS - made) / 1e9,
        "rl.trajectory.made_ns": T0 + made,
        "rl.trajectory.node": _NODE,
        "rl.weight_version": step - 1,
        "rl.trajectory.lag": 1,
    }
    ids = _field(0x0A, _TRACE) + _field(0x12, _id(_ROLLOUT, rollout))
    return _field(0x6A, ids + _attributes(about, 0x22) + b"\x35\x01\x01\x00\x00")


def _training_ends(step: int) -> tuple[int, list[tuple[list[int], int]]]:
    """When training starts in a step; of each epoch when the ranks have their gradients, and when these are summed."""
    at = start = step * _STEP_NS + 37 * _MS
    epochs = []
    for epoch in range(_EPOCHS):
        ready = [at + 44 * _MS + _some(step, 8 * epoch + rank, 4 * _MS) for rank in range(2)]
        at = max(ready) + 600 * _US
        epochs.append((ready, at))
    return start, epochs


def _driver(steps: int) -> Iterator[bytes]:
    job, step_of = _Named("rl.grpo.job", "job", None, _THREAD), _Named("rl.grpo.step", "step", None, _THREAD)
    starved = _Named("rl.idle.buffer_starvation", "efficiency", "idle", _THREAD)
    advantage = _Named("rl.grpo.advantage", "advantage", "overhead", _THREAD)
    logprobs = _Named("rl.grpo.reference_logprobs", "logprob", "overhead", _THREAD)
    training = _Named("rl.grpo.policy_training", "policy_update", "productive", _THREAD)
    sync = _Named("rl.grpo.weight_sync", "data_plane", "overhead", _THREAD)
    bubble = _Named("rl.idle.refit_bubble", "efficiency", "idle", _THREAD)
    evaluate = _Named("rl.grpo.evaluate", "evaluate", None, _THREAD)
    waited = _values(**{"rl.efficiency.category": "idle/buffer_starvation"})
    refitted = _values(**{"rl.efficiency.category": "idle/refit_bubble"})
    for step in range(steps):
        at, own, scope = step * _STEP_NS, _id(_STEP, step), _iteration(step)
        begin, epochs = _training_ends(step)
        trained = epochs[-1][1] + _MS
        synced = trained + 7 * _MS + _some(step, 40, 4 * _MS)
        yield starved.at(_id(_STARVED, step), own, at + 20_000, at + 3 * _MS, scope, waited)
        yield advantage.at(_id(_ADVANTAGE, step), own, at + 3 * _MS, at + 3 * _MS + 234_000, scope)
        yield logprobs.at(_id(_LOGPROBS, step), own, at + 4 * _MS, at + 35 * _MS, scope)
        links = b"".join(_link(step, number) for number in range(_LINKS)) if step else b""
        rest = _values(**{"rl.staleness.max": 1, "rl.reward.mean": 0.5}) + links
        yield training.at(_id(_TRAINING, step), own, begin - _MS, trained, scope, rest)
        yield bubble.at(_id(_BUBBLE, step), _id(_SYNC, step), synced - 3 * _MS, synced - 2 * _MS, scope, refitted)
        yield sync.at(_id(_SYNC, step), own, trained + _MS, synced, scope, _values(rl__weight_version=step + 1))
        if step % _EVALUATED == _EVALUATED - 1:
            yield evaluate.at(_id(_EVALUATE, step), own, synced, synced + 2 * _MS, scope)
        yield step_of.at(own, _JOB_ID, at, synced + 2 * _MS, scope)
    yield job.at(_JOB_ID, b"", 0, steps * _STEP_NS)


def _rollout_times(rollout: int) -> tuple[int, int]:
    start = rollout * (_STEP_NS // _ROLLOUTS)
    return start, start + 55 * _MS + _some(rollout, 5, 20 * _MS)


def _rollouts(steps: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Each rollout: its number, times and id."""
    for rollout in range(steps * _ROLLOUTS):
        yield (rollout, *_rollout_times(rollout), _id(_ROLLOUT, rollout))


def _collector(steps: int) -> Iterator[bytes]:
    loop = _thread(64, "collection-loop")
    pause = _Named("rl.idle.generation_limit_pause", "efficiency", None, loop, _REMOTE)
    processing = _Named("rl.grpo.data_processing", "data_processing", "overhead", loop, _REMOTE)
    whole = _Named("rl.grpo.rollout", "rollout")
    reward = _Named("rl.grpo.reward", "reward", "productive")
    backoff = _Named("rl.idle.buffer_full_backoff", "efficiency", "idle")
    paused, full = (
        _values(**{"rl.efficiency.category": f"idle/{what}"})
        for what in ("generation_limit_pause", "buffer_full_backoff")
    )
    for rollout, start, end, own in _rollouts(steps):
        by, batch = _thread(128 + 64 * (rollout % 2), f"rollout-{rollout}"), _values(rl__batch_id=rollout)
        back = end - 4 * _MS - _some(rollout, 6, 12 * _MS)
        yield pause.at(_id(_PAUSE, rollout), _JOB_ID, start + 100_000, start + 25 * _MS, b"", paused)
        yield processing.at(_id(_PROCESSING, rollout), _JOB_ID, start, start + 66_000, b"", batch)
        yield reward.at(_id(_REWARD, rollout), own, back - 300_000, back - 80_000, by=by)
        yield backoff.at(_id(_BACKOFF, rollout), own, back, end - 50_000, b"", full, by)
        yield whole.at(own, _JOB_ID, start, end, b"", batch, by)


def _buffer(steps: int) -> Iterator[bytes]:
    thread = _thread(0, "AsyncIO Thread: default")
    push = _Named("rl.grpo.buffer_push", "data_plane", "overhead", thread, _REMOTE)
    sample = _Named("rl.grpo.buffer_sample", "data_plane", "overhead", thread, _REMOTE)
    for rollout, _, end, _ in _rollouts(steps):
        rest = _values(rl__batch_id=rollout, **{"rl.staleness": 0, "rl.refused": False})
        at = end - 100_000
        yield push.at(_id(_PUSH, rollout), _id(_BACKOFF, rollout), at, at + 13_000, _queued(rollout, 7), rest)
        if rollout % _ROLLOUTS == 0:
            step = rollout // _ROLLOUTS
            rest = _values(rl__weight_version=step, **{"rl.staleness.max": 1, "rl.num_refused": 0})
            at, scopes = step * _STEP_NS + 2 * _MS, _queued(step, 8) + _iteration(step)
            yield sample.at(_id(_SAMPLE, step), _id(_STARVED, step), at, at + 19_000, scopes, rest)


def _generation(rank: int, steps: int) -> Iterator[bytes]:
    generation = _Named("rl.grpo.generation", "generation", "productive", _THREAD, _REMOTE)
    taken = _Named("rl.grpo.weight_sync", "data_plane", "overhead", _THREAD, _REMOTE)
    batch = _values(rl__num_prompt_groups=8, rl__num_generations_per_prompt=16)
    for rollout, start, end, own in _rollouts(steps):
        step = rollout // _ROLLOUTS
        version = _values(rl__weight_version=step)
        if rollout % 2 == rank:
            times = start + 2 * _MS, end - 18 * _MS
            yield generation.at(_id(_GENERATION, rollout), own, *times, _queued(rollout, 9), batch + version)
        if rollout % _ROLLOUTS == _ROLLOUTS - 1:
            synced = _training_ends(step)[1][-1][1] + 5 * _MS
            scopes = _queued(step, 10 + rank) + _iteration(step)
            yield taken.at(_id(_TAKEN, 2 * step + rank), _id(_SYNC, step), synced, synced + 900_000, scopes, version)


def _training(rank: int, steps: int) -> Iterator[bytes]:
    logprobs = _Named("rl.grpo.reference_logprobs", "logprob", "overhead", _THREAD, _REMOTE)
    training = _Named("rl.grpo.policy_training", "policy_update", "productive", _THREAD, _REMOTE)
    reduce = _Named("rl.grpo.gradient_all_reduce", "policy_update", "productive", _THREAD)
    export = _Named("rl.grpo.weight_export", "data_plane", "overhead", _THREAD, _REMOTE)
    size = _values(rl__num_bytes=408_064)
    for step in range(steps):
        at, scope, number = step * _STEP_NS, _iteration(step), 2 * step + rank
        shard = _values(**{"rl.shard.rows": 256, "rl.shard.crc32": _some(step, 11 + rank, 1 << 32)})
        ended = at + 24 * _MS + _some(step, 13 + rank, 8 * _MS)
        yield logprobs.at(_id(_RANK_LOGPROBS, number), _id(_LOGPROBS, step), at + 6 * _MS, ended, scope, shard)
        begin, epochs = _training_ends(step)
        own = _id(_RANK_TRAINING, number)
        for epoch, (ready, summed) in enumerate(epochs):
            yield reduce.at(_id(_REDUCE, _EPOCHS * number + epoch), own, ready[rank], summed, scope, size)
        rest = _values(rl__weight_version=step + 1) + shard
        scopes = _queued(step, 15 + rank) + scope
        yield training.at(own, _id(_TRAINING, step), begin, epochs[-1][1] + 400_000, scopes, rest)
        if rank == 0:
            start = epochs[-1][1] + 3 * _MS
            yield export.at(_id(_EXPORT, step), _id(_SYNC, step), start, start + 250_000, _queued(step, 17) + scope)


def make(run_dir: Path, spans: int) -> int:
    """Makes a run of about so many spans; returns how many there are."""
    steps = max(4, spans // SPANS_A_STEP)
    lanes: list[tuple[str, int | None, Iterator[bytes]]] = [
        ("driver", None, _driver(steps)),
        ("replay_buffer", None, _buffer(steps)),
        ("collector", None, _collector(steps)),
        *(("generation", rank, _generation(rank, steps)) for rank in range(2)),
        *(("training", rank, _training(rank, steps)) for rank in range(2)),
    ]
    whole = 0
    for number, (group, rank, records) in enumerate(lanes):
        about: dict[str, str | int] = {semconv.RL_RUN_ID: "made", semconv.RL_ROLE: "driver" if not number else "worker"}
        if number:
            about |= {semconv.RL_WORKER_GROUP: group, "ray.actor.id": f"{number:032x}"}
        if rank is not None:
            about[semconv.NV_DL_RANK] = rank
        whole += write(run_dir, _NODE, 1000 + number, records, about, steps * _STEP_NS)
    return whole
