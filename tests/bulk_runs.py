"""Runs for the tests that hold columns against rows: any shape, small times so that much coincides, and damage."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import strategies as st

from raytrace_rl.monitor import otlp_proto
from raytrace_rl.monitor.model import Run
from raytrace_rl.spool.format import Kind, pack_header, pack_record
from tests import spooling
from tests.made_runs import Made
from tests.spooling import T0, Spool, ended, resource, span

NAMES = ("work", "train", "all_reduce", "refit_engine", "rl.idle.wait")
BUCKETS = ("productive", "overhead", "wasted", "idle", None, "no bucket")
GROUPS = ("step", "step", "job", "rollout", "policy_update", None)


def spooled(run: Run, run_dir) -> str:
    """Writes a run that was made in memory as a spool; returns its directory."""
    for process in run.processes:
        spool_dir = run_dir / "spool" / (process.node or "node")
        spool_dir.mkdir(parents=True, exist_ok=True)
        rows = [row for row in run.spans if row.process is process]
        records = b"".join(pack_record(Kind.SPAN, otlp_proto.span(row)) for row in rows)
        about = {key.replace(".", "__"): value for key, value in process.resource.items()}
        header = spooling.header(
            pid=process.pid, start_ns=process.start_ns or T0, resource=resource(**about), heartbeat_ns=process.last_ns
        )
        path = spool_dir / f"{process.pid}-{process.start_ns or T0}.0.rts"
        path.write_bytes(pack_header(header) + records)
    return str(run_dir)


def differences(wanted: Any, found: Any, where: str = "") -> list[str]:
    """Where two reports differ: floats by more than a part in 10^9."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        if wanted.keys() != found.keys():
            return [f"{where}: keys {sorted(wanted.keys() ^ found.keys(), key=str)}"]
        return [line for key in wanted for line in differences(wanted[key], found[key], f"{where}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list):
        if len(wanted) != len(found):
            return [f"{where}: {len(wanted)} entries, {len(found)} found: {wanted} {found}"]
        pairs = enumerate(zip(wanted, found, strict=True))
        return [line for n, (one, other) in pairs for line in differences(one, other, f"{where}[{n}]")]
    if isinstance(wanted, float) and isinstance(found, float):
        near = abs(wanted - found) <= 1e-9 * max(1.0, abs(wanted)) or wanted == found
        return [] if near else [f"{where}: {wanted!r}, {found!r} found"]
    same = type(wanted) is type(found) and wanted == found
    return [] if same else [f"{where}: {wanted!r}, {found!r} found"]


@st.composite
def identities(draw, number: int):
    """The resource of a process, as keywords."""
    role = (
        "driver" if number == 0 and draw(st.booleans()) else draw(st.sampled_from(["worker", "worker", "driver", None]))
    )
    about: dict[str, Any] = {"rl__run__id": "drawn"}
    if role is not None:
        about["rl__role"] = role
    if role != "driver":
        about["rl__worker_group"] = draw(st.sampled_from(["training", "generation", None])) or None
        about["nv__dl__rank"] = draw(st.sampled_from([0, 1, 2, 3, None]))
        about["ray__actor__id"] = draw(st.sampled_from(["a1", "a2", None]))
        about["rl__gpu__ids"] = draw(st.sampled_from([["0"], ["0", "1"], None, None, None]))
    about["rl__attempt"] = draw(st.sampled_from([1, 1, 1, 2]))
    about["host__name"] = draw(st.sampled_from(["node-a", "node-b"]))
    return {key: value for key, value in about.items() if value is not None}


@st.composite
def spans(draw, numbers: list[int], others: list[int]):
    """Spans of one process: payloads of ended ones, and of open ones."""
    closed: list[bytes] = []
    opened: list[bytes] = []
    for number in numbers:
        start = draw(st.integers(0, 20))
        length = draw(st.sampled_from([0, 1, 2, 3, 5, 8]))
        if draw(st.integers(0, 9)) == 0:
            length = -1
        values: dict[str, Any] = {"thread__id": draw(st.integers(1, 2)), "thread__name": "MainThread"}
        bucket, group = draw(st.sampled_from(BUCKETS)), draw(st.sampled_from(GROUPS))
        optional = {
            "rl__bucket": bucket,
            "rl__span_group": group,
            "rl__iteration": draw(st.sampled_from([None, 1, 2, 3])),
            "rl__queued_ns": draw(st.sampled_from([None, None, -5, 7, 1 << 62])),
            "rl__queued_from": draw(st.sampled_from([None, "node-a", "node-b", "node-c"])),
            "rl__weight_version": draw(st.sampled_from([None, None, 3])),
            "rl__truncated": draw(st.sampled_from([None, None, None, None, True])),
        }
        values.update({key: value for key, value in optional.items() if value is not None})
        count = {"rl.trajectory.count": draw(st.integers(0, 3)), "rl.trajectory.node": "node-b"}
        links = (
            [(draw(st.sampled_from(others)), draw(st.sampled_from([{}, count])))]
            if draw(st.integers(0, 5)) == 0
            else []
        )
        is_open = draw(st.integers(0, 9)) == 0
        payload = span(
            number,
            start,
            None if is_open else start + length,
            parent=draw(st.sampled_from([0, *others])),
            name=draw(st.sampled_from(NAMES)),
            error=draw(st.integers(0, 9)) == 0,
            trace=bytes([draw(st.sampled_from([1, 1, 1, 2]))]) * 16,
            links=links,
            **values,
        )
        (opened if is_open else closed).append(payload)
    return closed, opened


@st.composite
def drawn_runs(draw):
    """A function that writes a drawn run into a directory; returns the locks of its living processes."""
    count = draw(st.integers(1, 5))
    size = draw(st.integers(1, 9))
    numbers = list(range(1, count * size + 1))
    made = []
    for number in range(count):
        own = numbers[number * size : (number + 1) * size]
        closed, opened = draw(spans(own, [*numbers, 999]))
        if draw(st.integers(0, 5)) == 0 and closed:
            closed.append(closed[0])
        state = draw(st.sampled_from(["closed", "closed", "dead", "unknown", "alive"]))
        cut = draw(st.integers(0, 12)) if draw(st.integers(0, 4)) == 0 else 0
        made.append((draw(identities(number)), closed, opened, state, cut, draw(st.integers(0, 25))))

    def write(run_dir) -> list[Any]:
        locks = []
        spools = {}
        pids = itertools.count(10)
        for about, closed, opened, state, cut, beat in made:
            node = "node-a" if about["host__name"] == "node-a" else "node-b"
            if node not in spools:
                spools[node] = Spool(run_dir, node)
            spool, pid = spools[node], next(pids)
            half = len(closed) // 2
            records = [ended(*closed[:half]), ended(*closed[half:])]
            records[1] = records[1][: len(records[1]) - cut] if cut else records[1]
            extra = pack_record(Kind.DROPS, b'{"spans": 2}') if beat % 2 else b""
            spool.segment(pid, records[0] + extra, heartbeat_ns=T0, resource=resource(**about))
            spool.segment(
                pid, records[1], 1, heartbeat_ns=T0 + beat * spooling.SECOND, resource=resource(**about), pad=cut
            )
            if opened:
                spool.slots(pid, opened)
            if state == "dead":
                spool.live_file(pid)
            elif state == "alive":
                locks.append(spool.alive(pid))
            elif state == "unknown":
                (spool.node_dir / f"{spool.stem(pid)}.live").mkdir()
        return locks

    return write


def ranked_run(generator: random.Random) -> Made:
    """A run of a driver and ranks: phases, collectives, calls outside of steps, slow ranks, a restarted one."""
    made = Made()
    unit = generator.choice([1.0, 0.25, 0.1234567])
    groups = generator.choice([["training"], ["training", "generation"]])
    nodes, count = generator.randint(1, 3), generator.randint(1, 6)
    ranks = {}
    for group in groups:
        ranks[group] = [made.rank(rank, group, node=f"node-{rank % nodes}") for rank in range(count)]
    restarted = made.rank(0, groups[0], node="node-0")
    restarted.key, restarted.start_ns = "again", T0 + spooling.SECOND
    slow = generator.randrange(count)
    iterations = generator.randint(1, 9)
    job = made.span(made.driver, "job", 0, 40 * iterations, group="job") if generator.random() < 0.7 else None
    for number in range(iterations):
        begin = 40.0 * number
        step = made.step(begin, begin + generator.randint(25, 39), parent=job)
        call = made.span(made.driver, "train", begin + 1, begin + 24, step, group="policy_update", bucket="productive")
        if generator.random() < 0.5:
            made.span(made.driver, "refit_engine", begin + 24, begin + 25, step, bucket="overhead")
        for group, of_group in ranks.items():
            turns = generator.choice([1, 1, 2, 3])
            for turn in range(turns):
                lengths = [
                    generator.randint(1, 4) * unit + (rank == slow) * generator.randint(0, 2) for rank in range(count)
                ]
                for rank, first in enumerate(of_group):
                    if generator.random() < 0.03:
                        continue  # a rank that does not take part
                    again = group == groups[0] and rank == 0 and number > iterations // 2
                    process = restarted if again else first
                    at = begin + 1 + 7 * turn
                    work = made.span(process, "work", at, at + lengths[rank], call, bucket="productive", thread=turn)
                    if generator.random() < 0.4:
                        made.span(process, "part", at, at + lengths[rank] / 2, work, bucket="overhead", thread=turn)
                    if group == groups[0]:
                        end = at + max(lengths) + generator.choice([0, 0.125])
                        made.span(process, "all_reduce", at + lengths[rank], end, call, bucket="idle", thread=turn)
                    if generator.random() < 0.5:
                        late = begin + 30 + generator.randint(0, 3)
                        made.span(process, "generate", late, late + 1 + unit * (rank == slow), job, group="rollout")
    for process in made.processes.values():
        process.start_ns = process.start_ns or T0
    for row in made.rows:
        if row.links == () and row.name == "train" and generator.random() < 0.3:
            rollouts = [one for one in made.rows if one.name == "generate"]
            if rollouts:
                to = generator.sample(rollouts, min(3, len(rollouts)))
                row.links = made.span(made.driver, "links", 0, 0, links=tuple(to)).links
    return made


def linked_run(run_dir, generator: random.Random) -> None:
    """Writes a run of many short steps: nested spans of several lanes, and links to rollouts outside of the steps."""
    unit, second = generator.choice([1.0, 0.001, 0.0003]), generator.choice(["node-a", "node-b"])
    lanes: list[list[bytes]] = [[] for _ in range(5)]
    numbers = itertools.count(1)
    rollouts: list[int] = []

    def add(lane: int, start: float, end: float, parent: int = 0, links=(), thread: int = 1, **values: Any) -> int:
        number = next(numbers)
        named = {f"rl__{key}": value for key, value in values.items() if value is not None and key != "name"}
        name = values.get("name") or generator.choice(NAMES)
        times = round(start, 6), round(max(start, end), 6)
        lanes[lane].append(span(number, *times, parent=parent, name=name, links=links, thread__id=thread, **named))
        return number

    def nested(lane: int, start: float, end: float, parent: int, depth: int) -> None:
        at = start
        for _ in range(generator.randint(0, 3)):
            at += generator.choice([0, 0, 0.1, 0.5]) * unit
            until = at + generator.choice([0, 0.2, 0.2, 1, 1.5]) * unit
            other = generator.choice([lane, lane, 1, 2, 3])
            bucket = generator.choice(["productive", "overhead", "idle", "idle", None])
            own = add(other, at, until, parent, links(3) if generator.random() < 0.1 else (), bucket=bucket)
            if depth and generator.random() < 0.6:
                nested(other, at, until, own, depth - 1)
            at = generator.choice([at, until])

    def links(most: int) -> list[tuple[int, dict[str, Any]]]:
        found = []
        for to in generator.sample([*rollouts[-8:], 10**6], min(most, len(rollouts[-8:]) + 1)):
            said = {
                "rl.trajectory.count": generator.choice([1, 1, 2, 0, "odd"]),
                "rl.trajectory.age_s": generator.choice([0.5, 0.25, -1.0, 3, float("inf")]),
                "rl.trajectory.made_ns": generator.choice([T0, T0 + 1]),
                "rl.trajectory.node": generator.choice(["node-a", "node-b", "node-c", 7]),
                "rl.weight_version": generator.choice([1, 2, 300]),
                "rl.trajectory.lag": generator.choice([0, 1, -1]),
                "unknown": generator.choice(["text", 1.5, True]),
            }
            regular = generator.random() < 0.7
            kept = said if regular else {key: said[key] for key in said if generator.random() < 0.5}
            found.append((to, kept))
        return found

    job = add(0, 0, 200 * unit, name="job", span_group="job")
    at = 1.0 * unit
    for iteration in range(generator.randint(33, 60)):
        length = generator.randint(1, 5) * unit
        group = generator.choice(["step"] * 9 + ["job"])
        step = add(0, at, at + length, job, name="step", span_group=group, iteration=iteration // 2)
        for _ in range(generator.randint(0, 3)):
            begin = at + generator.choice([-3, -1, 0, 0.5]) * unit
            until = begin + generator.choice([0.5, 1, 2]) * unit
            version = generator.choice([None, 5])
            rollouts.append(add(4, begin, until, job, span_group="rollout", weight_version=version))
            nested(4, begin, until, rollouts[-1], 1)
        waited = at + generator.choice([0, 0.3, 1]) * unit
        idle = add(0, at, waited, step, name="rl.idle.wait", bucket="idle", span_group="efficiency")
        nested(3, at, waited, idle, 0)
        call = add(0, waited, at + length, step, links(generator.randint(0, 4)), name="train", bucket="productive")
        nested(0, waited, at + length, call, 2)
        ends = [waited + generator.choice([0.2, 0.4]) * unit for _ in range(2)]
        for rank, end in enumerate(ends):
            work = add(1 + rank, waited, max(ends) + 0.1 * unit, call, name="train", bucket="productive")
            add(1 + rank, end, max(ends), work, name="all_reduce", bucket="productive", iteration=iteration)
        at += generator.choice([length, length, length / 2])
    spools = {node: Spool(run_dir, node) for node in {"node-a", second}}
    for lane, records in enumerate(lanes):
        about: dict[str, Any] = {"rl__run__id": "linked", "host__name": second if lane in {2, 4} else "node-a"}
        about["rl__role"] = "worker" if lane else "driver"
        if lane:
            about |= {"rl__worker_group": "training" if lane < 3 else f"group {lane}", "nv__dl__rank": lane - 1}
        generator.shuffle(records)
        spools[about["host__name"]].segment(10 + lane, ended(*records), resource=resource(**about), heartbeat_ns=T0)
