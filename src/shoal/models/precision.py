"""Which dtype and device a run uses, and what this machine cannot do, said before any weights are read."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from shoal.config.train import TrainConfig
from shoal.errors import HardwareError

SMALL_MODEL_PARAMETERS = 20_000_000


@dataclass(frozen=True)
class Precision:
    device: torch.device
    dtype: torch.dtype
    notice: str | None = None


def choose(train: TrainConfig, index: int | None = None) -> Precision:
    """fp32 on a CPU, where bf16 is far slower; bf16 on a GPU. What the machine cannot do is refused.

    `index` is the GPU of this process where several share a machine.
    """
    device, notice = train.device, None
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            notice = "no GPU here: running on the CPU"
    if device == "cuda" and not torch.cuda.is_available():
        raise HardwareError("train.device: cuda was asked for but this machine has no CUDA device; use cpu")
    recipe = train.recipe if train.recipe != "auto" else ("bf16" if device == "cuda" else "fp32")
    if recipe == "fp8-hybrid":
        _refuse_fp8(device)
    _refuse_unavailable(train)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe]
    if device == "cuda" and index is not None:
        torch.cuda.set_device(index)
        return Precision(torch.device("cuda", index), dtype, notice)
    return Precision(torch.device(device), dtype, notice)


def limit_threads(parameters: int) -> None:
    """Small models run on one thread: their operations are shorter than waking a second one takes.

    Called on the device's thread, before it computes anything; OMP_NUM_THREADS, if set, is obeyed instead.
    """
    if "OMP_NUM_THREADS" not in os.environ and parameters < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


def _refuse_unavailable(train: TrainConfig) -> None:
    for name in ("qlora_fp8", "qlora_bnb", "qlora_fp4"):
        if getattr(train, name):
            raise HardwareError(f"train.{name}: quantised bases are not available in this version; leave it out")
    if train.optimizer == "adamw_8bit":
        raise HardwareError("train.optimizer: adamw_8bit is not available in this version; use adamw")
    if train.gpus > 1 or (train.gpus == 0 and torch.cuda.device_count() > 1):
        raise HardwareError("train.gpus: several devices are not available in this version; use train.gpus=1")


def _refuse_fp8(kind: str) -> None:
    if kind == "cpu":
        raise HardwareError("train.recipe: fp8-hybrid needs a GPU with FP8 units; on this CPU use train.recipe=fp32")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        raise HardwareError(
            f"train.recipe: fp8-hybrid needs compute capability 8.9, this GPU has {major}.{minor}; use bf16"
        )
    raise HardwareError("train.recipe: fp8-hybrid is not available in this version; use train.recipe=bf16")
