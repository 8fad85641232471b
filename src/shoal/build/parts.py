"""The third phase of a run: `build_colocated` puts together the loop and everything it uses, with the model here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.evaluate import make_evaluator
from shoal.build.load import Run
from shoal.build.model import LoadedModel, PolicyFiles, make_objective, make_policy, recomputes_old
from shoal.build.remote_engines import absent_server
from shoal.build.sampler import (
    DeviceThread,
    Sampler,
    load_model,
    loop_settings,
    make_engine,
    make_runner,
    make_stream,
    reward_shape,
    sampling_params,
    temperature_schedule,
    total_steps,
)
from shoal.build.workspace import Workspace
from shoal.config.orch import OrchConfig
from shoal.config.problems import about
from shoal.config.resolve import as_data
from shoal.config.schema import RunConfig, SupervisedConfig
from shoal.core.admission import Admission
from shoal.core.collect import Collector, GroupRules, RunGroup
from shoal.core.learn import Learner, LearnSettings, OnDevice
from shoal.core.loop import Loop
from shoal.core.prompts import PromptStream
from shoal.core.protocols import Ranks, RolloutEngine, WeightChannel
from shoal.core.state import Parts
from shoal.core.types import Prompt, Rollout
from shoal.envs.user_code import load_filter, load_function
from shoal.rollout.group_exchange import GroupExchange
from shoal.rollout.remote.client import Waiting, WaitReporter
from shoal.runs.events import EventLog
from shoal.runs.run_dir import FollowerRunDir, RunDir
from shoal.signals.advantages import every_reward, total_reward
from shoal.signals.replay import GroupReplay, ReplaySettings
from shoal.signals.rows import make_row_signals
from shoal.signals.teacher import AskTeacher, make_teacher
from shoal.watch.health import LiveHealth
from shoal.watch.observer import Phases, RunObserver, Sinks, open_sinks
from shoal.watch.trackers import TrackerRun

if TYPE_CHECKING:
    from shoal.build.memory_plan import MemoryPlan
    from shoal.core.runner import GroupRunner
    from shoal.trainer.policy import TrainedPolicy

Build = Callable[[Run, Workspace], AbstractAsyncContextManager[Loop]]


@asynccontextmanager
async def build_colocated(run: Run, workspace: Workspace) -> AsyncIterator[Loop]:
    """The loop with the policy in this process. The order is fixed: model, memory plan, engine."""
    from shoal.build.memory_plan import make_plan
    from shoal.models.graph_cache import capture_seconds

    config, ranks = run.config, workspace.ranks
    phases = Phases(counters={"capture": capture_seconds})
    if absent := absent_server(config):
        workspace.console.note(absent)
    device = DeviceThread(config.orch.deadline_s, ranks)
    with workspace.stage("load", f"loading {config.train.model}"):
        model = load_model(config, run.objects, device, ranks)
    chat = model.chat
    stream = make_stream(config.orch, workspace.environments, chat, workspace.events)
    steps = total_steps(config, len(stream))
    with workspace.stage("memory", "measuring memory"):
        policy = device.run(make_policy, config.train, model, steps, ranks)
        plan = device.run(make_plan, config, model, policy, ranks)
    with workspace.stage("sampler", "warming up the sampler"):
        waits = WaitReporter(workspace.report_wait, whom="the inference server")
        engine = make_engine(config, model, device, plan.slots, waits.report)
        runner, endpoint = make_runner(config, workspace.environments, workspace.rewards, engine, chat)
    teacher_waits = WaitReporter(workspace.report_wait, whom="the teacher")
    sampler = Sampler(model, engine, runner, device, endpoint)
    _report_start(config, model, engine, plan, workspace)
    files = PolicyFiles(policy, chat, model.decoder)
    run_group = make_run_group(config.orch, runner, steps, phases, lambda: loop.progress.step)
    parts = Parts(
        engine=engine,
        weights=make_weights(config, sampler, files),
        collector=make_collector(config.orch, run_group, stream, ranks, steps),
        stream=stream,
        learner=make_learner(config, policy, plan, sampler.on_device, ranks, chat.token_text, teacher_waits.report),
        files=files,
        evaluator=make_evaluator(config.orch, workspace.environments, runner, chat),
        store=workspace.run_dir,
        observer=make_observer(config, workspace),
        phases=phases,
        on_device=sampler.on_device,
        token_text=chat.token_text,
        ranks=ranks,
        replay=make_replay(config.orch),
        snapshot=files.snapshot if plan.host_copy and ranks.world == 1 else None,
        save_shards=partial(files.save_shards, ranks.cpu_group) if model.sharded is not None else None,
    )
    loop = Loop(parts, loop_settings(config, steps, len(stream), run.command))
    async with running(loop, workspace, sampler.close):
        yield loop


@asynccontextmanager
async def running(loop: Loop, workspace: Workspace, close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """While the loop runs. At the end, however it ends: cancel the rollouts, then `close` the engine."""
    engine = loop.parts.engine
    workspace.watchdog.start()
    try:
        if engine.opening:
            with workspace.stage("server", engine.opening):
                await engine.connect()
        yield
    finally:
        workspace.console.waiting("ending the run")
        workspace.watchdog.close()
        await loop.parts.collector.cancel()
        await loop.end_saving()
        await close()
        loop.parts.observer.close()


def _report_start(
    config: RunConfig, model: LoadedModel, engine: RolloutEngine, plan: MemoryPlan, workspace: Workspace
) -> None:
    """What to know about the model and the device before the first step."""
    from shoal.build.memory_plan import cpu_share, path_lines, report_plan, teacher_line

    console, seq_len, positions = workspace.console, config.orch.seq_len, model.decoder.max_positions
    console.activity = lambda: engine.activity
    for notice in (*path_lines(engine.path), *model.notices, *teacher_line(model)):
        console.note(notice)
    if positions is not None and seq_len is not None and seq_len > positions:
        workspace.events.warn(
            "context",
            f"orch.seq_len {seq_len} is more than the {positions} positions the model was trained for; lower it, or "
            "expect poor text beyond them",
        )
    report_plan(plan, cpu_share(config.infer, model), console, workspace.events)


def make_run_group(
    orch: OrchConfig, runner: GroupRunner, steps: int, phases: Phases, steps_done: Callable[[], int]
) -> RunGroup:
    """Samples a group of rollouts with the temperature of the current step."""
    temperature = temperature_schedule(orch, steps)

    async def run_group(prompt: Prompt) -> Any:
        params = sampling_params(orch, temperature(steps_done() + 1))
        return await runner.run(prompt, orch.rollouts_per_example, params, phases)

    return run_group


def make_collector(orch: OrchConfig, run_group: RunGroup, stream: PromptStream, ranks: Ranks, steps: int) -> Collector:
    admission = Admission(
        orch.batch_size,
        orch.rollouts_per_example,
        orch.weight_sync_interval,
        orch.max_async_level,
        orch.max_off_policy_steps,
        steps,
    )
    with about("orch.groups.filter"):
        keep = load_filter(orch.groups.filter) if orch.groups.filter is not None else None
    several, uniform = ranks.world > 1, orch.groups.uniform or "refill"
    rules = GroupRules(uniform, orch.groups.max_refill, keep, orch.deadline_s, several, _compares(orch))
    return Collector(GroupExchange(run_group, ranks) if several else run_group, stream, admission, rules)


def make_replay(orch: OrchConfig) -> GroupReplay | None:
    replay, seed = orch.buffer.replay, orch.sampling.seed
    if replay is None:
        return None
    assert seed is not None
    return GroupReplay(ReplaySettings(orch.replayed_groups, replay.max_age, replay.times, seed), _compares(orch))


def _compares(orch: OrchConfig) -> Callable[[Rollout], Hashable]:
    """What differs between the rollouts of a useful group."""
    detailed = orch.advantage.per_part or orch.advantage.credit != "outcome"
    return every_reward if detailed else total_reward


def make_observer(config: RunConfig, workspace: Workspace) -> RunObserver:
    sinks = make_sinks(config, workspace.run_dir, workspace.events, main=workspace.ranks.rank == 0)
    return RunObserver(workspace.console, workspace.events, workspace.watchdog, sinks)


def make_weights(config: RunConfig, sampler: Sampler, files: PolicyFiles) -> WeightChannel:
    """Nothing is copied if the engine reads the trainer's tensors. Servers and adapters are updated from a folder."""
    from shoal.rollout.weight_channels import FolderWeightChannel, InProcessWeights

    train, infer = config.train, config.infer
    if infer.engine == "embedded" or (infer.in_process and not train.lora and infer.tp == 1):
        return InProcessWeights()

    async def export(folder: Path) -> None:
        await sampler.on_device(files.export, folder)

    return FolderWeightChannel(train.output_dir, "lora" if train.lora else "full", export, train.seed)


