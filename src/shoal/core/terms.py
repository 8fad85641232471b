"""Terms of the losses: ratios, the clipped surrogate, corrections for the sampler, and the KL to the reference.

Corrections and the KL are sections of `train.loss`. The configuration imports them, so formulas use tensor methods only
and this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from shoal.core.section import NonNegativeFloat, PositiveFloat, Section, Variant, one_of

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.core.loss_inputs import LossInputs

Metrics = dict[str, tuple["Tensor", "Tensor"]]
LOG_RATIO_CAP = 20.0  # exp(20) = 4.9e8, far from overflow


def log_ratio(numerator: Tensor, denominator: Tensor, cap: float = LOG_RATIO_CAP) -> Tensor:
    """Logarithm of a probability ratio, clamped so that its exponential is finite."""
    return (numerator - denominator).clamp(-cap, cap)


def policy_ratio(inputs: LossInputs) -> Tensor:
    """rho: the current policy over the old policy."""
    return log_ratio(inputs.policy_logprobs, inputs.old_logprobs, inputs.ratio_log_cap).exp()


@dataclass(frozen=True)
class ClipBounds:
    """A ratio outside [1 - low, 1 + high] has no gradient. `dual` bounds the loss of negative advantages."""

    low: float
    high: float
    dual: float | None = None


def clipped_surrogate(ratio: Tensor, advantages: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    """The larger of the clipped and the unclipped loss, and where a bound removed the gradient."""
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - bounds.low, 1 + bounds.high) * advantages
    loss = plain.maximum(clipped)
    active = clipped > plain
    if bounds.dual is not None:
        ceiling = -bounds.dual * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss = ceiling.where(capped, loss)
        active = active | capped
    return loss, active.detach()


class Correction(Variant):
    """A token weight that corrects for the mismatch between the old policy and the sampler."""

    type: str = Field(default="none", description="Weight against the mismatch between sampler and trainer.")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor | None, Metrics]:
        """The weight w of each token, [T], without gradient (None = 1), and metrics."""
        raise NotImplementedError


def _report(inputs: LossInputs, raw: Tensor, weight: Tensor) -> Metrics:
    return {
        "correction/weight_mean": inputs.token_metric(raw),
        "correction/capped_mean": inputs.token_metric(weight),
        "correction/capped_frac": inputs.token_metric(raw != weight),
    }


class NoCorrection(Correction):
    """no correction: w = 1"""

    type: Literal["none"] = "none"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor | None, Metrics]:
        return None, {}


class TruncatedImportance(Correction):
    """the ratio of old policy to sampler, capped from above

    The sequence level is a geometric mean, which does not collapse with length.
    """

    type: Literal["tis"] = "tis"
    cap: float = Field(default=5.0, gt=0, description="Upper bound of the weight.")
    level: Literal["token", "sequence"] = Field(
        default="token", description="One weight per token, or the geometric mean over the sequence."
    )

    def __call__(self, inputs: LossInputs) -> tuple[Tensor | None, Metrics]:
        gap = inputs.old_logprobs - inputs.sampler_logprobs
        if self.level == "sequence":
            gap = inputs.spread(inputs.mean_by_sequence(gap))
        raw = gap.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
        weight = raw.clamp_max(self.cap)
        return weight, _report(inputs, raw, weight)


class IcePop(Correction):
    """the ratio of old policy to sampler inside [floor, cap], zero outside

    A token outside is not trained but stays in the denominator.
    """

    type: Literal["icepop"] = "icepop"
    cap: float = Field(default=5.0, ge=1, description="Tokens whose weight is above get weight 0.")
    floor: float = Field(default=0.5, ge=0, le=1, description="Tokens whose weight is below get weight 0.")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor | None, Metrics]:
        raw = log_ratio(inputs.old_logprobs, inputs.sampler_logprobs).exp()
        weight = raw.where((raw >= self.floor) & (raw <= self.cap), 0.0)
        return weight, _report(inputs, raw, weight)


class EntropyBonus(Section):
    """- coef · entropy, added to the loss of each token, and a mask that leaves out the policy loss of certain tokens.

    With `target` the coefficient is adapted: after each step it rises by `delta` if the mean entropy was at most the
    target, else it falls by `delta`, and the bonus is applied only after a step whose entropy was at most the target.
    With `gain` the weight also follows the entropy that the last two steps predict for the next one.
    """

    coef: NonNegativeFloat = Field(
        default=0.0, description="Weight of the entropy bonus; with `target`, its first value. 0 turns it off."
    )
    target: NonNegativeFloat | None = Field(
        default=None, description="Adapt the weight so that the mean entropy stays above this, in nats."
    )
    delta: PositiveFloat = Field(default=0.005, description="With `target`: change of the weight per step.")
    gain: NonNegativeFloat = Field(
        default=0.0,
        description="With `target`: weight added for each nat that the predicted entropy is below the target.",
    )
    coef_min: NonNegativeFloat = Field(
        default=0.0, description="With `target`: smallest weight, before the `gain` term is added."
    )
    coef_max: PositiveFloat = Field(default=1.0, description="With `target`: largest weight.")
    top_fraction: float = Field(
        default=1.0, gt=0, le=1, description="Share of tokens, by entropy, that the policy loss covers. 1 = all tokens."
    )

    @property
    def on(self) -> bool:
        return self.coef > 0 or self.target is not None


CORRECTIONS = (NoCorrection, TruncatedImportance, IcePop)
if TYPE_CHECKING:
    CorrectionConfig = Correction
else:
    CorrectionConfig = one_of(CORRECTIONS)


class KLPenalty(Section):
    """beta · KL to the reference, added to the loss of each token or subtracted from the reward."""

    # `in` is a Python keyword, hence the alias: the key is `in`, the attribute `where`.
    beta: NonNegativeFloat = Field(default=0.0, description="Weight of the KL to the reference; 0 turns it off.")
    estimator: Literal["k1", "k2", "k3", "k3-unbiased"] = Field(
        default="k3", description="How the KL is estimated; k1 is only for `in: reward`."
    )
    where: Literal["loss", "reward"] = Field(
        default="loss", alias="in", description="Whether the KL is a term of the loss or is subtracted from the reward."
    )

    @property
    def in_loss(self) -> bool:
        return self.beta > 0 and self.where == "loss"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        kl = kl_estimate(self.estimator, inputs)
        return self.beta * kl, {"policy/kl_ref": inputs.token_metric(kl)}


def kl_estimate(estimator: str, inputs: LossInputs) -> Tensor:
    """KL from the policy to the reference at each token, [T], with gradient."""
    if inputs.reference_logprobs is None:
        raise ValueError("KL to the reference needs reference_logprobs, and the row has none")
    d = log_ratio(inputs.policy_logprobs, inputs.reference_logprobs)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    k3 = (-d).expm1() + d
    if estimator == "k3":
        return k3
    if estimator == "k3-unbiased":
        return policy_ratio(inputs) * k3
    raise ValueError(f"unknown KL estimator {estimator!r}")


def mismatch(inputs: LossInputs) -> Metrics:
    """Metrics of the difference between trainer and sampler log-probs for the same weights; empty if unknown."""
    if inputs.mismatch_from == "none":
        return {}
    ours = inputs.old_logprobs if inputs.mismatch_from == "old" else inputs.policy_logprobs.detach()
    gap = log_ratio(ours, inputs.sampler_logprobs)
    return {
        "mismatch/k3": inputs.token_metric(gap.expm1() - gap),
        "mismatch/ratio_mean": inputs.token_metric(gap.exp()),
    }
