"""The policy losses. One class declares parameters, bounds, defaults, documentation and formula of a loss.

A new loss is a class here and an entry in `BUILT_IN`, which configuration, checks and documentation read. Formulas
use tensor methods only, so that reading a configuration does not import torch. In them, `lp`, `old` and `inf` are the
log-probs of a token under the policy, the old policy and the sampler, `rho` = exp(lp - old), `A` is the advantage, `w`
the weight of the correction and `sg` a stop-gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, ValidationInfo, field_validator

from shoal.core.errors import UserCodeError
from shoal.core.section import USER_CODE, NonNegativeFloat, PositiveFloat, UserCode, Variant, one_of
from shoal.core.terms import (
    LOG_RATIO_CAP,
    ClipBounds,
    CorrectionConfig,
    EntropyBonus,
    KLPenalty,
    Metrics,
    NoCorrection,
    clipped_surrogate,
    log_ratio,
    policy_ratio,
)

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.core.loss_inputs import LossInputs

_SEQUENCE_LOG_CAP = 10.0
_VESPO_FLOOR = 1e-8  # smallest sequence ratio, as in TRL


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """A loss before aggregation."""

    loss: Tensor  # [T], 0 where loss_mask is false
    kept: Tensor | None = None  # [T] bool, false on trained tokens that the loss dropped; None = it dropped none
    metrics: Metrics = field(default_factory=dict)


def _above_low(value: float, info: ValidationInfo) -> float:
    """Checks x_high > x_low. A class declares x_low first."""
    low_name = f"{info.field_name}".replace("_high", "_low")
    low = info.data.get(low_name)
    if low is not None and low >= value:
        raise ValueError(f"above {low_name} ({low:g})")
    return value


Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"]
ClipLow = Annotated[float, Field(gt=0, le=1, description="Ratios below 1 - clip_low are clipped.")]
ClipHigh = Annotated[float, Field(gt=0, description="Ratios above 1 + clip_high are clipped.")]
DualClip = Annotated[float, Field(gt=1)]
# Absolute bounds include 1: a policy that equals the sampler is never clipped or dropped.
LowRatio = Annotated[float, Field(ge=0, le=1)]
HighRatio = Annotated[float, Field(ge=1), AfterValidator(_above_low)]


class Loss(Variant):
    """Base class. A subclass adds its parameters as fields and its formula as `__call__`."""

    custom: ClassVar[bool] = False
    takes_kl: ClassVar[bool] = False
    takes_correction: ClassVar[bool] = True
    needs_old: ClassVar[bool] = False  # `recompute_old: auto` computes old_logprobs with a forward pass
    uses_ratio: ClassVar[bool] = True  # ratio_log_cap has an effect
    adds_teacher: ClassVar[bool] = False  # the formula has `teacher_term`; else the teacher changes the advantages
    default_advantage_std: ClassVar[str] = "group"

    type: str = Field(
        default="masked",
        min_length=1,
        description="Name of the policy loss, or module:function for your own code.",
        json_schema_extra={"binding": True},
    )
    aggregation: Aggregation | None = Field(
        default=None, description="How token losses become one number; the default depends on the loss."
    )
    correction: CorrectionConfig = Field(
        default_factory=NoCorrection, description="Off-policy correction if supported."
    )
    kl: KLPenalty = Field(default_factory=KLPenalty, description="KL penalty; as a loss term only if supported.")
    entropy: EntropyBonus = Field(
        default_factory=EntropyBonus, description="Entropy bonus, and a mask that trains uncertain tokens only."
    )
    context_cross_entropy: NonNegativeFloat = Field(
        default=0.0, description="Weight of a cross-entropy on the tokens that an environment adds between turns."
    )
    ratio_log_cap: float = Field(
        default=LOG_RATIO_CAP, gt=0, le=LOG_RATIO_CAP, description="Largest absolute value of the ratio's log."
    )

    @property
    def default_aggregation(self) -> str:
        return "token-mean"

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss itself, apart from the entropy bonus, needs the gradient of `inputs.entropy`."""
        return False

    def resolved(self) -> Self:
        """The same loss with the defaults filled in that depend on other keys."""
        kl = self.kl
        if kl.beta > 0 and kl.where == "reward":
            kl = kl.model_copy(update={"estimator": "k1"})
        return self.model_copy(update={"aggregation": self.aggregation or self.default_aggregation, "kl": kl})

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        """The loss of each token, without KL. `w` is the weight of the correction, [T]; None = 1."""
        raise NotImplementedError


