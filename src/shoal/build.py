"""The one place where a configuration becomes objects.

`prepare` builds what needs no torch: environments and the reward workers, which are forked before anything heavy or
threaded exists. `assemble` loads the model and puts the loop together. Heavy imports happen inside the functions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.orch import DatasetConfig, EnvConfig, EvalConfig, OrchConfig, TemperatureSchedule
from shoal.config.resolve import as_data, as_yaml, binding_data, resolve_run
from shoal.config.schema import RunConfig, SftConfig
from shoal.config.train import TrainConfig
from shoal.envs.catalogue import BUILT_IN, REASONING_GYM
from shoal.envs.datasets import DatasetSpec, fingerprint
from shoal.envs.registry import load_environment
from shoal.envs.user_code import load_function, load_object
from shoal.errors import ConfigError, DeadlineError, StoppedByPolicy
from shoal.observability.console import Console
from shoal.observability.events import EventLog
from shoal.observability.run_dir import RunDir
from shoal.observability.sinks import Sinks, TrackerRun, check_sinks, open_sinks
from shoal.observability.spans import Phases
from shoal.observability.watchdog import Watchdog
from shoal.orchestrator import cadence
from shoal.orchestrator.admission import Admission
from shoal.orchestrator.collect import Collector, GroupRules
from shoal.orchestrator.evaluate import EvalSettings, Evaluator
from shoal.orchestrator.learn import Learner, LearnSettings
from shoal.orchestrator.loop import Loop, LoopSettings, Parts
from shoal.orchestrator.prompts import Buffer, PromptStream
from shoal.protocols import Environment
from shoal.rewards.pool import RewardPool
from shoal.rewards.shaping import RewardShape
from shoal.types import Message, Prompt, SamplingParams

if TYPE_CHECKING:
    from shoal.models.chat import Chat
    from shoal.models.decoder import Decoder, LayerShape
    from shoal.models.precision import Precision
    from shoal.models.sampler_view import SamplerView
    from shoal.rollout.embedded import EmbeddedRolloutEngine
    from shoal.rollout.runner import GroupRunner
    from shoal.trainer.policy import TrainedPolicy


CLOSE_LIMIT_S = 20.0


@dataclass
class Prepared:
    """Environments by label, and the pool that runs their rewards."""

    environments: dict[str, Environment]
    pool: RewardPool
    data_fingerprint: str


def prepare(config: RunConfig) -> Prepared:
    orch = config.orch
    if config.infer.engine != "embedded":
        raise ConfigError(
            f"infer.engine: {config.infer.engine} is not available in this version; use infer.engine=embedded"
        )
    check_sinks(config.train.report_to)
    environments = {env.label: _environment(env, orch.dataset) for env in orch.env}
    for env in (orch.eval.env or []) if orch.eval is not None else []:
        if env.label not in environments:  # one that training has too, with the same arguments: checked
            environments[env.label] = _environment(env, orch.dataset)
    if orch.reward.function is not None:
        function = load_object(orch.reward.function)
        for environment in environments.values():
            environment.reward = function  # type: ignore[method-assign]
    pool = RewardPool(
        environments,
        workers=orch.reward.workers,
        timeout_s=orch.reward.timeout_s,
        weights=dict.fromkeys(environments, orch.reward.parts) if orch.reward.parts else None,
    )
    trained = [environments[env.label] for env in orch.env]
    sizes = "+".join(str(len(env.tasks("train"))) for env in trained)
    data = f"{fingerprint(task for env in trained for task in _fingerprinted(env))} {sizes}"
    pool.start()
    return Prepared(environments, pool, data)


def _environment(env: EnvConfig, dataset: DatasetConfig | None) -> Environment:
    spec = None
    # Environments that make their own tasks stand beside one that reads the data set.
    makes_its_own = env.id.startswith(REASONING_GYM) or (env.id in BUILT_IN and not BUILT_IN[env.id].takes_dataset)
    if dataset is not None and not makes_its_own:
        spec = DatasetSpec(dataset.path, dataset.name, dataset.split, dataset.columns, dataset.max_rows)
    return load_environment(env.id, env.args, env.label, spec)


def _fingerprinted(environment: Environment) -> list[Any]:
    """Generated tasks follow from arguments that are bound too, so the first stand for all; data is read in full."""
    tasks = environment.tasks("train")
    return tasks if isinstance(tasks, list) else [tasks[i] for i in range(min(1000, len(tasks)))]


@dataclass
class Model:
    """A loaded model with everything that samples and trains it."""

    decoder: Decoder
    layers: dict[int, LayerShape]
    chat: Chat
    eos_token_ids: tuple[int, ...]
    precision: Precision


def load(train: TrainConfig, chat_options: Mapping[str, Any] | None = None) -> Model:
    """Precision first: what the machine cannot do is refused before weights are read."""
    import torch

    from shoal.models import precision as precisions
    from shoal.models.chat import Chat
    from shoal.models.decoder import Decoder
    from shoal.models.load import eos_token_ids, load_model, load_tokenizer
    from shoal.models.lora import LoraSettings, attach

    precision = precisions.choose(train)
    assert train.model is not None
    chat = Chat(load_tokenizer(train.model), **(chat_options or {}))
    torch.manual_seed(train.seed)
    model = load_model(train.model, precision.dtype, precision.device)
    if precision.device.type == "cpu":
        precisions.limit_threads(sum(p.numel() for p in model.parameters()))
    ends = eos_token_ids(model, chat.tokenizer)
    layers = Decoder(model).verify()
    if train.lora:
        targets = tuple(train.lora_target_modules) if train.lora_target_modules is not None else None
        settings = LoraSettings(train.lora_rank, train.lora_alpha, train.lora_dropout, targets, train.adapter_path)
        model = attach(model, settings)
    if train.recompute is True:
        Decoder(model).inner.gradient_checkpointing_enable()  # type: ignore[operator]
    return Model(Decoder(model), layers, chat, ends, precision)


def make_policy(train: TrainConfig, model: Model, total_steps: int) -> TrainedPolicy:
    import copy

    from shoal.models import lora
    from shoal.models.decoder import Decoder
    from shoal.trainer.optimizer import AdamSettings, MasterAdamW
    from shoal.trainer.policy import Reference, TrainedPolicy
    from shoal.trainer.schedule import Schedule

    optimizer = MasterAdamW(
        lora.trained_parameters(model.decoder.model),
        AdamSettings(train.adam_beta1, train.adam_beta2, train.adam_epsilon, train.weight_decay),
    )
    warmup = train.warmup_steps
    if warmup is None:
        warmup = round((train.warmup_ratio or 0.0) * total_steps)
    optimizer_steps = train.ppo_epochs * train.minibatches
    schedule = Schedule(
        train.learning_rate,
        total_steps * optimizer_steps,
        train.lr_scheduler_type,
        warmup * optimizer_steps,
        train.final_lr_fraction,
    )
    reference = None
    if train.reference == "adapter-off":
        wrapped: Any = model.decoder.model
        reference = Reference(model.decoder, lambda: lora.as_reference(wrapped))
    elif train.reference == "frozen":
        reference = Reference(Decoder(copy.deepcopy(model.decoder.model).requires_grad_(False)))
    return TrainedPolicy(model.decoder, optimizer, schedule, train.max_grad_norm, reference)


class PolicyFiles:
    """The policy's side of a checkpoint: weights people can load, and the state to continue from."""

    def __init__(self, policy: TrainedPolicy, chat: Chat) -> None:
        self._policy = policy
        self._tokenizer = chat.tokenizer

    def save(self, folder: Path) -> None:
        from shoal.trainer.checkpoint import export_weights, save_state

        export_weights(self._policy, self._tokenizer, folder / "weights")
        save_state(self._policy, folder)

    def load(self, folder: Path) -> None:
        from shoal.trainer.checkpoint import load_state

        load_state(self._policy, folder)

    def export(self, folder: Path) -> None:
        from shoal.trainer.checkpoint import export_weights

        export_weights(self._policy, self._tokenizer, folder)


