"""The model, the policy that trains it, its files and its objective. Heavy imports happen inside the functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.fits import starting_with
from shoal.build.given import Given
from shoal.config.problems import about
from shoal.config.train import TrainConfig
from shoal.envs.user_code import load_function

if TYPE_CHECKING:
    from shoal.models.chat import Chat
    from shoal.models.decoder import Decoder, LayerShape
    from shoal.models.precision import Precision
    from shoal.trainer.policy import Reference, TrainedPolicy


@dataclass
class Model:
    """A loaded model with everything that samples and trains it."""

    decoder: Decoder
    layers: dict[int, LayerShape]
    chat: Chat
    eos_token_ids: tuple[int, ...]
    precision: Precision
    path: str  # how training and prefill compute, in words
    given: bool = False  # the caller's own object, to be left as it was found
    sharded: Decoder | None = None  # what is trained where weights are shared out; `decoder` then only samples

    @property
    def trained(self) -> Decoder:
        return self.sharded or self.decoder

    @property
    def notices(self) -> list[str]:
        """What a person should know before the first step. Nobody expects kernels of a CPU."""
        plain = self.decoder.device.type == "cpu" and self.decoder.fused is None
        return [line for line in (self.precision.notice, None if plain else f"training: {self.path}") if line]


def load(train: TrainConfig, chat_options: Mapping[str, Any] | None = None, given: Given | None = None) -> Model:
    """Precision first: what the machine cannot do is refused before weights are read."""
    with starting_with(f"the weights of {train.model}"):
        return _load(train, chat_options, given or Given())


def _load(train: TrainConfig, chat_options: Mapping[str, Any] | None, given: Given) -> Model:
    import torch

    from shoal.models import fused, hybrid
    from shoal.models import precision as precisions
    from shoal.models.chat import Chat
    from shoal.models.decoder import Decoder
    from shoal.models.load import adopt_model, eos_token_ids, load_model, load_tokenizer
    from shoal.models.lora import LoraSettings, attach
    from shoal.models.quantised import count_weights
    from shoal.models.tokenizer import check_found

    assert train.model is not None
    if given.model is None:
        check_found("train.model", train.model)
    precision = precisions.choose(train, given.local_rank if given.processes > 1 else None)
    chat = Chat(given.tokenizer or load_tokenizer(train.model), **(chat_options or {}))
    torch.manual_seed(train.seed)
    if given.model is not None:
        model = adopt_model(given.model, precision)
    else:
        model = load_model(train.model, precision.dtype, precision.device, precision.stored)
    if precision.device.type == "cpu":
        precisions.limit_threads(count_weights(model))
    ends = eos_token_ids(model, chat.tokenizer)
    layers = Decoder(model).verify()
    if precision.fp8_products:  # before adapters, which stay in bf16
        hybrid.convert(model)
    if train.lora:
        targets = tuple(train.lora_target_modules) if train.lora_target_modules is not None else None
        settings = LoraSettings(train.lora_rank, train.lora_alpha, train.lora_dropout, targets, train.adapter_path)
        model = attach(model, settings)
    decoder = Decoder(model)
    path = fused.attach(decoder, layers)
    decoder.recompute(train.recompute is True)
    return Model(decoder, layers, chat, ends, precision, path, given.model is not None)


def release(model: Model) -> None:
    """Give the caller's own model object back: adapters taken out, its own attention in place again."""
    from shoal.models.load import release_model

    if model.given:
        release_model(model.decoder.model)


def make_policy(
    train: TrainConfig,
    model: Model,
    total_steps: int,
    sum_gradients: Callable[..., None] | None = None,
    mesh: Any = None,
) -> TrainedPolicy:
    """`sum_gradients` over the processes that train together; sharded weights do it by themselves, over `mesh`."""
    from shoal.models import lora
    from shoal.trainer.graphs import PassGraphs
    from shoal.trainer.optimizer import AdamSettings, MasterAdamW
    from shoal.trainer.policy import TrainedPolicy
    from shoal.trainer.schedule import Schedule

    adam = AdamSettings(
        train.adam_beta1,
        train.adam_beta2,
        train.adam_epsilon,
        train.weight_decay,
        eight_bit=train.optimizer == "adamw_8bit",
    )
    with starting_with("the fp32 copy of what is trained"):
        optimizer = MasterAdamW(lora.trained_parameters(model.trained.model), adam)
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
    summing = sum_gradients if model.sharded is None else None
    reference = _reference(train, model, mesh)
    graphs = PassGraphs(model.trained.device) if _may_capture(train, model) else None
    return TrainedPolicy(model.trained, optimizer, schedule, train.max_grad_norm, reference, summing, graphs)


