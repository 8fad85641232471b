"""How long a run is and what happens when: steps, saving, evaluation, noise, temperature."""

from __future__ import annotations

from shoal.config.orch import OrchConfig, TemperatureSchedule
from shoal.config.schema import RunConfig
from shoal.config.train import TrainConfig
from shoal.orchestrator import cadence
from shoal.orchestrator.parts import LoopSettings


def loop_settings(config: RunConfig, steps: int, prompts: int) -> LoopSettings:
    train, evaluation, noise = config.train, config.orch.eval, config.train.noise_scheduler
    sigma_at = None
    if noise.enabled:
        sigma_at = cadence.NoiseSchedule(noise.sigma_start, noise.sigma_end, noise.num_stages, steps)
    return LoopSettings(
        max_steps=steps,
        save=_save_cadence(train, config.orch, prompts),
        evaluation=_eval_cadence(config.orch, prompts) if evaluation else None,
        save_total_limit=train.save_total_limit,
        keep_best=evaluation.keep_best if evaluation else False,
        stop_after=evaluation.stop_after if evaluation else None,
        sigma_at=sigma_at,
        show_completions=train.show_completions,
        sync_deadline_s=config.orch.sync_deadline_s,
        save_deadline_s=train.save_deadline_s,
    )


def _save_cadence(train: TrainConfig, orch: OrchConfig, prompts: int) -> cadence.SaveCadence:
    steps = train.save_steps
    if train.save_epochs is not None:
        steps = train.save_epochs * _epoch_steps(orch, prompts)
    return cadence.SaveCadence(steps, train.save_seconds)


def _eval_cadence(orch: OrchConfig, prompts: int) -> cadence.EvalCadence:
    settings = orch.eval
    assert settings is not None
    interval = settings.interval
    if settings.interval_epochs is not None:
        interval = settings.interval_epochs * _epoch_steps(orch, prompts)
    return cadence.EvalCadence(interval, settings.at_start, settings.interval_seconds)


def _epoch_steps(orch: OrchConfig, prompts: int) -> int:
    """Steps of one pass over the prompts, the last of them perhaps shared with the next pass."""
    return max(1, -(-prompts * orch.rollouts_per_example // orch.batch_size))


def temperature_schedule(orch: OrchConfig, steps: int) -> cadence.TemperatureSchedule:
    temperature = orch.sampling.temperature
    if isinstance(temperature, TemperatureSchedule):
        return cadence.TemperatureSchedule(temperature.start, temperature.end, steps, temperature.schedule == "cosine")
    return cadence.TemperatureSchedule(temperature, temperature)


def total_steps(config: RunConfig, prompts: int) -> int:
    orch = config.orch
    if config.train.max_steps is not None:
        return config.train.max_steps
    assert config.train.epochs is not None
    groups = orch.batch_size // orch.rollouts_per_example
    return max(1, -(-prompts * config.train.epochs // groups))
