"""Rollouts whose environment sends its own requests to an OpenAI-compatible endpoint. Implements EpisodePlayer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from shoal.core.errors import EngineError
from shoal.core.protocols import EndpointEnvironment
from shoal.core.runner import rollout_seed
from shoal.core.types import EpisodeResult, Message, Rollout, SamplingParams, Score, Turn


class EndpointSession(Protocol):
    """One rollout at an endpoint: where the environment sends requests, and the turns recorded so far."""

    base_url: str
    model: str
    turns: list[Turn]
    conversation: list[Message]


class Endpoint(Protocol):
    """An OpenAI-compatible server in the training process."""

    failure: EngineError | None  # the engine failed while it served a session

    def session(
        self, name: str, sampling: SamplingParams, context_tokens: int, seed_of: Callable[[int], int]
    ) -> AbstractAsyncContextManager[EndpointSession]:
        """A session while the block runs. Turn n is sampled with `sampling` and the seed `seed_of(n)`."""
        ...


class EndpointEpisodes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def play(
        self,
        environment: EndpointEnvironment,
        rollouts: Sequence[Rollout],
        sampling: SamplingParams,
        context_tokens: int,
        seed: int,
    ) -> Sequence[Score]:
        """One session per rollout."""
        prompt = rollouts[0].prompt
        try:
            async with AsyncExitStack() as stack:
                opened = [self._session(rollout, sampling, context_tokens, seed) for rollout in rollouts]
                sessions = [await stack.enter_async_context(session) for session in opened]
                task = environment.tasks(prompt.split)[prompt.index]
                if (play_group := getattr(environment, "play_group", None)) is not None:
                    results = await play_group(task, [(session.base_url, session.model) for session in sessions])
                else:
                    results = [await environment.play(task, sessions[0].base_url, sessions[0].model)]
        except TimeoutError as error:
            return [Score("timeout", error=str(error)) for _ in rollouts]
        return [_score(rollout, result) for rollout, result in zip(rollouts, results, strict=True)]

    @asynccontextmanager
    async def _session(
        self, rollout: Rollout, sampling: SamplingParams, context_tokens: int, seed: int
    ) -> AsyncIterator[Any]:
        """An EndpointSession, which records the turns of the rollout in exact token ids."""
        endpoint = self._endpoint

        def seed_of(turn: int) -> int:
            return rollout_seed(seed, rollout.rollout_id, turn)

        try:
            async with endpoint.session(rollout.rollout_id, sampling, context_tokens, seed_of) as session:
                try:
                    yield session
                finally:
                    rollout.turns, rollout.messages = session.turns, session.conversation
        finally:
            if endpoint.failure is not None:
                raise endpoint.failure


def _score(rollout: Rollout, result: EpisodeResult) -> Score:
    if result.error is not None:
        return Score("error", error=result.error)
    if not rollout.turns:
        return Score("error", error="the environment sent no request to the model")
    rollout.messages = result.messages or rollout.messages
    return Score("ok", result.reward, result.parts)
