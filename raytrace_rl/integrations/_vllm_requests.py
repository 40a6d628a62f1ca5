"""One request, told after the fact: what its output says of itself, and spans made from the engine's own timings.

The engine core notes when it queued, scheduled and answered a request on its monotonic clock, which on one host is
ours too. On another host's it is another clock: then its times are moved so that its last token came when we saw it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, StatusCode

from raytrace_rl import _otel_context, _prompts, _state
from raytrace_rl._clock import OFFSET_NS
from raytrace_rl._span import RecordingSpan
from raytrace_rl.integrations._trajectories import RL_WEIGHT_VERSION_ATTR
from raytrace_rl.integrations._vllm_stats import GenerationStats
from raytrace_rl.span_groups import RLSpanGroup as G

REQUEST_SPAN: Final = "rl.vllm.request"
QUEUED_SPAN: Final = "rl.vllm.request.queued"
PREFILL_SPAN: Final = "rl.vllm.request.prefill"
DECODE_SPAN: Final = "rl.vllm.request.decode"

#: Where a request span's times come from: ``engine``, ``engine_shifted`` (another host's clock), or ``call`` (the
#: engine keeps none: ``disable_log_stats``).
RL_VLLM_TIMINGS_ATTR: Final = "rl.vllm.timings"
#: Set beside ``rl.weight_version`` where the weights changed while the request was generated: those it began with.
RL_WEIGHT_VERSION_FIRST_ATTR: Final = "rl.weight_version.first"

#: OpenTelemetry semantic conventions for generative AI; ``latency.*`` as vLLM's own engine spans have them.
GEN_AI_REQUEST_ID: Final = "gen_ai.request.id"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
_LATENCY: Final = "gen_ai.latency."
_LATENCIES: Final = {
    QUEUED_SPAN: "time_in_queue",
    PREFILL_SPAN: "time_in_model_prefill",
    DECODE_SPAN: "time_in_model_decode",
}

#: How far an engine's times may lie outside of the call before its clock is taken for another one.
_TOLERANCE_NS: Final = 50_000_000
#: What leaves a sample that can be trained on.
_OK: Final = frozenset({"stop", "length"})
_MAX_REASONS: Final = 64
#: What vLLM calls weights whose version nobody has told it.
_UNSET: Final = (None, "", "default")


@dataclass
class Answer:
    """What is known of one request once it has been answered.

    Attributes:
        request_id: As the caller named it.
        input_tokens: Tokens of the prompt.
        output_tokens: Tokens of all samples.
        cached_tokens: Prompt tokens that the prefix cache had; None where it does not say.
        reasons: Finish reason of each sample; empty where none was reached.
        versions: Weights at the first and the last token, as the engine names them; None where it does not.
        timings: The engine's own, None where it keeps none.
    """

    request_id: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    reasons: list[str] = field(default_factory=list)
    versions: tuple[Any, Any] | None = None
    timings: Any = None

    @property
    def stats(self) -> GenerationStats:
        """As counts; a request without any sample is one that failed."""
        ok = sum(reason in _OK for reason in self.reasons)
        failed = len(self.reasons) - ok if self.reasons else 1
        return GenerationStats(1, self.input_tokens, self.output_tokens, ok, failed)


class Progress:
    """Follows one request through its outputs, whole or in pieces.

    Args:
        pieces: Each output holds what is new alone (``RequestOutputKind.DELTA``).
    """

    def __init__(self, pieces: bool = False) -> None:
        self._pieces = pieces
        self._lengths: Counter[int] = Counter()
        self._reasons: dict[int, str] = {}
        self.answer = Answer()

    def see(self, output: Any) -> Answer:
        """Takes one ``RequestOutput`` into account; returns what is known now."""
        answer = self.answer
        answer.request_id = str(getattr(output, "request_id", ""))
        answer.input_tokens = len(getattr(output, "prompt_token_ids", None) or ())
        cached = getattr(output, "num_cached_tokens", None)
        answer.cached_tokens = cached if isinstance(cached, int) else None
        answer.timings = getattr(output, "metrics", None)
        for sample in getattr(output, "outputs", None) or ():
            index = getattr(sample, "index", 0)
            length = len(getattr(sample, "token_ids", None) or ())
            self._lengths[index] = self._lengths[index] + length if self._pieces else length
            if (reason := getattr(sample, "finish_reason", None)) is not None:
                self._reasons[index] = str(reason)
            if spans := [span for span in getattr(sample, "weight_versions", None) or () if span.version not in _UNSET]:
                answer.versions = version_of(spans[0].version), version_of(spans[-1].version)
        answer.output_tokens = sum(self._lengths.values())
        answer.reasons = list(self._reasons.values())
        return answer


def version_of(text: Any) -> Any:
    """Returns a version as a number where it is one."""
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 19 else text


def totals(answers: Iterable[Answer], version: Any) -> dict[str, Any]:
    """Returns the attributes of a call span: tokens, finish reasons and weights of all its requests."""
    answers = list(answers)
    reasons = Counter(reason for answer in answers for reason in answer.reasons)
    found: dict[str, Any] = {
        GEN_AI_INPUT_TOKENS: sum(answer.input_tokens for answer in answers),
        GEN_AI_OUTPUT_TOKENS: sum(answer.output_tokens for answer in answers),
        GEN_AI_FINISH_REASONS: sorted(reasons),
    }
    ended = [answer.versions[1] for answer in answers if answer.versions is not None]
    found[RL_WEIGHT_VERSION_ATTR] = ended[-1] if ended else version
    return found


def wanted() -> bool:
    """True if request spans are recorded here and now."""
    return G.PER_PROMPT in _state.enabled and not _prompts.muted()


def emit(
    answer: Answer,
    parent: Context,
    start_ns: int | None,
    end_ns: int,
    *,
    version: Any = None,
    call: SpanContext | None = None,
    error: str | None = None,
) -> None:
    """Records the span of a request and those of its phases.

    Args:
        answer: The request.
        parent: OTel context with the span that it belongs to.
        start_ns: When it was given to the engine, ns since the epoch; None where only the engine can tell.
        end_ns: When its answer was seen.
        version: Weights, where the engine does not name them itself.
        call: The call that it was part of, to link to where that is not its parent.
        error: Why it failed.
    """
    phases, source = _phases(answer.timings, start_ns, end_ns)
    attributes: dict[str, Any] = {
        GEN_AI_REQUEST_ID: answer.request_id,
        GEN_AI_INPUT_TOKENS: answer.input_tokens,
        GEN_AI_OUTPUT_TOKENS: answer.output_tokens,
        GEN_AI_CACHED_TOKENS: answer.cached_tokens,
        GEN_AI_FINISH_REASONS: answer.reasons[:_MAX_REASONS],
        RL_VLLM_TIMINGS_ATTR: source,
        RL_WEIGHT_VERSION_ATTR: answer.versions[1] if answer.versions is not None else version,
    }
    if answer.versions is not None and answer.versions[0] != answer.versions[1]:
        attributes[RL_WEIGHT_VERSION_FIRST_ATTR] = answer.versions[0]
    for name, begun, ended in phases:
        attributes[_LATENCY + _LATENCIES[name]] = (ended - begun) / 1e9
    if phases:
        attributes[_LATENCY + "time_to_first_token"] = (phases[1][2] - phases[0][1]) / 1e9
        start_ns, end_ns = phases[0][1], phases[-1][2]
    begun_ns = end_ns if start_ns is None else start_ns
    attributes[_LATENCY + "e2e"] = (end_ns - begun_ns) / 1e9
    given = {key: value for key, value in attributes.items() if value is not None}
    span = RecordingSpan(G.PER_PROMPT, REQUEST_SPAN, given)
    span.begin(parent, begun_ns)
    if call is not None:
        span.add_link(call)
    inside = Context({**parent, _otel_context.SPAN_KEY: span})
    for name, begun, ended in phases:
        phase = RecordingSpan(G.PER_PROMPT, name, {})
        phase.begin(inside, begun)
        phase.end(ended)
    if error is not None:
        span.set_status(StatusCode.ERROR, error)
    elif not _OK.issuperset(answer.reasons):
        span.set_status(StatusCode.ERROR, ", ".join(sorted(set(answer.reasons) - _OK)))
    span.end(end_ns)


def _phases(timings: Any, start_ns: int | None, end_ns: int) -> tuple[list[tuple[str, int, int]], str]:
    """Returns name, start and end of queueing, prefill and decoding, and whose clock says so; empty without timings."""
    moments = [_ns(timings, name) for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")]
    if not all(moments) or moments != sorted(moments):
        return [], "call"
    queued, scheduled, first, last = moments
    source = "engine"
    if last > end_ns + _TOLERANCE_NS or (start_ns is not None and queued < start_ns - _TOLERANCE_NS):
        queued, scheduled, first, last = (moment + end_ns - moments[3] for moment in moments)
        source = "engine_shifted"
    # What lies before the engine core's own queue (tokenising, the way there) is waiting too.
    queued = queued if start_ns is None else min(start_ns, queued)
    return [(QUEUED_SPAN, queued, scheduled), (PREFILL_SPAN, scheduled, first), (DECODE_SPAN, first, last)], source


def _ns(timings: Any, name: str) -> int:
    value = getattr(timings, name, 0.0)
    return int(value * 1e9) + OFFSET_NS if isinstance(value, float) and value > 0 else 0
