"""The model on its device, the engine that samples it, and the runner that drives environments with it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.fits import starting_with, within_memory
from shoal.build.given import Given
from shoal.build.model import Model, load, release
from shoal.build.prepare import Prepared
from shoal.build.remote import ModelFacts, make_remote
from shoal.config.orch import OrchConfig
from shoal.config.schema import RunConfig
from shoal.errors import DeadlineError
from shoal.observability.watchdog import awake_within
from shoal.protocols import PlayedEnvironment, RolloutEngine
from shoal.rewards.shaping import RewardShape
from shoal.rollout.link import Waiting
from shoal.types import SamplingParams

if TYPE_CHECKING:
    from shoal.models.chat import Chat
    from shoal.models.sampler_view import SamplerView
    from shoal.rollout.runner import GroupRunner
    from shoal.server.local import LocalEndpoint
    from shoal.trainer.memory import MemoryPlan


REMEDIES = "set train.recompute=true, or lower infer.max_num_seqs"
CLOSE_LIMIT_S = 20.0
LEAVE_LIMIT_S = 1.0  # where a signal ended what has nothing to save, or the device's thread was waited for in vain
# Prompt tokens of one prefill: enough to fill the device, and few enough that decoding is not held up for long.
CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 8192, 32_768


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
    """Work for the one thread that touches the device, awaited no longer than the deadline."""

    executor: ThreadPoolExecutor
    deadline_s: float
    noticing_loss: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # of the other ranks
    given_up: bool = False  # what it was given last did not end in time, and nothing after that will begin

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        work = asyncio.get_running_loop().run_in_executor(self.executor, self._run, function, *arguments)
        try:
            return await awake_within(work, self.deadline_s)
        except TimeoutError:
            self.given_up = True
            name = getattr(function, "__name__", "work")
            raise DeadlineError(
                f"the loop waited {self.deadline_s:.0f} s for the device to do {name}; raise orch.deadline_s if a step "
                "takes that long here"
            ) from None

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self.noticing_loss():
            return within_memory(REMEDIES, function, *arguments)


@dataclass
class Sampler:
    """The model and everything that samples it. All torch work goes to the device's own thread."""

    model: Model
    engine: Any  # a RolloutEngine that also says its path and activity
    runner: GroupRunner
    device: ThreadPoolExecutor
    work: DeviceThread
    endpoint: LocalEndpoint | None = None

    async def on_device(self, function: Callable[..., Any], *arguments: Any) -> Any:
        rest = getattr(self.engine, "rest", None)
        if rest is not None:
            await rest()  # an engine on the same device gives back what it can while training runs
        return await self.work(function, *arguments)

    async def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Wait for the device's thread, but not for ever: it may be what hangs."""
        from shoal.rollout.embedded import EmbeddedRolloutEngine

        with contextlib.suppress(TimeoutError):
            if self.endpoint is not None:
                await asyncio.wait_for(self.endpoint.close(), limit_s)
            # An engine in this process ends on the device's thread; one elsewhere has a process to end.
            if self.work.given_up and isinstance(self.engine, EmbeddedRolloutEngine):
                limit_s = LEAVE_LIMIT_S
            await asyncio.wait_for(self.engine.close(), limit_s)
            self.device.submit(release, self.model).result(limit_s)
        self.device.shutdown(wait=False, cancel_futures=True)


@dataclass
class Loaded:
    """The model on its device, what the sampler sees of it, and the one thread that touches either."""

    model: Model
    view: SamplerView
    device: ThreadPoolExecutor


def chat_options(orch: OrchConfig) -> dict[str, Any]:
    return {"template_kwargs": orch.sampling.chat_template_kwargs, "system_prompt": orch.sampling.system_prompt}


def load_model(config: RunConfig, given: Given, ranks: Any = None) -> Loaded:
    """The model, in shards too where the configuration says so; `ranks` are whom it is shared out over."""
    from shoal.models.sampler_view import SamplerView

    orch = config.orch
    device = ThreadPoolExecutor(1, thread_name_prefix="device")
    model = device.submit(load, config.train, chat_options(orch), given).result()
    if config.train.sharding == "fsdp" and ranks is not None:
        return Loaded(model, device.submit(shard, model, ranks).result(), device)
    # Another engine has weights of its own, so nothing here needs a copy.
    in_step = (orch.weight_sync_interval == 1 and orch.max_async_level == 0) or config.infer.engine != "embedded"
    mode = "shared" if in_step and config.infer.weights == "auto" else "snapshot"
    view = device.submit(SamplerView, model.decoder, mode).result()
    return Loaded(model, view, device)


