"""The terms losses are made of: ratios, the clipped surrogate, corrections for the sampler, KL to the reference.

Called by the losses and the objective. Knows nothing of aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from shoal.algorithms.inputs import LOG_RATIO_CAP, LossInputs, Metrics
from shoal.config.catalogue import CORRECTION_CATALOGUE, KL_PLACES


def log_ratio(numerator: Tensor, denominator: Tensor, cap: float = LOG_RATIO_CAP) -> Tensor:
    """Log of a probability ratio, clamped so that its exponential is finite."""
    return (numerator - denominator).clamp(-cap, cap)


def policy_ratio(inputs: LossInputs) -> Tensor:
    """rho: the policy over the policy at the start of this batch of updates."""
    return log_ratio(inputs.policy_logprobs, inputs.old_logprobs, inputs.ratio_log_cap).exp()


@dataclass(frozen=True)
class ClipBounds:
    """How far a ratio may move before its token stops pulling. `dual` bounds the loss of negative advantages."""

    low: float
    high: float
    dual: float | None = None


def clipped_surrogate(ratio: Tensor, advantages: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    """The pessimistic of the clipped and the unclipped loss, and where a bound took the gradient away."""
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - bounds.low, 1 + bounds.high) * advantages
    loss = torch.maximum(plain, clipped)
    active = clipped > plain
    if bounds.dual is not None:
        ceiling = -bounds.dual * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        active = active | capped
    return loss, active.detach()


class Correction(Protocol):
    """A weight for the gap between the old policy and the sampler."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:  # w [T], without gradient
        ...


def _refuse(kind: str, given: dict[str, float | str | None]) -> None:
    problems = CORRECTION_CATALOGUE[kind].problems(given)
    if problems:
        raise ValueError("; ".join(f"{kind}: {name} {reason}" for name, reason in problems.items()))


def _report(inputs: LossInputs, raw: Tensor, weight: Tensor) -> Metrics:
    return {
        "correction/weight_mean": inputs.token_metric(raw),
        "correction/capped_mean": inputs.token_metric(weight),
        "correction/capped_frac": inputs.token_metric(raw != weight),
    }


@dataclass(frozen=True)
class TruncatedImportance:
    """`tis`: old over sampler, capped. The sequence level is a geometric mean, which does not collapse with length."""

    cap: float = 5.0
    level: Literal["token", "sequence"] = "token"
    name: ClassVar[str] = "tis"

    def __post_init__(self) -> None:
        _refuse(self.name, {"cap": self.cap, "level": self.level})

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        gap = inputs.old_logprobs - inputs.sampler_logprobs
        if self.level == "sequence":
            gap = inputs.spread(inputs.mean_by_sequence(gap))
        raw = gap.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
        weight = raw.clamp_max(self.cap)
        return weight, _report(inputs, raw, weight)


@dataclass(frozen=True)
class IcePop:
    """`icepop`: old over sampler inside [floor, cap]; a token outside is not trained but stays in the denominator."""

    floor: float = 0.5
    cap: float = 5.0
    name: ClassVar[str] = "icepop"

    def __post_init__(self) -> None:
        _refuse(self.name, {"floor": self.floor, "cap": self.cap})

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        raw = log_ratio(inputs.old_logprobs, inputs.sampler_logprobs).exp()
        weight = torch.where((raw >= self.floor) & (raw <= self.cap), raw, 0.0)
        return weight, _report(inputs, raw, weight)


CORRECTIONS: dict[str, type[TruncatedImportance] | type[IcePop]] = {"tis": TruncatedImportance, "icepop": IcePop}


def kl_estimate(estimator: str, inputs: LossInputs) -> Tensor:
    """KL from the policy to the reference at each token, [T], with gradient."""
    if inputs.reference_logprobs is None:
        raise ValueError("KL to the reference needs reference_logprobs, and the row has none")
    d = log_ratio(inputs.policy_logprobs, inputs.reference_logprobs)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    k3 = torch.expm1(-d) + d
    if estimator == "k3":
        return k3
    if estimator == "k3-unbiased":
        return policy_ratio(inputs) * k3
    raise ValueError(f"unknown KL estimator {estimator!r}")


@dataclass(frozen=True)
class KLPenalty:
    """beta · KL, added to the loss of each token."""

    beta: float
    estimator: str = "k3"

    def __post_init__(self) -> None:
        if not 0 <= self.beta < float("inf"):
            raise ValueError(f"kl.beta must be a finite number >= 0, not {self.beta}")
        if self.estimator not in KL_PLACES["loss"]:
            raise ValueError(
                f"kl.estimator in the loss must be one of {', '.join(KL_PLACES['loss'])}, not {self.estimator}"
            )

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        kl = kl_estimate(self.estimator, inputs)
        return self.beta * kl, {"policy/kl_ref": inputs.token_metric(kl)}


def mismatch(inputs: LossInputs) -> Metrics:
    """How far the trainer's log-probs are from the sampler's for the same weights; empty where that cannot be told."""
    if inputs.mismatch_from == "none":
        return {}
    ours = inputs.old_logprobs if inputs.mismatch_from == "old" else inputs.policy_logprobs.detach()
    gap = log_ratio(ours, inputs.sampler_logprobs)
    return {
        "mismatch/k3": inputs.token_metric(torch.expm1(gap) - gap),
        "mismatch/ratio_mean": inputs.token_metric(gap.exp()),
    }
