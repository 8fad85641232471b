"""Shoal post-trains language models with GRPO. Importing the package loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.grpo_trainer import GRPOConfig, GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("GRPOConfig", "GRPOTrainer"):
        return getattr(importlib.import_module("shoal.grpo_trainer"), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
