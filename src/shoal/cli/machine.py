"""What a dry run refuses on this machine, in the words of the run that would refuse it later."""

from __future__ import annotations

from shoal.config.train import TrainConfig


def check_machine(train: TrainConfig) -> None:
    """Devices and packages that are asked for and not here; nothing heavy is imported where nothing is asked for."""
    if train.gpus != 1:
        from shoal.build import ranks_to_start

        ranks_to_start(train, None)
    from shoal.models import precision

    precision.check_machine(train)
