"""The loop and everything it holds, from a configuration and what `prepare` made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.build.model import PolicyFiles, make_objective, make_policy, recomputes_old
from shoal.build.plan import make_plan, tell
from shoal.build.prepare import Prepared
from shoal.build.sampler import (
    Sampler,
    fits_in,
    load_model,
    make_evaluator,
    make_sampler,
    reward_shape,
    sampling_params,
)
from shoal.config.orch import OrchConfig, TemperatureSchedule
from shoal.config.resolve import as_data
from shoal.config.schema import RunConfig, SftConfig
from shoal.config.train import TrainConfig
from shoal.envs.user_code import load_function
from shoal.errors import DataError
from shoal.observability.console import Console
from shoal.observability.events import EventLog
from shoal.observability.follower import FollowerRunDir
from shoal.observability.health import LiveHealth
from shoal.observability.run_dir import RunDir
from shoal.observability.sinks import Sinks, TrackerRun, open_sinks
from shoal.observability.spans import Phases
from shoal.observability.watchdog import Watchdog
from shoal.orchestrator import cadence
from shoal.orchestrator.admission import Admission
from shoal.orchestrator.collect import Collector, GroupRules, RunGroup
from shoal.orchestrator.learn import Learner, LearnSettings
from shoal.orchestrator.loop import Loop, LoopSettings, Parts
from shoal.orchestrator.prompts import Buffer, Fits, PromptStream
from shoal.orchestrator.ranks import SharedGroups
from shoal.protocols import Ranks
from shoal.types import Message, Prompt, Task

if TYPE_CHECKING:
    from shoal.models.chat import Chat
    from shoal.trainer.memory import MemoryPlan
    from shoal.trainer.policy import TrainedPolicy

TEMPLATE_BYTES = 2048  # more than any chat template writes around a short conversation


@dataclass
class Assembled:
    loop: Loop
    files: PolicyFiles
    sampler: Sampler
    sinks: Sinks

    async def export(self) -> None:
        """The weights as people load them, into final/."""
        with self.loop.parts.run_dir.export() as folder:
            await self.loop.parts.on_device(self.files.export, folder)

    async def close(self) -> None:
        await self.sampler.close()
        self.sinks.close()


@dataclass
class Watching:
    """Where a run is written and who is told about it."""

    run_dir: RunDir | FollowerRunDir
    events: EventLog
    console: Console
    watchdog: Watchdog


def assemble(config: RunConfig, prepared: Prepared, watching: Watching, next_command: str) -> Assembled:
    from shoal.transport.in_process import InProcessWeights

    train, orch, console = config.train, config.orch, watching.console
    with console.progress(f"loading {train.model}"):
        loaded = load_model(config, prepared.given, prepared.ranks)
    model = loaded.model
    stream = _stream(orch, prepared, model.chat, watching.events)
    steps = total_steps(config, len(stream))
    ranks = prepared.ranks
    summing, mesh = getattr(ranks, "sum_gradients", None), getattr(ranks, "mesh", None)
    with console.progress("measuring memory"):
        policy = loaded.device.submit(make_policy, train, model, steps, summing, mesh).result()
        plan = loaded.device.submit(make_plan, config, model, policy, ranks).result()
    with console.progress("warming up the sampler"):
        sampler = make_sampler(config, prepared, loaded, plan)
    console.activity = lambda: sampler.engine.activity
    _tell(sampler, orch, watching)
    tell(plan, console, watching.events)
    files = PolicyFiles(policy, model.chat, model.decoder)
    phases = Phases()
    temperature = _temperature(orch, steps)

    async def run_group(prompt: Prompt) -> Any:
        drawn_with = sampling_params(orch, temperature(loop.progress.step + 1))
        return await sampler.runner.run(prompt, orch.rollouts_per_example, drawn_with, phases)

    parts = Parts(
        engine=sampler.engine,
        weights=InProcessWeights(),
        collector=_collector(orch, run_group, stream, ranks),
        stream=stream,
        learner=_learner(config, policy, sampler, plan, ranks),
        files=files,
        evaluator=make_evaluator(orch, prepared.environments, sampler.runner, model.chat) if orch.eval else None,
        run_dir=watching.run_dir,  # type: ignore[arg-type]
        events=watching.events,
        console=console,
        watchdog=watching.watchdog,
        sinks=make_sinks(config, watching.run_dir, watching.events, main=ranks.rank == 0),  # type: ignore[arg-type]
        phases=phases,
        on_device=sampler.on_device,
        token_text=model.chat.token_text,
        ranks=ranks,
        save_shards=partial(files.save_shards, ranks.talk) if model.sharded is not None else None,  # type: ignore[attr-defined]
    )
    loop = Loop(parts, _loop_settings(config, steps, len(stream), next_command))
    return Assembled(loop, files, sampler, parts.sinks)  # type: ignore[arg-type]


def make_sinks(config: RunConfig | SftConfig, run_dir: RunDir, events: EventLog, *, main: bool = True) -> Sinks:
    """Trackers and health notes are the main process's; the others report to it alone."""
    return open_sinks(
        config.train.report_to if main else [],
        run_dir,
        TrackerRun(
            run_dir.path,
            config.train.report_project,
            config.train.report_name,
            as_data(config),
            metric_names=config.train.metric_names,
            completions=config.train.log_completions,
        ),
        on_problem=lambda kind, message, data: events.warn(kind, message, data=data),
        watcher=LiveHealth(run_dir.path, config, events) if main else None,
    )


