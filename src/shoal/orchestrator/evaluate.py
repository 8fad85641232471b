"""Held-out evaluation: the first prompts of each environment's eval split, the same seeds every time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import DataError, DeadlineError
from shoal.protocols import Environment
from shoal.types import Message, Prompt, RolloutGroup, SamplingParams

RunGroup = Callable[[Prompt, int, SamplingParams], Awaitable[RolloutGroup]]


@dataclass(frozen=True)
class EvalSettings:
    num_examples: int
    rollouts_per_example: int
    sampling: SamplingParams
    deadline_s: float = 600.0


class Evaluator:
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

    async def evaluate(self) -> tuple[dict[str, float], list[RolloutGroup]]:
        """Metrics eval/<env>/… and the groups behind them."""
        metrics: dict[str, float] = {}
        everything: list[RolloutGroup] = []
        for name, prompts in self._prompts.items():
            runs = [self._run_group(p, self._settings.rollouts_per_example, self._settings.sampling) for p in prompts]
            try:
                groups = await asyncio.wait_for(asyncio.gather(*runs), self._settings.deadline_s)
            except TimeoutError:
                limit = self._settings.deadline_s
                raise DeadlineError(f"the evaluation of {name} did not finish within {limit:.0f} s") from None
            metrics |= {f"eval/{name}/{key}": value for key, value in summarise(groups).items()}
            everything += groups
        return metrics, everything


def summarise(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """By raw rewards throughout: what training does to a reward is no part of how good an answer is."""
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