def shard(model: Model, ranks: Any) -> SamplerView:
    """Share the model out over the ranks; what is seen of it is the whole copy, of the last version gathered."""
    from shoal.models.sampler_view import SamplerView
    from shoal.models.sharded import ShardedDecoder

    model.sharded = ShardedDecoder(model.decoder, ranks.mesh)
    return SamplerView.of_shards(model.sharded, model.decoder, ranks.whole)


def make_sampler(
    config: RunConfig, prepared: Prepared, loaded: Loaded, plan: MemoryPlan, waiting: Waiting = lambda _: None
) -> Sampler:
    engine = make_engine(config, loaded, plan.slots, waiting)
    runner, endpoint = make_runner(config, prepared, engine, loaded.model.chat)
    noticing = getattr(prepared.ranks, "noticing_loss", contextlib.nullcontext)
    work = DeviceThread(loaded.device, config.orch.deadline_s, noticing)
    return Sampler(loaded.model, engine, runner, loaded.device, work, endpoint)


def make_runner(
    config: RunConfig, prepared: Prepared, engine: RolloutEngine, chat: Chat
) -> tuple[GroupRunner, LocalEndpoint | None]:
    """What plays environments against an engine, wherever that is."""
    from shoal.rollout.runner import GroupRunner, RunnerSettings

    orch = config.orch
    assert orch.seq_len is not None and orch.sampling.seed is not None
    settings = RunnerSettings(orch.seq_len, orch.sampling.seed, reward_shape(orch))
    endpoint = _endpoint(config, prepared, engine, chat)
    return GroupRunner(engine, prepared.environments, prepared.pool, chat, settings, endpoint), endpoint


def make_engine(config: RunConfig, loaded: Loaded, slots: int, waiting: Waiting) -> Any:
    """What samples: the trainer's own tensors, vLLM beside them in this process, or a server, maybe waited for."""
    model, device = loaded.model, loaded.device
    if config.infer.engine == "embedded":
        from shoal.rollout.embedded import EmbeddedRolloutEngine

        inner = device.submit(_engine, config, loaded, slots).result()
        return EmbeddedRolloutEngine(inner, device, config.train.seed)
    if config.infer.in_process:
        from shoal.build.in_process import make_in_process

        return make_in_process(config, model, device)
    return make_remote(config, model_facts(model), Path(config.train.output_dir), waiting)


def model_facts(model: Model) -> ModelFacts:
    decoder = model.decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    return ModelFacts(decoder.vocab_size, model.eos_token_ids, model.chat.text, dtype, decoder.device.type == "cpu")


def _endpoint(config: RunConfig, prepared: Prepared, engine: RolloutEngine, chat: Chat) -> LocalEndpoint | None:
    """HTTP in this process, where an environment plays its rollouts by itself."""
    if not any(isinstance(env, PlayedEnvironment) for env in prepared.environments.values()):
        return None
    from shoal.server.completions import Served
    from shoal.server.local import LocalEndpoint

    assert config.orch.seq_len is not None
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(config.train.model)).strip("-") or "model"
    return LocalEndpoint(Served(engine, chat, name, config.orch.seq_len))


def _engine(config: RunConfig, loaded: Loaded, slots: int) -> Any:
    from shoal.engine.engine import EmbeddedEngine, EngineSettings

    model = loaded.model
    assert config.infer.max_model_len is not None
    prefill = GPU_PREFILL_TOKENS if model.decoder.device.type == "cuda" else CPU_PREFILL_TOKENS
    settings = EngineSettings(slots, config.infer.max_model_len, prefill, model.eos_token_ids)
    with starting_with(f"the cache of {slots} sequences"):
        return EmbeddedEngine(loaded.view, model.layers, settings, model.chat.text)


def reward_shape(orch: OrchConfig) -> RewardShape:
    reward, truncated = orch.reward, orch.truncated
    clip = (reward.clip[0], reward.clip[1]) if reward.clip is not None else None
    return RewardShape(reward.scale, reward.bias, clip, truncated.type, truncated.tokens, truncated.factor or 1.0)
