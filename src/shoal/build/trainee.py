"""The trainer of the split layout: one process or several, each with all weights or with its share of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.given import Given
from shoal.build.model import Model, PolicyFiles, load, make_policy
from shoal.build.plan import lines_of, make_plan
from shoal.build.run import make_learner
from shoal.build.sampler import DeviceThread, chat_options, shard
from shoal.config.schema import RunConfig
from shoal.observability.token import WEIGHTS, write_token
from shoal.orchestrator.ranks import all_or_none
from shoal.orchestrator.service import Trainee
from shoal.protocols import Ranks, WeightChannel
from shoal.transport.presence import FOLDER as HANDSHAKE

if TYPE_CHECKING:
    from shoal.models.sampler_view import SamplerView


@dataclass
class TrainerDevice:
    """The thread that holds the trained model, and the way its weights take."""

    executor: ThreadPoolExecutor
    weights: WeightChannel | None = None

    async def close(self) -> None:
        if isinstance(close := getattr(self.weights, "close", None), Callable):
            await asyncio.to_thread(close)  # the next trainee of this process listens on the same port
        self.executor.shutdown(wait=False, cancel_futures=True)


@dataclass
class ShardedWeights:
    """The shares of all ranks: gathered into the whole copy that files are written from, or saved as they are."""

    view: SamplerView
    files: PolicyFiles
    ranks: Any

    def gather(self, moved: int) -> None:
        self.view.refresh(moved)

    def save(self, folder: Path) -> None:
        self.files.save_shards(self.ranks.talk, folder)


async def make_trainee(config: RunConfig, ranks: Ranks, given: Given, steps: int) -> Trainee:
    """A policy as it is before the first step, with everything that the calls need of it."""
    config = _with_old_logprobs(config)
    train = config.train
    executor = ThreadPoolExecutor(1, thread_name_prefix="device")
    noticing = getattr(ranks, "noticing_loss", contextlib.nullcontext)
    on_device = DeviceThread(executor, config.orch.deadline_s, noticing)
    model: Model = await all_or_none(ranks, on_device(load, train, chat_options(config.orch), given))
    view = await on_device(shard, model, ranks) if train.sharding == "fsdp" else None
    summing, mesh = getattr(ranks, "sum_gradients", None), getattr(ranks, "mesh", None)
    policy = await on_device(make_policy, train, model, steps, summing, mesh)
    plan = await on_device(make_plan, config, model, policy, ranks)
    files = PolicyFiles(policy, model.chat, model.decoder)
    shards = ShardedWeights(view, files, ranks) if view is not None else None
    notices = [*_notices(model, ranks), *lines_of(plan)]
    about = {"notices": notices, "dtype": str(model.decoder.dtype), "device": str(model.decoder.device)}
    weights = make_weights(config, model, files, on_device) if ranks.rank == 0 else None
    if view is not None:
        await on_device(lambda: view.leave_device(keep=ranks.rank == 0))
    learner = make_learner(config, policy, plan, on_device, ranks)
    device = TrainerDevice(executor, weights)
    return Trainee(steps, learner, files, weights, on_device, device, about, shards)


def _with_old_logprobs(config: RunConfig) -> RunConfig:
    """The engine's base is not stored as a quantised one is, so its log-probs cannot stand in for the policy's."""
    train = config.train
    if not train.quantised or train.recompute_old != "auto":
        return config
    return config.model_copy(update={"train": train.model_copy(update={"recompute_old": True})})


def _notices(model: Model, ranks: Ranks) -> list[str]:
    held = "whole" if model.sharded is None else "in shards"
    several = [f"training: {ranks.world} processes, weights {held}"] if ranks.world > 1 else []
    return model.notices + several


def make_weights(config: RunConfig, model: Model, files: PolicyFiles, on_device: DeviceThread) -> WeightChannel:
    """The trainer's end of the way that weights take. Only adapters travel where only adapters are trained."""
    train = config.train
    if train.weight_broadcast.type == "filesystem":
        from shoal.transport.folder_weights import FolderWeightChannel

        export: Callable[[Path], Awaitable[Any]] = functools.partial(on_device, files.export)
        return FolderWeightChannel(train.output_dir, "lora" if train.lora else "full", export, train.seed)
    from shoal.trainer.checkpoint import snapshot_weights
    from shoal.transport.broadcast import BroadcastWeightChannel, Place

    where, kind = train.weight_broadcast, model.trained.device.type
    take = functools.partial(on_device, snapshot_weights, model.decoder)
    place = Place(where.host, where.port, write_token(Path(train.output_dir) / HANDSHAKE / WEIGHTS))
    return BroadcastWeightChannel(place, take, train.seed, kind)
