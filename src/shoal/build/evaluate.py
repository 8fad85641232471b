"""Evaluation: the evaluator of a run, `shoal eval`, and the statistics of its scores.

Confidence intervals take prompts as the unit, because rollouts of one prompt are correlated. Models are scored on the
same prompts with the same seeds, so that they can be compared prompt by prompt.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Any

from shoal.build.load import PythonObjects, Run
from shoal.build.sampler import (
    CLOSE_LIMIT_S,
    LEAVE_LIMIT_S,
    DeviceThread,
    Sampler,
    fits_in,
    load_model,
    make_engine,
    make_runner,
)
from shoal.build.signals import exit_on_first_signal
from shoal.build.workspace import prepare_environments, reward_workers
from shoal.config.orch import EvalConfig, OrchConfig
from shoal.config.resolve import as_yaml, resolve_run
from shoal.config.schema import RunConfig
from shoal.core.errors import ConfigError, StoppedByPolicy
from shoal.core.evaluate import EvalSettings, Evaluator
from shoal.core.protocols import Environment
from shoal.core.types import RolloutGroup, SamplingParams
from shoal.rewards.pool import RewardPool
from shoal.runs.run_dir import RunDir
from shoal.runs.weight_files import Weights, template_of
from shoal.watch.console import stderr_console

if TYPE_CHECKING:
    from shoal.core.runner import GroupRunner
    from shoal.models.chat import Chat


SOLVED = 1.0
LEVEL = 0.95
MIN_VALUES = 4  # fewer give an interval wider than any range of rewards


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its confidence interval. The bounds are nan if there are too few prompts."""

    value: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.4g} (too few for an interval)"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def average(scores: Mapping[int, Sequence[float]]) -> Estimate:
    """avg@k: the mean reward, with equal weight for each prompt."""
    return interval([fmean(rewards) for rewards in scores.values() if rewards])


def pass_at(scores: Mapping[int, Sequence[float]], k: int) -> Estimate:
    """Unbiased pass@k from n >= k rollouts per prompt, c of them solved: 1 - C(n - c, k) / C(n, k)."""
    values = []
    for rewards in scores.values():
        n, solved = len(rewards), sum(reward >= SOLVED for reward in rewards)
        if n >= k:
            values.append(1 - math.comb(n - solved, k) / math.comb(n, k))
    return interval(values)


def difference(ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]]) -> Estimate:
    """Mean of ours minus theirs over the prompts that both answered. Paired, so the difficulty of prompts cancels."""
    shared = [index for index in ours if ours[index] and theirs.get(index)]
    return interval([fmean(ours[index]) - fmean(theirs[index]) for index in shared], paired=True)


def interval(values: Sequence[float], *, paired: bool = False) -> Estimate:
    """Student's interval of a mean. Wilson's if every value is 0 or 1, since it is also correct near 0 and 1."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = fmean(values)
    if not paired and all(value in (0, 1) for value in values):
        return _wilson(mean, n)
    if n < MIN_VALUES:
        return Estimate(mean, math.nan, math.nan, n)
    half = student_quantile(0.5 + LEVEL / 2, n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def _wilson(mean: float, n: int) -> Estimate:
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), n)


def student_quantile(probability: float, freedom: int) -> float:
    """Exact for one and two degrees of freedom, else Hill's expansion around the normal quantile (error below 1e-2)."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalTask:
    """An environment with its arguments, and how to evaluate on it."""

    env: str
    settings: EvalConfig
    env_args: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"


@dataclass(frozen=True)
class Scores:
    """Rewards by prompt, and the metrics that an evaluation during training reports."""

    metrics: dict[str, float]
    by_prompt: dict[int, list[float]]
    rollouts_per_example: int

    def estimates(self) -> dict[str, Estimate]:
        """avg@k of all rollouts, and pass@k for k = 1, 2, 4, … and all rollouts."""
        most = self.rollouts_per_example
        ks = sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})
        found = {f"avg@{most}": average(self.by_prompt)}
        return found | {f"pass@{k}": estimate for k in ks if (estimate := pass_at(self.by_prompt, k)).prompts}

    def minus(self, other: Scores) -> Estimate:
        """The difference of the mean rewards, paired by prompt."""
        return difference(self.by_prompt, other.by_prompt)


@exit_on_first_signal()
def score(models: Sequence[Weights], task: EvalTask, folders: Sequence[Path] = ()) -> list[Scores]:
    """Score models one after the other; `folders` get their answers. The reward workers fork before a model is loaded.

    There is nothing to save, so a signal ends the process at once, even while a model loads.
    """
    configs = [
        evaluation_config(weights.model, task.env, dict(task.env_args), weights.adapter, task.settings, task.device)
        for weights in models
    ]
    first = Run(configs[0])
    environments, notices = prepare_environments(first)
    for notice in notices:
        log.log(logging.WARNING if notice.warning else logging.INFO, "%s", notice.text)

    async def run_all(rewards: RewardPool) -> list[Scores]:
        scores = []
        for number, config in enumerate(configs):
            folder = folders[number] if folders else None
            metrics, groups = await evaluate_once(config, first.objects, environments, rewards, folder)
            _check_failures(groups)
            by_prompt = {
                group.prompt.index: [r.raw_reward for r in group.rollouts if r.scored and r.raw_reward is not None]
                for group in groups
            }
            scores.append(Scores(metrics, by_prompt, task.settings.rollouts_per_example))
        return scores

    with reward_workers(_isolated_if_needed(first.config.orch, environments), environments) as rewards:
        for notice in rewards.notices:
            log.warning("%s", notice)
        return asyncio.run(run_all(rewards))


