"""The prompt stream of a run, its length, and its schedules: saving, evaluation, noise and temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shoal.config.orch import OrchConfig, TemperatureSchedule
from shoal.config.schema import RunConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import DataError
from shoal.core.prompts import Buffer, Fits, PromptStream
from shoal.core.protocols import Environment
from shoal.core.state import EvalCadence, LoopSettings, SaveCadence
from shoal.core.types import Message, Task
from shoal.runs.events import EventLog

if TYPE_CHECKING:
    from shoal.models.chat import Chat


def loop_settings(config: RunConfig, steps: int, prompts: int, next_command: str) -> LoopSettings:
    train, evaluation, noise = config.train, config.orch.eval, config.train.noise_scheduler
    sigma_at = None
    if noise.enabled:
        sigma_at = partial(noise.sigma_at, total_steps=steps)
    return LoopSettings(
        max_steps=steps,
        save=_save_cadence(train, config.orch, prompts),
        evaluation=_eval_cadence(config.orch, prompts) if evaluation else None,
        save_total_limit=train.save_total_limit,
        keep_best=evaluation.keep_best if evaluation else False,
        stop_after=evaluation.stop_after if evaluation else None,
        sigma_at=sigma_at,
        next_command=next_command,
        show_completions=train.show_completions,
        sync_deadline_s=config.orch.sync_deadline_s,
        save_deadline_s=train.save_deadline_s,
    )


def _save_cadence(train: TrainConfig, orch: OrchConfig, prompts: int) -> SaveCadence:
    steps = train.save_steps
    if train.save_epochs is not None:
        steps = train.save_epochs * _epoch_steps(orch, prompts)
    return SaveCadence(steps, train.save_seconds)


def _eval_cadence(orch: OrchConfig, prompts: int) -> EvalCadence:
    settings = orch.eval
    assert settings is not None
    interval = settings.interval
    if settings.interval_epochs is not None:
        interval = settings.interval_epochs * _epoch_steps(orch, prompts)
    return EvalCadence(interval, settings.at_start, settings.interval_seconds)


def _epoch_steps(orch: OrchConfig, prompts: int) -> int:
    """Steps of one pass over the prompts, rounded up."""
    return max(1, -(-prompts * orch.rollouts_per_example // orch.batch_size))


def temperature_schedule(orch: OrchConfig, steps: int) -> Callable[[int], float]:
    temperature = orch.sampling.temperature
    if isinstance(temperature, TemperatureSchedule):
        return partial(temperature.at, total_steps=steps)
    return lambda _: temperature


def total_steps(config: RunConfig, prompts: int) -> int:
    orch = config.orch
    if config.train.max_steps is not None:
        return config.train.max_steps
    assert config.train.epochs is not None
    groups = orch.batch_size // orch.rollouts_per_example
    return max(1, -(-prompts * config.train.epochs // groups))


TEMPLATE_BYTES = 2048  # more than any chat template writes around a short conversation


def make_stream(
    orch: OrchConfig, environments: Mapping[str, Environment], chat: Chat, events: EventLog
) -> PromptStream:
    """Prompts that leave no room for a completion are skipped, with a warning."""
    assert orch.seq_len is not None and orch.sampling.max_tokens is not None and orch.sampling.seed is not None
    max_tokens = orch.seq_len - orch.sampling.max_tokens
    fits_context = fits_in(chat, max_tokens)
    for env in orch.env:
        _report_long_prompts(env.label, environments[env.label].tasks("train"), fits_context, max_tokens, events)

    def fits(messages: Sequence[Message]) -> bool:
        if fits_context(messages):
            return True
        if not events.counts["set-aside"]:  # once; the journal has the number
            events.warn("set-aside", f"a prompt is longer than {max_tokens} tokens (seq_len - max_tokens) and skipped")
        return False

    weights = {env.label: env.weight_at if isinstance(env.weight, dict) else env.weight for env in orch.env}
    buffer = Buffer(
        orch.buffer.easy_threshold,
        orch.buffer.hard_threshold,
        1.0 if orch.buffer.easy_fraction is None else orch.buffer.easy_fraction,
        1.0 if orch.buffer.hard_fraction is None else orch.buffer.hard_fraction,
        1.0 if orch.buffer.zero_variance_fraction is None else orch.buffer.zero_variance_fraction,
    )
    return PromptStream(environments, weights, orch.sampling.seed, fits, buffer)


def _report_long_prompts(name: str, tasks: Sequence[Task], fits: Fits, max_tokens: int, events: EventLog) -> None:
    """Count the prompts of a data set that are too long. Generated prompts are checked when they are drawn."""
    if not isinstance(tasks, list):
        return
    # A token has at least one byte, so short prompts fit without running the tokenizer.
    long = [task for task in tasks if _bytes_of(task) + TEMPLATE_BYTES > max_tokens]
    too_long = [task for task in long if not fits(task.messages)]
    if tasks and len(too_long) == len(tasks):
        raise DataError(f"no prompt of {name} fits: prompt plus sampling.max_tokens exceeds orch.seq_len")
    if too_long:
        events.warn(
            "set-aside",
            f"{len(too_long)} of {len(tasks)} prompts of {name} are longer than {max_tokens} tokens "
            "(seq_len - max_tokens) and skipped",
            data={"prompts": len(too_long), "of": len(tasks)},
        )


def _bytes_of(task: Task) -> int:
    return sum(len(str(message.get("content") or "").encode("utf-8", "surrogatepass")) for message in task.messages)


def fits_in(chat: Chat, max_tokens: int) -> Callable[[Sequence[Message]], bool]:
    return lambda messages: not chat.exceeds(messages, max_tokens) and 0 < len(chat.prompt_ids(messages)) <= max_tokens
