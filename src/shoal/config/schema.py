"""The schema of a run (`train`, `infer`, `orch`) and of supervised runs (`train` and a dataset), and the named shapes.

Every interface is translated to these models. load.py fills them from files, rules.py checks keys against each other,
and resolve.py fills in the defaults that depend on other keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from shoal.config.infer import InferConfig
from shoal.config.orch import DatasetConfig, OrchConfig
from shoal.config.preference import PreferenceLossConfig, SigmoidLoss
from shoal.config.train import TrainConfig
from shoal.core.section import NonEmpty, PositiveInt, Section


@dataclass(frozen=True)
class Layout:
    """A named shape for `training_shape_id`. `settings` are keys of the train section."""

    name: str
    summary: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def device(self) -> str:
        return str(dict(self.settings)["device"])


def _layout(name: str, summary: str, **settings: Any) -> Layout:
    return Layout(name, summary, tuple(settings.items()))


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        _layout("cpu-fp32", "one process on the CPU, fp32", device="cpu", recipe="fp32"),
        _layout("cpu-bf16", "one process on the CPU, bf16: half the memory, slower", device="cpu", recipe="bf16"),
        _layout("1xgpu-bf16", "one GPU, bf16 weights with fp32 masters", device="cuda", gpus=1, recipe="bf16"),
        _layout("1xgpu-fp32", "one GPU, fp32 throughout", device="cuda", gpus=1, recipe="fp32"),
    )
}


class RunConfig(Section):
    verb: ClassVar[str] = "grpo"

    train: TrainConfig = Field(default_factory=TrainConfig, description="The trainer.")
    infer: InferConfig = Field(default_factory=InferConfig, description="The sampling engine.")
    orch: OrchConfig = Field(description="Environments, batches, sampling and rewards.")


class SupervisedConfig(Section):
    """A run that trains on the completions of a data set, without sampling."""

    verb: ClassVar[str]
    training: ClassVar[str]  # its name in messages

    train: TrainConfig = Field(description="The trainer, as in a GRPO run. Keys used only by GRPO are rejected.")
    dataset: DatasetConfig = Field(
        description="Rows with messages, or with prompt and completion. Preference training: chosen and rejected.",
        json_schema_extra={"binding": True},
    )
    chat_template: NonEmpty | None = Field(
        default=None,
        description="Chat template that replaces the tokenizer's, also in final/: chatml, plain (for base models) or a "
        "file.",
        json_schema_extra={"binding": True},
    )
    batch_size: PositiveInt = Field(
        default=16,
        description="Rows per optimizer step. Preference training: pairs.",
        json_schema_extra={"binding": True},
    )


class SftConfig(SupervisedConfig):
    verb = "sft"
    training = "supervised training"


class DpoConfig(SupervisedConfig):
    verb = "dpo"
    training = "preference training"

    loss: PreferenceLossConfig = Field(default_factory=SigmoidLoss, description="The loss of a pair.")


SECTIONS: dict[str, type[Section]] = {"train": TrainConfig, "infer": InferConfig, "orch": OrchConfig}