def weigh(loss: Tensor, w: Tensor | None) -> Tensor:
    return loss if w is None else w * loss


def _clipped(inputs: LossInputs, ratio: Tensor, bounds: ClipBounds, w: Tensor | None) -> TokenLoss:
    loss, clipped = clipped_surrogate(ratio, inputs.advantages, bounds)
    return TokenLoss(inputs.masked(weigh(loss, w)), metrics={"policy/clip_frac": inputs.token_metric(clipped)})


class GRPO(Loss):
    """clipped policy gradient, optionally with a KL penalty

    w · max(-rho·A, -clip(rho, 1-clip_low, 1+clip_high)·A); with dual_clip c, at most -c·A where A < 0.
    """

    aliases = ("ppo",)
    takes_kl = True
    type: Literal["grpo"] = "grpo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh | None = Field(default=None, description="Upper clip distance; equals clip_low if unset.")
    dual_clip: DualClip | None = Field(default=None, description="Loss bound for negative advantages.")

    def resolved(self) -> Self:
        high = self.clip_low if self.clip_high is None else self.clip_high
        return super().resolved().model_copy(update={"clip_high": high})

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        high = self.clip_low if self.clip_high is None else self.clip_high
        return _clipped(inputs, policy_ratio(inputs), ClipBounds(self.clip_low, high, self.dual_clip), w)


class ImportanceSampling(Loss):
    """ratio-weighted policy gradient, optionally with bounds on the ratio

    -w · rho · A, or -w · clip(rho, ratio_low, ratio_high) · A. One bound alone leaves the other side open.
    """

    takes_kl = True
    type: Literal["importance_sampling"] = "importance_sampling"
    ratio_low: LowRatio | None = Field(default=None, description="Absolute lower bound of the ratio.")
    ratio_high: HighRatio | None = Field(default=None, description="Absolute upper bound of the ratio.")

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        rho = policy_ratio(inputs)
        if self.ratio_low is None and self.ratio_high is None:
            return TokenLoss(inputs.masked(weigh(-rho * inputs.advantages, w)))
        bounded = rho.clamp(self.ratio_low, self.ratio_high)
        loss = inputs.masked(weigh(-bounded * inputs.advantages, w))
        return TokenLoss(loss, metrics={"policy/clip_frac": inputs.token_metric(bounded != rho)})


class Reinforce(Loss):
    """plain policy gradient, corrected by the stop-gradient ratio to the sampler

    -A · sg[exp(lp - inf)] · lp; `ratio: none` drops the factor.
    """

    takes_kl = True
    takes_correction = False
    type: Literal["reinforce"] = "reinforce"
    ratio: Literal["on", "none"] = Field(default="on", description="Whether to weigh by the ratio to the sampler.")

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        loss = -inputs.advantages * inputs.policy_logprobs
        if self.ratio == "on":
            lp, sampler = inputs.policy_logprobs.detach(), inputs.sampler_logprobs
            loss = loss * log_ratio(lp, sampler, inputs.ratio_log_cap).exp()
        return TokenLoss(inputs.masked(loss))


class DAPO(Loss):
    """clipped policy gradient with a wider upper bound

    w · max(-rho·A, -clip(rho, 1-clip_low, 1+clip_high)·A); with dual_clip c, at most -c·A where A < 0.
    """

    type: Literal["dapo"] = "dapo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28
    dual_clip: DualClip | None = Field(default=None, description="Loss bound for negative advantages.")

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        return _clipped(inputs, policy_ratio(inputs), ClipBounds(self.clip_low, self.clip_high, self.dual_clip), w)


class DRO(Loss):
    """log-prob times advantage, with a quadratic penalty on the distance to the old policy

    -(w · lp · A - ½ · quad_beta · (lp - old)²)
    """

    uses_ratio = False
    type: Literal["dro"] = "dro"
    quad_beta: NonNegativeFloat = Field(default=0.05, description="Weight of the quadratic penalty.")

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        gain = weigh(inputs.policy_logprobs * inputs.advantages, w)
        pull = 0.5 * self.quad_beta * (inputs.policy_logprobs - inputs.old_logprobs).square()
        return TokenLoss(inputs.masked(pull - gain))


