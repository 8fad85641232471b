"""Sampling for one's own loop: prompts are tokenised here, and n answers are n concurrent requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.envs.datasets import to_messages
from shoal.errors import ArgumentError
from shoal.protocols import RolloutEngine
from shoal.recipes.datums import SampledCompletion
from shoal.rollout.runner import rollout_seed
from shoal.types import Completion, Message, Request, SamplingParams

Prompt = str | Sequence[Message] | Sequence[int]


_SAMPLERS = itertools.count()


class DeploymentSampler:
    """Draws completions from a deployment. `defaults` holds the run's sampling; calls may differ in part."""

    def __init__(
        self, engine: RolloutEngine, chat: Any, defaults: SamplingParams, context_tokens: int, seed: int = 0
    ) -> None:
        self.engine = engine
        self._chat = chat
        self._defaults = defaults
        self._context_tokens = context_tokens
        self._seed = seed
        self._number = next(_SAMPLERS)  # several may share one engine
        self._calls = itertools.count()

    @property
    def version(self) -> int:
        """The weight version that answers now."""
        return self.engine.version

    async def sample_with_tokens(self, prompt: Prompt, n: int = 1, **sampling: Any) -> list[SampledCompletion]:
        """`n` completions of one prompt (text, messages or token ids) with their tokens and log-probs.

        `sampling` may hold temperature, max_tokens, top_p, top_k, min_p, min_tokens, stop and seed.
        """
        if n < 1:
            raise ArgumentError(f"sample_with_tokens: n: must be at least 1, not {n}")
        prompt_ids = self._prompt_ids(prompt)
        params = self._params(sampling, len(prompt_ids))
        call = next(self._calls)
        seed = sampling.get("seed", self._seed)
        requests = [
            Request(
                f"api:{self._number}:{call}/{i}", prompt_ids, replace(params, seed=rollout_seed(seed, f"{call}/{i}", 0))
            )
            for i in range(n)
        ]
        completions = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        return [_sampled(prompt_ids, completion, params.temperature) for completion in completions]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str | Sequence):
            raise ArgumentError(
                f"sample_with_tokens: prompt: must be text, messages or token ids, not {type(prompt).__name__}"
            )
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        messages = to_messages(prompt if isinstance(prompt, str) else list(prompt))
        return self._chat.prompt_ids(messages)

    def _params(self, sampling: dict[str, Any], prompt_tokens: int) -> SamplingParams:
        known = set(SamplingParams.__dataclass_fields__) - {"stop_token_ids"}
        for name in sampling:
            if name not in known:
                raise ArgumentError(f"sample_with_tokens: {name}: is not known; known: {', '.join(sorted(known))}")
        params = replace(self._defaults, **{name: value for name, value in sampling.items() if name != "seed"})
        room = self._context_tokens - prompt_tokens
        if room < 1:
            raise ArgumentError(
                f"sample_with_tokens: prompt: takes {prompt_tokens} of {self._context_tokens} tokens; raise max_seq_len"
            )
        return replace(params, max_tokens=min(params.max_tokens, room), stop=tuple(params.stop))


def _sampled(prompt_ids: list[int], completion: Completion, temperature: float) -> SampledCompletion:
    given: list[float | None] = [None, *([0.0] * (len(prompt_ids) - 1))] if prompt_ids else []
    return SampledCompletion(
        token_ids=[*prompt_ids, *completion.token_ids],
        prompt_tokens=len(prompt_ids),
        logprobs=[*given, *completion.logprobs],
        text=completion.text,
        finish_reason=completion.finish_reason,
        temperature=temperature,
        kept_ids=completion.kept_ids,
    )
