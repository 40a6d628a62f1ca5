"""Fuzzes one target, where atheris is installed: ``python -m tests.fuzz.one TARGET [libFuzzer's options, corpora]``."""

from __future__ import annotations

import logging
import sys

import atheris


def main() -> None:
    """Runs libFuzzer over a target; it ends the process."""
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["raytrace_rl"]):
        from tests.fuzz.targets import TARGETS
    logging.disable(logging.CRITICAL)  # a warning a try, of what is damaged on purpose
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