class GSPO(Loss):
    """clipping by the geometric mean of the ratios of a sequence

    w · max(-s·A, -clip(s, 1-clip_low, 1+clip_high)·A), s = exp(lp - sg[lp] + sg[sequence mean of lp-old]). The bounds
    are far narrower than bf16 noise, so `old` must come from the trainer, not from the sampler.
    """

    takes_kl = True
    needs_old = True
    type: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4

    @property
    def default_aggregation(self) -> str:
        return "seq-mean-token-mean"

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        lp = inputs.policy_logprobs
        cap = inputs.ratio_log_cap
        mean_gap = inputs.mean_by_sequence(lp.detach() - inputs.old_logprobs).clamp(-cap, cap)
        ratio = (lp - lp.detach() + inputs.spread(mean_gap)).exp()
        return _clipped(inputs, ratio, ClipBounds(self.clip_low, self.clip_high), w)


class CISPO(Loss):
    """policy gradient weighted by a clipped, stop-gradient ratio; no token loses its gradient

    -w · sg[clip(rho, ratio_low, ratio_high)] · lp · A
    """

    takes_kl = True
    type: Literal["cispo"] = "cispo"
    ratio_low: LowRatio = Field(default=0.0, description="Absolute lower bound of the ratio.")
    ratio_high: HighRatio = Field(default=4.0, description="Absolute upper bound of the ratio.")

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        rho = policy_ratio(inputs).detach()
        bounded = rho.clamp(self.ratio_low, self.ratio_high)
        loss = inputs.masked(weigh(-bounded * inputs.policy_logprobs * inputs.advantages, w))
        return TokenLoss(loss, metrics={"policy/clip_frac": inputs.token_metric(bounded != rho)})


class Decoupled(Loss):
    """clipping against the old policy, weighting against the sampler, for stale rollouts

    v · max(-rho·A, -clip(rho, 1-clip_low, 1+clip_high)·A) with v = exp(old - inf), 0 above cap; dual_clip as in DAPO.
    """

    takes_correction = False
    needs_old = True
    type: Literal["decoupled"] = "decoupled"
    clip_low: ClipLow = 0.4
    clip_high: ClipHigh = 0.4
    cap: float = Field(default=5.0, ge=1, description="Tokens with a larger ratio of old to sampler get weight 0.")
    dual_clip: DualClip | None = Field(default=None, description="Loss bound for negative advantages.")

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        behaviour = log_ratio(inputs.old_logprobs, inputs.sampler_logprobs).exp()
        kept = behaviour <= self.cap
        bounds = ClipBounds(self.clip_low, self.clip_high, self.dual_clip)
        surrogate, clipped = clipped_surrogate(policy_ratio(inputs), inputs.advantages, bounds)
        metrics = {
            "policy/clip_frac": inputs.token_metric(clipped),
            "mask/token_frac": inputs.token_metric(~kept),
        }
        return TokenLoss(inputs.masked(behaviour.where(kept, 0.0) * surrogate), kept & inputs.loss_mask, metrics)


