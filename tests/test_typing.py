"""A type checker understands the public names as code uses them: ``mypy --strict`` over a program of a user's."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from mypy import api

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
    from collections.abc import AsyncIterator, Iterator

    from raytrace_rl import RLSpanGroup as G
    from raytrace_rl import iteration_scope, managed_span, safe_set_span_attributes, span_cm, trace_fn, umbrella_span
    from raytrace_rl.instrumentation import (
        efficiency_span,
        evaluate_span,
        per_prompt_scope,
        setup_span,
        start_efficiency_span,
        umbrella_trace_fn,
    )
    from raytrace_rl.setup import init_telemetry_driver
    from raytrace_rl.timer import Timer

    timer = Timer(span_prefix="rl.grpo")
    mixed = {"rl.a": 1, "rl.b": "x"}
    of_run = {"rl.model": "tiny", "rl.num_rollouts": 8}
    init_telemetry_driver({"enabled": True}, resource_attributes=of_run)

    with timer.time("reward", group=G.REWARD, **{"rl.x": 1}), timer.time("reward", False, group=G.REWARD, **mixed):
        pass
    with timer.time("idle/refit_bubble", span=efficiency_span("idle/refit_bubble", **{"rl.x": 1})):
        pass
    with umbrella_span(G.U_STEP, "rl.grpo.step", **mixed), managed_span(G.REWARD, "rl.grpo.x", **{"rl.x": 1}) as span:
        safe_set_span_attributes(span, {"rl.y": 2})
    with setup_span("workers", **{"rl.x": 1}), evaluate_span("grpo", **{"rl.x": 1}), span_cm("rl.grpo.x", **mixed):
        start_efficiency_span("idle/refit_bubble", **mixed)
    with iteration_scope(1), per_prompt_scope(3, of=8), per_prompt_scope("uid"):
        pass


    @trace_fn(G.REWARD, "rl.grpo.reward", tracer=None)
    def plain(x: int) -> int:
        return x


    @umbrella_trace_fn(G.U_ROLLOUT, "rl.grpo.rollout")
    async def coroutine(x: int) -> str:
        return str(x)


    @trace_fn(G.GENERATION)
    def generator(x: int) -> Iterator[int]:
        yield x


    @trace_fn(G.GENERATION)
    async def stream(x: int) -> AsyncIterator[int]:
        yield x


    reveal_type(plain)
    reveal_type(generator)
    plain("no number")
"""


def test_a_strict_program_type_checks(tmp_path: Path):
    """Attributes as keywords, or a decorator, that a user's own type checker refuses, or that hide their types."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    out, errors, _ = api.run(["--strict", str(program)])
    assert errors == ""
    said = [line.partition(": ")[2] for line in out.splitlines()[:-1]]
    assert said == [
        'note: Revealed type is "def (x: int) -> int"',
        'note: Revealed type is "def (x: int) -> typing.Iterator[int]"',
        'error: Argument 1 to "plain" has incompatible type "str"; expected "int"  [arg-type]',
    ]
