"""Held-out evaluation: the first prompts of each environment's eval split, the same seeds every time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import DataError, DeadlineError
from shoal.observability.watchdog import wait_awake
from shoal.protocols import Environment
from shoal.types import Message, Prompt, RolloutGroup, SamplingParams

Evaluated = tuple[dict[str, float], list[RolloutGroup]]
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

    @property
    def groups(self) -> int:
        return sum(len(prompts) for prompts in self._prompts.values())

    async def evaluate(self, advance: Callable[[float], None] = lambda _: None) -> Evaluated:
        """Metrics eval/<env>/… and the groups behind them; `advance` is told how many more groups are done."""
        metrics: dict[str, float] = {}
        everything: list[RolloutGroup] = []
        for name, prompts in self._prompts.items():
            groups = await self._run_all(name, prompts, advance)
            metrics |= {f"eval/{name}/{key}": value for key, value in summarise(groups).items()}
            everything += groups
        return metrics, everything

    async def _run_all(
        self, name: str, prompts: Sequence[Prompt], advance: Callable[[float], None]
    ) -> list[RolloutGroup]:
        """All groups, in order. The deadline is on going without any progress, as in training."""
        settings = self._settings
        runs = [
            asyncio.ensure_future(self._run_group(prompt, settings.rollouts_per_example, settings.sampling))
            for prompt in prompts
        ]
        pending = set(runs)
        try:
            while pending:
                done, pending = await wait_awake(pending, settings.deadline_s, asyncio.FIRST_COMPLETED)
                advance(len(done))
                for run in done:
                    run.result()  # a broken engine is told at once
                if not done:
                    limit = f"{settings.deadline_s:.0f} s"
                    raise DeadlineError(
                        f"the evaluation of {name} waited {limit} and none of {len(pending)} groups ended"
                    )
        finally:
            for run in pending:
                run.cancel()
        return [run.result() for run in runs]


async def unless_stopped(evaluation: Coroutine[Any, Any, Evaluated], stop: asyncio.Event) -> Evaluated | None:
    """What it came to; None if the run was asked to stop before that, and nobody waits for the rest of it."""
    running, stopping = asyncio.ensure_future(evaluation), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)


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
