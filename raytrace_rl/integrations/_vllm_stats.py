"""What an engine generated, in numbers: counted in the engine's process, added up and logged by the driver.

``rl.*`` metrics come from the driver alone, so an engine hands its counts over and the driver logs them with the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from raytrace_rl.vocabulary import TeedMetric, register_teed_metrics

PROMPT_TOKENS: Final = "vllm/prompt_tokens"
GENERATION_TOKENS: Final = "vllm/generation_tokens"
PROMPT_LENGTH_MEAN: Final = "vllm/prompt_length_mean"
GENERATION_LENGTH_MEAN: Final = "vllm/generation_length_mean"
GENERATIONS_OK: Final = "vllm/generations_ok"
GENERATIONS_FAILED: Final = "vllm/generations_failed"
BATCH_DURATION: Final = "vllm/batch_duration_s"

STEP_SERIES: Final = (
    TeedMetric(
        PROMPT_TOKENS,
        "rl.vllm.prompt_tokens",
        "counter",
        "{token}",
        "Prompt tokens of the requests that have finished.",
    ),
    TeedMetric(GENERATION_TOKENS, "rl.vllm.generation_tokens", "counter", "{token}", "Tokens generated."),
    TeedMetric(
        PROMPT_LENGTH_MEAN,
        "rl.vllm.prompt_length.mean",
        unit="{token}",
        description="Mean prompt length of the step's requests.",
    ),
    TeedMetric(
        GENERATION_LENGTH_MEAN,
        "rl.vllm.generation_length.mean",
        unit="{token}",
        description="Mean length of the step's generations.",
    ),
    TeedMetric(
        GENERATIONS_OK,
        "rl.vllm.generations.ok",
        "counter",
        "{generation}",
        "Generations that stopped by themselves or at their maximal length.",
    ),
    TeedMetric(
        GENERATIONS_FAILED,
        "rl.vllm.generations.failed",
        "counter",
        "{generation}",
        "Generations that ended in any other way: aborted, or with an error.",
    ),
    TeedMetric(
        BATCH_DURATION,
        "rl.vllm.batch.duration",
        "histogram",
        "s",
        "Wall clock from the first call of the step to the end of the last, over all engines.",
    ),
)
register_teed_metrics(STEP_SERIES)


@dataclass
class GenerationStats:
    """What was generated since the counts were taken last. Pickles, so that an actor can return it.

    Attributes:
        requests: Requests that have finished, well or not.
        prompt_tokens: Their prompts' tokens.
        generation_tokens: Tokens that came out, of all samples.
        ok: Samples that stopped by themselves or at their maximal length: what can be trained on.
        failed: Samples that ended otherwise. A request that was never answered counts as one.
        started_ns, ended_ns: First call's start and last call's end, ns since the epoch; 0 before the first.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ok: int = 0
    failed: int = 0
    started_ns: int = 0
    ended_ns: int = 0

    def add(self, other: GenerationStats) -> None:
        """Adds another engine's, or another call's."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.generation_tokens += other.generation_tokens
        self.ok += other.ok
        self.failed += other.failed
        if other.started_ns:
            self.started_ns = min(self.started_ns or other.started_ns, other.started_ns)
        self.ended_ns = max(self.ended_ns, other.ended_ns)


def step_metrics(stats: Iterable[GenerationStats]) -> dict[str, float]:
    """Returns what the driver logs of a step's generation: keys that have a row of `STEP_SERIES`.

    Args:
        stats: One for each engine.

    Returns:
        Counters hold the step's own counts. Of a step without a request there are no means and no duration.
    """
    total = GenerationStats()
    for one in stats:
        total.add(one)
    found: dict[str, float] = {
        PROMPT_TOKENS: total.prompt_tokens,
        GENERATION_TOKENS: total.generation_tokens,
        GENERATIONS_OK: total.ok,
        GENERATIONS_FAILED: total.failed,
    }
    if total.requests:
        found[PROMPT_LENGTH_MEAN] = total.prompt_tokens / total.requests
    if total.ok + total.failed:
        found[GENERATION_LENGTH_MEAN] = total.generation_tokens / (total.ok + total.failed)
    if total.ended_ns > total.started_ns > 0:
        found[BATCH_DURATION] = (total.ended_ns - total.started_ns) / 1e9
    return found