def _isolated_if_needed(orch: OrchConfig, environments: Mapping[str, Environment]) -> OrchConfig:
    """`shoal eval` has no key for it: code written by the model is isolated if an environment runs any."""
    if not any(getattr(environment, "needs_isolation", False) for environment in environments.values()):
        return orch
    return orch.model_copy(update={"reward": orch.reward.model_copy(update={"isolated": True})})


def evaluate_run(run: Run) -> dict[str, float]:
    """One evaluation as orch.eval describes it; returns metrics by name."""
    environments, _ = prepare_environments(run)
    with reward_workers(run.config.orch, environments) as rewards:
        return asyncio.run(evaluate_once(run.config, run.objects, environments, rewards))[0]


def _check_failures(groups: Sequence[RolloutGroup]) -> None:
    """Raise if no rollout has a reward, and warn if some have none, with the error of the first."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if not rollout.scored]
    why = next((rollout.error for rollout in failed if rollout.error), "the environment returned none")
    if len(failed) == len(rollouts):
        raise StoppedByPolicy(f"none of {len(rollouts)} rollouts got a reward: {why}; fix the environment's reward")
    if failed:
        log.warning("no reward for %d of %d rollouts: %s", len(failed), len(rollouts), why)


def make_evaluator(
    orch: OrchConfig, environments: Mapping[str, Environment], runner: GroupRunner, chat: Chat
) -> Evaluator | None:
    """None if the configuration has no evaluation."""
    if orch.eval is None:
        return None
    own = orch.eval.sampling
    assert orch.seq_len is not None and own.seed is not None
    values = {name: getattr(own, name) for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")}
    sampling = SamplingParams(**values, min_tokens=own.min_tokens or 0, stop=tuple(own.stop or ()))
    names = [env.label for env in orch.eval.env or orch.env]
    return Evaluator(
        runner.with_seed(own.seed).run,
        {name: environments[name] for name in names},
        fits_in(chat, orch.seq_len - sampling.max_tokens),
        EvalSettings(orch.eval.num_examples, orch.eval.rollouts_per_example, sampling, orch.deadline_s),
    )


def evaluation_config(
    model: str, env: str, env_args: dict[str, Any], adapter: str | None, settings: EvalConfig, device: str
) -> RunConfig:
    """A run that only evaluates, in the schema of a training run."""
    sampling = settings.sampling
    assert sampling.max_tokens is not None
    seq_len = 2048 + sampling.max_tokens
    raw = {
        "train": {
            "model": model,
            "max_steps": 1,
            "sequence_len": seq_len,
            "device": device,
            "lora": adapter is not None,
        }
        | ({"adapter_path": adapter} if adapter is not None else {}),
        "orch": {
            "env": [{"id": env, "args": env_args}],
            "chat_template": template_of(adapter),
            "batch_size": max(2, min(256, settings.num_examples * settings.rollouts_per_example)),
            "rollouts_per_example": 1,
            "sampling": {"max_tokens": sampling.max_tokens, "seed": sampling.seed},
            "eval": settings.model_dump(exclude_unset=True),
        },
    }
    return resolve_run(RunConfig.model_validate(raw))


async def evaluate_once(
    config: RunConfig,
    objects: PythonObjects,
    environments: Mapping[str, Environment],
    rewards: RewardPool,
    folder: Path | None = None,
) -> tuple[dict[str, float], list[RolloutGroup]]:
    """Load the model, evaluate it as orch.eval says, and close it. Only sampling is planned."""
    from shoal.build.memory_plan import lines_of, make_plan, path_lines

    name, limit_s = config.train.adapter_path or config.train.model, CLOSE_LIMIT_S
    device = DeviceThread(config.orch.deadline_s)
    with stderr_console() as console:
        with console.progress(f"loading {name}", quiet=True):
            model = load_model(config, objects, device)
            _check_max_tokens(config.orch, model.decoder.max_positions)
            plan = device.run(make_plan, config, model, None)
            engine = make_engine(config, model, device, plan.slots)
        runner, endpoint = make_runner(config, environments, rewards, engine, model.chat)
        sampler = Sampler(model, engine, runner, device, endpoint)
        for line in (*path_lines(engine.path), *lines_of(plan)):
            console.note(line)
        console.activity = lambda: engine.activity
        try:
            evaluator = make_evaluator(config.orch, environments, runner, model.chat)
            assert evaluator is not None
            with console.progress(f"evaluation of {name}", evaluator.groups, quiet=True) as bar:
                metrics, groups = await evaluator.evaluate(bar.advance)
            if folder is not None:
                _write(folder, config, metrics, groups, model.chat.token_text)
            return metrics, groups
        except asyncio.CancelledError:  # by a signal: a device step may take long, and there is nothing to save
            limit_s = LEAVE_LIMIT_S
            raise
        finally:
            await sampler.close(limit_s)


def _write(
    folder: Path,
    config: RunConfig,
    metrics: dict[str, float],
    groups: Sequence[RolloutGroup],
    token_text: Callable[[int], str],
) -> None:
    """As a run directory that has an evaluation before its first step, and nothing else."""
    with RunDir.create(folder, as_yaml(config), {}) as run:
        run.record_evaluation(0, groups, token_text)
        run.append_metrics(0, metrics)
        run.write_status("finished", step=0, reason="evaluated by shoal eval", resumable=False)


def _check_max_tokens(orch: OrchConfig, positions: int | None) -> None:
    """Beyond the positions that a model was trained for, its text is meaningless, and scores would be too."""
    longest = orch.eval.sampling.max_tokens if orch.eval is not None else None
    if positions is not None and longest is not None and longest >= positions:
        raise ConfigError(
            f"--max-tokens (orch.eval.sampling.max_tokens): {longest} leaves no room for a prompt in the {positions} "
            "positions the model was trained for; lower it"
        )
