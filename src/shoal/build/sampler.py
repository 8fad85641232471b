"""The sampling side of a run: prompt stream and schedules, the device thread, the model with the sampler's view, the
engine and the runner."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.load import PythonObjects
from shoal.build.model import LoadedModel, explain_oom, explain_start_oom, load, release
from shoal.build.remote_engines import ModelFacts, make_remote
from shoal.config.orch import OrchConfig, TemperatureSchedule
from shoal.config.schema import RunConfig
from shoal.core.advantages import RewardShape
from shoal.core.deadlines import wait_while_awake
from shoal.core.errors import DataError, DeadlineError
from shoal.core.prompts import Buffer, Fits, PromptStream
from shoal.core.protocols import EndpointEnvironment, Environment, Ranks, RolloutEngine
from shoal.core.ranks import SingleProcess
from shoal.core.state import EvalCadence, LoopSettings, SaveCadence
from shoal.core.types import Message, SamplingParams, Task
from shoal.planning.memory import GPU_PREFILL_TOKENS
from shoal.rollout.remote.client import Waiting
from shoal.runs.events import EventLog

if TYPE_CHECKING:
    from shoal.core.runner import GroupRunner
    from shoal.models.chat import Chat
    from shoal.models.sampler_view import SamplerView
    from shoal.rewards.pool import RewardPool
    from shoal.server.app import LocalEndpoint


REMEDIES = "set train.recompute=true, or lower infer.max_num_seqs"
CLOSE_LIMIT_S = 20.0
LEAVE_LIMIT_S = 1.0  # after a signal if there is nothing to save, and if the device thread has timed out
# Prompt tokens of one prefill; on a GPU GPU_PREFILL_TOKENS.
CPU_PREFILL_TOKENS = 8192


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


@dataclass
class DeviceThread:
    """The one thread that touches the device. Work is awaited no longer than the deadline."""

    deadline_s: float
    ranks: Ranks = field(default_factory=SingleProcess)  # their loss is noticed during the work
    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="device"), repr=False
    )
    timed_out: bool = False  # the thread hangs, so later work would never begin

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Without a deadline, while the run starts."""
        return self.executor.submit(function, *arguments).result()

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        work = asyncio.get_running_loop().run_in_executor(self.executor, self._run, function, *arguments)
        try:
            return await wait_while_awake(work, self.deadline_s)
        except TimeoutError:
            self.timed_out = True
            name = getattr(function, "__name__", "work")
            raise DeadlineError(
                f"the loop waited {self.deadline_s:.0f} s for the device to do {name}; raise orch.deadline_s if a step "
                "takes that long here"
            ) from None

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self.ranks.watch_peers():
            return explain_oom(REMEDIES, function, *arguments)


@dataclass
class Sampler:
    """A model with the engine that samples from it and the runner of the environments."""

    model: LoadedModel
    engine: RolloutEngine
    runner: GroupRunner
    device: DeviceThread
    endpoint: LocalEndpoint | None = None

    async def on_device(self, function: Callable[..., Any], *arguments: Any) -> Any:
        await self.engine.rest()  # an engine on the same device releases memory while training runs
        return await self.device(function, *arguments)

    async def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Wait for the device thread, but only up to a limit, because it may hang."""
        from shoal.rollout.embedded import EmbeddedRolloutEngine

        with contextlib.suppress(TimeoutError):
            if self.endpoint is not None:
                await asyncio.wait_for(self.endpoint.close(), limit_s)
            # The embedded engine closes on the device thread. Another engine has a process to end, which takes longer.
            if self.device.timed_out and isinstance(self.engine, EmbeddedRolloutEngine):
                limit_s = LEAVE_LIMIT_S
            await asyncio.wait_for(self.engine.close(), limit_s)
            self.device.executor.submit(release, self.model).result(limit_s)
        self.device.executor.shutdown(wait=False, cancel_futures=True)


def chat_options(orch: OrchConfig) -> dict[str, Any]:
    """The arguments of make_chat."""
    return {
        "chat_template": orch.chat_template,
        "template_kwargs": orch.sampling.chat_template_kwargs,
        "system_prompt": orch.sampling.system_prompt,
        "history": orch.chat_history,
    }


def load_model(
    config: RunConfig, objects: PythonObjects, device: DeviceThread, ranks: Ranks | None = None
) -> LoadedModel:
    """The model and the sampler's view of it. With `ranks` it is sharded over them if the configuration says so."""
    from shoal.models.sampler_view import SamplerView

    orch = config.orch
    model: LoadedModel = device.run(load, config.train, chat_options(orch), objects)
    if config.train.sharding == "fsdp" and ranks is not None:
        model.view = device.run(shard, model, ranks)
        return model
    # Another engine has its own weights, so no copy is needed here.
    in_step = (orch.weight_sync_interval == 1 and orch.max_async_level == 0) or config.infer.engine != "embedded"
    mode = "shared" if in_step and config.infer.weights == "auto" else "snapshot"
    model.view = device.run(SamplerView, model.decoder, mode)
    return model


