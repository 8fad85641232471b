"""The loop and everything it holds, from a configuration and what `prepare` made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.evaluation import make_evaluator
from shoal.build.model import PolicyFiles, make_objective, make_policy, recomputes_old
from shoal.build.plan import cpu_share, make_plan, path_lines, tell
from shoal.build.prepare import Prepared
from shoal.build.prompts import make_stream
from shoal.build.remote import absent_server
from shoal.build.sampler import Sampler, load_model, make_sampler, reward_shape, sampling_params
from shoal.build.schedule import loop_settings, temperature_schedule, total_steps
from shoal.build.waits import tell_wait
from shoal.config.orch import OrchConfig
from shoal.config.problems import about
from shoal.config.resolve import as_data
from shoal.config.schema import RunConfig, SftConfig
from shoal.envs.user_code import load_filter, load_function
from shoal.observability.console import Console
from shoal.observability.events import EventLog
from shoal.observability.follower import FollowerRunDir
from shoal.observability.health import LiveHealth
from shoal.observability.run_dir import RunDir
from shoal.observability.sinks import Sinks, TrackerRun, open_sinks
from shoal.observability.spans import Phases
from shoal.observability.watchdog import Watchdog
from shoal.orchestrator.admission import Admission
from shoal.orchestrator.collect import Collector, GroupRules, RunGroup
from shoal.orchestrator.learn import Learner, LearnSettings, OnDevice
from shoal.orchestrator.loop import Loop, Parts
from shoal.orchestrator.meeting import Waits
from shoal.orchestrator.prompts import PromptStream
from shoal.orchestrator.ranks import SharedGroups
from shoal.protocols import Ranks, RolloutEngine, WeightChannel
from shoal.types import Prompt

if TYPE_CHECKING:
    from shoal.models.chat import Chat
    from shoal.rollout.runner import GroupRunner
    from shoal.trainer.memory import MemoryPlan
    from shoal.trainer.policy import TrainedPolicy


@dataclass
class Assembled:
    loop: Loop
    files: PolicyFiles
    sampler: Sampler
    sinks: Sinks

    async def start(self, watching: Watching) -> None:
        """Wait for a server that is to sample, if there is one; its own log is shown if it does not come up."""
        engine = self.sampler.engine
        if hasattr(engine, "connect"):
            with watching.stage("server", engine.opening):
                await engine.connect()

    async def export(self) -> None:
        """The weights as people load them, into final/."""
        self.loop.parts.doing("writing the final weights")
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
    next_command: str | None = None  # how to go on, for status.json
    stages: dict[str, float] = field(default_factory=dict)  # of the start, and the seconds each took

    @contextmanager
    def stage(self, name: str, doing: str, quiet: bool = False) -> Iterator[None]:
        """A part of the start: shown while it goes on, and timed."""
        began = time.monotonic()
        with self.console.progress(doing, quiet=quiet):
            yield
        self.stages[name] = time.monotonic() - began


@dataclass
class Pieces:
    """What differs between layouts: who samples, who trains, and how either is reached."""

    engine: RolloutEngine
    runner: GroupRunner
    tokens: Chat
    weights: WeightChannel
    learner: Any  # a Learner, or one that asks another process
    files: Any  # the policy's side of a checkpoint; what `on_device` runs of it may be a coroutine
    on_device: OnDevice
    save_shards: Any = None  # every rank's part of a checkpoint, where weights are sharded


def assemble(config: RunConfig, prepared: Prepared, watching: Watching) -> Assembled:
    train, orch, console = config.train, config.orch, watching.console
    if absent := absent_server(config):
        console.note(absent)
    with watching.stage("load", f"loading {train.model}"):
        loaded = load_model(config, prepared.given, prepared.ranks)
    model = loaded.model
    stream = make_stream(orch, prepared, model.chat, watching.events)
    steps = total_steps(config, len(stream))
    ranks = prepared.ranks
    summing, mesh = getattr(ranks, "sum_gradients", None), getattr(ranks, "mesh", None)
    with watching.stage("memory", "measuring memory"):
        policy = loaded.device.submit(make_policy, train, model, steps, summing, mesh).result()
        plan = loaded.device.submit(make_plan, config, model, policy, ranks).result()
    with watching.stage("sampler", "warming up the sampler"):
        waits = Waits(partial(tell_wait, watching), whom="the inference server")
        sampler = make_sampler(config, prepared, loaded, plan, waits.heard)
    console.activity = lambda: sampler.engine.activity
    _tell(sampler, orch, watching)
    tell(plan, cpu_share(config.infer, model), console, watching.events)
    files = PolicyFiles(policy, model.chat, model.decoder)
    pieces = Pieces(
        engine=sampler.engine,
        runner=sampler.runner,
        tokens=model.chat,
        weights=make_weights(config, sampler, files),
        learner=make_learner(config, policy, plan, sampler.on_device, ranks),
        files=files,
        on_device=sampler.on_device,
        save_shards=partial(files.save_shards, ranks.talk) if model.sharded is not None else None,  # type: ignore[attr-defined]
    )
    loop = make_loop(config, prepared, watching, stream, pieces)
    return Assembled(loop, files, sampler, loop.parts.sinks)  # type: ignore[arg-type]


def make_loop(config: RunConfig, prepared: Prepared, watching: Watching, stream: PromptStream, pieces: Pieces) -> Loop:
    """The one loop, around whatever samples and trains."""
    orch, ranks, phases = config.orch, prepared.ranks, Phases()
    steps = total_steps(config, len(stream))
    temperature = temperature_schedule(orch, steps)

    async def run_group(prompt: Prompt) -> Any:
        drawn_with = sampling_params(orch, temperature(loop.progress.step + 1))
        return await pieces.runner.run(prompt, orch.rollouts_per_example, drawn_with, phases)

    chat = pieces.tokens
    parts = Parts(
        engine=pieces.engine,
        weights=pieces.weights,
        collector=_collector(orch, run_group, stream, ranks, steps),
        stream=stream,
        learner=pieces.learner,
        files=pieces.files,
        evaluator=make_evaluator(orch, prepared.environments, pieces.runner, chat) if orch.eval else None,
        run_dir=watching.run_dir,  # type: ignore[arg-type]
        events=watching.events,
        console=watching.console,
        watchdog=watching.watchdog,
        sinks=make_sinks(config, watching.run_dir, watching.events, main=ranks.rank == 0),  # type: ignore[arg-type]
        phases=phases,
        on_device=pieces.on_device,
        token_text=chat.token_text,
        ranks=ranks,
        save_shards=pieces.save_shards,
    )
    settings = loop_settings(config, steps, len(stream))
    loop = Loop(parts, replace(settings, next_command=watching.next_command))
    return loop


def make_weights(config: RunConfig, sampler: Sampler, files: PolicyFiles) -> WeightChannel:
    """Nothing moves where the engine sees the trainer's tensors; a server reads folders, as adapters are."""
    from shoal.transport.folder_weights import FolderWeightChannel
    from shoal.transport.in_process import InProcessWeights

    train, infer = config.train, config.infer
    if infer.engine == "embedded" or (infer.in_process and not train.lora and infer.tp == 1):
        return InProcessWeights()

    async def export(folder: Path) -> None:
        await sampler.on_device(files.export, folder)

    return FolderWeightChannel(train.output_dir, "lora" if train.lora else "full", export, train.seed)


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
            run_id=run_dir.status.get("run_id"),
        ),
        on_problem=lambda kind, message, data: events.warn(kind, message, data=data),
        watcher=LiveHealth(run_dir.path, config, events) if main else None,
    )