class Masked(Loss):
    """ratio-weighted policy gradient that drops tokens and rollouts far from the sampler

    -sg[weight · (adv_tau·A - kl_tau·l)] · lp on kept tokens, l = lp - inf. No clip and no reference. A teacher adds
    tau · (teacher - lp - baseline) to the bracket. Dropped tokens stay in the denominators.
    """

    takes_correction = False
    uses_ratio = False
    adds_teacher = True
    default_advantage_std = "none"
    type: Literal["masked"] = "masked"
    kl_tau: NonNegativeFloat = Field(default=0.0, description="Weight of the penalty on drift from the sampler.")
    adv_tau: NonNegativeFloat = Field(default=1.0, description="Scale of the advantage.")
    ratio_type: Literal["token", "sequence"] = Field(default="token", description="Which ratio weighs a token.")
    token_mask_low: LowRatio = Field(default=0.125, description="A token with a ratio below is dropped.")
    token_mask_high: HighRatio = Field(default=8.0, description="A token with a ratio above is dropped.")
    geo_mask_low: LowRatio = Field(default=0.1, description="A rollout whose geometric mean is below is dropped.")
    geo_mask_high: HighRatio = Field(default=10.0, description="A rollout whose geometric mean is above is dropped.")
    sequence_mask_low: LowRatio = Field(default=0.0, description="A rollout with a token ratio below is dropped.")
    sequence_mask_high: HighRatio = Field(default=100.0, description="A rollout with a token ratio above is dropped.")
    sequence_clip_high: PositiveFloat = Field(default=10.0, description="Largest weight with `ratio_type: sequence`.")

    @field_validator("sequence_clip_high")
    @classmethod
    def _check_ratio_type(cls, value: float, info: ValidationInfo) -> float:
        default = cls.model_fields["sequence_clip_high"].default
        if value != default and info.data.get("ratio_type") == "token":
            raise ValueError("left out unless ratio_type is sequence")
        return value

    @property
    def default_aggregation(self) -> str:
        return "token-mean" if self.ratio_type == "token" else "seq-mean-token-mean"

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        gap = inputs.policy_logprobs.detach() - inputs.sampler_logprobs
        ratio = gap.exp()
        token_dropped = (ratio < self.token_mask_low) | (ratio > self.token_mask_high)
        sequence_dropped = self._drop_sequences(inputs, gap, ratio)
        with_sequence = inputs.spread(sequence_dropped)
        kept = inputs.loss_mask & ~token_dropped & ~with_sequence
        gain = self.adv_tau * inputs.advantages - self.kl_tau * gap
        if inputs.teacher_term is not None:
            gain = gain + inputs.teacher_term
        coefficient = self._weight(inputs, gap, ratio) * gain
        # The coefficient of a dropped token may be infinite. Setting it to 0 before the product avoids NaN in backward.
        coefficient = coefficient.where(kept, 0.0)
        metrics = {
            "mask/token_frac": inputs.token_metric(token_dropped & ~with_sequence),
            "mask/sequence_frac": inputs.token_metric(with_sequence),
            "masked": inputs.token_metric(~kept),
        }
        return TokenLoss(-coefficient * inputs.policy_logprobs, kept, metrics)

    def _drop_sequences(self, inputs: LossInputs, gap: Tensor, ratio: Tensor) -> Tensor:  # [S] bool
        geometric = inputs.mean_by_sequence(gap).exp()
        return (
            (geometric < self.geo_mask_low)
            | (geometric > self.geo_mask_high)
            | (inputs.min_by_sequence(ratio) < self.sequence_mask_low)
            | (inputs.max_by_sequence(ratio) > self.sequence_mask_high)
        )

    def _weight(self, inputs: LossInputs, gap: Tensor, ratio: Tensor) -> Tensor:  # [T]
        if self.ratio_type == "token":
            return ratio
        product = inputs.sum_by_sequence(gap).clamp_max(_SEQUENCE_LOG_CAP).exp()
        return inputs.spread(product.clamp_max(self.sequence_clip_high))


class DPPO(Loss):
    """drops tokens whose probability moved too far from the sampler's, with a quadratic penalty on drift

    -keep · A · exp(lp - inf) + kl_tau · (lp - inf)². The criterion is the change of probability, not the ratio, so that
    noise on rare tokens drops none.
    """

    takes_correction = False
    type: Literal["dppo"] = "dppo"
    mask_low: float = Field(default=0.2, ge=0, le=1, description="A token whose probability fell by more is dropped.")
    mask_high: float = Field(default=0.2, ge=0, le=1, description="A token whose probability rose by more is dropped.")
    kl_tau: NonNegativeFloat = Field(default=1e-3, description="Weight of the penalty on drift from the sampler.")

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        lp, sampler = inputs.policy_logprobs, inputs.sampler_logprobs
        moved = lp.detach().exp() - sampler.exp()
        too_far = (moved > self.mask_high).where(inputs.advantages > 0, moved < -self.mask_low)
        gain = inputs.advantages.where(~too_far, 0.0) * log_ratio(lp, sampler, inputs.ratio_log_cap).exp()
        pull = self.kl_tau * (lp - sampler).square()
        kept = inputs.loss_mask & ~too_far
        return TokenLoss(inputs.masked(pull - gain), kept, {"mask/token_frac": inputs.token_metric(too_far)})


class SAPO(Loss):
    """a sigmoid gate instead of a clip: the gradient fades as the ratio leaves 1

    -w · (4/t) · sigmoid(t · (rho - 1)) · A, t = tau_pos where A > 0, else tau_neg.
    """

    takes_kl = True
    type: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = Field(default=1.0, description="Temperature for positive advantages.")
    tau_neg: PositiveFloat = Field(default=1.05, description="Temperature for the other advantages.")

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        advantages = inputs.advantages
        # A tensor of the right dtype: where() with two numbers would round them to float32.
        tau = advantages.new_full(advantages.shape, self.tau_pos).where(advantages > 0, self.tau_neg)
        gate = (4 / tau) * (tau * (policy_ratio(inputs) - 1)).sigmoid()
        return TokenLoss(inputs.masked(weigh(-gate * advantages, w)))


