"""The user's own loss: any function of LossInputs that returns one number a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.errors import UserCodeError


@dataclass(frozen=True)
class CustomLoss:
    """Wraps `function(inputs) -> [T]`; values at untrained positions are ignored. Takes KL, but no correction."""

    function: Callable[[LossInputs], Tensor]
    name: str = "custom"
    takes_kl: bool = True
    takes_correction: bool = False
    needs_old: bool = False
    default_aggregation: str = "token-mean"

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        loss = self.function(inputs)
        if not isinstance(loss, Tensor) or loss.shape != inputs.loss_mask.shape:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserCodeError(
                f"loss {self.name} returned {got}; it must return one number a token, {len(inputs.loss_mask)}"
            )
        return TokenLoss(inputs.masked(loss))
