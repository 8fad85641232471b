"""`setup_infra`: starts a policy, its reference and a deployment in parallel from one `Config`.

All of them run in this process. A trainer or deployment with an id can be reused until its `Infra` is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.build.load import PythonObjects
from shoal.build.memory_plan import make_plan
from shoal.build.model import make_policy
from shoal.build.sampler import DeviceThread, Sampler, load_model, make_engine, make_runner, sampling_params
from shoal.build.signals import outside_event_loop
from shoal.config.schema import RunConfig
from shoal.core.errors import ArgumentError, DeadlineError, ModelError
from shoal.recipes.clients import DeploymentSampler, Device, PolicyClient, ReferenceClient
from shoal.recipes.config import Config, WeightSyncScope, check_config, translate
from shoal.rewards.pool import RewardPool
from shoal.surfaces.excepthook import one_line_if_uncaught


@dataclass
class _Trainer:
    """A loaded model with its policy and engine."""

    run: RunConfig
    sampler: Any  # build.Sampler
    policy: Any  # TrainedPolicy
    client: PolicyClient
    stopped: bool = False


@dataclass
class _Deployment:
    """An engine with its own weights."""

    run: RunConfig
    sampler: Any
    stopped: bool = False


Piece = TypeVar("Piece")
_TRAINERS: dict[str, _Trainer] = {}
_DEPLOYMENTS: dict[str, _Deployment] = {}


class Infra:
    """The parts of a custom loop: `policy`, and `reference` and `sampler` if requested."""

    def __init__(self, config: Config, trainer: _Trainer, deployment: _Deployment | None, wants: _Wants) -> None:
        self.config = config
        self._trainer = trainer
        self._deployment = deployment
        self.policy = trainer.client
        device = _device(trainer)
        self._reference = ReferenceClient(trainer.policy, device) if wants.reference else None
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
        return _requested(self._sampler, "sampler", "needs_inference")

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
        return (self._deployment or self._trainer).sampler.engine

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
        if self._deployment is not None:
            source, target = self._trainer.sampler.model.decoder.model, self._deployment.sampler.model.decoder.model
            await self._deployment.sampler.on_device(_write_weights, source, target)
        await self._engine.load(self.policy.version)

    def close(self) -> None:
        """Stop the trainer and deployment. A deployment with its own weights and an id keeps running."""
        _stop(_TRAINERS, self._trainer)
        if self._deployment is not None and self._deployment not in _DEPLOYMENTS.values():
            _stop(_DEPLOYMENTS, self._deployment)

    def close_deployment(self) -> None:
        """Stop a deployment with its own weights too."""
        if self._deployment is not None:
            _stop(_DEPLOYMENTS, self._deployment)

    def __enter__(self) -> Infra:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _requested(piece: Piece | None, name: str, argument: str) -> Piece:
    with one_line_if_uncaught():
        if piece is None:
            raise ArgumentError(
                f"setup_infra: {argument}: was False, so there is no infra.{name}; call setup_infra(…, {argument}=True)"
            )
    return piece


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
    owns = config.deployment.weight_sync_scope is WeightSyncScope.PER_DEPLOYMENT and needs_inference
    deployment_id = config.deployment.deployment_id if owns else None
    with ThreadPoolExecutor(2) as parallel:
        trainer = parallel.submit(_attach, _TRAINERS, config.infra.trainer_id, run, _start_trainer)
        deployment = parallel.submit(_attach, _DEPLOYMENTS, deployment_id, run, _start_deployment) if owns else None
    infra = Infra(
        config,
        trainer.result(),
        deployment.result() if deployment is not None else None,
        _Wants(needs_reference, needs_inference),
    )
    try:
        outside_event_loop(lambda: asyncio.run(infra.sync_weights()))
    except BaseException:
        infra.close()
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
    kind = "adapter-off" if run.train.lora else "frozen"
    return run.model_copy(update={"train": run.train.model_copy(update={"reference": kind})})


def _attach(running: dict[str, Any], id: str | None, run: RunConfig, start: Callable[[RunConfig], Any]) -> Any:
    if id is None or id not in running:
        started = start(run)
        if id is not None:
            running[id] = started
        return started
    found = running[id]
    for key in ("model", "lora", "lora_rank", "recipe"):
        ours, theirs = getattr(run.train, key), getattr(found.run.train, key)
        if ours != theirs:
            raise ArgumentError(
                f"setup_infra: {id!r} is running with train.{key} {theirs!r}, not {ours!r}; use another id"
            )
    return found


def _start_trainer(run: RunConfig) -> _Trainer:
    own = run.model_copy(update={"infer": run.infer.model_copy(update={"weights": "own"})})
    thread = DeviceThread(run.orch.deadline_s)
    model = load_model(own, PythonObjects(), thread)
    policy = thread.run(make_policy, run.train, model, run.train.max_steps or 1)
    sampler = _sampler(own, model, thread, policy)
    device = Device(thread.executor, run.train.sequence_len)
    return _Trainer(run, sampler, policy, PolicyClient(policy, device, sampler.model.chat))


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


def _stop(running: dict[str, Any], what: _Trainer | _Deployment) -> None:
    for id in [id for id, found in running.items() if found is what]:
        del running[id]
    if not what.stopped:
        what.stopped = True
        outside_event_loop(lambda: asyncio.run(what.sampler.close()))


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