def shard(model: LoadedModel, ranks: Ranks) -> SamplerView:
    """Shard the model over the ranks. The view is the full copy, with the weights that were gathered last."""
    from shoal.models.sampler_view import SamplerView
    from shoal.models.sharded import ShardedDecoder

    model.sharded = ShardedDecoder(model.decoder, ranks.mesh)
    return SamplerView.of_shards(model.sharded, model.decoder, ranks.gather_full)


def make_engine(
    config: RunConfig, model: LoadedModel, device: DeviceThread, slots: int, waiting: Waiting = lambda _: None
) -> RolloutEngine:
    """The embedded engine on the trainer's tensors, vLLM in this process, or a client of a server.

    `waiting` is called while a server does not answer.
    """
    if config.infer.engine == "embedded":
        from shoal.rollout.embedded import EmbeddedRolloutEngine

        inner = device.run(_engine, config, model, slots)
        return EmbeddedRolloutEngine(inner, device.executor, config.train.seed)
    if config.infer.in_process:
        from shoal.build.remote_engines import make_in_process

        return make_in_process(config, model, device.executor)
    return make_remote(config, model_facts(model), Path(config.train.output_dir), waiting)


def _engine(config: RunConfig, model: LoadedModel, slots: int) -> Any:
    from shoal.engine.engine import EmbeddedEngine, EngineSettings

    assert config.infer.max_model_len is not None and model.view is not None
    prefill = GPU_PREFILL_TOKENS if model.decoder.device.type == "cuda" else CPU_PREFILL_TOKENS
    settings = EngineSettings(slots, config.infer.max_model_len, prefill, model.eos_token_ids)
    with explain_start_oom(f"the cache of {slots} sequences"):
        return EmbeddedEngine(model.view, model.layers, settings, model.chat.text)


def make_runner(
    config: RunConfig, environments: Mapping[str, Environment], rewards: RewardPool, engine: RolloutEngine, chat: Chat
) -> tuple[GroupRunner, LocalEndpoint | None]:
    """Runs environments with any engine; the endpoint is for environments that drive their rollouts over HTTP."""
    from shoal.core.runner import GroupRunner, RunnerSettings
    from shoal.rollout.endpoint_episodes import EndpointEpisodes

    orch = config.orch
    assert orch.seq_len is not None and orch.sampling.seed is not None
    endpoint = None
    if any(isinstance(environment, EndpointEnvironment) for environment in environments.values()):
        from shoal.server.app import LocalEndpoint
        from shoal.server.completions import ServedModel

        name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(config.train.model)).strip("-") or "model"
        endpoint = LocalEndpoint(ServedModel(engine, chat, name, orch.seq_len))
    teacher = config.train.teacher
    settings = RunnerSettings(
        orch.seq_len,
        orch.sampling.seed,
        reward_shape(orch),
        needs_reward=teacher is None or teacher.reward_weight > 0,
        uses_hints=teacher is not None and teacher.itself,
    )
    player = EndpointEpisodes(endpoint) if endpoint is not None else None
    return GroupRunner(engine, environments, rewards, chat, settings, player), endpoint


def model_facts(model: LoadedModel) -> ModelFacts:
    decoder = model.decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    return ModelFacts(decoder.vocab_size, model.eos_token_ids, model.chat.text, dtype, decoder.device.type == "cpu")


def reward_shape(orch: OrchConfig) -> RewardShape:
    reward, truncated = orch.reward, orch.truncated
    clip = (reward.clip[0], reward.clip[1]) if reward.clip is not None else None
    return RewardShape(reward.scale, reward.bias, clip, truncated.type, truncated.tokens, truncated.factor or 1.0)


def loop_settings(config: RunConfig, steps: int, prompts: int, next_command: str) -> LoopSettings:
    train, evaluation, noise = config.train, config.orch.eval, config.train.noise_scheduler
    epoch = _epoch_steps(config.orch, prompts)
    save_steps = train.save_steps if train.save_epochs is None else train.save_epochs * epoch
    cadence = None
    if evaluation is not None:
        epochs = evaluation.interval_epochs
        interval = evaluation.interval if epochs is None else epochs * epoch
        cadence = EvalCadence(interval, evaluation.at_start, evaluation.interval_seconds)
    return LoopSettings(
        max_steps=steps,
        save=SaveCadence(save_steps, train.save_seconds),
        evaluation=cadence,
        save_total_limit=train.save_total_limit,
        keep_best=evaluation.keep_best if evaluation else False,
        stop_after=evaluation.stop_after if evaluation else None,
        sigma_at=partial(noise.sigma_at, total_steps=steps) if noise.enabled else None,
        next_command=next_command,
        show_completions=train.show_completions,
        sync_deadline_s=config.orch.sync_deadline_s,
        save_deadline_s=train.save_deadline_s,
    )


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
