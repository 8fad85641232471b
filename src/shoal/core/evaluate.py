"""Held-out evaluation on the first prompts of each environment's eval split, with the same seeds every time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.deadlines import wait_without_suspension
from shoal.core.errors import DataError, DeadlineError
from shoal.core.protocols import Environment
from shoal.core.types import Message, Prompt, RolloutGroup, SamplingParams

Advance = Callable[[float], None]
Evaluated = tuple[dict[str, float], list[RolloutGroup]]
RunGroup = Callable[[Prompt, int, SamplingParams], Awaitable[RolloutGroup]]


@dataclass(frozen=True)
class EvalSettings:
    """How many prompts and rollouts an evaluation has."""

    num_examples: int
    rollouts_per_example: int
    sampling: SamplingParams
    deadline_s: float = 600.0


class Evaluator:
    """Samples the held-out prompts and summarises their rewards."""

    def __init__(
        self,
        run_group: RunGroup,
        environments: Mapping[str, Environment],
        fits: Callable[[Sequence[Message]], bool],
        settings: EvalSettings,
    ) -> None:
        self._run_group = run_group
        self._settings = settings
        self._prompts = {name: self._choose(name, env, fits) for name, env in environments.items()}

    def _choose(self, name: str, environment: Environment, fits: Callable[[Sequence[Message]], bool]) -> list[Prompt]:
        tasks = environment.tasks("eval")
        prompts = []
        for index in range(len(tasks)):
            messages = list(tasks[index].messages)
            if fits(messages):
                prompts.append(Prompt(name, index, messages, "eval"))
            if len(prompts) == self._settings.num_examples:
                break
        if not prompts:
            raise DataError(f"environment {name} has no held-out prompt that fits; orch.eval cannot run")
        return prompts

    @property
    def groups(self) -> int:
        return sum(len(prompts) for prompts in self._prompts.values())

    async def evaluate(self, advance: Advance = lambda _: None) -> Evaluated:
        """Metrics eval/<env>/… and their groups. `advance` receives the number of groups that finished."""
        metrics: dict[str, float] = {}
        everything: list[RolloutGroup] = []
        for name, prompts in self._prompts.items():
            groups = await self._run_all(name, prompts, advance)
            metrics |= {f"eval/{name}/{key}": value for key, value in summarise(groups).items()}
            everything += groups
        return metrics, everything

    async def _run_all(self, name: str, prompts: Sequence[Prompt], advance: Advance) -> list[RolloutGroup]:
        """All groups, in order. The deadline limits the time in which no group finishes."""
        settings = self._settings
        runs = [
            asyncio.ensure_future(self._run_group(prompt, settings.rollouts_per_example, settings.sampling))
            for prompt in prompts
        ]
        pending = set(runs)
        try:
            while pending:
                done, pending = await wait_without_suspension(pending, settings.deadline_s, asyncio.FIRST_COMPLETED)
                advance(len(done))
                for run in done:
                    run.result()  # raises at once if the engine failed
                if not done:
                    waited = f"the evaluation of {name} waited {settings.deadline_s:.0f} s"
                    raise DeadlineError(f"{waited} and none of {len(pending)} groups finished")
        finally:
            for run in pending:
                run.cancel()
        return [run.result() for run in runs]


def summarise(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metrics of an evaluation, from raw rewards: reward shaping is a matter of training only."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_group = [[r.raw_reward for r in g.rollouts if r.scored and r.raw_reward is not None] for g in groups]
    rewards = [reward for group in by_group for reward in group]
    result = {"error_frac": 1 - len(rewards) / len(rollouts)}
    if rewards:
        result["mean"] = float(np.mean(rewards))
    if len(rewards) > 1:
        result["std"] = float(np.std(rewards, ddof=1))
    if max(len(group.rollouts) for group in groups) > 1:
        result["pass_at_k"] = float(np.mean([any(r >= 1 for r in group) for group in by_group]))
    result["length_mean"] = float(np.mean([rollout.completion_tokens for rollout in rollouts]))
    result["truncated_frac"] = float(np.mean([rollout.truncated for rollout in rollouts]))
    return result
