"""grpo-train: executes the orchestrator's numbered calls, one at a time (load, learn, publish, save, export).

Its state is a checkpoint and the `learn` calls since, so repeating them restores a killed trainer. With several
processes the first one receives the calls and forwards them; all of them execute every call.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shoal.build.load import PythonObjects
from shoal.build.model import LoadedModel, PolicyFiles, load, make_policy
from shoal.build.parts import make_learner
from shoal.build.sampler import DeviceThread, chat_options, shard
from shoal.config.schema import RunConfig
from shoal.core.errors import ConfigError, LostRanksError, ShoalError, StorageError
from shoal.core.learn import Learner
from shoal.core.metrics import Tally
from shoal.core.protocols import Files, Ranks, WeightChannel
from shoal.rollout.remote.client import Waiting
from shoal.runs.files import fault, remove_quietly, storage
from shoal.runs.run_dir import SHARDS
from shoal.runs.secrets import WEIGHTS, write_token
from shoal.split.calls import (
    Answer,
    Answerer,
    Call,
    ErrorRecord,
    PayloadNotReady,
    failed,
    pack_learned,
    read_bulk,
    unpack_groups,
)
from shoal.split.rendezvous import FOLDER as HANDSHAKE
from shoal.split.rendezvous import Rendezvous, RunEndedByPeer

if TYPE_CHECKING:
    from shoal.models.sampler_view import SamplerView


log = logging.getLogger(__name__)
PAYLOAD_S, PAYLOAD_PAUSE_S = 30.0, 0.25


async def all_ranks_succeed(ranks: Ranks, work: Awaitable[Any]) -> Any:
    """The result of this rank's work. If the work fails on one rank, all ranks raise an error."""
    failure: Exception | None = None
    result: Any = None
    try:
        result = await work
    except Exception as error:
        failure = error
    failures = await ranks.exchange(b"" if failure is None else msgspec.msgpack.encode(ErrorRecord.of(failure)))
    if failure is not None:
        raise failure
    for rank, reason in enumerate(failures):
        if reason:
            msgspec.msgpack.decode(reason, type=ErrorRecord).raise_here(f"process {rank} of {ranks.world}")
    return result


class Closable(Protocol):
    async def close(self) -> None: ...


class Shards(Protocol):
    """Weights sharded over the ranks. All ranks call both methods together."""

    def gather(self, moved: int) -> None:
        """Gather the full weights for writing. An unchanged `moved` means unchanged weights."""
        ...

    def save(self, folder: Path) -> None: ...


@dataclass
class TrainerState:
    """The objects that the calls use, created for a run of `steps` steps."""

    steps: int
    learner: Learner
    files: Files
    weights: WeightChannel | None  # on rank 0 only
    on_device: Callable[..., Awaitable[Any]]
    sampler: Closable  # closed with it
    about: dict[str, Any]  # sent to the orchestrator
    shards: Shards | None = None
    moved: int = 0  # number of weight changes so far


Make = Callable[[int], Awaitable[TrainerState]]


@dataclass
class _MissingPayloads:
    """Waits for payloads that a network file system shows late. Each is reported once and has a deadline."""

    tell: Callable[[str], None]
    since: dict[tuple[str, int], float] = field(default_factory=dict)

    def wait(self, call: Call, why: PayloadNotReady) -> None:
        """Raises StorageError after PAYLOAD_S."""
        now, what = time.monotonic(), (call.session, call.number)
        assert call.file is not None
        if what not in self.since:
            text = f"waiting for {call.file.name}, the payload of call {call.number} ({call.method}) of grpo-orch"
            log.warning("%s: %s", text, why)
            self.tell(f"{text} (at most {PAYLOAD_S:g} s)")
        if now - self.since.setdefault(what, now) > PAYLOAD_S:
            raise StorageError(f"{why}, and did not arrive within {PAYLOAD_S:g} s")


