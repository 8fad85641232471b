"""`setup_infra`: starts a policy, its reference and a deployment in parallel from one `Config`.

The policy runs in this process. A deployment with an id is a server process that outlives this one (attach.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shoal.build.load import PythonObjects
from shoal.build.memory_plan import make_plan
from shoal.build.model import make_policy
from shoal.build.sampler import DeviceThread, Sampler, load_model, make_engine, make_runner, sampling_params
from shoal.build.signals import outside_event_loop
from shoal.config.schema import RunConfig
from shoal.core.errors import ArgumentError, DeadlineError, ModelError
from shoal.recipes.attach import Server, TrainerFolder, start_deployment, start_reference
from shoal.recipes.clients import DeploymentSampler, Device, PolicyClient, ReferenceClient, local_reference
from shoal.recipes.config import Config, WeightSyncScope, check_config, translate
from shoal.rewards.pool import RewardPool
from shoal.surfaces.names import one_line_if_uncaught


@dataclass
class _Trainer:
    """A loaded model with its policy and engine."""

    run: RunConfig
    sampler: Any  # build.Sampler
    policy: Any  # TrainedPolicy
    client: PolicyClient
    folder: TrainerFolder | None = None  # of a trainer with an id
    stopped: bool = False

    def stop(self) -> None:
        _close(self)
        if self.folder is not None:
            self.folder.release()


@dataclass
class _Deployment:
    """An engine with its own weights, in this process."""

    run: RunConfig
    sampler: Any
    stopped: bool = False

    @property
    def engine(self) -> Any:
        return self.sampler.engine

    def stop(self) -> None:
        _close(self)


Piece = TypeVar("Piece")
_TRAINERS: dict[str, _Trainer] = {}
_SERVERS: dict[str, Server] = {}
_LOCK = threading.Lock()


class Infra:
    """The parts of a custom loop: `policy`, and `reference` and `sampler` if requested."""

    def __init__(self, config: Config, parts: _Parts, wants: _Wants) -> None:
        self.config = config
        self._trainer = trainer = parts.trainer
        self._deployment = parts.deployment
        self._reference_server = parts.reference
        self._channel: Any = None
        self.policy = trainer.client
        local = partial(local_reference, trainer.policy, _device(trainer))
        score = parts.reference.logprobs if parts.reference is not None else local
        self._reference = ReferenceClient(score) if wants.reference else None
        self.tokenizer = trainer.sampler.model.chat.tokenizer
        self._synced = self.policy.version  # setup_infra syncs
        self._sampler = self._make_sampler() if wants.inference else None

    @property
    def reference(self) -> ReferenceClient | None:
        """The frozen reference model; None without `needs_reference`."""
        return self._reference

    @property
    def sampler(self) -> DeploymentSampler:
        """Samples completions with the weights of the last sync."""
        if self._sampler is None:
            with one_line_if_uncaught():
                raise ArgumentError(
                    "setup_infra was called with needs_inference=False, so there is no infra.sampler; call "
                    "setup_infra(…, needs_inference=True)"
                )
        return self._sampler

    def _make_sampler(self) -> DeploymentSampler:
        orch = self._trainer.run.orch
        assert orch.seq_len is not None and orch.sampling.seed is not None
        params = sampling_params(orch, self.config.temperature)
        chat = self._trainer.sampler.model.chat
        sampler = DeploymentSampler(self._engine, chat, params, orch.seq_len, orch.sampling.seed)
        sampler.check_synced = self._check_synced
        return sampler

    def _check_synced(self) -> None:
        """Raise if the loop trained a whole window without a sync: forgotten, or not awaited."""
        window = self.config.weight_sync.weight_sync_interval * self.config.ppo_n_minibatches
        behind = self.policy.version - self._synced
        if 0 < window <= behind:
            raise ArgumentError(
                f"sample_with_tokens: the sampler is {behind} optimizer steps behind the policy; call "
                "`await infra.sync_weights()` after training, or set weight_sync_interval=0 for no syncs"
            )

    @property
    def _engine(self) -> Any:
        return self._deployment.engine if self._deployment is not None else self._trainer.sampler.engine

    async def sync_weights(self) -> int:
        """Load the current policy weights into the sampler, and return their version. Limit: weight_sync_timeout."""
        limit = self.config.weight_sync.weight_sync_timeout
        try:
            await asyncio.wait_for(self._sync(), limit)
        except TimeoutError:
            raise DeadlineError(
                f"the weight sync took longer than {limit:g} s (weight_sync.weight_sync_timeout)"
            ) from None
        self._synced = self.policy.version
        return self._synced

    async def _sync(self) -> None:
        if isinstance(self._deployment, Server):
            manifest = await self._weights(self._deployment).publish(self.policy.version)
            await self._deployment.engine.load(self.policy.version, manifest)
            return
        if self._deployment is not None:
            source, target = self._trainer.sampler.model.decoder.model, self._deployment.sampler.model.decoder.model
            await self._deployment.sampler.on_device(_write_weights, source, target)
        await self._engine.load(self.policy.version)

    def _weights(self, server: Server) -> Any:
        """Writes weights into the folder of the server."""
        if self._channel is None:
            from shoal.rollout.weight_channels import FolderWeightChannel

            train, write = self._trainer.run.train, self._trainer.client.files.export
            export = partial(self._trainer.sampler.on_device, write)
            self._channel = FolderWeightChannel(server.folder, "lora" if train.lora else "full", export, train.seed)
        return self._channel

    def close(self) -> None:
        """Stop the trainer and the deployment. A deployment or reference with an id keeps running."""
        _stop(self._trainer)
        for part in (self._deployment, self._reference_server):
            _detach(part) if isinstance(part, Server) else _stop(part)
        self._deployment = self._reference_server = None

    def close_deployment(self) -> None:
        """Stop a deployment with an id too."""
        if self._deployment is not None:
            _stop(self._deployment)
            self._deployment = None

    def close_reference(self) -> None:
        """Stop a reference with an id too."""
        if self._reference_server is not None:
            _stop(self._reference_server)
            self._reference_server = None

    def __enter__(self) -> Infra:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Wants:
    reference: bool
    inference: bool


def setup_infra(config: Config, needs_reference: bool = False, needs_inference: bool = True) -> Infra:
    """Start (or attach to) the policy and, if requested, its reference and a deployment."""
    with one_line_if_uncaught():
        check_config("setup_infra", config)
        run, _ = translate(config, in_memory=True)
        run = _with_reference(config, run, needs_reference)
        check_tokenizers(config)
    shared = list(_TRAINERS.values())
    parts = _start_parts(config, run, needs_reference, needs_inference)
    infra = Infra(config, parts, _Wants(needs_reference, needs_inference))
    try:
        outside_event_loop(lambda: asyncio.run(infra.sync_weights()))
    except BaseException:
        for part in (parts.trainer, parts.deployment, parts.reference):
            _leave(part, shared)
        raise
    return infra


def _with_reference(config: Config, run: RunConfig, needed: bool) -> RunConfig:
    if not needed:
        return run
    if not run.train.lora and config.infra.ref_training_shape_id is None:
        raise ArgumentError(
            "setup_infra: needs_reference: full fine-tuning needs infra.ref_training_shape_id for a reference "
            "(`shoal shapes` lists the values)"
        )
    kind = "adapter-off" if run.train.lora else "none" if config.infra.ref_trainer_id is not None else "frozen"
    return run.model_copy(update={"train": run.train.model_copy(update={"reference": kind})})


@dataclass(frozen=True)
class _Parts:
    trainer: _Trainer
    deployment: _Deployment | Server | None = None
    reference: Server | None = None


def _start_parts(config: Config, run: RunConfig, needs_reference: bool, needs_inference: bool) -> _Parts:
    """Start or attach to all parts in parallel. If one fails, the others are closed."""
    trainer_id, reference_id = config.infra.trainer_id, config.infra.ref_trainer_id
    every, shared = config.weight_sync.dcp_save_interval, list(_TRAINERS.values())
    started: dict[str, Future[Any]] = {}
    with ThreadPoolExecutor(3) as parallel:
        started["trainer"] = parallel.submit(_attach_trainer, trainer_id, run, every)
        if config.deployment.weight_sync_scope is WeightSyncScope.PER_DEPLOYMENT and needs_inference:
            id = config.deployment.deployment_id
            make = partial(_attach_server, id, run, start_deployment) if id else partial(_start_deployment, run)
            started["deployment"] = parallel.submit(make)
        if reference_id and needs_reference:
            started["reference"] = parallel.submit(_attach_server, reference_id, run, start_reference)
    if errors := [error for part in started.values() if (error := part.exception()) is not None]:
        for part in (part.result() for part in started.values() if part.exception() is None):
            _leave(part, shared)
        raise errors[0]
    return _Parts(**{name: part.result() for name, part in started.items()})


def _attach_trainer(id: str | None, run: RunConfig, every: int) -> _Trainer:
    if id is None:
        return _start_trainer(run, None)
    key = f"{run.train.output_dir} {id}"
    if key not in _TRAINERS:
        _TRAINERS[key] = _start_trainer(run, TrainerFolder(id, run, every))
    return _same_model(id, _TRAINERS[key], run)


def _attach_server(id: str, run: RunConfig, start: Callable[[str, RunConfig], Server]) -> Server:
    key = f"{run.train.output_dir} {start.__name__} {id}"
    if key not in _SERVERS:
        _SERVERS[key] = start(id, run)
    found = _same_model(id, _SERVERS[key], run)
    with _LOCK:
        found.users += 1
    return found


def _same_model(id: str, found: Piece, run: RunConfig) -> Piece:
    for key in ("model", "lora", "lora_rank", "recipe"):
        ours, theirs = getattr(run.train, key), getattr(found.run.train, key)  # type: ignore[attr-defined]
        if ours != theirs:
            raise ArgumentError(
                f"setup_infra: {id!r} is running with train.{key} {theirs!r}, not {ours!r}; use another id"
            )
    return found


def _start_trainer(run: RunConfig, folder: TrainerFolder | None) -> _Trainer:
    """A trainer with a folder continues from its newest checkpoint."""
    own = run.model_copy(update={"infer": run.infer.model_copy(update={"weights": "own"})})
    thread = DeviceThread(run.orch.deadline_s)
    try:
        model = load_model(own, PythonObjects(), thread)
        policy = thread.run(make_policy, run.train, model, run.train.max_steps or 1)
        sampler = _sampler(own, model, thread, policy)
        device = Device(thread.executor, run.train.sequence_len)
        client = PolicyClient(policy, device, sampler.model.chat)
        if folder is not None:
            client.version = device.do(folder.restore, client.files.load)
            client.after_step = partial(folder.save_if_due, save=client.files.save)
    except BaseException:
        if folder is not None:
            folder.release()
        raise
    return _Trainer(run, sampler, policy, client, folder)


def _start_deployment(run: RunConfig) -> _Deployment:
    """The engine reads its own tensors directly, since no trainer shares them."""
    in_step = run.orch.model_copy(update={"weight_sync_interval": 1, "max_async_level": 0})
    direct = run.model_copy(update={"infer": run.infer.model_copy(update={"weights": "auto"}), "orch": in_step})
    thread = DeviceThread(run.orch.deadline_s)
    return _Deployment(run, _sampler(direct, load_model(direct, PythonObjects(), thread), thread, None))


def _sampler(run: RunConfig, model: Any, thread: DeviceThread, policy: Any) -> Sampler:
    plan = thread.run(make_plan, run, model, policy)
    engine = make_engine(run, model, thread, plan.slots)
    runner, _ = make_runner(run, {}, RewardPool({}), engine, model.chat)
    return Sampler(model, engine, runner, thread)


def _device(trainer: _Trainer) -> Device:
    return Device(trainer.sampler.device.executor, trainer.run.train.sequence_len)


def _write_weights(source: Any, target: Any) -> None:
    import torch

    theirs = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(theirs[name])


def _stop(part: _Trainer | _Deployment | Server | None) -> None:
    for running in (_TRAINERS, _SERVERS):
        for id in [id for id, found in running.items() if found is part]:
            del running[id]
    if part is not None:
        part.stop()


def _leave(part: _Trainer | _Deployment | Server | None, shared: Sequence[_Trainer]) -> None:
    """Close a part of an Infra that could not be set up. `shared`: trainers of another Infra, which go on."""
    if isinstance(part, Server):
        _detach(part)
    elif not any(part is trainer for trainer in shared):
        _stop(part)


def _detach(server: Server) -> None:
    """Leave the server running. The last Infra of this process ends the connection."""
    with _LOCK:
        server.users -= 1
        last = server.users <= 0
    if last:
        for id in [id for id, found in _SERVERS.items() if found is server]:
            del _SERVERS[id]
        server.detach()


def _close(part: _Trainer | _Deployment) -> None:
    if not part.stopped:
        part.stopped = True
        outside_event_loop(lambda: asyncio.run(part.sampler.close()))


def check_tokenizers(config: Config) -> None:
    """Raises unless deployment and policy have the same vocabulary, special tokens and chat template."""
    ours, theirs = config.base_model, config.deployment.tokenizer_model
    if theirs is None or theirs == ours:
        return
    from shoal.models.tokenizer import load_tokenizer

    one = load_tokenizer(ours)
    try:
        other = load_tokenizer(theirs)
    except ModelError as error:
        raise ArgumentError(f"Config: deployment.tokenizer_model: {error}") from error
    for what, same in (
        ("vocabulary", one.get_vocab() == other.get_vocab()),
        ("special tokens", one.special_tokens_map == other.special_tokens_map),
        ("chat template", one.chat_template == other.chat_template),
    ):
        if not same:
            raise ArgumentError(
                f"Config: deployment.tokenizer_model: the {what} of {theirs!r} differs from base_model {ours!r}; "
                "use the same tokenizer"
            )
