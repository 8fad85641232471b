"""A server's answer as a Completion: checked, with text made from its ids. Used by every engine that is not our own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.errors import EngineError
from shoal.types import Completion, FinishReason, Request, Span

# What taking an answer apart raises where it is not what it should be.
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class Answer:
    """A completion in the server's terms; `versions` as (start, end, name), empty if it does not say."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """How answers are read: what an id is, where a completion ends, and what text its ids are."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    detokenize: Callable[[list[int]], str]

    def check(self, request: Request) -> None:
        """Refuse ids that a server would refuse, or worse, not."""
        ids = request.prompt_ids
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise EngineError(f"{request.request_id}: token ids must be from 0 to {self.vocab_size - 1}")

    def ends(self, request: Request) -> list[int]:
        return sorted({*self.eos_token_ids, *request.sampling.stop_token_ids})

    def completion(self, request: Request, answer: Answer, version: int, by: str) -> Completion:
        """`version` drew what the answer does not say a version of; `by` is whose answer it is, for messages."""
        name, sampling, ids = request.request_id, request.sampling, answer.token_ids
        problem = self._problem(request, answer)
        if problem is not None:
            raise EngineError(f"{by} answered {name} wrongly: {problem}")
        text = self.detokenize(ids)
        if answer.finish_reason == "stop":
            text = text[: min((text.find(stop) for stop in sampling.stop if stop in text), default=len(text))]
        kept = None
        if sampling.min_tokens > 0 and not sampling.truncated:
            banned = [~i for i in self.ends(request)]
            kept = [banned if i < sampling.min_tokens else [] for i in range(len(ids))]
        reason: FinishReason = answer.finish_reason  # type: ignore[assignment]
        logprobs = [min(0.0, float(value)) for value in answer.logprobs]
        return Completion(name, ids, logprobs, _spans(answer, version), reason, text, kept)

    def _problem(self, request: Request, answer: Answer) -> str | None:
        ids, values = answer.token_ids, answer.logprobs
        if answer.finish_reason not in ("stop", "length", "abort"):
            return f"finish_reason is {answer.finish_reason!r}"
        if not all(type(i) is int and 0 <= i < self.vocab_size for i in ids):
            return f"a token id is not one of 0 to {self.vocab_size - 1}"
        if len(values) != len(ids):
            return f"{len(ids)} tokens but {len(values)} log-probs"
        if not all(isinstance(value, int | float) and math.isfinite(value) and value < 1e-4 for value in values):
            return "a log-prob is positive or not finite"
        if len(ids) > request.sampling.max_tokens:
            return f"{len(ids)} tokens, {request.sampling.max_tokens} were asked for"
        edges = [0, *(edge for start, end, _ in answer.versions if start != end for edge in (start, end)), len(ids)]
        if len(edges) > 2 and (edges[::2] != edges[1::2] or edges != sorted(edges)):
            return f"its versions do not cover {len(ids)} tokens"
        return None


def _spans(answer: Answer, version: int) -> list[Span]:
    count = len(answer.token_ids)
    named = [(start, end, name) for start, end, name in answer.versions if end > start]
    if not named:
        return [Span(0, count, version)] if count else []
    return [Span(start, end, int(name) if name.isdigit() else version) for start, end, name in named]
