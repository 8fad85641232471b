"""The model, the policy that trains it, its checkpoint files and its objective. Torch is imported in the functions.

If the device has too little memory, errors name settings that need less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.load import PythonObjects
from shoal.config.problems import about
from shoal.config.train import TrainConfig
from shoal.core.errors import ConfigError, HardwareError, MemoryStop
from shoal.core.protocols import Ranks
from shoal.core.ranks import SingleProcess
from shoal.envs.user_code import load_function

if TYPE_CHECKING:
    from shoal.models.chat import Chat
    from shoal.models.decoder import Decoder, LayerShape
    from shoal.models.precision import Precision
    from shoal.models.sampler_view import SamplerView
    from shoal.trainer.policy import Reference, TrainedPolicy


SMALLER = "a smaller model, adapters (train.lora=true) or a quantised base under them (train.qlora_fp8=true)"


@contextmanager
def explain_start_oom(what: str) -> Iterator[None]:
    """Around allocations that stay for the whole run."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise HardwareError(f"the device has not enough memory for {what}; try {SMALLER}") from error


def explain_oom(remedies: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function while training. Out of memory stops the run, which can resume from the last checkpoint."""
    import torch

    try:
        return function(*arguments)
    except torch.OutOfMemoryError as error:
        raise MemoryStop(
            f"the device ran out of memory while training; {remedies}, then resume from the last checkpoint"
        ) from error


@dataclass
class LoadedModel:
    """A loaded model with its tokenizer, and how it computes."""

    decoder: Decoder
    layers: dict[int, LayerShape]
    chat: Chat
    eos_token_ids: tuple[int, ...]
    precision: Precision
    path: str  # how training and prefill compute, for people
    given: bool = False  # an object of the caller, which is restored at the end
    sharded: Decoder | None = None  # trained instead of `decoder`, which then only samples
    view: SamplerView | None = None  # the sampler's view of the weights
    teacher_bytes: int = 0  # weights of a teacher on the same device

    @property
    def trained(self) -> Decoder:
        return self.sharded or self.decoder

    @property
    def notices(self) -> list[str]:
        """Shown before the first step. On a CPU the plain path is expected and not mentioned."""
        plain = self.decoder.device.type == "cpu" and self.decoder.fused is None
        return [line for line in (self.precision.notice, None if plain else f"training: {self.path}") if line]


def make_chat(model: str, tokenizer: Any = None, chat_template: str | None = None, **options: Any) -> Chat:
    """`tokenizer`: an object of the caller, which is not changed. `options` are those of Chat."""
    from shoal.models.chat import Chat
    from shoal.models.chat_templates import with_chat_template
    from shoal.models.tokenizer import load_tokenizer

    if tokenizer is None:
        return Chat(load_tokenizer(model, chat_template), **options)
    return Chat(with_chat_template(tokenizer, chat_template) if chat_template else tokenizer, **options)


def load(
    train: TrainConfig, chat_options: Mapping[str, Any] | None = None, given: PythonObjects | None = None
) -> LoadedModel:
    """The precision is checked first, so a machine that lacks it is reported before weights are read."""
    with explain_start_oom(f"the weights of {train.model}"):
        return _load(train, chat_options, given or PythonObjects())


def _load(train: TrainConfig, chat_options: Mapping[str, Any] | None, given: PythonObjects) -> LoadedModel:
    import torch

    from shoal.engine.decode_check import check_decode
    from shoal.models import fp8_linear as hybrid
    from shoal.models import fused
    from shoal.models import precision as precisions
    from shoal.models.decoder import Decoder
    from shoal.models.load import adopt_model, load_model
    from shoal.models.lora import LoraSettings, attach
    from shoal.models.quantize import count_weights
    from shoal.models.tokenizer import check_found, eos_token_ids

    assert train.model is not None
    if given.model is None:
        check_found("train.model", train.model)
    precision = precisions.choose(train, given.local_rank if given.processes > 1 else None)
    chat = make_chat(train.model, given.tokenizer, **(chat_options or {}))
    torch.manual_seed(train.seed)
    if given.model is not None:
        model = adopt_model(given.model, precision)
    else:
        model = load_model(train.model, precision.dtype, precision.device, precision.stored)
    if precision.device.type == "cpu":
        precisions.limit_threads(count_weights(model))
    ends = eos_token_ids(model, chat.tokenizer)
    plain = Decoder(model)
    layers = plain.verify()
    check_decode(plain, layers)
    if precision.fp8_products:  # before adapters, which stay in bf16
        hybrid.convert(model)
    if train.lora:
        targets = tuple(train.lora_target_modules) if train.lora_target_modules is not None else None
        settings = LoraSettings(train.lora_rank, train.lora_alpha, train.lora_dropout, targets, train.adapter_path)
        model = attach(model, settings)
    decoder = Decoder(model)
    path = fused.attach(decoder, layers)
    decoder.recompute(train.recompute is True)
    return LoadedModel(decoder, layers, chat, ends, precision, path, given.model is not None)


def release(model: LoadedModel) -> None:
    """Restore the model object of the caller: remove adapters and put its own attention back."""
    from shoal.models.load import release_model

    if model.given:
        release_model(model.decoder.model)


def make_policy(train: TrainConfig, model: LoadedModel, total_steps: int, ranks: Ranks | None = None) -> TrainedPolicy:
    """Gradients are summed over the ranks, except with sharded weights, whose backward does that."""
    from shoal.models import lora
    from shoal.trainer.optimizer import AdamSettings, MasterAdamW, Schedule
    from shoal.trainer.pass_graphs import PassGraphs
    from shoal.trainer.policy import TrainedPolicy

    adam = AdamSettings(
        train.adam_beta1,
        train.adam_beta2,
        train.adam_epsilon,
        train.weight_decay,
        eight_bit=train.optimizer == "adamw_8bit",
    )
    with explain_start_oom("the fp32 copy of what is trained"):
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
    ranks = ranks or SingleProcess()
    summing = ranks.sum_gradients if model.sharded is None else None
    reference = _reference(train, model, ranks.mesh)
    graphs = PassGraphs(model.trained.device) if _may_capture(train, model) else None
    with explain_start_oom("the teacher"):
        teacher = _teacher(train, model)
    return TrainedPolicy(model.trained, optimizer, schedule, train.max_grad_norm, reference, summing, graphs, teacher)


def _teacher(train: TrainConfig, model: LoadedModel) -> Decoder | None:
    """The frozen teacher model on the device of the policy; None if there is none, or if it is elsewhere."""
    from shoal.models import fused
    from shoal.models.decoder import Decoder
    from shoal.models.load import load_model
    from shoal.models.lora import merged
    from shoal.models.tokenizer import check_found, load_tokenizer

    teacher = train.teacher
    name = None if teacher is None else (teacher.model or (train.model if teacher.adapter else None))
    if teacher is None or name is None:
        return None
    if teacher.model is not None:
        check_found("train.teacher.model", name)
        check_same_tokens(load_tokenizer(name), model.chat.tokenizer)
    loaded = load_model(name, model.precision.dtype, model.trained.device)
    if teacher.adapter is not None:
        with about("train.teacher.adapter"):
            loaded = merged(loaded, teacher.adapter)
    decoder = Decoder(loaded.requires_grad_(False))
    fused.attach(decoder, decoder.verify())
    model.teacher_bytes = decoder.weight_bytes
    return decoder


def check_same_tokens(teacher: Any, student: Any) -> None:
    """Raises ConfigError if a token id means different texts for the two."""
    theirs, ours = teacher.get_vocab(), student.get_vocab()
    if theirs == ours:
        return
    differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    first = differing[0]
    raise ConfigError(
        f"train.teacher.model: its tokenizer is not that of train.model: {len(differing)} tokens differ, for example "
        f"{first!r} ({theirs.get(first)} there, {ours.get(first)} here); use a teacher of the same family"
    )


def _may_capture(train: TrainConfig, model: LoadedModel) -> bool:
    """Training passes may become CUDA graphs: 16-bit weights, the fused kernels, and a built-in loss."""
    from shoal.models.fused import turns_by_length

    decoder = model.trained
    on_gpu = decoder.device.type == "cuda" and decoder.dtype.itemsize == 2 and model.sharded is None
    ours = decoder.fused is not None and not turns_by_length(decoder) and decoder.head.weight is not None
    return on_gpu and ours and not train.loss.custom


def _reference(train: TrainConfig, model: LoadedModel, mesh: Any) -> Reference | None:
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
    """The policy's files in a checkpoint: weights in the transformers format, and the state to resume from.

    With sharded weights, `whole` is the sampler's full copy, which has the same version whenever something is saved.
    """

    def __init__(self, policy: TrainedPolicy, chat: Chat, whole: Decoder | None = None) -> None:
        self._policy = policy
        self._tokenizer = chat.tokenizer
        self._whole = whole

    def save_shards(self, group: Any, folder: Path) -> None:
        """Called by all ranks before rank 0 saves the rest; `group` is their process group on the CPU."""
        from shoal.trainer.checkpoint import save_shards

        save_shards(self._policy, folder, group)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy what `save` writes to the host. The result writes it, in any thread and while training continues."""
        from shoal.trainer.checkpoint import copy_state, copy_weights, export_weights, write_state

        policy, tokenizer = self._policy, self._tokenizer
        weights, state, counts = copy_weights(policy), *copy_state(policy)

        def write(folder: Path) -> None:
            export_weights(policy, tokenizer, folder / "weights", tensors=weights)
            write_state(state, counts, folder)

        return write

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
    from shoal.core.losses import CustomLoss
    from shoal.core.objective import Objective, TeacherWeights

    loss = train.loss
    if isinstance(loss, CustomLoss):
        with about("train.loss.type"):
            loss = loss.with_function(load_function(loss.type))
    teacher = train.teacher
    return Objective(loss, TeacherWeights(teacher.tau, teacher.reward_weight) if teacher is not None else None)


def recomputes_old(train: TrainConfig, objective: Any, fp32: bool, remote: bool) -> bool:
    """`recompute_old: auto`: whether a forward pass must compute old_logprobs instead of taking sampler_logprobs."""
    if train.recompute_old != "auto":
        return bool(train.recompute_old)
    several = train.ppo_epochs * train.minibatches > 1 and not fp32
    # The policy computes in FP8 and the sampler in bf16: their log-probs differ by more than a clip range.
    fp8 = train.recipe == "fp8-hybrid" and not train.quantised
    return objective.needs_old or several or remote or fp8
