"""`Config` of a recipe, the dataclasses inside it, and their translation to the schema.

`main` and `setup_infra` call `translate`. The annotation of a field declares its schema key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from shoal.config.schema import LAYOUTS, Layout, RunConfig
from shoal.core.errors import ArgumentError
from shoal.core.losses import BUILT_IN, CISPO, DAPO, DRO, GRPO, GSPO, LOSSES, ImportanceSampling, Loss, Reinforce
from shoal.core.section import IN_MEMORY, NAME_PATTERN
from shoal.envs.datasets import DATA_SUFFIXES
from shoal.surfaces.names import Key, Translation, keys_of, named_arguments, one_line_if_uncaught
from shoal.surfaces.trainer import LABEL

Kind = TypeVar("Kind", bound=type)
PARAMETER_NAMES = {"clip_low": "eps_clip", "clip_high": "eps_clip_high", "quad_beta": "beta"}  # schema → Config


def strict(kind: Kind) -> Kind:
    """Checks the arguments of a dataclass: unknown and missing fields, and objects of the wrong type, by name."""
    named_arguments(kind)
    fill: Callable[..., None] = kind.__init__
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    @wraps(fill)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        with one_line_if_uncaught():
            for name in required:
                if name not in values and not set(values) - set(kind.__annotations__):
                    raise ArgumentError(f"{kind.__name__}: {name}: is required; write {kind.__name__}({name}=…)")
            for name, value in values.items():
                _check_object(kind.__name__, name, value)
            fill(self, *args, **values)

    kind.__init__ = checked  # type: ignore[misc]
    return kind


def _check_object(owner: str, name: str, value: Any) -> None:
    """Check a field that holds a dataclass or a WeightSyncScope. Some may be None."""
    wanted = OBJECTS.get(name) if owner == "Config" else WeightSyncScope if name == "weight_sync_scope" else None
    if wanted is None or isinstance(value, wanted) or (value is None and name not in ALWAYS):
        return
    if wanted is WeightSyncScope:
        fix = " or ".join(str(scope) for scope in WeightSyncScope)
    else:
        given = ", ".join(f"{key}={part!r}" for key, part in value.items()) if isinstance(value, dict) else "…"
        fix = f"{wanted.__name__}({given})"
    raise ArgumentError(f"{owner}: {name}: must be a {wanted.__name__}, not {value!r:.80}; write {fix}")


class WeightSyncScope(Enum):
    """Who owns the weights used for sampling.

    PER_TRAINER: the trainer; the sampler reads them. PER_DEPLOYMENT: the deployment has its own copy and trainers write
    to it, so another trainer can take over without a restart.
    """

    PER_TRAINER = "per_trainer"
    PER_DEPLOYMENT = "per_deployment"


@strict
@dataclass(frozen=True)
class WeightSyncConfig:
    # Steps. N > 1: sampling and training overlap within windows of N steps. 0: never sync.
    weight_sync_interval: Annotated[int, Key("orch.weight_sync_interval")] = 1
    # Steps between resumable checkpoints. 0: none.
    dcp_save_interval: Annotated[int, Key("train.save_steps", "with a value above 0, main resumes from log_path")] = 0
    weight_sync_timeout: Annotated[float, Key("orch.sync_deadline_s")] = 600.0  # seconds
    dcp_timeout: Annotated[float, Key("train.save_deadline_s")] = 600.0  # seconds


@strict
@dataclass(frozen=True)
class InfraConfig:
    # Default: chosen for the machine.
    training_shape_id: Annotated[
        str | None,
        Key(("train.device", "train.gpus", "train.recipe"), "`shoal shapes` lists the shapes", composed=True),
    ] = None
    # Set it to use a frozen reference with full fine-tuning.
    ref_training_shape_id: Annotated[
        str | None, Key("train.reference", "a frozen copy; with LoRA the base model is the reference", composed=True)
    ] = None
    trainer_id: Annotated[
        str | None, Key(note="setup_infra attaches to this trainer, or continues from its newest checkpoint")
    ] = None
    ref_trainer_id: Annotated[
        str | None, Key(note="the reference is a process of its own (`grpo-train --forward-only`) with this id")
    ] = None


def _owned_weights(scope: WeightSyncScope) -> str | None:
    return "own" if scope is WeightSyncScope.PER_DEPLOYMENT else None


@strict
@dataclass(frozen=True)
class DeployConfig:
    # Required.
    tokenizer_model: Annotated[str | None, Key(note="required; must agree with the tokenizer of base_model")] = None
    weight_sync_scope: Annotated[
        WeightSyncScope, Key("infer.weights", "PER_DEPLOYMENT sets `own`", convert=_owned_weights)
    ] = WeightSyncScope.PER_TRAINER
    deployment_id: Annotated[
        str | None, Key(note="with PER_DEPLOYMENT: a server process that setup_infra starts, or attaches to")
    ] = None


@strict
@dataclass(frozen=True)
class TISConfig:
    cap: Annotated[float, Key("train.loss.correction.cap", composed=True)] = 5.0
    level: Annotated[Literal["token", "sequence"], Key("train.loss.correction.level", composed=True)] = "token"


def _trackers(wandb: object) -> list[str] | None:
    return ["wandb"] if wandb else None


@strict
@dataclass(frozen=True)
class WandBConfig:
    project: Annotated[str, Key("train.report_project")] = "shoal"
    run_name: Annotated[str | None, Key("train.report_name")] = None


class LossParameters:
    """The parameters of one loss, all unset. The fields come from the declaration of the loss."""

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **parameters: Any) -> None: ...


LOSS_OBJECTS: dict[str, type] = {}  # loss → the class with its parameters; those of grpo are fields of Config


def parameters_of(loss: type[Loss]) -> Callable[[type], Any]:
    """A class decorator: adds the parameters of `loss` as fields, with the names in PARAMETER_NAMES."""

    def add_fields(kind: type) -> Any:
        for name, info in loss.parameters().items():
            field_name = PARAMETER_NAMES.get(name, name)
            kind.__annotations__[field_name] = (
                f"Annotated[{_type_text(info.annotation)} | None, Key('train.loss.{name}')]"
            )
            setattr(kind, field_name, None)
        LOSS_OBJECTS[loss.choice()] = strict(dataclass(frozen=True)(kind))
        return kind

    return add_fields


def _type_text(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        return _type_text(get_args(annotation)[0])
    if get_origin(annotation) is Annotated:
        return _type_text(annotation.__origin__)
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")


@parameters_of(ImportanceSampling)
class ISConfig(LossParameters): ...


@parameters_of(Reinforce)
class ReinforceConfig(LossParameters): ...


@parameters_of(DAPO)
class DAPOConfig(LossParameters): ...


@parameters_of(DRO)
class DROConfig(LossParameters): ...


@parameters_of(GSPO)
class GSPOConfig(LossParameters): ...


@parameters_of(CISPO)
class CISPOConfig(LossParameters): ...


# The classes of the other losses.
for _kind in BUILT_IN:
    if _kind is not GRPO and _kind.choice() not in LOSS_OBJECTS:
        _name = f"{_kind.__name__}Config"
        globals()[_name] = parameters_of(_kind)(type(_name, (LossParameters,), {"__module__": __name__}))
OBJECTS: dict[str, type] = {
    "deployment": DeployConfig, "infra": InfraConfig, "weight_sync": WeightSyncConfig, "tis": TISConfig,
    "wandb": WandBConfig, **LOSS_OBJECTS,
}  # fmt: skip
ALWAYS = ("deployment", "infra", "weight_sync")
PolicyLossName = str  # a name of a built-in loss


def _with_loss_objects(kind: type) -> Any:
    """Adds a field for each loss without one."""
    for name, parameters in LOSS_OBJECTS.items():
        if name not in kind.__annotations__:
            kind.__annotations__[name] = f"{parameters.__name__} | None"
            setattr(kind, name, None)
    return kind


@strict
@dataclass(frozen=True, kw_only=True)
@_with_loss_objects
class Config:
    """One run of `main`. `dataset` is a file, a folder, a hub name, or rows. `log_path` is the run directory."""

    log_path: Annotated[str, Key("train.output_dir")]
    base_model: Annotated[str, Key("train.model")]
    dataset: Annotated[
        str | Sequence[Any] | None,
        Key(
            ("orch.dataset.path", "orch.dataset.name"),
            "a file or folder, a data set on the Hugging Face hub, or rows in memory; optional for a loop of your own",
            composed=True,
        ),
    ] = None
    deployment: DeployConfig = field(default_factory=DeployConfig)
    infra: InfraConfig = field(default_factory=InfraConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    lora_rank: Annotated[int, Key(("train.lora", "train.lora_rank"), "0 means full fine-tuning", composed=True)] = 0
    max_seq_len: Annotated[int | None, Key("train.sequence_len")] = None
    learning_rate: Annotated[float, Key("train.learning_rate")] = 1e-5
    kl_beta: Annotated[
        float | None,
        Key("train.loss.kl.beta", "with a reference, the default is .001 for grpo and reinforce", composed=True),
    ] = None
    completions_per_prompt: Annotated[int, Key("orch.rollouts_per_example")] = 4
    max_completion_tokens: Annotated[int, Key("orch.sampling.max_tokens")] = 1024
    temperature: Annotated[float, Key("orch.sampling.temperature")] = 1.0
    epochs: Annotated[int, Key("train.epochs")] = 1
    max_rows: Annotated[int | None, Key("orch.dataset.max_rows", composed=True)] = 100
    prompt_groups_per_step: Annotated[
        int, Key("orch.batch_size", "the value is prompt_groups_per_step × completions_per_prompt", composed=True)
    ] = 1
    policy_loss: Annotated[PolicyLossName, Key("train.loss.type")] = "grpo"
    eps_clip: Annotated[float, Key("train.loss.clip_low", "only for grpo and dapo", composed=True)] = 0.2
    eps_clip_high: Annotated[float | None, Key("train.loss.clip_high", "only for grpo and dapo", composed=True)] = None
    ratio_log_cap: Annotated[float, Key("train.loss.ratio_log_cap", composed=True)] = 20.0
    ppo_n_minibatches: Annotated[int, Key("train.minibatches")] = 1
    tis: Annotated[TISConfig | None, Key("train.loss.correction.type", "None disables it", composed=True)] = field(
        default_factory=TISConfig
    )
    importance_sampling: ISConfig | None = None
    reinforce: ReinforceConfig | None = None
    dapo: DAPOConfig | None = None
    dro: DROConfig | None = None
    gspo: GSPOConfig | None = None
    cispo: CISPOConfig | None = None
    wandb: Annotated[WandBConfig | None, Key("train.report_to", convert=_trackers)] = None
    seed: Annotated[int, Key("train.seed")] = 0
    overrides: Annotated[Sequence[str], Key(note="any other key of the schema, as on the command line")] = ()


KEYS = keys_of(Config)
POLICY_LOSSES = tuple(loss.choice() for loss in BUILT_IN)
DEFAULT_KL = {"grpo": 0.001, "reinforce": 0.001}


def check_config(surface: str, config: Any) -> None:
    """Raises ArgumentError if `config`, the first argument of the call, is not a Config."""
    if not isinstance(config, Config):
        raise ArgumentError(f"{surface}: config: must be a Config, not a {type(config).__name__}; write Config(…)")


def translate(config: Config, in_memory: bool = False) -> tuple[RunConfig, list[str]]:
    """The resolved run, and notices. `in_memory`: the rows or the reward function are Python objects."""
    to = Translation("Config", {f.name: f.default for f in fields(Config) if f.default is not MISSING})
    if not config.deployment.tokenizer_model:
        to.refuse(
            "deployment.tokenizer_model", "is required", "set it to the model whose tokenizer the deployment uses"
        )
    _ids(to, config)
    if config.policy_loss not in POLICY_LOSSES:
        near = difflib.get_close_matches(str(config.policy_loss), POLICY_LOSSES, n=1)
        fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(POLICY_LOSSES)}"
        to.refuse("policy_loss", f"there is no loss {config.policy_loss!r}", fix)
        to.raise_problems()
    to.put_declared(KEYS, {name: _value(config, name) for name in KEYS})
    to.data["orch"]["groups"] = {"uniform": "skip"}
    _batch(to, config)
    _data(to, config, in_memory)
    _loss(to, config)
    notices = _reference(to, config)
    _shapes(to, config)
    run, advice = to.config(config.overrides)
    return run, [*notices, *advice]


def _value(config: Config, name: str) -> Any:
    """The value of a field such as `tis.cap`; None if the outer field is None."""
    outer, _, inner = name.partition(".")
    value = getattr(config, outer)
    return getattr(value, inner) if inner and value is not None else value


def _ids(to: Translation, config: Config) -> None:
    ids = {
        "deployment.deployment_id": config.deployment.deployment_id,
        "infra.trainer_id": config.infra.trainer_id,
        "infra.ref_trainer_id": config.infra.ref_trainer_id,
    }
    for name, id in ids.items():
        if id is not None and not (isinstance(id, str) and re.fullmatch(NAME_PATTERN, id)):
            to.refuse(name, f"is {id!r}", "use at most 64 letters, digits, dots, dashes and underscores")
    if config.infra.ref_trainer_id is not None and config.infra.ref_training_shape_id is None:
        what = "needs infra.ref_training_shape_id, and full fine-tuning"
        to.refuse("infra.ref_trainer_id", what, "set infra.ref_training_shape_id, or remove infra.ref_trainer_id")
    if config.infra.trainer_id is not None and config.infra.trainer_id == config.infra.ref_trainer_id:
        to.refuse("infra.ref_trainer_id", "equals infra.trainer_id", "use another id")


def _batch(to: Translation, config: Config) -> None:
    for name in ("prompt_groups_per_step", "completions_per_prompt"):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            to.refuse(name, f"must be a whole number of at least 1, not {value!r}")
    to.raise_problems()
    rollouts = config.prompt_groups_per_step * config.completions_per_prompt
    to.put("prompt_groups_per_step", "orch.batch_size", rollouts)


def _data(to: Translation, config: Config, in_memory: bool) -> None:
    data = config.dataset
    if in_memory or not isinstance(data, str):
        to.put("dataset", "orch.env", [{"id": IN_MEMORY, "name": LABEL}])
        return
    to.put("dataset", "orch.env", [{"id": "dataset", "name": LABEL}])
    to.put("dataset", f"orch.dataset.{'path' if is_path(data) else 'name'}", data)
    if config.max_rows is not None:
        to.put("max_rows", "orch.dataset.max_rows", config.max_rows)


def is_path(dataset: str) -> bool:
    return (
        Path(dataset).expanduser().exists()
        or dataset.endswith(tuple(DATA_SUFFIXES))
        or dataset.startswith((".", "/", "~"))
    )


def _loss(to: Translation, config: Config) -> None:
    loss, spec = config.policy_loss, LOSSES[config.policy_loss]
    if loss != "gspo":
        to.data["train"]["loss"]["aggregation"] = "token-mean"
    for name, default in (("eps_clip", 0.2), ("eps_clip_high", None)):
        value, (key,) = getattr(config, name), KEYS[name].keys
        if loss not in ("grpo", "dapo") and value != default:
            where = f"set {loss}.{name}" if hasattr(getattr(config, loss), name) else "remove it"
            to.refuse(name, f"is for grpo and dapo, not for {loss}", where)
        if loss in ("grpo", "dapo") and value is not None and key not in to.arguments:  # dapo.eps_clip has priority
            to.put(name, key, value)
    for name in LOSS_OBJECTS:
        if getattr(config, name) is not None and name != loss:
            to.refuse(name, f"is not used with policy_loss {loss!r}", "remove it")
    to.raise_problems()  # the schema does not know the parameters of another loss
    if spec.uses_ratio or config.ratio_log_cap != 20.0:
        to.put("ratio_log_cap", "train.loss.ratio_log_cap", config.ratio_log_cap)
    # The default is dropped if the loss has no correction. Any other value is checked by the schema.
    if config.tis is not None and (spec.takes_correction or config.tis != TISConfig()):
        to.put("tis", "train.loss.correction.type", "tis")
        to.put("tis.cap", "train.loss.correction.cap", config.tis.cap)
        to.put("tis.level", "train.loss.correction.level", config.tis.level)


def _reference(to: Translation, config: Config) -> list[str]:
    """With LoRA the base model is the reference. Full fine-tuning has a reference only if its shape is set."""
    shape, lora, beta = config.infra.ref_training_shape_id, config.lora_rank != 0, config.kl_beta
    if lora:
        to.put("lora_rank", "train.lora", True)
        to.put("lora_rank", "train.lora_rank", config.lora_rank)
        if shape is not None:
            what = "is not used with LoRA, where the reference is the base model"
            to.refuse("infra.ref_training_shape_id", what, "remove it")
    if beta and not lora and shape is None:
        what = f"is {beta:g}, but full fine-tuning has no reference"
        to.refuse("kl_beta", what, "set infra.ref_training_shape_id or lora_rank, or remove kl_beta")
    usual = DEFAULT_KL.get(config.policy_loss)
    if beta is None and (lora or shape is not None):
        beta = usual
    if beta:
        to.put("kl_beta", "train.loss.kl.beta", beta)
    if shape is not None:
        to.put("infra.ref_training_shape_id", "train.reference", "frozen")
    if usual is not None and config.kl_beta is None and not lora and shape is None:
        return ["kl_beta: there is no reference (infra.ref_training_shape_id is unset), so the KL is off"]
    return []


def _shapes(to: Translation, config: Config) -> None:
    names = ("training_shape_id", "ref_training_shape_id")
    found = {name: _layout(to, f"infra.{name}", getattr(config.infra, name)) for name in names}
    ours, reference = found["training_shape_id"], found["ref_training_shape_id"]
    for key, value in ours.settings if ours is not None else ():
        to.put("infra.training_shape_id", f"train.{key}", value)
    if reference is not None and ours is not None and reference.device != ours.device:
        what = f"is {reference.name}, on another device than {ours.name}"
        to.refuse("infra.ref_training_shape_id", what, "use the same device for both")


def _layout(to: Translation, argument: str, name: str | None) -> Layout | None:
    if name is not None and name not in LAYOUTS:
        near = difflib.get_close_matches(name, LAYOUTS, n=1)
        hint = f"did you mean {near[0]}?" if near else "`shoal shapes` lists the shapes"
        to.refuse(argument, f"there is no shape {name!r}", hint)
    return LAYOUTS.get(name) if name is not None else None
