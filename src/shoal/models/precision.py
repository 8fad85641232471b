"""Which dtype and device a run uses, and what this machine cannot do, said before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.errors import HardwareError


@dataclass(frozen=True)
class Precision:
    device: torch.device
    dtype: torch.dtype
    notice: str | None = None


def choose(recipe: str | None, device: str | None, gpus: int = 1) -> Precision:
    """fp32 on a CPU, where bf16 is far slower; bf16 on a GPU. A recipe the machine cannot run is refused."""
    notice = None
    if device in (None, "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and gpus >= 1:
            notice = "no GPU here: running on the CPU"
    assert device is not None
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise HardwareError(f"train.device: {device} was asked for but this machine has no CUDA device; use cpu")
    kind = torch.device(device).type
    if recipe is None:
        recipe = "bf16" if kind == "cuda" else "fp32"
    if recipe == "fp8-hybrid":
        _refuse_fp8(kind)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe]
    return Precision(torch.device(device), dtype, notice)


def _refuse_fp8(kind: str) -> None:
    if kind == "cpu":
        raise HardwareError("train.recipe: fp8-hybrid needs a GPU with FP8 units; on this CPU use train.recipe=fp32")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        raise HardwareError(f"train.recipe: fp8-hybrid needs compute capability 8.9, this GPU has {major}.{minor}; use bf16")
    raise HardwareError("train.recipe: fp8-hybrid is not available in this version; use train.recipe=bf16")
