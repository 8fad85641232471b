"""What every policy loss has in common. What may be combined with a loss is read from the catalogue."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, ClassVar

from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.config.catalogue import LOSS_CATALOGUE, LossSpec


class PolicyLoss:
    """A frozen dataclass whose fields are the loss's parameters; calling it gives the loss of each token."""

    name: ClassVar[str]
    spec: ClassVar[LossSpec]
    takes_kl: ClassVar[bool]
    takes_correction: ClassVar[bool]
    needs_old: ClassVar[bool]  # meaningless or unstable with the sampler's log-probs in place of the old policy's

    def __init_subclass__(cls) -> None:
        cls.spec = LOSS_CATALOGUE[cls.name]
        cls.takes_kl = cls.spec.takes_kl
        cls.takes_correction = cls.spec.takes_correction
        cls.needs_old = cls.spec.needs_old

    def __post_init__(self) -> None:
        problems = self.spec.problems(self._set_parameters())
        if problems:
            raise ValueError("; ".join(f"{self.name}: {name} {reason}" for name, reason in problems.items()))

    @property
    def default_aggregation(self) -> str:
        return self.spec.aggregation(self._set_parameters())

    def _set_parameters(self) -> dict[str, Any]:
        """Parameters that differ from their default, by name."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, (value, default) in values.items() if default is MISSING or value != default}

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        """The loss of each token. `w` is the correction's weight, [T]; None is 1."""
        raise NotImplementedError


def weigh(loss: Tensor, w: Tensor | None) -> Tensor:
    return loss if w is None else w * loss
