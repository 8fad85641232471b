"""Short ways to run the embedded engine in tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shoal.core.types import Completion, Request, SamplingParams
from shoal.engine.engine import EmbeddedEngine, EngineSettings
from shoal.models.decoder import Decoder
from shoal.models.sampler_view import SamplerView
from support.models import EOS, TOKENIZER, layer_shapes


def detokenize(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=True))


def make_engine(decoder: Decoder, view: SamplerView | None = None, **settings: Any) -> EmbeddedEngine:
    """An engine on the decoder's weights. Only `eos_token_ids` end a completion."""
    values = {"slots": 8, "context_tokens": 128, "eos_token_ids": (), **settings}
    return EmbeddedEngine(view or SamplerView(decoder), layer_shapes(decoder), EngineSettings(**values), detokenize)


def ask(name: str, prompt_ids: Sequence[int], **sampling: Any) -> Request:
    return Request(name, list(prompt_ids), SamplingParams(**{"max_tokens": 16, **sampling}))


def run(engine: EmbeddedEngine, requests: Iterable[Request]) -> dict[str, Completion]:
    """Every completion by request id."""
    answered = [answer for request in requests if (answer := engine.add(request)) is not None]
    for _ in range(10_000):
        if not engine.busy:
            break
        answered += engine.step()
    assert not engine.busy, "the engine did not finish"
    return {completion.request_id: completion for completion in answered}


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], tokens: int, **settings: Any) -> list[list[int]]:
    requests = [ask(str(i), prompt, temperature=0.0, max_tokens=tokens) for i, prompt in enumerate(prompts)]
    answers = run(make_engine(decoder, **settings), requests)
    return [answers[str(i)].token_ids for i in range(len(prompts))]


__all__ = ["EOS", "ask", "detokenize", "greedy", "make_engine", "run"]
