"""``python -m tests.soak``: many writers, a collector with hundreds of open spans and a relay, for minutes, watched.

Every writer, the relay and the server are processes of their own; the server speaks real OTLP/gRPC. Each second it is
looked how much the spool takes, in all and in the tmpfs, how much memory the relay, and how far it is behind. At the
end every span that a writer has noted as ended must have arrived, or be in the spool, or be counted as dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from raytrace_rl import _decode
from raytrace_rl.spool import seal
from raytrace_rl.spool.format import MAX_HEADER_SIZE, Kind, parse_header
from raytrace_rl.spool.listing import node_processes
from raytrace_rl.spool.place import node_name
from raytrace_rl.spool.reader import Cursor, UnreadableFileError, read_whole
from tests.soak_processes import BEGUN, ENDED, OPEN, flags
from tests.soak_results import Plan, Seen, judge

MIB: Final = 1 << 20
_RANK: Final = "nv.dl.rank"


class Soak:
    """One soak in a directory of its own."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.seen = Seen()
        self.run_dir = directory / "run"
        self.node_dir = self.run_dir / "spool" / node_name()
        self._files = directory / "flags"
        self._files.mkdir()
        self._collector = plan.writers
        capacity = int(plan.rate * (plan.seconds + 120)) + 100 * OPEN
        for rank in range(plan.writers + 1):
            for kind in ("noted", "received", "cut"):
                flags(self._files, kind, rank, capacity).close()
        self._maps = {
            kind: [flags(self._files, kind, rank) for rank in range(plan.writers + 1)]
            for kind in ("noted", "received", "cut")
        }
        self._stack = ExitStack()
        self._log = self._stack.enter_context((directory / "log").open("wb"))
        self._env = {
            **os.environ,
            "RAYTRACE_RL_ENABLED": "1",
            "RAYTRACE_RL_RUN_DIR": str(self.run_dir),
            "RAYTRACE_RL_RUN_ID": "soak",
            "RAYTRACE_RL_SPAN_GROUPS": "all",
            "RAYTRACE_RL_SPOOL_MAX_MIB": str(plan.spool_max_mib),
        }
        self._relay: subprocess.Popen[str] | None = None
        self._was_open: set[int] = set()

    def _start(self, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.soak_processes", *map(str, arguments)]
        process = subprocess.Popen(command, env=self._env, stdout=subprocess.PIPE, stderr=self._log, text=True)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def run(self, *, each: Any = None) -> Seen:
        """Runs it to its end; ``each`` is called with what was seen, every ten seconds.

        Returns:
            What was seen; ``failures`` says what must not be.
        """
        plan = self.plan
        with self._stack:
            if plan.relays:
                server = self._start("serve", self._files)
                assert server.stdout is not None
                url = f"http://127.0.0.1:{int(server.stdout.readline())}"
                self.node_dir.mkdir(mode=0o700, parents=True)
                self._relay = self._start("relay", self.node_dir, "soak", url, plan.spool_max_mib * MIB)
                assert self._relay.stdout is not None
                assert self._relay.stdout.readline() == "ready\n"
            writers = [self._start("write", self._files, rank, plan.rate) for rank in range(plan.writers)]
            collector = self._start("collect", self._files, self._collector, plan.rate)
            self._watch(plan.seconds, each)
            self._end(writers, collector)
            self._sample()
            self._settle()
            seal.adopt_orphans(str(self.node_dir))  # what the killed have left in memory goes with the directory
        self.seen.failures += judge(self.plan, self.seen)
        return self.seen

    def _watch(self, seconds: float, each: Any) -> None:
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + seconds:
            self._sample()
            if each is not None and self.seen.samples % 10 == 0:
                each(now - begun, self.seen)
            time.sleep(1)

    def _sample(self) -> None:
        seen = self.seen
        seen.samples += 1
        sizes = {"segments": 0, "journals": 0}
        memory = 0
        for files in node_processes(self.node_dir) if self.node_dir.is_dir() else ():
            for kind, paths in (("segments", files.segments), ("journals", files.journals)):
                for path in map(Path, paths.values()):
                    try:
                        size = path.stat().st_size
                        memory += size if path.is_symlink() else 0
                    except OSError:
                        continue  # sealed or removed meanwhile
                    sizes[kind] += size
        seen.spool_mib = max(seen.spool_mib, sizes["segments"] / MIB)
        seen.journals_mib = max(seen.journals_mib, sizes["journals"] / MIB)
        seen.shm_mib = max(seen.shm_mib, memory / MIB)
        if self._relay is not None:
            status = Path(f"/proc/{self._relay.pid}/status").read_text(encoding="ascii")
            seen.relay_mib = max(seen.relay_mib, int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024)
            seen.behind = max(seen.behind, self._count("noted") - self._count("received"))

    def _count(self, kind: str) -> int:
        if kind == "noted":
            return sum(one[:].count(ENDED) for one in self._maps[kind])
        return sum(len(one) - one[:].count(0) for one in self._maps[kind])

    def _open(self, collector: subprocess.Popen[str]) -> set[int]:
        """The spans that the collector has open, once its heartbeat has surely noted them: two beats later.

        A span that was opened since the last one, beyond those that the table holds, has left nothing yet.
        """
        flags = self._maps["noted"][self._collector]
        begun = {n for n, flag in enumerate(flags[:]) if flag == BEGUN}
        beats = {self._beat(collector.pid)}
        deadline = time.monotonic() + 60
        while len(beats) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
            beats.add(self._beat(collector.pid))
        return begun

    def _beat(self, pid: int) -> int:
        beats = [0]
        for files in node_processes(self.node_dir):
            for path in files.segments.values() if files.pid == pid else ():
                with contextlib.suppress(UnreadableFileError, ValueError):
                    beats.append(parse_header(read_whole(path, MAX_HEADER_SIZE)).heartbeat_ns)
        return max(beats)

    def _end(self, writers: list[subprocess.Popen[str]], collector: subprocess.Popen[str]) -> None:
        """A third of the writers is killed, and the collector with all its open spans; the others shut down."""
        for n, process in enumerate(writers):
            process.send_signal(signal.SIGKILL if n % 3 == 0 else signal.SIGTERM)
            self.seen.killed += n % 3 == 0
        self._was_open = self._open(collector)
        collector.kill()
        self.seen.killed += 1
        for n, process in enumerate([*writers, collector]):
            code = process.wait(120)
            if code not in (0, -signal.SIGKILL):
                self.seen.failures.append(f"process {n} has ended with {code}")
        if self._relay is not None:
            # Nobody says that a process was killed: the relay finds out at its next look.
            deadline = time.monotonic() + 60
            while self._missing_open() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert self._relay.stdout is not None
            self._relay.terminate()
            if self._relay.stdout.readline() != "drained\n":
                self.seen.failures.append("the relay did not send everything")
            self._relay.wait(60)
            self._relay = None

    def _missing_open(self) -> set[int]:
        """Spans that were open a while before the collector was killed, and have not arrived as truncated, or ended."""
        cut, noted = (self._maps[kind][self._collector][:] for kind in ("cut", "noted"))
        return {n for n in self._was_open if not cut[n] and noted[n] != ENDED}

    def _settle(self) -> None:
        """What came of each span."""
        seen = self.seen
        kept, seen.dropped = self._spooled()
        seen.open_spans = len(self._was_open)
        seen.open_lost = len(self._missing_open()) if self.plan.relays else 0
        for rank in range(self.plan.writers + 1):
            noted, received, cut = (self._maps[kind][rank][:] for kind in ("noted", "received", "cut"))
            arrived = {n for n, count in enumerate(received) if count}
            ended = {n for n, flag in enumerate(noted) if flag == ENDED}
            there = arrived | kept.get(rank, set())
            seen.ended += len(ended)
            seen.received += len(arrived)
            seen.twice += sum(received) - len(arrived)
            seen.cut += sum(cut)
            seen.kept += len(kept.get(rank, set()))
            seen.lost += len(ended - there)
            seen.unnoted += len(there - ended)

    def _spooled(self) -> tuple[dict[int, set[int]], int]:
        """The numbers of the spans in the spool by their writer, and how many were dropped, as the writers say.

        Not by `load_run`, which would have all of them in memory at once.
        """
        kept: dict[int, set[int]] = {}
        dropped = 0
        for files in node_processes(self.node_dir):
            of_process = 0
            for _, path in sorted(files.segments.items()):
                with Cursor(path) as cursor:
                    numbers = set()
                    for record in cursor.poll():
                        if record.kind == Kind.SPAN:
                            numbers.add(_decode.span(record.payload).attributes.get("n"))
                        elif record.kind == Kind.DROPS:
                            of_process = max(of_process, json.loads(record.payload)["spans"])
                    if cursor.header is not None:
                        of_process = max(of_process, cursor.header.dropped_spans)
                        rank: Any = _decode.resource(cursor.header.resource).get(_RANK)
                        kept.setdefault(rank, set()).update(n for n in numbers if isinstance(n, int))
            dropped += of_process
        return kept, dropped


def main() -> int:
    """Runs what was asked for; 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--writers", type=int, default=Plan.writers)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="spans a second, each writer")
    parser.add_argument("--spool-max-mib", type=int, default=Plan.spool_max_mib)
    parser.add_argument("--no-relay", action="store_true", help="nothing is forwarded: the bound must act")
    given = parser.parse_args()
    plan = Plan(given.writers, given.rate, given.minutes * 60, given.spool_max_mib, relays=not given.no_relay)

    def each(elapsed_s: float, seen: Seen) -> None:
        print(
            f"{elapsed_s:5.0f} s  at most: spool {seen.spool_mib:.1f} MiB, journals {seen.journals_mib:.1f}, tmpfs "
            f"{seen.shm_mib:.1f}, relay {seen.relay_mib:.1f}, {seen.behind} spans behind",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as directory:
        seen = Soak(plan, Path(directory)).run(each=each)
    print(json.dumps({**asdict(plan), **asdict(seen)}, indent=1))
    return 1 if seen.failures else 0


if __name__ == "__main__":
    sys.exit(main())