def _tell(sampler: Sampler, orch: OrchConfig, watching: Watching) -> None:
    """What a person should know about the model before the first step."""
    notice, positions = sampler.model.precision.notice, sampler.model.decoder.max_positions
    if notice:
        watching.console.note(notice)
    if sampler.engine.path != "eager":
        watching.console.note(f"rollouts: {sampler.engine.path}")
        watching.console.note(f"training: {sampler.model.path}")
    if positions is not None and orch.seq_len is not None and orch.seq_len > positions:
        said = f"orch.seq_len {orch.seq_len} is more than the {positions} positions the model was made for"
        watching.events.warn("context", f"{said}; lower it, or expect nonsense beyond them")


def _stream(orch: OrchConfig, prepared: Prepared, chat: Chat, events: EventLog) -> PromptStream:
    assert orch.seq_len is not None and orch.sampling.max_tokens is not None and orch.sampling.seed is not None
    room = orch.seq_len - orch.sampling.max_tokens
    fitting = fits_in(chat, room)
    for env in orch.env:
        _tell_unfit(env.label, prepared.environments[env.label].tasks("train"), fitting, room, events)

    def fits(messages: Sequence[Message]) -> bool:
        if fitting(messages):
            return True
        if not events.counts["set-aside"]:  # said once; the journal counts
            events.warn("set-aside", f"a prompt is longer than {room} tokens (seq_len - max_tokens) and is set aside")
        return False

    weights = {env.label: env.weight for env in orch.env}
    return PromptStream(prepared.environments, weights, orch.sampling.seed, fits, _buffer(orch))


def _tell_unfit(name: str, tasks: Sequence[Task], fits: Fits, room: int, events: EventLog) -> None:
    """Count the prompts of a data set that are too long; generated ones are met as they are drawn."""
    if not isinstance(tasks, list):
        return
    # A token is at least one byte, so most prompts need no tokenizer to be sure of.
    long = [task for task in tasks if _bytes_of(task) + TEMPLATE_BYTES > room]
    unfit = [task for task in long if not fits(task.messages)]
    if len(unfit) == len(tasks):
        raise DataError(f"no prompt of {name} fits: prompt plus sampling.max_tokens exceeds orch.seq_len")
    if unfit:
        said = f"{len(unfit)} of {len(tasks)} prompts of {name} are longer than {room} tokens (seq_len - max_tokens)"
        events.warn("set-aside", f"{said} and are set aside", data={"prompts": len(unfit), "of": len(tasks)})


def _bytes_of(task: Task) -> int:
    return sum(len(str(message.get("content") or "").encode("utf-8", "surrogatepass")) for message in task.messages)


def _buffer(orch: OrchConfig) -> Buffer:
    buffer = orch.buffer
    return Buffer(
        buffer.easy_threshold,
        buffer.hard_threshold,
        1.0 if buffer.easy_fraction is None else buffer.easy_fraction,
        1.0 if buffer.hard_fraction is None else buffer.hard_fraction,
    )


def _admission(orch: OrchConfig) -> Admission:
    return Admission(
        orch.batch_size,
        orch.rollouts_per_example,
        orch.weight_sync_interval,
        orch.max_async_level,
        orch.max_off_policy_steps,
    )


def _collector(orch: OrchConfig, run_group: RunGroup, stream: PromptStream, ranks: Ranks) -> Collector:
    keep = load_function(orch.groups.filter) if orch.groups.filter is not None else None
    several = ranks.world > 1
    rules = GroupRules(orch.groups.uniform or "refill", orch.groups.max_refill, keep, orch.deadline_s, several)
    return Collector(SharedGroups(run_group, ranks) if several else run_group, stream, _admission(orch), rules)


def _learner(config: RunConfig, policy: TrainedPolicy, sampler: Sampler, plan: MemoryPlan, ranks: Ranks) -> Learner:
    train, orch = config.train, config.orch
    objective = make_objective(train)
    assert orch.sampling.max_tokens is not None
    fp32 = sampler.model.decoder.dtype.itemsize >= 4
    settings = LearnSettings(
        token_budget=train.sequence_len,
        aggregation=train.loss.aggregation or "token-mean",
        max_tokens=orch.sampling.max_tokens,
        minibatches=train.minibatches,
        ppo_epochs=train.ppo_epochs,
        rows_per_micro_batch=train.per_device_train_batch_size,
        # Rows that the user counted are not counted again in tokens.
        micro_batch_tokens=plan.micro_batch_tokens if train.per_device_train_batch_size is None else None,
        recompute_old=recomputes_old(train, objective, fp32, remote=False),
        needs_reference=objective.needs_reference,
        reward_kl_beta=train.loss.kl.beta if train.loss.kl.where == "reward" else 0.0,
        trains=reward_shape(orch).trains,
    )
    return Learner(policy, make_advantages(orch), objective, settings, sampler.on_device, ranks)


def make_advantages(orch: OrchConfig) -> Any:
    from shoal.algorithms.advantages import CustomAdvantages, Normaliser

    advantage = orch.advantage
    if advantage.function is not None:
        return CustomAdvantages(load_function(advantage.function), advantage.function)
    return Normaliser(advantage.mean, advantage.std or "none", advantage.leave_one_out, advantage.eps)


def _loop_settings(config: RunConfig, steps: int, prompts: int, next_command: str) -> LoopSettings:
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
        next_command=next_command,
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


def _temperature(orch: OrchConfig, steps: int) -> cadence.TemperatureSchedule:
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
