"""The one schema: a run is `train`, `infer` and `orch`; a supervised run is `train` and a data set.

Every surface is translated onto these models. They hold shapes, ranges and defaults; load.py fills them from files,
checks.py judges keys against each other, resolve.py fills in what follows from other keys.
"""

from __future__ import annotations

from pydantic import Field

from shoal.config.base import PositiveInt, Section
from shoal.config.infer import InferConfig
from shoal.config.orch import DatasetConfig, OrchConfig
from shoal.config.train import TrainConfig


class RunConfig(Section):
    train: TrainConfig = Field(default_factory=TrainConfig, description="The trainer.")
    infer: InferConfig = Field(default_factory=InferConfig, description="The engine that samples.")
    orch: OrchConfig = Field(description="Environments, batches, sampling and rewards.")


class SftConfig(Section):
    train: TrainConfig = Field(description="The trainer, as in a run; keys only GRPO uses are refused.")
    dataset: DatasetConfig = Field(description="Rows of messages, or of prompt and completion.")
    batch_size: PositiveInt = Field(default=16, description="Rows an optimizer step.")


SECTIONS: dict[str, type[Section]] = {"train": TrainConfig, "infer": InferConfig, "orch": OrchConfig}
