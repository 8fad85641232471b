"""What a recipe is told: `Config` and the small configurations inside it. Plain data; surfaces/recipe.py reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import wraps
from typing import Any, Literal, TypeVar

from shoal.errors import ArgumentError
from shoal.surfaces.table import unknown_argument

Kind = TypeVar("Kind", bound=type)


def strict(kind: Kind) -> Kind:
    """A misspelt field is answered with the nearest one there is; one that is missing, or no such object, by name."""
    fill: Callable[..., None] = kind.__init__
    known = [f.name for f in fields(kind)]
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    @wraps(fill)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                raise unknown_argument(kind.__name__, name, known)
        for name in required:
            if name not in values:
                raise ArgumentError(f"{kind.__name__}: {name}: is required; write {kind.__name__}({name}=…)")
        for name, value in values.items():
            _check_object(kind.__name__, name, value)
        fill(self, *args, **values)

    kind.__init__ = checked  # type: ignore[misc]
    return kind


def _check_object(owner: str, name: str, value: Any) -> None:
    """Fields that hold a configuration of their own hold nothing else; None leaves some of them out."""
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
    """Who owns the weights that are sampled with.

    PER_TRAINER: the trainer; the sampler is pointed at them. PER_DEPLOYMENT: the deployment has a copy of its own that
    trainers write to, so that another trainer can take over without restarting it.
    """

    PER_TRAINER = "per_trainer"
    PER_DEPLOYMENT = "per_deployment"


@strict
@dataclass(frozen=True)
class WeightSyncConfig:
    weight_sync_interval: int = 1  # steps; N > 1 overlaps inside windows of N, 0 never syncs
    dcp_save_interval: int = 0  # steps between resumable checkpoints; 0 = none
    weight_sync_timeout: float = 600.0  # seconds
    dcp_timeout: float = 600.0  # seconds


@strict
@dataclass(frozen=True)
class InfraConfig:
    training_shape_id: str | None = None  # `shoal shapes` lists them; unset = chosen for the machine
    ref_training_shape_id: str | None = None  # set it to have a frozen reference for full fine-tuning
    trainer_id: str | None = None  # setup_infra re-attaches to a running trainer of this id


@strict
@dataclass(frozen=True)
class DeployConfig:
    tokenizer_model: str | None = None  # required
    weight_sync_scope: WeightSyncScope = WeightSyncScope.PER_TRAINER
    deployment_id: str | None = None  # setup_infra re-attaches to a running deployment of this id


@strict
@dataclass(frozen=True)
class TISConfig:
    cap: float = 5.0
    level: Literal["token", "sequence"] = "token"


@strict
@dataclass(frozen=True)
class WandBConfig:
    project: str = "shoal"
    run_name: str | None = None


@strict
@dataclass(frozen=True)
class ISConfig:
    ratio_low: float | None = None
    ratio_high: float | None = None


@strict
@dataclass(frozen=True)
class ReinforceConfig:
    ratio: Literal["on", "none"] | None = None


@strict
@dataclass(frozen=True)
class DAPOConfig:
    eps_clip: float | None = None
    eps_clip_high: float | None = None
    dual_clip: float | None = None


@strict
@dataclass(frozen=True)
class DROConfig:
    beta: float | None = None


@strict
@dataclass(frozen=True)
class GSPOConfig:
    eps_clip: float | None = None
    eps_clip_high: float | None = None


@strict
@dataclass(frozen=True)
class CISPOConfig:
    ratio_low: float | None = None
    ratio_high: float | None = None


OBJECTS: dict[str, type] = {
    "deployment": DeployConfig, "infra": InfraConfig, "weight_sync": WeightSyncConfig, "tis": TISConfig,
    "wandb": WandBConfig, "importance_sampling": ISConfig, "reinforce": ReinforceConfig, "dapo": DAPOConfig,
    "dro": DROConfig, "gspo": GSPOConfig, "cispo": CISPOConfig,
}  # fmt: skip
ALWAYS = ("deployment", "infra", "weight_sync")
PolicyLossName = Literal["grpo", "importance_sampling", "reinforce", "dapo", "dro", "gspo", "cispo"]


@strict
@dataclass(frozen=True, kw_only=True)
class Config:
    """One run of `main`. `dataset` is a file, a folder, a hub name, or rows; everything is written to `log_path`."""

    log_path: str
    base_model: str
    dataset: str | Sequence[Any]
    deployment: DeployConfig = field(default_factory=DeployConfig)
    infra: InfraConfig = field(default_factory=InfraConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    lora_rank: int = 0
    max_seq_len: int | None = None
    learning_rate: float = 1e-5
    kl_beta: float | None = None  # .001 for grpo and reinforce where there is a reference
    completions_per_prompt: int = 4
    max_completion_tokens: int = 1024
    temperature: float = 1.0
    epochs: int = 1
    max_rows: int | None = 100
    prompt_groups_per_step: int = 1
    policy_loss: PolicyLossName = "grpo"
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    ratio_log_cap: float = 20.0
    ppo_n_minibatches: int = 1
    tis: TISConfig | None = field(default_factory=TISConfig)
    importance_sampling: ISConfig | None = None
    reinforce: ReinforceConfig | None = None
    dapo: DAPOConfig | None = None
    dro: DROConfig | None = None
    gspo: GSPOConfig | None = None
    cispo: CISPOConfig | None = None
    wandb: WandBConfig | None = None
    seed: int = 0
    overrides: Sequence[str] = ()  # any other key of the schema, as on the command line
