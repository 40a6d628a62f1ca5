"""A program that treats two vLLM engines in one process as nobody should, and says what it saw of them.

``python -m tests.engines.hostile MODEL RUN_DIR``: prints one line of JSON. Its run is read by `test_hostile`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.vllm_megatron_grpo.engine import ENVIRONMENT
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import setup, umbrella_span
from raytrace_rl.context import current_trace_carrier
from raytrace_rl.instrumentation import per_prompt_scope
from raytrace_rl.integrations.vllm import (
    engine_args,
    load_model_span,
    request_parents,
    take_stats,
    trace_engine,
)

MANY = 320
CONTEXT = 8192
#: Takes seconds: what is to be cut short has not ended by then, on however busy a machine.
LONG = 8000
ARGUMENTS = {
    "skip_tokenizer_init": True,
    "max_model_len": CONTEXT,
    "max_num_seqs": 64,
    "dtype": "float32",
    "enforce_eager": True,
    "use_tqdm_on_load": False,
}


def params(tokens: int = 4, **more: Any) -> Any:
    """Sampling parameters that give exactly ``tokens`` tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def prompt(*tokens: int) -> Any:
    """A prompt of token ids."""
    from vllm import TokensPrompt

    return TokensPrompt(prompt_token_ids=list(tokens) or [1, 2, 3])


def cores() -> list[Any]:
    """The processes of engines that this one has started and that live."""
    import psutil

    return [one for one in psutil.Process().children() if one.name().startswith("VLLM")]


def offline(llm: Any) -> dict[str, Any]:
    """Uses an ``LLM``, and its ``LLMEngine`` by hand."""
    from vllm.exceptions import VLLMValidationError

    found: dict[str, Any] = {"empty": llm.generate([], params())}
    # Samples, and a prefix that the cache has the second time.
    long = prompt(*([7] * 300))
    outputs = llm.generate([long, prompt()], params(n=3), use_tqdm=False)
    found["samples"] = [len(output.outputs) for output in outputs]
    found["cached"] = llm.generate([long], params(), use_tqdm=False)[0].num_cached_tokens
    # One prompt among others that vLLM refuses.
    with umbrella_span(G.U_ROLLOUT, "rl.test.refused"):
        try:
            llm.generate([prompt(), prompt(*([1] * (CONTEXT + 1))), prompt()], params(), use_tqdm=False)
        except VLLMValidationError as error:
            found["refused"] = type(error).__name__
    with umbrella_span(G.U_ROLLOUT, "rl.test.many"):
        carriers = []
        for place in range(MANY):
            with umbrella_span(G.U_ROLLOUT, "rl.test.one_of_many", place=place):
                carriers.append(current_trace_carrier())
        with request_parents(carriers):
            found["many"] = len(llm.generate([prompt(place % 10) for place in range(MANY)], params(), use_tqdm=False))
    found["stats"] = vars(take_stats(llm))
    # By hand: an id twice, and an abort. Both engines are traced, and each request is told once.
    engine = trace_engine(llm.llm_engine)
    with umbrella_span(G.U_ROLLOUT, "rl.test.by_hand"):
        internal = [engine.add_request(name, prompt(), params(8)) for name in ("a", "same", "same", "b", "c")]
        engine.step()
        engine.abort_request(["a"])
        engine.abort_request([internal[3]], internal=True)
    done = []
    while engine.has_unfinished_requests():
        done += [output.request_id for output in engine.step() if output.finished]
    found["by_hand"] = sorted(done)
    found["stats_by_hand"] = vars(take_stats(engine))
    return found


async def until(condition: Callable[[], Any]) -> None:
    """Lets the others run until something is true."""
    while not condition():  # noqa: ASYNC110 - vLLM tells nobody
        await asyncio.sleep(0)


async def online(engine: Any) -> dict[str, Any]:
    """Uses an ``AsyncLLM``, and kills it in the end."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    found: dict[str, Any] = {}

    async def answer(name: str, sampling: Any, given: Any = None) -> list[Any]:
        return [output async for output in engine.generate(given or prompt(), sampling, name)]

    async def rollout(place: int) -> int:
        with umbrella_span(G.U_ROLLOUT, "rl.test.online", place=place), per_prompt_scope():
            return len((await answer(f"many-{place}", params(output_kind=RequestOutputKind.FINAL_ONLY)))[-1].outputs)

    found["many"] = sum(await asyncio.gather(*(rollout(place) for place in range(MANY))))
    found["stats_many"] = vars(take_stats(engine))
    with umbrella_span(G.U_ROLLOUT, "rl.test.pieces"):
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
            await answer(f"pieces-{kind.name}", params(6, n=2, output_kind=kind))
        twice = await asyncio.gather(*(answer("same", params()) for _ in range(2)))
        found["same"] = [len(outputs[-1].outputs[0].token_ids) for outputs in twice]
    found["stats_pieces"] = vars(take_stats(engine))
    with umbrella_span(G.U_ROLLOUT, "rl.test.left"):
        cancelled = asyncio.create_task(answer("cancelled", params(LONG)))
        stream = engine.generate(prompt(), params(LONG), "closed")
        await anext(stream)
        await stream.aclose()
        abandoned = engine.generate(prompt(), params(LONG), "abandoned")
        await anext(abandoned)
        del abandoned
        gc.collect()
        cancelled.cancel()
        aborted = asyncio.create_task(answer("aborted", params(LONG)))
        await until(lambda: engine.output_processor.external_req_ids.get("aborted"))
        await engine.abort("aborted")
        found["aborted"] = (await aborted)[-1].outputs[0].finish_reason
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        try:
            await answer("refused", params(), prompt(*([1] * (CONTEXT + 1))))
        except VLLMValidationError as error:
            found["refused"] = type(error).__name__
        await until(lambda: not engine.output_processor.has_unfinished_requests())
    found["stats_left"] = vars(take_stats(engine))
    with umbrella_span(G.U_ROLLOUT, "rl.test.dead"):
        under_way = [asyncio.create_task(answer(f"dead-{place}", params(LONG))) for place in range(4)]
        await until(lambda: engine.output_processor.get_num_unfinished_requests() == len(under_way))
        for core in cores():
            os.kill(core.pid, signal.SIGKILL)
        found["dead"] = [type(error).__name__ for error in await asyncio.gather(*under_way, return_exceptions=True)]
    found["stats_dead"] = vars(take_stats(engine))
    return found


def main(model: str, run_dir: str) -> None:
    """Drives both engines, the first of which is older than telemetry."""
    os.environ.update({**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "CRITICAL"})
    import psutil
    from vllm import LLM, AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    class Own(LLM):
        """A program's own."""

    llm = Own(model=model, enable_prefix_caching=True, **ARGUMENTS, **engine_args())
    setup.init_telemetry_driver({"enabled": True, "run_dir": run_dir, "span_groups": "all", "heartbeat_s": 0.2})
    found: dict[str, Any] = {}
    with umbrella_span(G.U_JOB, "rl.test.job"):
        found["offline"] = offline(trace_engine(llm, weight_version=1))
        before = cores()
        gc.disable()
        del llm
        found["gone"] = len(psutil.wait_procs(before, timeout=20)[0])
        gc.enable()
        with load_model_span():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **ARGUMENTS, **engine_args()))
        found["online"] = asyncio.run(online(trace_engine(engine, weight_version=2)))
    found["dropped"] = dict(setup.get_telemetry_handle().dropped)
    setup.shutdown_telemetry()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], str(Path(sys.argv[2]).absolute()))
