"""Shoal post-trains language models with GRPO. Importing the package loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.grpo_trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "GRPOTrainer":
        return importlib.import_module("shoal.grpo_trainer").GRPOTrainer
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
