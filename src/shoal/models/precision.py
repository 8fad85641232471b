"""Which dtype and device a run uses, and what this machine cannot do, said before any weights are read."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.config.train import TrainConfig
from shoal.errors import HardwareError

if TYPE_CHECKING:
    import torch

SMALL_MODEL_PARAMETERS = 20_000_000
# Our key → how the frozen base is stored; models/formats.py has the formats.
STORED = {"qlora_fp8": "fp8", "qlora_bnb": "nf4", "qlora_fp4": "fp4"}


@dataclass(frozen=True)
class Precision:
    device: torch.device
    dtype: torch.dtype
    notice: str | None = None
    stored: str | None = None  # the format of the frozen base, if it is quantised
    fp8_products: bool = False  # the policy's linear layers compute in FP8


def choose(train: TrainConfig, index: int | None = None) -> Precision:
    """fp32 on a CPU, where bf16 is far slower; bf16 on a GPU. What the machine cannot do is refused.

    `index` is the GPU of this process where several share a machine.
    """
    import torch

    device = "cuda" if train.device != "cpu" and torch.cuda.is_available() else "cpu"
    check_machine(train, device)
    notice = "no GPU here: running on the CPU" if train.device == "auto" and device == "cpu" else None
    stored = next((name for key, name in STORED.items() if getattr(train, key)), None)
    recipe = train.recipe if train.recipe != "auto" else ("bf16" if device == "cuda" else "fp32")
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    where = torch.device(device)
    if device == "cuda" and index is not None:
        _refuse_crowd(index)
        torch.cuda.set_device(index)
        where = torch.device("cuda", index)
    return Precision(where, dtype, notice, stored, recipe == "fp8-hybrid" and stored is None)


def check_machine(train: TrainConfig, device: str) -> None:
    """Refuse what this machine cannot do, where `device` (cuda or cpu) is what train.device comes to."""
    if train.device == "cuda" and device != "cuda":
        raise HardwareError("train.device: cuda was asked for but this machine has no CUDA device; use cpu")
    if train.qlora_bnb:
        _need("bitsandbytes", "bnb", "train.qlora_bnb", "leave it out, or use train.qlora_fp4")
    if train.optimizer == "adamw_8bit":
        _need("bitsandbytes", "bnb", "train.optimizer: adamw_8bit", "use adamw")
    if train.recipe == "fp8-hybrid":
        _refuse_fp8(device)
        if not train.quantised:
            _need("torchao", "fp8", "train.recipe: fp8-hybrid", "use train.recipe=bf16")


def limit_threads(parameters: int) -> None:
    """Small models run on one thread: their operations are shorter than waking a second one takes.

    Called on the device's thread, before it computes anything; OMP_NUM_THREADS, if set, is obeyed instead.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ and parameters < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


def _refuse_crowd(index: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if index >= found:
        raise HardwareError(
            f"process {index} of this machine has no GPU of its own, since there are {found}; start {found} processes "
            "a machine, or set train.device=cpu"
        )


def _need(package: str, extra: str, what: str, instead: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise HardwareError(f"{what} needs the package {package}: pip install 'shoal[{extra}]'; or {instead}")


def _refuse_fp8(kind: str) -> None:
    if kind == "cpu":
        raise HardwareError("train.recipe: fp8-hybrid needs a GPU with FP8 units; on this CPU use train.recipe=fp32")
    import torch

    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        raise HardwareError(
            f"train.recipe: fp8-hybrid needs compute capability 8.9, this GPU has {major}.{minor}; "
            "use train.recipe=bf16"
        )