def _may_capture(train: TrainConfig, model: Model) -> bool:
    """Packed attention in 16 bits through our own kernels, and a loss that is the same every time."""
    from shoal.models.fused import turns_by_length

    decoder = model.trained
    on_gpu = decoder.device.type == "cuda" and decoder.dtype.itemsize == 2 and model.sharded is None
    ours = decoder.fused is not None and not turns_by_length(decoder) and decoder.head.weight is not None
    return on_gpu and ours and not train.loss.custom


def _reference(train: TrainConfig, model: Model, mesh: Any) -> Reference | None:
    import copy

    from shoal.models import lora
    from shoal.models.sharded import ShardedDecoder
    from shoal.trainer.policy import Reference

    if train.reference == "adapter-off":
        wrapped: Any = model.trained.model
        return Reference(model.trained, lambda: lora.as_reference(wrapped))
    if train.reference != "frozen":
        return None
    if model.sharded is not None:
        return Reference(ShardedDecoder(model.decoder, mesh, frozen=True))
    return Reference(model.decoder.over(copy.deepcopy(model.decoder.model).requires_grad_(False)))


class PolicyFiles:
    """The policy's side of a checkpoint: weights people can load, and the state to continue from.

    Where weights are sharded, `whole` is the sampler's copy of them, of the same version whenever something is saved.
    """

    def __init__(self, policy: TrainedPolicy, chat: Chat, whole: Decoder | None = None) -> None:
        self._policy = policy
        self._tokenizer = chat.tokenizer
        self._whole = whole

    def save_shards(self, group: Any, folder: Path) -> None:
        """By all ranks, before the main one saves the rest; they agree over `group` who writes what."""
        from shoal.trainer.checkpoint import save_shards

        save_shards(self._policy, folder, group)

    def save(self, folder: Path) -> None:
        from shoal.trainer.checkpoint import export_weights, save_state

        export_weights(self._policy, self._tokenizer, folder / "weights", self._whole)
        save_state(self._policy, folder)

    def load(self, folder: Path) -> None:
        from shoal.trainer.checkpoint import load_state

        load_state(self._policy, folder)

    def export(self, folder: Path) -> None:
        from shoal.trainer.checkpoint import export_weights

        export_weights(self._policy, self._tokenizer, folder, self._whole)


def make_objective(train: TrainConfig) -> Any:
    from shoal.algorithms.losses import LOSSES, CustomLoss
    from shoal.algorithms.objective import Objective
    from shoal.algorithms.terms import CORRECTIONS, KLPenalty

    loss = train.loss
    if loss.custom:
        with about("train.loss.type"):
            policy_loss = CustomLoss(partial(load_function(loss.type), **loss.args), name=loss.type)
    else:
        policy_loss = LOSSES[loss.type](**loss.resolved_loss_parameters())
    correction = None
    if loss.correction.type != "none":
        correction = CORRECTIONS[loss.correction.type](**loss.correction.resolved_parameters())
    kl = None
    if loss.kl.beta > 0 and loss.kl.where == "loss":
        kl = KLPenalty(loss.kl.beta, loss.kl.estimator)
    return Objective(policy_loss, correction, kl, loss.ratio_log_cap)


def recomputes_old(train: TrainConfig, objective: Any, fp32: bool, remote: bool) -> bool:
    """`recompute_old: auto`: a forward is taken where the sampler's log-probs cannot stand in for the old policy's."""
    if train.recompute_old != "auto":
        return bool(train.recompute_old)
    several = train.ppo_epochs * train.minibatches > 1 and not fp32
    # The policy computes in FP8 and the sampler in bf16: their log-probs differ by more than a clip range forgives.
    fp8 = train.recipe == "fp8-hybrid" and not train.quantised
    return objective.needs_old or several or remote or fp8