class VESPO(Loss):
    """a smooth weight of the whole sequence's ratio instead of a clip

    -sg[W^k · exp(rate·(1 - W))] · A · lp, W = exp(Σ of lp-old over the sequence); k and rate by the sign of A. A
    correction multiplies W by the product of its weights over the sequence.
    """

    takes_kl = True
    needs_old = True
    type: Literal["vespo"] = "vespo"
    k_pos: NonNegativeFloat = Field(default=2.0, description="Exponent of the ratio where A >= 0.")
    rate_pos: PositiveFloat = Field(default=3.0, description="Decay rate where A >= 0.")
    k_neg: NonNegativeFloat = Field(default=3.0, description="Exponent of the ratio where A < 0.")
    rate_neg: PositiveFloat = Field(default=2.0, description="Decay rate where A < 0.")

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        lp, cap, advantages = inputs.policy_logprobs, inputs.ratio_log_cap, inputs.advantages
        product = inputs.sum_by_sequence(log_ratio(lp.detach(), inputs.old_logprobs, cap))
        if w is not None:
            product = product + inputs.sum_by_sequence(w.clamp_min(_VESPO_FLOOR).log())
        log_w = inputs.spread(product.clamp(math.log(_VESPO_FLOOR), cap))
        # Tensors of the right dtype: where() with two numbers would round them to float32.
        k = advantages.new_full(advantages.shape, self.k_pos).where(advantages >= 0, self.k_neg)
        rate = advantages.new_full(advantages.shape, self.rate_pos).where(advantages >= 0, self.rate_neg)
        gate = (k * log_w + rate * (1 - log_w.exp())).exp()
        return TokenLoss(inputs.masked(-gate * advantages * lp), metrics={"policy/gate": inputs.token_metric(gate)})


class CustomLoss(Loss):
    """a function written by the user, from LossInputs to one number per token, [T]

    Values at untrained positions are ignored. A KL penalty is possible, a correction is not.
    """

    custom = True
    takes_kl = True
    takes_correction = False
    type: UserCode = Field(...)
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    _function: Callable[..., Any] | None = PrivateAttr(default=None)

    @classmethod
    def choice(cls) -> str:
        return USER_CODE

    def with_function(self, function: Callable[..., Any]) -> Self:
        """The same loss, with the function that `type` names."""
        loss = self.model_copy()
        loss._function = function
        return loss

    @property
    def needs_entropy_gradient(self) -> bool:
        return bool(getattr(self._function, "needs_entropy_gradient", False))

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        if self._function is None:
            raise ValueError(f"loss {self.type} has no function yet; call with_function first")
        loss = self._function(inputs, **self.args)
        if not isinstance(loss, type(inputs.loss_mask)) or loss.shape != inputs.loss_mask.shape:
            got = tuple(getattr(loss, "shape", ())) or type(loss).__name__
            raise UserCodeError(
                f"loss {self.type} returned {got}; it must return one number per token, {len(inputs.loss_mask)}"
            )
        return TokenLoss(inputs.masked(loss))


BUILT_IN: tuple[type[Loss], ...] = (
    GRPO, ImportanceSampling, Reinforce, DAPO, DRO, GSPO, CISPO, Decoupled, Masked, DPPO, VESPO,
    SAPO,
)  # fmt: skip
LOSSES: dict[str, type[Loss]] = {loss.choice(): loss for loss in BUILT_IN}
LOSSES.update({alias: loss for loss in BUILT_IN for alias in loss.aliases})
if TYPE_CHECKING:
    LossConfig = Loss
else:
    LossConfig = one_of((*BUILT_IN, CustomLoss))


def default_loss() -> Loss:
    """The loss of a run that does not configure one."""
    return LOSSES[Loss.choice()]()


def keeps_uniform(mean: str, std: str) -> bool:
    """Whether zero-variance groups are trained. Only batch statistics need them, and a group std would divide by eps.

    `mean` and `std` are those of the advantages. Declared here, not in advantages.py, which imports NumPy: the check of
    a configuration needs it.
    """
    return "batch" in (mean, std) and std != "group"
