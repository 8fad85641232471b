"""Turns a prompt into a group of scored rollouts: environment, engine and reward. The collector calls `run`.

An error in an environment or a reward is recorded in the rollout and counted. Only an error of the engine is raised.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

from shoal.core.advantages import RewardShape
from shoal.core.errors import ConfigError, DataError, EngineError, EpisodeError, StoppedByPolicy, StorageError
from shoal.core.protocols import (
    EndpointEnvironment,
    Environment,
    Episode,
    EpisodePlayer,
    Judge,
    RolloutEngine,
    StatefulEpisode,
    Tokens,
)
from shoal.core.types import (
    Completion,
    Message,
    Prompt,
    Request,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    Tools,
    Turn,
)

Phase = Callable[[str], AbstractContextManager[Any]]  # `phase(name)` measures the time of its block


@dataclass(frozen=True)
class RunnerSettings:
    """Limits and seeds of all rollouts."""

    context_tokens: int  # limit for the prompt and all completions of a rollout
    seed: int = 0
    shape: RewardShape = field(default_factory=RewardShape)
    needs_reward: bool = True  # false = a rollout without a reward is trained, with the reward 0
    uses_hints: bool = False  # a teacher sees the hints of rewards


def rollout_seed(run_seed: int, rollout_id: str, turn: int) -> int:
    """A 63-bit seed from the rollout's identity, so that a resumed run needs no generator state."""
    digest = hashlib.blake2b(f"{run_seed}/{rollout_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class GroupRunner:
    """Runs groups of rollouts against one engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        environments: Mapping[str, Environment],
        judge: Judge,
        tokens: Tokens,
        settings: RunnerSettings,
        player: EpisodePlayer | None = None,
    ) -> None:
        self._engine = engine
        self._environments = environments
        self._judge = judge
        self._tokens = tokens
        self._settings = settings
        self._player = player
        # Checked once: `isinstance` with a protocol is slow compared with a short rollout.
        self._endpoint_environments = {
            name: env for name, env in environments.items() if isinstance(env, EndpointEnvironment)
        }

    def with_seed(self, seed: int) -> GroupRunner:
        """The same runner with another seed, for held-out rollouts."""
        settings = replace(self._settings, seed=seed)
        return GroupRunner(self._engine, self._environments, self._judge, self._tokens, settings, self._player)

    async def run(
        self, prompt: Prompt, size: int, sampling: SamplingParams, phase: Phase = nullcontext
    ) -> RolloutGroup:
        """`size` rollouts of one prompt, started together so that they share one prefill."""
        version = self._engine.version
        rollouts = [Rollout(prompt, index, []) for index in range(size)]
        together = getattr(self._endpoint_environments.get(prompt.env), "play_group", None) is not None
        parts = [rollouts] if together else [[rollout] for rollout in rollouts]
        running = [asyncio.ensure_future(self._roll_out(part, sampling, phase)) for part in parts]
        try:
            await asyncio.gather(*running)
            if self._scores_groups(prompt.env):
                await self._score_group(prompt, rollouts, sampling, phase)
            environment = self._endpoint_environments.get(prompt.env) or self._environments[prompt.env]
            return RolloutGroup(prompt, rollouts, version, max_reward=getattr(environment, "max_reward", None))
        except BaseException:  # the run ends: no rollout may send requests to an engine that is being closed
            for rollout in running:
                rollout.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise

    async def _roll_out(self, rollouts: Sequence[Rollout], sampling: SamplingParams, phase: Phase) -> None:
        """Make one rollout, or all rollouts of a group that its environment makes together."""
        env = rollouts[0].prompt.env
        environment = self._endpoint_environments.get(env)
        try:
            with phase("rollout"):
                if environment is not None:
                    assert self._player is not None, "an EndpointEnvironment needs a player"
                    limits = self._settings.context_tokens, self._settings.seed
                    scores: Sequence[Score | None] = await self._player.play(environment, rollouts, sampling, *limits)
                else:
                    scores = [await self._run_episode(rollouts[0], sampling, phase)]
        except (StoppedByPolicy, StorageError, asyncio.CancelledError):
            raise
        except EpisodeError as error:
            for rollout in rollouts:
                rollout.status, rollout.error, rollout.traceback = error.score.status, str(error), error.score.traceback
            return
        except Exception as error:  # the environment is user code
            for rollout in rollouts:
                rollout.status, rollout.error = "error", f"{type(error).__name__}: {error}"
            return
        for rollout, score in zip(rollouts, scores, strict=True):
            if score is not None:
                self._apply_score(rollout, score, sampling)
            elif not self._scores_groups(env):
                with phase("reward"):
                    await self._score(rollout, sampling)

    async def _run_episode(self, rollout: Rollout, sampling: SamplingParams, phase: Phase) -> Score | None:
        prompt = rollout.prompt
        environment = self._environments[prompt.env]
        episode = environment.start(environment.tasks(prompt.split)[prompt.index])
        if not hasattr(episode, "running"):
            return await self._converse(episode, rollout, sampling)
        stateful = cast(StatefulEpisode, episode)
        async with stateful.running(phase):
            rollout.prompt = replace(prompt, messages=list(episode.messages))  # with the first observation
            await self._converse(episode, rollout, sampling)
            return await stateful.score(self._messages_for_reward(rollout))

    async def _converse(self, episode: Episode, rollout: Rollout, sampling: SamplingParams) -> None:
        prompt = rollout.prompt
        tools: Tools = getattr(episode, "tools", None) or None
        prompt_ids = self._tokens.prompt_ids(episode.messages, tools)
        while True:
            tokens_left = self._settings.context_tokens - len(prompt_ids)
            if tokens_left < 1 and not rollout.turns:
                raise DataError(f"the prompt takes {len(prompt_ids)} of {self._settings.context_tokens} context tokens")
            if tokens_left < 1:
                break
            turn = len(rollout.turns)
            turn_sampling = replace(
                sampling,
                max_tokens=min(sampling.max_tokens, tokens_left),
                seed=rollout_seed(self._settings.seed, rollout.rollout_id, turn),
            )
            request = Request(f"{prompt.split}:{rollout.rollout_id}/{turn}", prompt_ids, turn_sampling)
            completion = await self._generate(request)
            rollout.turns.append(Turn(prompt_ids, completion, sampling.temperature))
            following = await episode.reply(self._tokens.message(prompt_ids, completion, tools))
            rollout.messages = list(episode.messages)
            if following is None or completion.finish_reason != "stop":
                break
            messages = episode.messages[: len(episode.messages) - len(following)]
            prompt_ids = self._tokens.next_prompt_ids(prompt_ids + completion.token_ids, messages, following, tools)

    async def _generate(self, request: Request) -> Completion:
        """A request that the engine rejects ends the run: it is not an error of the environment."""
        try:
            return await self._engine.generate(request)
        except ConfigError as error:
            raise EngineError(str(error)) from error

    async def _score(self, rollout: Rollout, sampling: SamplingParams) -> None:
        prompt = rollout.prompt
        if not self._settings.needs_reward and getattr(self._environments[prompt.env], "without_reward", False):
            self._apply_score(rollout, Score("ok"), sampling)
            return
        messages = self._messages_for_reward(rollout)
        score = await self._judge.score(prompt.env, prompt.split, prompt.index, messages)
        self._apply_score(rollout, score, sampling)

    def _messages_for_reward(self, rollout: Rollout) -> list[Message]:
        """The conversation. With the attribute `sees_tokens` of the environment, answers have their `token_ids`."""
        if not getattr(self._environments[rollout.prompt.env], "sees_tokens", False):
            return rollout.messages
        messages = list(rollout.messages)
        answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
        for at, turn in zip(answers[-len(rollout.turns) :], rollout.turns, strict=False):
            messages[at] = {**messages[at], "token_ids": list(turn.completion.token_ids)}
        return messages

    def _scores_groups(self, env: str) -> bool:
        environment = self._environments[env]
        return env not in self._endpoint_environments and getattr(environment, "reward_group", None) is not None

    async def _score_group(
        self, prompt: Prompt, rollouts: Sequence[Rollout], sampling: SamplingParams, phase: Phase
    ) -> None:
        """Score the complete group in one call. An error of the call excludes all of its rollouts."""
        played = [rollout for rollout in rollouts if rollout.status == "ok"]
        if not played:
            return
        with phase("reward"):
            conversations = [self._messages_for_reward(rollout) for rollout in played]
            scores = await self._judge.score_group(prompt.env, prompt.split, prompt.index, conversations)
        for rollout, score in zip(played, scores, strict=True):
            self._apply_score(rollout, score, sampling)

    def _apply_score(self, rollout: Rollout, score: Score, sampling: SamplingParams) -> Rollout:
        if score.hint is not None and self._settings.uses_hints:
            rollout.hint_ids = self._tokens.prompt_ids(_with_hint(rollout.prompt.messages, score.hint))
        rollout.reward_s, rollout.parts, rollout.part_weights = score.seconds, score.parts, score.part_weights
        rollout.turn_rewards, rollout.token_rewards, rollout.kinds = score.turns, score.tokens, score.kinds
        if score.status == "ok" and (wrong := _wrong_length(rollout)):
            rollout.turn_rewards = rollout.token_rewards = rollout.kinds = None
            rollout.status, rollout.error = "error", wrong
        elif score.status != "ok":
            rollout.status, rollout.error, rollout.traceback = score.status, score.error, score.traceback
        elif score.reward is None and self._settings.needs_reward:
            rollout.status = "excluded"
        elif score.reward is not None:
            rollout.raw_reward = score.reward
            rollout.reward = self._settings.shape(score.reward, rollout, sampling.max_tokens)
        if rollout.reward is None and not self._settings.needs_reward and rollout.turns:
            rollout.status, rollout.reward = "ok", 0.0
        return rollout


def _with_hint(messages: Sequence[Message], hint: str) -> list[Message]:
    """The hint is added to the last message of the user."""
    found = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    if not found:
        return [*messages, {"role": "user", "content": hint}]
    last = messages[found[-1]]
    changed = {**last, "content": f"{last.get('content') or ''}\n\n{hint}"}
    return [*messages[: found[-1]], changed, *messages[found[-1] + 1 :]]


def _wrong_length(rollout: Rollout) -> str | None:
    """What is wrong with the lists of a reward, which have one entry per turn or sampled token."""
    lengths = [len(turn.completion.token_ids) for turn in rollout.turns]
    for name, values in (("turns", rollout.turn_rewards), ("kinds", rollout.kinds), ("tokens", rollout.token_rewards)):
        if values is not None and len(values) != len(lengths):
            return f"the reward has {len(values)} {name} for {len(lengths)} turns of the policy"
    found = [len(of_turn) for of_turn in rollout.token_rewards or []]
    if rollout.token_rewards is not None and found != lengths:
        return f"the reward has {found} tokens for turns of {lengths} tokens"
    return None
