"""``python -m tests.fuzz [--seconds S] [TARGET ...]``: fuzzes each target for a fixed time; 1 if one broke.

Coverage-guided, by atheris (libFuzzer). Inputs that led somewhere new are kept in ``.fuzz/`` and gone on from the next
time; one that breaks a property is written to ``.fuzz/broken/TARGET``: move it to ``tests/fuzz/regressions/TARGET``
with the repair, under a name that says what it is. `tests.test_fuzz` tries all of these in every run of the tests.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.seeds import regressions, seeds
from tests.fuzz.targets import TARGETS

_ROOT = Path(__file__).parent.parent.parent
_KEPT = _ROOT / ".fuzz"
#: A try takes a millisecond or less: one that takes this long (seconds) hangs, as far as anybody waiting can tell.
_TIMEOUT_S = 10
_RSS_MIB = 1024
_LONGEST = 16384


def fuzz(target: str, seconds: int, first: dict[str, bytes]) -> tuple[bool, str]:
    """Fuzzes one target; whether every property held, and one line about it."""
    broken = _KEPT / "broken" / target
    corpus, begin = _KEPT / target, _KEPT / "seeds" / target
    for directory in (broken, corpus, begin):
        directory.mkdir(parents=True, exist_ok=True)
    for name, data in first.items():
        (begin / name).write_bytes(data)
    options = [f"-max_total_time={seconds}", f"-timeout={_TIMEOUT_S}", f"-rss_limit_mb={_RSS_MIB}"]
    options += [f"-max_len={_LONGEST}", f"-artifact_prefix={broken}/", "-print_final_stats=1", "-use_value_profile=1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.one", target, *options, str(corpus), str(begin)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    text = done.stdout + done.stderr
    rate = re.search(r"average_exec_per_sec:\s+(\d+)", text)
    tries = re.search(r"number_of_executed_units:\s+(\d+)", text)
    memory = re.search(r"peak_rss_mb:\s+(\d+)", text)
    features = re.findall(r"cov: (\d+) ft: (\d+)", text)
    line = f"{target:10} {tries[1] if tries else '?':>9} tries {rate[1] if rate else '?':>6}/s"
    line += f"  edges {features[-1][0] if features else '?':>5}  rss {memory[1] if memory else '?':>4} MiB"
    if done.returncode == 0:
        return True, line
    about = re.search(r"=== Uncaught Python exception: ===.*?(?=\nINFO: )", text, re.DOTALL)
    written = re.findall(r"Test unit written to (.*)", text)
    shown = about[0] if about else text[-4000:]
    return False, f"{line}  BROKEN, exit {done.returncode}\n{shown}\n{' '.join(written)}\n"


def main() -> int:
    """Fuzzes what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzzes what reads bytes of others.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    first = seeds()
    for name, known in regressions().items():
        first[name].update(known)
    held = True
    for target in arguments.targets or TARGETS:
        fine, line = fuzz(target, arguments.seconds, first[target])
        print(line, flush=True)
        held = held and fine
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
