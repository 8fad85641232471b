"""The losses of `shoal dpo`. One class declares parameters, bounds, defaults, documentation and formula of a loss.

Formulas use tensor methods only, so that reading a configuration does not import torch. trainer/supervised.py calls
them. In them, `c` and `r` are the sums of policy_logprobs - reference_logprobs over the tokens of the chosen and of the
rejected completion, and `m` = beta · (c - r) is the reward margin of the pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shoal.core.section import NonNegativeFloat, PositiveFloat, Variant, one_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PairRatios:
    """Log-ratios of policy and reference for P pairs, summed over the tokens of each completion."""

    chosen: Tensor  # [P]
    rejected: Tensor  # [P]
    chosen_tokens: Tensor  # [P], length of the completion with its end token
    rejected_tokens: Tensor  # [P]


def _negative_log_sigmoid(values: Tensor) -> Tensor:
    return values.new_zeros(()).logaddexp(-values)  # log(1 + exp(-x)) without overflow, also in the gradient


class PreferenceLoss(Variant):
    """Base class. A subclass adds its parameters as fields and its formula as `__call__`."""

    type: str = Field(
        default="sigmoid", min_length=1, description="Name of the preference loss.", json_schema_extra={"binding": True}
    )
    beta: PositiveFloat = Field(
        default=0.1, description="Strength of the reference: a higher value keeps the policy closer to it."
    )
    sft_weight: NonNegativeFloat = Field(
        default=0.0, description="Weight of the mean cross-entropy of the chosen tokens, which is added to the loss."
    )

    def margin(self, pairs: PairRatios) -> Tensor:
        return self.beta * (pairs.chosen - pairs.rejected)

    def __call__(self, pairs: PairRatios) -> Tensor:
        """The loss of each pair, [P]."""
        raise NotImplementedError


class SigmoidLoss(PreferenceLoss):
    """DPO; with label_smoothing, conservative DPO (cDPO)

    -(1 - e)·log sigmoid(m) - e·log sigmoid(-m), where e is label_smoothing.
    """

    type: Literal["sigmoid"] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="Assumed share of pairs with swapped labels."
    )

    def __call__(self, pairs: PairRatios) -> Tensor:
        margin, swapped = self.margin(pairs), self.label_smoothing
        return (1 - swapped) * _negative_log_sigmoid(margin) + swapped * _negative_log_sigmoid(-margin)


class RobustLoss(PreferenceLoss):
    """robust DPO: an unbiased estimate of the DPO loss if a known share of the labels is swapped

    (-(1 - e)·log sigmoid(m) + e·log sigmoid(-m)) / (1 - 2e), where e is label_smoothing.
    """

    type: Literal["robust"] = "robust"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.1, description="Share of pairs with swapped labels."
    )

    def __call__(self, pairs: PairRatios) -> Tensor:
        margin, swapped = self.margin(pairs), self.label_smoothing
        loss = (1 - swapped) * _negative_log_sigmoid(margin) - swapped * _negative_log_sigmoid(-margin)
        return loss / (1 - 2 * swapped)


class HingeLoss(PreferenceLoss):
    """hinge loss on the margin (SLiC)

    max(0, 1 - m).
    """

    type: Literal["hinge"] = "hinge"

    def __call__(self, pairs: PairRatios) -> Tensor:
        return (1 - self.margin(pairs)).clamp_min(0)


class IPOLoss(PreferenceLoss):
    """IPO: the difference of the mean log-ratios per token has a target, so it cannot grow without limit

    (c/n_c - r/n_r - 1/(2·beta))², where n_c and n_r are the numbers of tokens.
    """

    type: Literal["ipo"] = "ipo"

    def __call__(self, pairs: PairRatios) -> Tensor:
        difference = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
        return (difference - 1 / (2 * self.beta)) ** 2


PREFERENCE_LOSSES: tuple[type[PreferenceLoss], ...] = (SigmoidLoss, RobustLoss, HingeLoss, IPOLoss)
if TYPE_CHECKING:
    PreferenceLossConfig = PreferenceLoss
else:
    PreferenceLossConfig = one_of(PREFERENCE_LOSSES)