class TrainingService:
    def __init__(self, make: Make, ranks: Ranks, folder: Path | None = None) -> None:
        self._make = make
        self._ranks = ranks
        self._folder = folder  # folder of the payloads
        self._state: TrainerState | None = None
        self.calls = 0

    async def run(self, answerer: Answerer | None, rendezvous: Rendezvous | None) -> None:
        """Answer calls until `rendezvous` raises the end of the run. Only rank 0 has an answerer."""
        while True:
            call = await self._receive(answerer, rendezvous)
            answer = await self._answer(call)
            if answerer is not None:
                await answerer.answer(call, answer)
                fault(f"service:answered:{call.method}")

    async def _receive(self, answerer: Answerer | None, rendezvous: Rendezvous | None) -> Call:
        """The next call, on every rank. The others wait while rank 0 is alive."""
        received: list[Call] = []

        async def listen() -> None:
            assert answerer is not None and rendezvous is not None
            received.append(await self._next_call(answerer, rendezvous))

        await unless_ended(self._ranks, listen)
        parts = await self._ranks.exchange(msgspec.msgpack.encode(received[0]) if received else b"")
        return msgspec.msgpack.decode(parts[0], type=Call)

    async def _next_call(self, answerer: Answerer, rendezvous: Rendezvous) -> Call:
        since, missing = time.monotonic(), _MissingPayloads(rendezvous.tell)
        while True:
            call = await answerer.next()
            if call is not None:
                try:
                    if self._has_payload(call, missing):
                        return call
                except ShoalError as error:  # the other ranks have not received the call
                    await answerer.answer(call, failed(call.number, error))
                    continue
                await asyncio.sleep(PAYLOAD_PAUSE_S)  # the channel would return the same call again immediately
            if rendezvous.peers.is_alive("orch"):
                since = time.monotonic()  # busy with other work
            rendezvous.watch("orch", "come back", since)

    def _has_payload(self, call: Call, missing: _MissingPayloads) -> bool:
        """Read the payload of the call. False if it may still arrive; raises if not."""
        try:
            call.bulk = read_bulk(call, self._folder) if call.method == "learn" else None
        except PayloadNotReady as error:
            missing.wait(call, error)
            return False
        return True

    async def _answer(self, call: Call) -> Answer:
        self.calls += 1
        log.info("call %d: %s %s", call.number, call.method, call.head)
        handler: Callable[[Call], Awaitable[dict[str, Any]]] | None = getattr(self, f"_{call.method}", None)
        if handler is None or call.method not in METHODS:
            return failed(call.number, ConfigError(f"there is no call {call.method!r}; are all processes one version?"))
        learns = call.method == "learn"  # runs collectives throughout
        try:
            return Answer(
                call.number, await (handler(call) if learns else all_ranks_succeed(self._ranks, handler(call)))
            )
        except Exception as error:
            # After a lost rank this trainer ends and the next one is restored. A rank that fails while it learns must
            # exit, because the others wait in a collective and notice only that.
            if isinstance(error, LostRanksError) if self._ranks.rank == 0 else learns:
                raise
            if not isinstance(error, ShoalError):
                log.exception("call %d failed", call.number)
            return failed(call.number, error)

    def _loaded_state(self) -> TrainerState:
        if self._state is None:
            raise ConfigError("the trainer received a call before `load`")
        return self._state

    async def _load(self, call: Call) -> dict[str, Any]:
        """Start from a checkpoint, or from the base model."""
        folder, steps = call.head.get("folder"), int(call.head["steps"])
        await self._have(steps, fresh=folder is None)
        state = self._loaded_state()
        if folder is not None:
            state.moved += 1
            await state.on_device(state.files.load, Path(folder))
        return state.about

    async def _have(self, steps: int, *, fresh: bool) -> None:
        now = self._state
        if now is not None and (now.steps != steps or (fresh and now.moved > 0)):
            await now.sampler.close()
            self._state = now = None  # close it first: two may not fit on the device
        if self._state is None:
            self._state = await self._make(steps)

    async def _learn(self, call: Call) -> dict[str, Any]:
        assert call.bulk is not None  # read when the call was received
        state, tally = self._loaded_state(), Tally()
        state.moved += 1
        groups = unpack_groups(call.bulk)
        fault("service:learn")
        learned = await state.learner.learn(groups, tally)
        fault("service:learned")
        return pack_learned(learned, tally, groups)

    async def _publish(self, call: Call) -> dict[str, Any]:
        state, version = await self._gathered_state(), int(call.head["version"])

        async def publish() -> Mapping[str, Any]:
            assert state.weights is not None
            return await state.weights.publish(version)

        return dict(await self._ranks.on_main(publish))

    async def _gathered_state(self) -> TrainerState:
        """The state with gathered weights."""
        state = self._loaded_state()
        if state.shards is not None:
            await state.on_device(state.shards.gather, state.moved)
        return state

    async def _save(self, call: Call) -> dict[str, Any]:
        shards, folder = self._loaded_state().shards, Path(str(call.head["folder"])) / SHARDS
        if shards is not None:

            async def create_folder() -> None:
                with storage(f"save {folder}"):
                    remove_quietly(folder)  # left by a trainer that was killed while writing
                    folder.mkdir()

            await self._ranks.on_main(create_folder)
            await self._loaded_state().on_device(shards.save, folder)
        return await self._write(self._loaded_state().files.save, call)

    async def _export(self, call: Call) -> dict[str, Any]:
        return await self._write(self._loaded_state().files.export, call)

    async def _write(self, write: Callable[[Path], None], call: Call) -> dict[str, Any]:
        state, folder = await self._gathered_state(), Path(str(call.head["folder"]))
        fault(f"service:{call.method}")
        await self._ranks.on_main(lambda: state.on_device(write, folder))
        return {}

    async def close(self) -> None:
        if self._state is not None:
            await self._state.sampler.close()


