"""What a dry run says of this machine: a note in the words of the run that would be refused here.

A note, since the machine may be another one: configurations are checked where no GPU is.
"""

from __future__ import annotations

from shoal.cli.output import notices
from shoal.config.train import TrainConfig
from shoal.errors import HardwareError
from shoal.observability.machine import has_gpu


def note_machine(train: TrainConfig) -> None:
    """Devices and packages that are asked for and not here; nothing heavy is imported where there is no GPU."""
    try:
        _check(train)
    except HardwareError as error:
        notices([f"a run on this machine would be refused: {error}"])


def _usable() -> bool:
    """A driver is here; whether this torch can use it, and may, torch knows."""
    import torch

    return torch.cuda.is_available()


def _check(train: TrainConfig) -> None:
    from shoal.models.precision import check_machine

    check_machine(train, "cuda" if train.device != "cpu" and has_gpu() and _usable() else "cpu")
    if train.gpus != 1:
        from shoal.build import ranks_to_start

        ranks_to_start(train, None)