def _tell(sampler: Sampler, orch: OrchConfig, watching: Watching) -> None:
    """What a person should know about the model before the first step."""
    positions = sampler.model.decoder.max_positions
    for notice in (*path_lines(sampler.engine.path), *sampler.model.notices):
        watching.console.note(notice)
    if positions is not None and orch.seq_len is not None and orch.seq_len > positions:
        said = f"orch.seq_len {orch.seq_len} is more than the {positions} positions the model was made for"
        watching.events.warn("context", f"{said}; lower it, or expect nonsense beyond them")


def _admission(orch: OrchConfig, steps: int) -> Admission:
    return Admission(
        orch.batch_size,
        orch.rollouts_per_example,
        orch.weight_sync_interval,
        orch.max_async_level,
        orch.max_off_policy_steps,
        steps,
    )


def _collector(orch: OrchConfig, run_group: RunGroup, stream: PromptStream, ranks: Ranks, steps: int) -> Collector:
    with about("orch.groups.filter"):
        keep = load_filter(orch.groups.filter) if orch.groups.filter is not None else None
    several = ranks.world > 1
    rules = GroupRules(orch.groups.uniform or "refill", orch.groups.max_refill, keep, orch.deadline_s, several)
    return Collector(SharedGroups(run_group, ranks) if several else run_group, stream, _admission(orch, steps), rules)


def make_learner(
    config: RunConfig, policy: TrainedPolicy, plan: MemoryPlan, on_device: OnDevice, ranks: Ranks
) -> Learner:
    train, orch = config.train, config.orch
    objective = make_objective(train)
    assert orch.sampling.max_tokens is not None
    fp32 = policy.decoder.dtype.itemsize >= 4
    remote = config.infer.engine != "embedded"  # its log-probs are not the policy's to the last bit
    settings = LearnSettings(
        token_budget=train.sequence_len,
        aggregation=train.loss.aggregation or "token-mean",
        max_tokens=orch.sampling.max_tokens,
        minibatches=train.minibatches,
        ppo_epochs=train.ppo_epochs,
        rows_per_micro_batch=train.per_device_train_batch_size,
        # Rows that the user counted are not counted again in tokens.
        micro_batch_tokens=plan.micro_batch_tokens if train.per_device_train_batch_size is None else None,
        keys_for_token=plan.keys_for_token,
        recompute_old=recomputes_old(train, objective, fp32, remote=remote),
        needs_reference=objective.needs_reference,
        reward_kl_beta=train.loss.kl.beta if train.loss.kl.where == "reward" else 0.0,
        trains=reward_shape(orch).trains,
    )
    return Learner(policy, make_advantages(orch), objective, settings, on_device, ranks)


def make_advantages(orch: OrchConfig) -> Any:
    from shoal.algorithms.advantages import CustomAdvantages, Normaliser

    advantage = orch.advantage
    if advantage.function is not None:
        with about("orch.advantage.function"):
            return CustomAdvantages(load_function(advantage.function), advantage.function)
    return Normaliser(advantage.mean, advantage.std or "none", advantage.leave_one_out, advantage.eps)
