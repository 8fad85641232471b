"""The policy losses by name, one formula a file. Importing this loads torch; `shoal.config.catalogue` does not."""

from __future__ import annotations

from shoal.algorithms.losses.base import PolicyLoss
from shoal.algorithms.losses.cispo import CISPO
from shoal.algorithms.losses.custom import CustomLoss
from shoal.algorithms.losses.dapo import DAPO
from shoal.algorithms.losses.decoupled import Decoupled
from shoal.algorithms.losses.dppo import DPPO
from shoal.algorithms.losses.dro import DRO
from shoal.algorithms.losses.grpo import GRPO
from shoal.algorithms.losses.gspo import GSPO
from shoal.algorithms.losses.importance_sampling import ImportanceSampling
from shoal.algorithms.losses.masked import Masked
from shoal.algorithms.losses.reinforce import Reinforce
from shoal.algorithms.losses.sapo import SAPO
from shoal.config.catalogue import LOSS_ALIASES

_CLASSES: tuple[type[PolicyLoss], ...] = (
    GRPO, ImportanceSampling, Reinforce, DAPO, DRO, GSPO, CISPO, Decoupled, Masked, DPPO, SAPO,
)  # fmt: skip

LOSSES: dict[str, type[PolicyLoss]] = {cls.name: cls for cls in _CLASSES}
LOSSES.update({alias: LOSSES[name] for alias, name in LOSS_ALIASES.items()})

__all__ = ["LOSSES", "CustomLoss", "PolicyLoss"]
