"""Plays environments against an engine: one group of scored rollouts a prompt.

Knows tokens, episodes and rewards; nothing of advantages, losses or weights. A rollout that fails becomes a counted
value, never an exception; only a broken engine is one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from shoal.errors import ConfigError, DataError, EngineError, StoppedByPolicy, StorageError
from shoal.protocols import Environment, Judge, PlayedEnvironment, RolloutEngine
from shoal.rewards.shaping import RewardShape
from shoal.server.sessions import Session, Tools
from shoal.types import Completion, Message, Prompt, Request, Rollout, RolloutGroup, SamplingParams, Score, Turn


class Tokens(Protocol):
    """What the runner needs of a tokenizer and its chat template; models.chat.Chat is one."""

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]: ...

    def next_prompt_ids(
        self, so_far: Sequence[int], messages: Sequence[Message], following: Sequence[Message], tools: Tools = None
    ) -> list[int]: ...


class Endpoint(Protocol):
    """Where environments that talk HTTP play their rollouts; server.local.LocalEndpoint is one."""

    failure: EngineError | None

    def session(self, session: Session) -> AbstractAsyncContextManager[tuple[str, str]]: ...


Phase = Callable[[str], AbstractContextManager[None]]


def _untimed(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class RunnerSettings:
    context_tokens: int  # prompt and completions of a rollout together
    seed: int = 0
    shape: RewardShape = field(default_factory=RewardShape)


def rollout_seed(run_seed: int, rollout_id: str, turn: int) -> int:
    """A 63-bit seed from counters alone, so that resuming needs no generator state."""
    digest = hashlib.blake2b(f"{run_seed}/{rollout_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class GroupRunner:
    def __init__(
        self,
        engine: RolloutEngine,
        environments: Mapping[str, Environment],
        judge: Judge,
        tokens: Tokens,
        settings: RunnerSettings,
        endpoint: Endpoint | None = None,
    ) -> None:
        self._engine = engine
        self._environments = environments
        self._judge = judge
        self._tokens = tokens
        self._settings = settings
        self._endpoint = endpoint
        # Asked once: comparing an object with a protocol takes longer than the rest of a short rollout's bookkeeping.
        self._played = {name: env for name, env in environments.items() if isinstance(env, PlayedEnvironment)}

    def with_seed(self, seed: int) -> GroupRunner:
        """The same runner drawing from another seed, for held-out rollouts."""
        settings = replace(self._settings, seed=seed)
        return GroupRunner(self._engine, self._environments, self._judge, self._tokens, settings, self._endpoint)

    async def run(self, prompt: Prompt, size: int, sampling: SamplingParams, phase: Phase = _untimed) -> RolloutGroup:
        """`size` rollouts of one prompt, all started together so that the engine reads the prompt once."""
        version = self._engine.version
        playing = [asyncio.ensure_future(self._rollout(prompt, i, sampling, phase)) for i in range(size)]
        try:
            return RolloutGroup(prompt, await asyncio.gather(*playing), version)
        except BaseException:  # one that ends the run ends the others: nothing may ask an engine that is being closed
            for rollout in playing:
                rollout.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            raise

    async def _rollout(self, prompt: Prompt, index: int, sampling: SamplingParams, phase: Phase) -> Rollout:
        rollout = Rollout(prompt, index, [])
        played = self._played.get(prompt.env)
        try:
            with phase("rollout"):
                if played is not None:
                    score = await self._be_played(played, rollout, sampling)
                    return self._settle(rollout, score, sampling)
                await self._play(rollout, sampling)
        except (StoppedByPolicy, StorageError, asyncio.CancelledError):
            raise
        except Exception as error:  # the environment is the user's code
            rollout.status, rollout.error = "error", f"{type(error).__name__}: {error}"
            return rollout
        with phase("reward"):
            await self._score(rollout, sampling)
        return rollout

    async def _play(self, rollout: Rollout, sampling: SamplingParams) -> None:
        prompt = rollout.prompt
        environment = self._environments[prompt.env]
        episode = environment.start(environment.tasks(prompt.split)[prompt.index])
        tools: Tools = getattr(episode, "tools", None) or None
        prompt_ids = self._tokens.prompt_ids(episode.messages, tools)
        while True:
            room = self._settings.context_tokens - len(prompt_ids)
            if room < 1 and not rollout.turns:
                raise DataError(f"the prompt takes {len(prompt_ids)} of {self._settings.context_tokens} context tokens")
            if room < 1:
                break
            turn = len(rollout.turns)
            drawn_with = replace(
                sampling,
                max_tokens=min(sampling.max_tokens, room),
                seed=rollout_seed(self._settings.seed, rollout.rollout_id, turn),
            )
            request = Request(f"{prompt.split}:{rollout.rollout_id}/{turn}", prompt_ids, drawn_with)
            completion = await self._draw(request)
            rollout.turns.append(Turn(prompt_ids, completion, sampling.temperature))
            following = await episode.reply(completion.text)
            rollout.messages = list(episode.messages)
            if following is None or completion.finish_reason != "stop":
                break
            answered = episode.messages[: len(episode.messages) - len(following)]
            prompt_ids = self._tokens.next_prompt_ids(prompt_ids + completion.token_ids, answered, following, tools)

    async def _draw(self, request: Request) -> Completion:
        """What an engine refuses is no fault of the environment: it ends the run, and is not a rollout's error."""
        try:
            return await self._engine.generate(request)
        except ConfigError as error:
            raise EngineError(str(error)) from error

    async def _be_played(self, environment: PlayedEnvironment, rollout: Rollout, sampling: SamplingParams) -> Score:
        """The environment talks to the endpoint; what it asked and got is the rollout, in exact ids."""
        assert self._endpoint is not None, "build/ gives an endpoint where an environment plays"
        prompt, settings = rollout.prompt, self._settings

        def seed_of(turn: int) -> int:
            return rollout_seed(settings.seed, rollout.rollout_id, turn)

        session = Session(rollout.rollout_id, sampling, settings.context_tokens, seed_of)
        try:
            async with self._endpoint.session(session) as (base_url, model):
                task = environment.tasks(prompt.split)[prompt.index]
                played = await environment.play(task, base_url, model)
        except TimeoutError as error:
            return Score("timeout", error=str(error))
        finally:
            rollout.turns, rollout.messages = session.turns, session.conversation
            if self._endpoint.failure is not None:
                raise self._endpoint.failure
        if not session.turns:
            return Score("error", error="the environment never asked the model")
        rollout.messages = played.messages or session.conversation
        return Score("ok", played.reward, played.parts)

    async def _score(self, rollout: Rollout, sampling: SamplingParams) -> None:
        prompt = rollout.prompt
        score = await self._judge.score(prompt.env, prompt.split, prompt.index, rollout.messages)
        self._settle(rollout, score, sampling)

    def _settle(self, rollout: Rollout, score: Score, sampling: SamplingParams) -> Rollout:
        rollout.reward_s, rollout.parts = score.seconds, score.parts
        if score.status != "ok":
            rollout.status, rollout.error = score.status, score.error
        elif score.reward is None:
            rollout.status = "excluded"
        else:
            rollout.raw_reward = score.reward
            rollout.reward = self._settings.shape(score.reward, rollout, sampling.max_tokens)
        return rollout
