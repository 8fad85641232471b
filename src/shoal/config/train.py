"""The `train` section: model, optimizer, precision, LoRA, loss, checkpoints.

Used by build/ and the trainer. This file has types, ranges and defaults. Checks across keys are in rules.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shoal.core.losses import LossConfig, default_loss
from shoal.core.section import (
    Fraction,
    Name,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Strings,
)

Sink = Literal["wandb", "tensorboard", "trackio", "mlflow"]


def _sink_list(value: object) -> object:
    if value is None or value == "none":
        return []
    return [value] if isinstance(value, str) else value


class NoiseConfig(Section):
    enabled: bool = Field(
        default=False,
        description="Add QeRL noise to the norm weights used for sampling; training uses the weights without noise.",
    )
    sigma_start: PositiveFloat = Field(default=5e-2, description="Noise level of the first stage with noise.")
    sigma_end: PositiveFloat = Field(default=5e-4, description="Noise level of the last stage.")
    num_stages: PositiveInt = Field(
        default=10, description="Number of stages in the run; the first stage has no noise."
    )

    def sigma_at(self, step: int, total_steps: int) -> float:
        """Noise of a step. The stages after the first fall geometrically from sigma_start to sigma_end."""
        stage = min((step - 1) * self.num_stages // total_steps, self.num_stages - 1)
        if stage <= 0:
            return 0.0
        if self.num_stages == 2:
            return self.sigma_start
        return self.sigma_start * (self.sigma_end / self.sigma_start) ** ((stage - 1) / (self.num_stages - 2))


class WeightBroadcastConfig(Section):
    type: Literal["filesystem", "nccl"] = Field(
        default="filesystem",
        description="How weights are sent to the engine; nccl uses gloo on machines without a GPU.",
    )
    host: NonEmpty = Field(default="127.0.0.1", description="nccl: address of the trainer.")
    port: int = Field(default=0, ge=0, le=65535, description="nccl: port of the trainer; 0 picks a free port.")


class RolloutTransportConfig(Section):
    type: Literal["filesystem", "tcp"] = Field(
        default="filesystem", description="How rollouts are sent to the trainer."
    )
    host: NonEmpty = Field(default="127.0.0.1", description="tcp: address of the trainer.")
    port: int = Field(default=0, ge=0, le=65535, description="tcp: port of the trainer; 0 picks a free port.")


class TeacherConfig(Section):
    """Where teacher_logprobs come from: one of model, adapter, url and self."""

    model: NonEmpty | None = Field(default=None, description="A frozen model: a local folder, a hub id or a GGUF file.")
    adapter: NonEmpty | None = Field(default=None, description="A PEFT adapter on train.model, frozen.")
    url: NonEmpty | None = Field(
        default=None, description="A server with /v1/completions that returns prompt_logprobs, such as vLLM."
    )
    served_model: NonEmpty | None = Field(
        default=None, description="With url: the model name to request. Default: the only one that is served."
    )
    api_key_var: Name | None = Field(default=None, description="With url: environment variable with the API key.")
    itself: bool = Field(
        default=False,
        alias="self",
        description="The policy is its own teacher; it sees the hint of the reward in the prompt.",
    )
    tau: NonNegativeFloat = Field(default=1.0, description="Weight of the teacher's signal.")
    reward_weight: NonNegativeFloat = Field(
        default=1.0, description="Weight of the advantages from rewards. 0 = distillation only, no reward is needed."
    )

    @property
    def sources(self) -> list[str]:
        return [name for name in ("model", "adapter", "url") if getattr(self, name)] + ["self"] * self.itself


class TrainConfig(Section):
    model: NonEmpty | None = Field(
        default=None,
        description="Model to train: a local folder, a hub id, a GGUF file, or random weights of a shape, such as "
        "shape:qwen3-0.6b.",
        json_schema_extra={"binding": True},
    )
    output_dir: NonEmpty = Field(
        default="./outputs", description="The run directory. All files of a run are written here."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device for training; auto uses a GPU if there is one."
    )
    gpus: NonNegativeInt = Field(
        default=1,
        description="Training processes, one per GPU. 0 = all visible GPUs. With `device: cpu`, the number of CPU "
        "processes.",
    )
    sharding: Literal["none", "fsdp"] = Field(
        default="none",
        description="none = each process holds everything; fsdp = weights, gradients and optimizer state are sharded.",
    )
    seed: NonNegativeInt = Field(
        default=0, description="Seed of all random numbers in the run.", json_schema_extra={"binding": True}
    )

    max_steps: PositiveInt | None = Field(default=None, description="Optimizer steps to train. Alternative: epochs.")
    epochs: PositiveInt | None = Field(default=None, description="Passes over the prompts. Alternative: max_steps.")
    per_device_train_batch_size: PositiveInt | None = Field(
        default=None,
        description="Packed rows per micro-batch. Default: set by the memory plan on a GPU, 1 on a CPU.",
    )
    sequence_len: PositiveInt = Field(
        default=2048, description="Tokens per packed row; must equal orch.seq_len.", json_schema_extra={"binding": True}
    )
    ppo_epochs: PositiveInt = Field(
        default=1, description="Passes over the rollouts of each step.", json_schema_extra={"grpo_only": True}
    )
    minibatches: PositiveInt = Field(
        default=1,
        description="Optimizer updates per step; the rollouts of a step are split between them.",
        json_schema_extra={"grpo_only": True},
    )

    learning_rate: Annotated[float, Field(ge=0, le=1)] = Field(default=5e-6, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "cosine", "linear", "wsd"] = Field(
        default="constant", description="Learning-rate schedule after warm-up."
    )
    warmup_steps: NonNegativeInt | None = Field(default=None, description="Steps of linear warm-up. Default: 0.")
    warmup_ratio: Fraction | None = Field(
        default=None, description="Warm-up as a fraction of all steps. Alternative: warmup_steps."
    )
    final_lr_fraction: Fraction = Field(
        default=0.0, description="Final learning rate of a decaying schedule, as a fraction of the peak."
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(default="adamw", description="Optimizer.")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="Decay rate of the first moment.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.999, description="Decay rate of the second moment."
    )
    adam_epsilon: PositiveFloat = Field(default=1e-8, description="Added to the denominator of the update.")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="Gradients are clipped to this norm.")
    weight_decay: NonNegativeFloat = Field(default=0.01, description="Decoupled weight decay, applied to matrices.")

    recipe: Literal["auto", "bf16", "fp32", "fp8-hybrid"] = Field(
        default="auto", description="Precision; auto is bf16 on a GPU and fp32 on a CPU."
    )
    recompute: Literal["auto"] | bool = Field(
        default="auto",
        description="Activation checkpointing; with auto the memory plan decides.",
    )
    lora: bool = Field(
        default=False,
        description="Train low-rank adapters instead of all weights.",
        json_schema_extra={"binding": True},
    )
    lora_rank: PositiveInt = Field(
        default=16, description="Rank of the adapters.", json_schema_extra={"binding": True, "lora_only": True}
    )
    lora_alpha: PositiveInt = Field(
        default=32,
        description="Adapters are scaled by lora_alpha / lora_rank.",
        json_schema_extra={"binding": True, "lora_only": True},
    )
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Dropout on the input of the adapters.", json_schema_extra={"lora_only": True}
    )
    lora_target_modules: Strings | None = Field(
        default=None,
        description="Names of the layers with an adapter. Default: all linear layers.",
        json_schema_extra={"binding": True, "lora_only": True},
    )
    adapter_path: NonEmpty | None = Field(
        default=None,
        description="Adapter to continue training from; the KL reference is then this adapter.",
        json_schema_extra={"binding": True},
    )
    qlora_fp8: bool = Field(
        default=False, description="Store the frozen base as FP8 E4M3 in blocks of 128; requires lora."
    )
    qlora_bnb: bool = Field(
        default=False, description="Store the frozen base as NF4 with double quantisation; requires lora."
    )
    qlora_fp4: bool = Field(default=False, description="Store the frozen base as NVFP4; requires lora.")

    loss: LossConfig = Field(
        default_factory=default_loss,
        description="The policy loss and its parameters.",
        json_schema_extra={"grpo_only": True},
    )
    reference: Literal["auto", "none", "adapter-off", "frozen"] = Field(
        default="auto",
        description="Source of reference_logprobs; auto is none without a KL term. In DPO, auto is adapter-off with "
        "LoRA, else frozen.",
        json_schema_extra={"not_sft": True},
    )
    teacher: TeacherConfig | None = Field(
        default=None,
        description="A teacher scores the sampled tokens (on-policy distillation). Default: none.",
        json_schema_extra={"grpo_only": True},
    )
    recompute_old: Literal["auto"] | bool = Field(
        default="auto",
        description="Compute old_logprobs with a forward pass before the step (true), or use the sampler's (false).",
        json_schema_extra={"grpo_only": True},
    )
    noise_scheduler: NoiseConfig = Field(
        default_factory=NoiseConfig, description="QeRL exploration noise.", json_schema_extra={"grpo_only": True}
    )

    logging_steps: PositiveInt = Field(default=1, description="Steps between console lines; files record every step.")
    report_to: Annotated[
        list[Sink], BeforeValidator(_sink_list, json_schema_input_type=Sink | list[Sink] | Literal["none"] | None)
    ] = Field(default_factory=list, description="Trackers that also receive the metrics.")
    metric_names: Literal["native", "trl", "verl"] = Field(
        default="native",
        description="Naming scheme of the metrics in trackers; metrics.jsonl always has Shoal's names.",
    )
    log_completions: NonNegativeInt = Field(
        default=8,
        description="Completions per step sent to trackers as a table; 0 = none.",
        json_schema_extra={"grpo_only": True},
    )
    show_completions: NonNegativeInt = Field(
        default=0,
        description="Completions printed with each console line; files hold all of them.",
        json_schema_extra={"grpo_only": True},
    )
    report_project: NonEmpty = Field(default="shoal", description="Project name in the trackers of report_to.")
    report_name: NonEmpty | None = Field(
        default=None, description="Run name in the trackers. Default: the name of the run directory."
    )
    save_steps: NonNegativeInt | None = Field(
        default=None, description="Steps between checkpoints. Default: 10. 0 = only when the run is interrupted."
    )
    save_epochs: PositiveInt | None = Field(
        default=None, description="Epochs between checkpoints. Alternative: save_steps."
    )
    save_seconds: PositiveFloat | None = Field(
        default=None, description="Seconds between checkpoints. Alternative: save_steps."
    )
    save_total_limit: PositiveInt = Field(
        default=2, description="Number of checkpoints to keep; older ones are deleted."
    )
    save_deadline_s: PositiveFloat = Field(default=600.0, description="Time limit for writing a checkpoint.")
    resume_from_checkpoint: bool = Field(
        default=False,
        description="Continue the run in output_dir if there is one, else start it. With --resume there must be one.",
    )

    weight_broadcast: WeightBroadcastConfig = Field(
        default_factory=WeightBroadcastConfig,
        description="Transfer of weights to the engine.",
        json_schema_extra={"grpo_only": True, "split_only": True},
    )
    rollout_transport: RolloutTransportConfig = Field(
        default_factory=RolloutTransportConfig,
        description="Transfer of rollouts to the trainer.",
        json_schema_extra={"grpo_only": True, "split_only": True},
    )

    deadline_s: PositiveFloat = Field(
        default=600.0,
        description="Time limit when the trainer waits for another process.",
        json_schema_extra={"split_only": True},
    )

    @property
    def quantised(self) -> bool:
        return self.qlora_fp8 or self.qlora_bnb or self.qlora_fp4