async def unless_ended(ranks: Ranks, work: Callable[[], Awaitable[None]] | None = None) -> None:
    """Run `work` on rank 0. If the run ends normally meanwhile, all ranks raise RunEndedByPeer."""
    ended: list[RunEndedByPeer] = []

    async def listen() -> bool:
        assert work is not None
        try:
            await work()
        except RunEndedByPeer as error:
            ended.append(error)
        return bool(ended)

    if await ranks.on_main(listen):
        raise ended[0] if ended else RunEndedByPeer("the first process ended")


METHODS = ("load", "learn", "publish", "save", "export")


@dataclass
class TrainerDevice:
    """The device thread and the weight channel."""

    executor: ThreadPoolExecutor
    weights: WeightChannel | None = None

    async def close(self) -> None:
        if isinstance(close := getattr(self.weights, "close", None), Callable):
            await asyncio.to_thread(close)  # the next state in this process uses the same port
        self.executor.shutdown(wait=False, cancel_futures=True)


@dataclass
class ShardedWeights:
    """The shards of all ranks: gathered into a full copy for writing, or saved as they are."""

    view: SamplerView
    files: PolicyFiles
    ranks: Ranks

    def gather(self, moved: int) -> None:
        self.view.refresh(moved)

    def save(self, folder: Path) -> None:
        self.files.save_shards(self.ranks.cpu_group, folder)


async def make_trainer_state(
    config: RunConfig, ranks: Ranks, given: PythonObjects, steps: int, waiting: Waiting
) -> TrainerState:
    """The state before the first step. `waiting` is called while the server of a teacher does not answer."""
    from shoal.build.memory_plan import lines_of, make_plan, teacher_line

    config = _with_old_logprobs(config)
    train = config.train
    on_device = DeviceThread(config.orch.deadline_s, ranks)
    model: LoadedModel = await all_ranks_succeed(ranks, on_device(load, train, chat_options(config.orch), given))
    view = await on_device(shard, model, ranks) if train.sharding == "fsdp" else None
    policy = await on_device(make_policy, train, model, steps, ranks)
    plan = await on_device(make_plan, config, model, policy, ranks)
    files = PolicyFiles(policy, model.chat, model.decoder)
    shards = ShardedWeights(view, files, ranks) if view is not None else None
    notices = [*_notices(model, ranks), *teacher_line(model), *lines_of(plan)]
    about = {"notices": notices, "dtype": str(model.decoder.dtype), "device": str(model.decoder.device)}
    weights = make_weights(config, model, files, on_device) if ranks.rank == 0 else None
    if view is not None:
        await on_device(lambda: view.leave_device(keep=ranks.rank == 0))
    learner = make_learner(config, policy, plan, on_device, ranks, model.chat.token_text, waiting)
    device = TrainerDevice(on_device.executor, weights)
    return TrainerState(steps, learner, files, weights, on_device, device, about, shards)


def _with_old_logprobs(config: RunConfig) -> RunConfig:
    """Always recompute old log-probs for a quantised base, since the sampler's base is not quantised."""
    train = config.train
    if not train.quantised or train.recompute_old != "auto":
        return config
    return config.model_copy(update={"train": train.model_copy(update={"recompute_old": True})})


def _notices(model: LoadedModel, ranks: Ranks) -> list[str]:
    held = "replicated" if model.sharded is None else "sharded"
    several = [f"training: {ranks.world} processes, weights {held}"] if ranks.world > 1 else []
    return model.notices + several


def make_weights(config: RunConfig, model: LoadedModel, files: PolicyFiles, on_device: DeviceThread) -> WeightChannel:
    """The trainer's end of the weight channel. With LoRA it transfers only adapters."""
    train = config.train
    if train.weight_broadcast.type == "filesystem":
        from shoal.rollout.weight_channels import FolderWeightChannel

        export: Callable[[Path], Awaitable[Any]] = functools.partial(on_device, files.export)
        return FolderWeightChannel(train.output_dir, "lora" if train.lora else "full", export, train.seed)
    from shoal.split.weight_broadcast import BroadcastAddress, BroadcastWeightChannel
    from shoal.trainer.checkpoint import snapshot_weights

    where, kind = train.weight_broadcast, model.trained.device.type
    take = functools.partial(on_device, snapshot_weights, model.decoder)
    place = BroadcastAddress(where.host, where.port, write_token(Path(train.output_dir) / HANDSHAKE / WEIGHTS))
    return BroadcastWeightChannel(place, take, train.seed, kind)
