"""Evaluation: the evaluator of a run, and a run that does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.build.plan import lines_of, make_plan, path_lines
from shoal.build.prepare import Prepared
from shoal.build.prompts import fits_in
from shoal.build.sampler import CLOSE_LIMIT_S, LEAVE_LIMIT_S, Sampler, load_model, make_sampler
from shoal.config.orch import EvalConfig, OrchConfig
from shoal.config.resolve import resolve_run
from shoal.config.schema import RunConfig
from shoal.errors import ConfigError
from shoal.observability.console import told_on_stderr
from shoal.orchestrator.evaluate import EvalSettings, Evaluator
from shoal.protocols import Environment
from shoal.types import RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from shoal.models.chat import Chat
    from shoal.rollout.runner import GroupRunner
    from shoal.trainer.memory import MemoryPlan


def eval_sampling_params(orch: OrchConfig) -> SamplingParams:
    assert orch.eval is not None
    own = orch.eval.sampling
    values = {name: getattr(own, name) for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")}
    return SamplingParams(**values, min_tokens=own.min_tokens or 0, stop=tuple(own.stop or ()))


def make_evaluator(
    orch: OrchConfig, environments: Mapping[str, Environment], runner: GroupRunner, chat: Chat
) -> Evaluator:
    assert orch.eval is not None and orch.seq_len is not None and orch.eval.sampling.seed is not None
    sampling = eval_sampling_params(orch)
    names = [env.label for env in orch.eval.env or orch.env]
    return Evaluator(
        runner.with_seed(orch.eval.sampling.seed).run,
        {name: environments[name] for name in names},
        fits_in(chat, orch.seq_len - sampling.max_tokens),
        EvalSettings(orch.eval.num_examples, orch.eval.rollouts_per_example, sampling, orch.deadline_s),
    )


def evaluation_config(
    model: str, env: str, env_args: dict[str, Any], adapter: str | None, settings: EvalConfig, device: str
) -> RunConfig:
    """A run that only evaluates: the same schema, so the same objects."""
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
            "batch_size": max(2, min(256, settings.num_examples * settings.rollouts_per_example)),
            "rollouts_per_example": 1,
            "sampling": {"max_tokens": sampling.max_tokens, "seed": sampling.seed},
            "eval": settings.model_dump(exclude_unset=True),
        },
    }
    return resolve_run(RunConfig.model_validate(raw))


def sampler_only(config: RunConfig, prepared: Prepared) -> tuple[Sampler, MemoryPlan]:
    """For evaluation: nothing is trained, so only sampling is planned."""
    loaded = load_model(config, prepared.given)
    _check_room(config.orch, loaded.model.decoder.max_positions)
    plan = loaded.device.submit(make_plan, config, loaded.model, None).result()
    return make_sampler(config, prepared, loaded, plan), plan


async def evaluate_once(config: RunConfig, prepared: Prepared) -> tuple[dict[str, float], list[RolloutGroup]]:
    model, limit_s = config.train.adapter_path or config.train.model, CLOSE_LIMIT_S
    with told_on_stderr() as console:
        with console.progress(f"loading {model}", quiet=True):
            sampler, plan = sampler_only(config, prepared)
        for line in (*path_lines(sampler.engine.path), *lines_of(plan)):
            console.note(line)
        console.activity = lambda: sampler.engine.activity
        try:
            evaluator = make_evaluator(config.orch, prepared.environments, sampler.runner, sampler.model.chat)
            with console.progress(f"evaluation of {model}", evaluator.groups, quiet=True) as bar:
                return await evaluator.evaluate(bar.advance)
        except asyncio.CancelledError:  # by a signal; what the device is in the middle of may take long
            limit_s = LEAVE_LIMIT_S
            raise
        finally:
            await sampler.close(limit_s)


def _check_room(orch: OrchConfig, positions: int | None) -> None:
    """Beyond the positions a model was made for it writes nonsense, and an evaluation would score that."""
    longest = orch.eval.sampling.max_tokens if orch.eval is not None else None
    if positions is not None and longest is not None and longest >= positions:
        raise ConfigError(
            f"--max-tokens (orch.eval.sampling.max_tokens): {longest} leaves no room for a prompt in the {positions} "
            "positions the model was made for; give less"
        )