def make_sinks(
    config: RunConfig | SupervisedConfig, run_dir: RunDir | FollowerRunDir, events: EventLog, *, main: bool = True
) -> Sinks:
    """Trackers and health notes run on rank 0 only."""
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


def _ask_teacher(config: RunConfig, token_text: Callable[[int], str], waiting: Waiting) -> AskTeacher | None:
    from shoal.rollout.remote.prompt_scores import PromptScorer

    teacher = config.train.teacher
    if teacher is None or teacher.url is None:
        return None
    return PromptScorer(teacher, token_text, config.orch.deadline_s, waiting)


def make_learner(
    config: RunConfig,
    policy: TrainedPolicy,
    plan: MemoryPlan,
    on_device: OnDevice,
    ranks: Ranks,
    token_text: Callable[[int], str],
    waiting: Waiting = lambda _: None,
) -> Learner:
    """`waiting` is called while the server of a teacher does not answer."""
    train, orch = config.train, config.orch
    objective = make_objective(train)
    assert orch.sampling.max_tokens is not None
    fp32 = policy.decoder.dtype.itemsize >= 4
    remote = config.infer.engine != "embedded"  # its log-probs differ from the policy's by rounding
    settings = LearnSettings(
        token_budget=train.sequence_len,
        aggregation=train.loss.aggregation or "token-mean",
        max_tokens=orch.sampling.max_tokens,
        minibatches=train.minibatches,
        ppo_epochs=train.ppo_epochs,
        rows_per_micro_batch=train.per_device_train_batch_size,
        # A number of rows replaces the planned number of tokens.
        micro_batch_tokens=plan.micro_batch_tokens if train.per_device_train_batch_size is None else None,
        keys_for_token=plan.keys_for_token,
        recompute_old=recomputes_old(train, objective, fp32, remote=remote),
        needs_reference=objective.needs_reference,
        reward_kl_beta=train.loss.kl.beta if train.loss.kl.where == "reward" else 0.0,
        trains=reward_shape(orch).trains,
        context_cross_entropy=train.loss.context_cross_entropy,
    )
    context = train.loss.context_cross_entropy
    ask = _ask_teacher(config, token_text, waiting)
    teacher = make_teacher(train.teacher, policy, ranks, train.sequence_len, context, ask)
    signals = [*teacher, *make_row_signals(train.loss, policy, ranks)]
    return Learner(policy, make_advantages(orch), objective, settings, on_device, ranks, signals)


def make_advantages(orch: OrchConfig) -> Any:
    from shoal.signals.advantages import AdvantageNormalizer, CustomAdvantages, PartAdvantages, TurnAdvantages

    advantage = orch.advantage
    if advantage.function is not None:
        with about("orch.advantage.function"):
            return CustomAdvantages(load_function(advantage.function), advantage.function)
    normalizer = AdvantageNormalizer(advantage.mean, advantage.std or "none", advantage.leave_one_out, advantage.eps)
    if advantage.per_part:
        return PartAdvantages(normalizer, advantage.rescale)
    if advantage.credit != "outcome":
        return TurnAdvantages(normalizer, advantage.credit, advantage.discount)
    return normalizer