def make_objective(train: TrainConfig) -> Any:
    from shoal.algorithms.losses import LOSSES, CustomLoss
    from shoal.algorithms.objective import Objective
    from shoal.algorithms.terms import CORRECTIONS, KLPenalty

    loss = train.loss
    if loss.custom:
        policy_loss = CustomLoss(partial(load_function(loss.type), **loss.args), name=loss.type)
    else:
        policy_loss = LOSSES[loss.type](**loss.resolved_loss_parameters())
    correction = None
    if loss.correction.type != "none":
        correction = CORRECTIONS[loss.correction.type](**loss.correction.resolved_parameters())
    kl = None
    if loss.kl.beta > 0 and loss.kl.where == "loss":
        kl = KLPenalty(loss.kl.beta, loss.kl.estimator)
    return Objective(policy_loss, correction, kl)


def recomputes_old(train: TrainConfig, objective: Any, fp32: bool, remote: bool) -> bool:
    """`recompute_old: auto`: a forward is taken where the sampler's log-probs cannot stand in for the old policy's."""
    if train.recompute_old != "auto":
        return bool(train.recompute_old)
    several = train.ppo_epochs * train.minibatches > 1 and not fp32
    return objective.needs_old or several or remote


def sampling_params(orch: OrchConfig, temperature: float) -> SamplingParams:
    sampling = orch.sampling
    assert sampling.max_tokens is not None
    return SamplingParams(
        temperature=temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=tuple(sampling.stop),
    )


