"""Scoring models on an environment: the same prompts and seeds for each, so that two can be compared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.build.evaluation import evaluate_once, evaluation_config
from shoal.build.prepare import prepare
from shoal.config.orch import EvalConfig
from shoal.errors import StoppedByPolicy
from shoal.observability.weights import Weights
from shoal.orchestrator.signals import terminated_at_once
from shoal.orchestrator.statistics import Estimate, average, difference, pass_at
from shoal.types import RolloutGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalTask:
    """What is asked: an environment with its arguments, and how."""

    env: str
    settings: EvalConfig
    env_args: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"


@dataclass(frozen=True)
class Scores:
    """Rewards by prompt, and the metrics an evaluation in training would have reported."""

    metrics: dict[str, float]
    by_prompt: dict[int, list[float]]
    rollouts_per_example: int

    def estimates(self) -> dict[str, Estimate]:
        """avg@k and pass@k for k = 1, 2, 4, … and all rollouts."""
        most = self.rollouts_per_example
        ks = sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})
        found = {f"avg@{most}": average(self.by_prompt)}
        return found | {f"pass@{k}": estimate for k in ks if (estimate := pass_at(self.by_prompt, k)).prompts}

    def minus(self, other: Scores) -> Estimate:
        """How much better, paired by prompt."""
        return difference(self.by_prompt, other.by_prompt)


@terminated_at_once()
def score(models: Sequence[Weights], task: EvalTask) -> list[Scores]:
    """One after the other, with one pool of reward workers: it is forked before the first model is loaded.

    There is nothing to save, so a signal does not wait for a model to load.
    """
    configs = [
        evaluation_config(weights.model, task.env, dict(task.env_args), weights.adapter, task.settings, task.device)
        for weights in models
    ]
    prepared = prepare(configs[0])
    for notice in prepared.notices:
        log.warning("%s", notice)

    async def run(config: Any) -> Scores:
        metrics, groups = await evaluate_once(config, prepared)
        _tell_failures(groups)
        return Scores(metrics, _by_prompt(groups), task.settings.rollouts_per_example)

    async def run_all() -> list[Scores]:
        return [await run(config) for config in configs]

    try:
        return asyncio.run(run_all())
    finally:
        asyncio.run(prepared.pool.close())


def _tell_failures(groups: Sequence[RolloutGroup]) -> None:
    """With the text of the first. A score of nothing is none."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if not rollout.scored]
    why = next((rollout.error for rollout in failed if rollout.error), "the environment gave none")
    if len(failed) == len(rollouts):
        raise StoppedByPolicy(f"not one of {len(rollouts)} rollouts got a reward: {why}; fix the environment's reward")
    if failed:
        log.warning("no reward for %d of %d rollouts: %s", len(failed), len(rollouts), why)


def _by_prompt(groups: Sequence[RolloutGroup]) -> dict[int, list[float]]:
    return {
        group.prompt.index: [r.raw_reward for r in group.rollouts if r.scored and r.raw_reward is not None]
        for group in groups
    }
