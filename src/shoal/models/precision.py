"""Choose the dtype and device of a run. Settings that this machine cannot run are rejected before loading weights."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.config.train import TrainConfig
from shoal.core.errors import HardwareError

if TYPE_CHECKING:
    import torch

SMALL_MODEL_PARAMETERS = 20_000_000
# Config key → storage format of the frozen base (models/quantize.py).
STORED = {"qlora_fp8": "fp8", "qlora_bnb": "nf4", "qlora_fp4": "fp4"}


@dataclass(frozen=True)
class Precision:
    device: torch.device
    dtype: torch.dtype
    notice: str | None = None
    stored: str | None = None  # storage format of a quantised frozen base
    fp8_products: bool = False  # the policy's linear layers compute in FP8


def choose(train: TrainConfig, index: int | None = None) -> Precision:
    """fp32 on a CPU, where bf16 is far slower; bf16 on a GPU. Raises HardwareError for unsupported settings.

    `index` is the GPU of this process if several processes share a machine.
    """
    import torch

    device = "cuda" if train.device != "cpu" and torch.cuda.is_available() else "cpu"
    check_machine(train, device)
    notice = "no GPU found, running on the CPU" if train.device == "auto" and device == "cpu" else None
    stored = next((name for key, name in STORED.items() if getattr(train, key)), None)
    recipe = train.recipe if train.recipe != "auto" else ("bf16" if device == "cuda" else "fp32")
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    where = torch.device(device)
    if device == "cuda" and index is not None:
        _check_device_count(index)
        torch.cuda.set_device(index)
        where = torch.device("cuda", index)
    return Precision(where, dtype, notice, stored, recipe == "fp8-hybrid" and stored is None)


def check_machine(train: TrainConfig, device: str) -> None:
    """Raise HardwareError for settings that `device` (cuda or cpu) does not support."""
    if train.device == "cuda" and device != "cuda":
        raise HardwareError("train.device: cuda is not available on this machine; use cpu")
    if train.qlora_bnb:
        _need("bitsandbytes", "bnb", "train.qlora_bnb", "leave it out, or use train.qlora_fp4")
    if train.optimizer == "adamw_8bit":
        _need("bitsandbytes", "bnb", "train.optimizer: adamw_8bit", "use adamw")
    if train.recipe == "fp8-hybrid":
        _refuse_fp8(device)
        if not train.quantised:
            _need("torchao", "fp8", "train.recipe: fp8-hybrid", "use train.recipe=bf16")


def limit_threads(parameters: int) -> None:
    """Run small models on one thread: their operations take less time than waking a second one.

    Called on the device thread before any computation. OMP_NUM_THREADS takes precedence.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ and parameters < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


def _check_device_count(index: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if index >= found:
        raise HardwareError(
            f"process {index} has no GPU: this machine has {found}; start {found} processes per machine, "
            "or set train.device=cpu"
        )


def _need(package: str, extra: str, what: str, instead: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise HardwareError(f"{what} requires the package {package}: pip install 'shoal[{extra}]'; or {instead}")


def _refuse_fp8(kind: str) -> None:
    if kind == "cpu":
        raise HardwareError("train.recipe: fp8-hybrid requires a GPU with FP8 support; on a CPU use train.recipe=fp32")
    import torch

    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        raise HardwareError(
            f"train.recipe: fp8-hybrid requires compute capability 8.9, this GPU has {major}.{minor}; "
            "use train.recipe=bf16"
        )