def eval_sampling_params(orch: OrchConfig) -> SamplingParams:
    assert orch.eval is not None
    own = orch.eval.sampling
    values = {name: getattr(own, name) for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")}
    return SamplingParams(**values, min_tokens=own.min_tokens or 0, stop=tuple(own.stop or ()))


def total_steps(config: RunConfig, prompts: int) -> int:
    orch = config.orch
    if config.train.max_steps is not None:
        return config.train.max_steps
    assert config.train.epochs is not None
    groups = orch.batch_size // orch.rollouts_per_example
    return max(1, -(-prompts * config.train.epochs // groups))


@dataclass
class Sampler:
    """The model and everything that samples it. All torch work goes to the device's own thread."""

    model: Model
    engine: EmbeddedRolloutEngine
    runner: GroupRunner
    device: ThreadPoolExecutor
    deadline_s: float = 600.0

    async def on_device(self, function: Callable[..., Any], *arguments: Any) -> Any:
        work = asyncio.get_running_loop().run_in_executor(self.device, _within_memory, function, *arguments)
        try:
            return await asyncio.wait_for(work, self.deadline_s)
        except TimeoutError:
            name = getattr(function, "__name__", "work")
            raise DeadlineError(
                f"the loop waited {self.deadline_s:.0f} s for the device to do {name}; raise orch.deadline_s if a step "
                "takes that long here"
            ) from None

    async def close(self) -> None:
        """Wait for the device's thread, but not for ever: it may be what hangs."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.engine.close(), CLOSE_LIMIT_S)
            self.device.submit(int).result(CLOSE_LIMIT_S)
        self.device.shutdown(wait=False, cancel_futures=True)


def _within_memory(function: Callable[..., Any], *arguments: Any) -> Any:
    import torch

    try:
        return function(*arguments)
    except torch.OutOfMemoryError as error:
        raise StoppedByPolicy(
            "the device ran out of memory while training; lower train.per_device_train_batch_size, set "
            "train.recompute=true, or lower infer.max_num_seqs, then resume from the last checkpoint"
        ) from error


def make_sampler(config: RunConfig, prepared: Prepared) -> Sampler:
    from shoal.models.sampler_view import SamplerView
    from shoal.rollout.embedded import EmbeddedRolloutEngine
    from shoal.rollout.runner import GroupRunner, RunnerSettings

    orch, sampling = config.orch, config.orch.sampling
    assert orch.seq_len is not None and sampling.seed is not None
    options = {"template_kwargs": sampling.chat_template_kwargs, "system_prompt": sampling.system_prompt}
    device = ThreadPoolExecutor(1, thread_name_prefix="device")
    model = device.submit(load, config.train, options).result()
    mode = "shared" if orch.weight_sync_interval == 1 and orch.max_async_level == 0 else "snapshot"
    view = device.submit(SamplerView, model.decoder, mode).result()
    inner = device.submit(_engine, config, model, view).result()
    engine = EmbeddedRolloutEngine(inner, device, config.train.seed)
    settings = RunnerSettings(orch.seq_len, sampling.seed, _shape(orch))
    runner = GroupRunner(engine, prepared.environments, prepared.pool, model.chat, settings)
    return Sampler(model, engine, runner, device, orch.deadline_s)


@dataclass
class Assembled:
    loop: Loop
    files: PolicyFiles
    sampler: Sampler
    sinks: Sinks

    async def close(self) -> None:
        await self.sampler.close()
        self.sinks.close()


@dataclass
class Watching:
    """Where a run is written and who is told about it."""

    run_dir: RunDir
    events: EventLog
    console: Console
    watchdog: Watchdog


def assemble(config: RunConfig, prepared: Prepared, watching: Watching, next_command: str) -> Assembled:
    from shoal.transport.in_process import InProcessWeights

    train, orch, console = config.train, config.orch, watching.console
    with console.progress(f"loading {train.model}"):
        sampler = make_sampler(config, prepared)
    model = sampler.model
    _tell(sampler, orch, watching)
    stream = _stream(orch, prepared, model.chat, watching.events)
    steps = total_steps(config, len(stream))
    policy = sampler.device.submit(make_policy, train, model, steps).result()
    files = PolicyFiles(policy, model.chat)
    phases = Phases()
    temperature = _temperature(orch, steps)

    async def run_group(prompt: Prompt) -> Any:
        drawn_with = sampling_params(orch, temperature(loop.progress.step + 1))
        return await sampler.runner.run(prompt, orch.rollouts_per_example, drawn_with, phases)

    parts = Parts(
        engine=sampler.engine,
        weights=InProcessWeights(),
        collector=Collector(run_group, stream, _admission(orch), _group_rules(orch)),
        stream=stream,
        learner=_learner(config, policy, sampler),
        files=files,
        evaluator=_evaluator(orch, prepared.environments, sampler.runner, model.chat) if orch.eval else None,
        run_dir=watching.run_dir,
        events=watching.events,
        console=console,
        watchdog=watching.watchdog,
        sinks=make_sinks(config, watching.run_dir, watching.events),
        phases=phases,
        on_device=sampler.on_device,
        token_text=model.chat.token_text,
    )
    loop = Loop(parts, _loop_settings(config, steps, len(stream), next_command))
    return Assembled(loop, files, sampler, parts.sinks)  # type: ignore[arg-type]


def make_sinks(config: RunConfig | SftConfig, run_dir: RunDir, events: EventLog) -> Sinks:
    return open_sinks(
        config.train.report_to,
        run_dir,
        TrackerRun(run_dir.path, config=as_data(config)),
        on_problem=lambda kind, message, data: events.warn(kind, message, data=data),
    )


def _tell(sampler: Sampler, orch: OrchConfig, watching: Watching) -> None:
    """What a person should know about the model before the first step."""
    notice, positions = sampler.model.precision.notice, sampler.model.decoder.max_positions
    if notice:
        watching.console.note(notice)
    if sampler.engine.path != "eager":
        watching.console.note(f"rollouts: {sampler.engine.path}")
    if positions is not None and orch.seq_len is not None and orch.seq_len > positions:
        said = f"orch.seq_len {orch.seq_len} is more than the {positions} positions the model was made for"
        watching.events.warn("context", f"{said}; lower it, or expect nonsense beyond them")


def _stream(orch: OrchConfig, prepared: Prepared, chat: Chat, events: EventLog) -> PromptStream:
    assert orch.seq_len is not None and orch.sampling.max_tokens is not None and orch.sampling.seed is not None
    room = orch.seq_len - orch.sampling.max_tokens
    fitting = _fits(chat, room)

    def fits(messages: Sequence[Message]) -> bool:
        if fitting(messages):
            return True
        if not events.counts["set-aside"]:  # said once; the journal counts
            events.warn("set-aside", f"a prompt is longer than {room} tokens (seq_len - max_tokens) and is set aside")
        return False

    weights = {env.label: env.weight for env in orch.env}
    return PromptStream(prepared.environments, weights, orch.sampling.seed, fits, _buffer(orch))


def _admission(orch: OrchConfig) -> Admission:
    return Admission(
        orch.batch_size,
        orch.rollouts_per_example,
        orch.weight_sync_interval,
        orch.max_async_level,
        orch.max_off_policy_steps,
    )


def _group_rules(orch: OrchConfig) -> GroupRules:
    keep = load_function(orch.groups.filter) if orch.groups.filter is not None else None
    return GroupRules(orch.groups.uniform or "refill", orch.groups.max_refill, keep, orch.deadline_s)


def _learner(config: RunConfig, policy: TrainedPolicy, sampler: Sampler) -> Learner:
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
        recompute_old=recomputes_old(train, objective, fp32, remote=False),
        needs_reference=objective.needs_reference,
        reward_kl_beta=train.loss.kl.beta if train.loss.kl.where == "reward" else 0.0,
        trains=_shape(orch).trains,
    )
    return Learner(policy, _advantages(orch), objective, settings, sampler.on_device)


def _loop_settings(config: RunConfig, steps: int, prompts: int, next_command: str) -> LoopSettings:
    train, evaluation, noise = config.train, config.orch.eval, config.train.noise_scheduler
    sigma_at = None
    if noise.enabled:
        sigma_at = cadence.NoiseSchedule(noise.sigma_start, noise.sigma_end, noise.num_stages, steps)
    return LoopSettings(
        max_steps=steps,
        save=_save_cadence(train, config.orch, prompts),
        evaluation=cadence.EvalCadence(evaluation.interval, evaluation.at_start) if evaluation else None,
        save_total_limit=train.save_total_limit,
        keep_best=evaluation.keep_best if evaluation else False,
        stop_after=evaluation.stop_after if evaluation else None,
        sigma_at=sigma_at,
        next_command=next_command,
    )


def _engine(config: RunConfig, model: Model, view: SamplerView) -> Any:
    from shoal.engine.engine import EmbeddedEngine, EngineSettings
    from shoal.trainer.memory import engine_slots

    infer = config.infer
    assert infer.max_model_len is not None and infer.max_num_seqs is not None
    slots = engine_slots(
        model.decoder, model.layers, infer.max_num_seqs, infer.max_model_len, infer.gpu_memory_utilization
    )
    settings = EngineSettings(slots, infer.max_model_len, eos_token_ids=model.eos_token_ids)
    return EmbeddedEngine(view, model.layers, settings, model.chat.text)


def _fits(chat: Chat, room: int) -> Callable[[Sequence[Message]], bool]:
    return lambda messages: 0 < len(chat.prompt_ids(messages)) <= room


def _buffer(orch: OrchConfig) -> Buffer:
    buffer = orch.buffer
    return Buffer(
        buffer.easy_threshold,
        buffer.hard_threshold,
        1.0 if buffer.easy_fraction is None else buffer.easy_fraction,
        1.0 if buffer.hard_fraction is None else buffer.hard_fraction,
    )


def _shape(orch: OrchConfig) -> RewardShape:
    reward, truncated = orch.reward, orch.truncated
    clip = (reward.clip[0], reward.clip[1]) if reward.clip is not None else None
    return RewardShape(reward.scale, reward.bias, clip, truncated.type, truncated.tokens, truncated.factor or 1.0)


def _temperature(orch: OrchConfig, steps: int) -> cadence.TemperatureSchedule:
    temperature = orch.sampling.temperature
    if isinstance(temperature, TemperatureSchedule):
        return cadence.TemperatureSchedule(temperature.start, temperature.end, steps, temperature.schedule == "cosine")
    return cadence.TemperatureSchedule(temperature, temperature)


def _advantages(orch: OrchConfig) -> Any:
    from shoal.algorithms.advantages import CustomAdvantages, Normaliser

    advantage = orch.advantage
    if advantage.function is not None:
        return CustomAdvantages(load_function(advantage.function), advantage.function)
    return Normaliser(advantage.mean, advantage.std or "none", advantage.leave_one_out, advantage.eps)


def _evaluator(orch: OrchConfig, environments: Mapping[str, Environment], runner: GroupRunner, chat: Chat) -> Evaluator:
    assert orch.eval is not None and orch.seq_len is not None and orch.eval.sampling.seed is not None
    sampling = eval_sampling_params(orch)
    names = [env.label for env in orch.eval.env or orch.env]
    return Evaluator(
        runner.with_seed(orch.eval.sampling.seed).run,
        {name: environments[name] for name in names},
        _fits(chat, orch.seq_len - sampling.max_tokens),
        EvalSettings(orch.eval.num_examples, orch.eval.rollouts_per_example, sampling, orch.deadline_s),
    )


def _save_cadence(train: TrainConfig, orch: OrchConfig, prompts: int) -> cadence.SaveCadence:
    steps = train.save_steps
    if train.save_epochs is not None:
        per_epoch = -(-prompts * orch.rollouts_per_example // orch.batch_size)
        steps = max(1, train.save_epochs * per_epoch)
    return cadence.SaveCadence(steps, train.save_seconds)


def binding(config: RunConfig, prepared: Prepared) -> dict[str, Any]:
    return {**binding_data(config), "data": prepared.data_fingerprint}


def open_run_dir(config: RunConfig, prepared: Prepared, resume: bool, next_command: str) -> RunDir:
    path = Path(config.train.output_dir)
    if resume and (path / "status.json").exists():
        run_dir = RunDir.resume(path)
        run_dir.reopen(as_yaml(config), binding(config, prepared), next_command)
        return run_dir
    if resume and path.exists() and any(path.glob("checkpoints/*")):
        raise ConfigError(f"{path} holds checkpoints but no status.json; it is not a run directory of Shoal")
    return RunDir.create(path, as_yaml(config), binding(config, prepared))


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


async def evaluate_once(config: RunConfig, prepared: Prepared) -> dict[str, float]:
    sampler = make_sampler(config, prepared)
    try:
        metrics, _ = await _evaluator(config.orch, prepared.environments, sampler.runner, sampler.model.chat).evaluate()
    finally:
        await sampler.close()
    return metrics
