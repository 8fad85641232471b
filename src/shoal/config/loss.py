"""The `train.loss` section: the loss, every parameter any loss has, its off-policy correction and its KL term.

A parameter left out is None here and takes the default of the chosen loss (config/catalogue.py); one that the chosen
loss does not have is refused by config/checks.py.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from shoal.config.base import NonNegativeFloat, PositiveFloat, Section
from shoal.config.catalogue import CORRECTION_CATALOGUE, LOSS_CATALOGUE

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"]


class CorrectionConfig(Section):
    type: Literal["none", "tis", "icepop"] = Field(
        default="none",
        description="Weight against the gap between sampler and trainer: none, truncated (tis) or icepop.",
    )
    cap: PositiveFloat | None = Field(default=None, description="Upper bound of the weight (5 unless given).")
    floor: NonNegativeFloat | None = Field(
        default=None, description="icepop: tokens whose weight is below get weight 0 (0.5 unless given)."
    )
    level: Literal["token", "sequence"] | None = Field(
        default=None, description="tis: one weight a token, or the geometric mean of a sequence (token unless given)."
    )

    def given_parameters(self) -> dict[str, Any]:
        return {name: value for name in ("cap", "floor", "level") if (value := getattr(self, name)) is not None}

    def resolved_parameters(self) -> dict[str, Any]:
        """The knobs of the chosen correction, defaults filled in."""
        return CORRECTION_CATALOGUE[self.type].resolve(self.given_parameters())


class KlConfig(Section):
    # `in` is a Python keyword, hence the alias below: the key is `in`, the attribute `where`.
    beta: NonNegativeFloat = Field(default=0.0, description="Weight of the KL to the reference; 0 turns it off.")
    estimator: Literal["k1", "k2", "k3", "k3-unbiased"] = Field(
        default="k3", description="How the KL is estimated; k1 only folded into the reward."
    )
    where: Literal["loss", "reward"] = Field(
        default="loss", alias="in", description="Whether the KL is a term of the loss or is subtracted from the reward."
    )


class LossConfig(Section):
    type: str = Field(
        default="masked", min_length=1, description="Name of the policy loss, or module:function for your own code."
    )
    aggregation: Aggregation | None = Field(
        default=None, description="How token losses become one number; unless given, what the loss calls for."
    )
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Off-policy correction of the losses that have one."
    )
    kl: KlConfig = Field(default_factory=KlConfig, description="KL term of grpo, reinforce and importance_sampling.")
    ratio_log_cap: PositiveFloat = Field(
        default=20.0, le=20.0, description="The log of the policy's ratio is clamped to ± this."
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of a module:function loss; refused with a built-in one."
    )

    clip_low: NonNegativeFloat | None = Field(default=None, description="Ratios below 1 - clip_low are clipped.")
    clip_high: NonNegativeFloat | None = Field(default=None, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Bound on the loss of tokens with a negative advantage."
    )
    ratio_low: NonNegativeFloat | None = Field(default=None, description="Absolute lower bound of the ratio.")
    ratio_high: PositiveFloat | None = Field(default=None, description="Absolute upper bound of the ratio.")
    ratio: Literal["on", "none"] | None = Field(
        default=None, description="Whether reinforce weighs by the sampler ratio."
    )
    quad_beta: NonNegativeFloat | None = Field(default=None, description="Weight of dro's quadratic term.")
    cap: PositiveFloat | None = Field(
        default=None, description="Tokens whose decoupled weight exceeds this get weight 0."
    )
    tau_pos: PositiveFloat | None = Field(default=None, description="sapo's temperature for positive advantages.")
    tau_neg: PositiveFloat | None = Field(default=None, description="sapo's temperature for negative advantages.")
    mask_low: NonNegativeFloat | None = Field(
        default=None, description="dppo drops a token whose probability fell by more."
    )
    mask_high: NonNegativeFloat | None = Field(
        default=None, description="dppo drops a token whose probability rose by more."
    )
    kl_tau: NonNegativeFloat | None = Field(
        default=None, description="Weight of the penalty on drift from the sampler."
    )
    adv_tau: NonNegativeFloat | None = Field(default=None, description="Scale of the advantage in the masked loss.")
    ratio_type: Literal["token", "sequence"] | None = Field(
        default=None, description="Whether the masked loss weighs by token ratios or by the ratio of the sequence."
    )
    token_mask_low: NonNegativeFloat | None = Field(
        default=None, description="A token whose ratio is below is dropped."
    )
    token_mask_high: PositiveFloat | None = Field(default=None, description="A token whose ratio is above is dropped.")
    geo_mask_low: NonNegativeFloat | None = Field(
        default=None, description="A rollout whose geometric mean ratio is below is dropped."
    )
    geo_mask_high: PositiveFloat | None = Field(
        default=None, description="A rollout whose geometric mean ratio is above is dropped."
    )
    sequence_mask_low: NonNegativeFloat | None = Field(
        default=None, description="A rollout with a token ratio below is dropped."
    )
    sequence_mask_high: PositiveFloat | None = Field(
        default=None, description="A rollout with a token ratio above is dropped."
    )
    sequence_clip_high: PositiveFloat | None = Field(
        default=None, description="Upper bound of the weight with ratio_type sequence."
    )

    @property
    def custom(self) -> bool:
        return ":" in self.type

    def given_parameters(self) -> dict[str, Any]:
        """The loss parameters the user set, in the order of the schema."""
        return {name: getattr(self, name) for name in LOSS_PARAMETERS if getattr(self, name) is not None}

    def resolved_loss_parameters(self) -> dict[str, Any]:
        """The chosen loss's own parameters, defaults filled in; for user code, `args` as it was given."""
        if self.custom:
            return dict(self.args)
        return LOSS_CATALOGUE[self.type].resolve(self.given_parameters())


_COMMON_KEYS = {"type", "aggregation", "correction", "kl", "ratio_log_cap", "args"}
LOSS_PARAMETERS: tuple[str, ...] = tuple(name for name in LossConfig.model_fields if name not in _COMMON_KEYS)
