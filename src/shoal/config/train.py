"""The `train` section: model, optimizer, precision, LoRA, loss, checkpoints.

Read by build.py and the trainer. Only shapes and ranges live here; what needs two keys to judge is in config/checks.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shoal.config.base import (
    Fraction,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Strings,
)
from shoal.config.loss import LossConfig

Sink = Literal["wandb", "tensorboard", "trackio", "mlflow"]


def _sink_list(value: object) -> object:
    if value is None or value == "none":
        return []
    return [value] if isinstance(value, str) else value


class NoiseConfig(Section):
    enabled: bool = Field(
        default=False, description="Add QeRL noise to the norm weights that sample; training never sees it."
    )
    sigma_start: PositiveFloat = Field(default=5e-2, description="Noise of the first noisy stage.")
    sigma_end: PositiveFloat = Field(default=5e-4, description="Noise of the last stage.")
    num_stages: PositiveInt = Field(
        default=10, description="Stages the run is cut into; the first one is without noise."
    )


class WeightBroadcastConfig(Section):
    type: Literal["filesystem", "nccl"] = Field(
        default="filesystem",
        description="How weights reach the engine in the split layout; nccl is gloo where there is no GPU.",
    )
    host: NonEmpty = Field(default="127.0.0.1", description="nccl: address where the trainer is reached.")
    port: int = Field(default=0, ge=0, le=65535, description="nccl: port of the trainer; 0 takes a free one.")


class RolloutTransportConfig(Section):
    type: Literal["filesystem", "tcp"] = Field(
        default="filesystem", description="How rollouts reach the trainer in the split layout."
    )
    host: NonEmpty = Field(default="127.0.0.1", description="tcp: address where the trainer is reached.")
    port: int = Field(default=0, ge=0, le=65535, description="tcp: port of the trainer; 0 takes a free one.")


class TrainConfig(Section):
    model: NonEmpty | None = Field(default=None, description="Local folder, hub id or GGUF file of the model to train.")
    output_dir: NonEmpty = Field(
        default="./outputs", description="The run directory; everything a run writes lies under it."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to train; auto takes a GPU if there is one."
    )
    gpus: NonNegativeInt = Field(
        default=1,
        description="Processes that train together, one a GPU; 0 takes all GPUs; with device cpu, so many on the CPU.",
    )
    sharding: Literal["none", "fsdp"] = Field(
        default="none",
        description="What each process holds: none = everything; fsdp = its share of weights, gradients and optimizer, "
        "and all weights to sample with.",
    )
    seed: NonNegativeInt = Field(default=0, description="Seed of everything random in the run.")

    max_steps: PositiveInt | None = Field(default=None, description="Optimizer steps to train; or give epochs.")
    epochs: PositiveInt | None = Field(default=None, description="Passes over the prompts; or give max_steps.")
    per_device_train_batch_size: PositiveInt | None = Field(
        default=None,
        description="Packed rows in one micro-batch. Unset: as many as the memory plan allows on a GPU, 1 on a CPU.",
    )
    sequence_len: PositiveInt = Field(default=2048, description="Token budget of a packed row; equal to orch.seq_len.")
    ppo_epochs: PositiveInt = Field(default=1, description="Passes over the rollouts of a step.")
    minibatches: PositiveInt = Field(default=1, description="Optimizer steps the rollouts of a step are split into.")

    learning_rate: Annotated[float, Field(ge=0, le=1)] = Field(default=5e-6, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "cosine", "linear", "wsd"] = Field(
        default="constant", description="Shape of the learning rate after warm-up."
    )
    warmup_steps: NonNegativeInt | None = Field(default=None, description="Steps of linear warm-up (0 unless given).")
    warmup_ratio: Fraction | None = Field(
        default=None, description="Warm-up as a share of all steps; or give warmup_steps."
    )
    final_lr_fraction: Fraction = Field(
        default=0.0, description="Share of the learning rate a decaying schedule ends at."
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(default="adamw", description="The optimizer.")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="Decay of the first moment.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.999, description="Decay of the second moment.")
    adam_epsilon: PositiveFloat = Field(default=1e-8, description="Added to the denominator of the update.")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="Gradients are scaled down to this norm.")
    weight_decay: NonNegativeFloat = Field(default=0.01, description="Decoupled weight decay of matrices.")

    recipe: Literal["auto", "bf16", "fp32", "fp8-hybrid"] = Field(
        default="auto", description="Precision; auto is bf16 on a GPU and fp32 on a CPU."
    )
    recompute: Literal["auto"] | bool = Field(
        default="auto", description="Recompute activations in backward to save memory; auto is false in this version."
    )
    lora: bool = Field(default=False, description="Train low-rank adapters instead of all weights.")
    lora_rank: PositiveInt = Field(default=16, description="Rank of the adapters.")
    lora_alpha: PositiveInt = Field(default=32, description="Scale of the adapters: alpha / rank.")
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Dropout in front of the adapters."
    )
    lora_target_modules: Strings | None = Field(
        default=None, description="Names of the layers that get an adapter; all linear layers unless given."
    )
    adapter_path: NonEmpty | None = Field(
        default=None, description="Adapter to start from; the KL reference is then this start."
    )
    qlora_fp8: bool = Field(
        default=False, description="Store the frozen base as FP8 E4M3 in blocks of 128; needs lora."
    )
    qlora_bnb: bool = Field(default=False, description="Store the frozen base as NF4, double quantised; needs lora.")
    qlora_fp4: bool = Field(default=False, description="Store the frozen base as NVFP4; needs lora.")

    loss: LossConfig = Field(default_factory=LossConfig, description="The policy loss and its parameters.")
    reference: Literal["auto", "none", "adapter-off", "frozen"] = Field(
        default="auto", description="Where reference log-probs come from; auto is none without a KL term."
    )
    recompute_old: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether a forward at the start of a step gives the old log-probs, or the sampler's serve.",
    )
    noise_scheduler: NoiseConfig = Field(default_factory=NoiseConfig, description="QeRL exploration noise.")

    logging_steps: PositiveInt = Field(
        default=1, description="A console line every so many steps; files get every step."
    )
    report_to: Annotated[list[Sink], BeforeValidator(_sink_list)] = Field(
        default_factory=list, description="Trackers that also receive the metrics."
    )
    metric_names: Literal["native", "trl", "verl"] = Field(
        default="native", description="Whose names trackers get the metrics under; metrics.jsonl always has Shoal's."
    )
    log_completions: NonNegativeInt = Field(
        default=8, description="Completions a step that trackers get as a table; 0 sends none."
    )
    show_completions: NonNegativeInt = Field(
        default=0, description="Completions shown on the console with each of its lines; files hold them all."
    )
    report_project: NonEmpty = Field(
        default="shoal", description="Project the trackers of report_to file the run under."
    )
    report_name: NonEmpty | None = Field(
        default=None, description="Name of the run in the trackers (its folder's unless given)."
    )
    save_steps: NonNegativeInt | None = Field(
        default=None, description="A checkpoint every so many steps (10 unless given); 0 = only when interrupted."
    )
    save_epochs: PositiveInt | None = Field(
        default=None, description="A checkpoint every so many epochs; or give save_steps."
    )
    save_seconds: PositiveFloat | None = Field(
        default=None, description="A checkpoint every so many seconds; or give save_steps."
    )
    save_total_limit: PositiveInt = Field(default=2, description="Newest checkpoints kept.")
    save_deadline_s: PositiveFloat = Field(default=600.0, description="Writing a checkpoint takes no longer than this.")
    resume_from_checkpoint: bool = Field(
        default=False, description="Continue the run in output_dir; the same as --resume."
    )

    weight_broadcast: WeightBroadcastConfig = Field(
        default_factory=WeightBroadcastConfig, description="Weights on their way to the engine (split layout)."
    )
    rollout_transport: RolloutTransportConfig = Field(
        default_factory=RolloutTransportConfig, description="Rollouts on their way to the trainer (split layout)."
    )

    deadline_s: PositiveFloat = Field(
        default=600.0, description="The trainer waits no longer than this for the other processes (split layout)."
    )

    @property
    def quantised(self) -> bool:
        return self.qlora_fp8 or self.qlora_bnb or self.qlora_fp4
