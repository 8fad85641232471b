"""The `orch` section: environments, batches, sampling, rewards, evaluation.

Read by build.py and the orchestrator. What needs two keys to judge is in config/checks.py.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from shoal.config.base import (
    Fraction,
    Name,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Strings,
    UserCode,
)


def _env_list(value: Any) -> Any:
    """`env: reverse-text` and `env: {id: …}` are the list of one."""
    many = value if isinstance(value, list) else [value]
    return [{"id": item} if isinstance(item, str) else item for item in many]


def _function_section(value: Any) -> Any:
    return {"function": value} if isinstance(value, str) else value


def _truncated_section(value: Any) -> Any:
    if isinstance(value, str):
        return {"type": value}
    return {"type": "overlong", **value} if isinstance(value, dict) else value


def _clip_bounds(value: Any) -> Any:
    """`clip: 5` is `clip: [-5, 5]`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return [-abs(float(value)), abs(float(value))] if number else value


class OrchModelConfig(Section):
    name: NonEmpty | None = Field(default=None, description="The model that is asked; equal to train.model.")
    lora_adapter: Name | None = Field(
        default=None, description="Name the adapter is served under (default unless given)."
    )
    lora_rank: PositiveInt | None = Field(default=None, description="Rank of the adapter; equal to train.lora_rank.")
    lora_alpha: PositiveInt | None = Field(default=None, description="Scale of the adapter; equal to train.lora_alpha.")


class EnvConfig(Section):
    id: NonEmpty = Field(description="A built-in environment, reasoning-gym:TASK, or module:function of your own.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")
    name: Name | None = Field(default=None, description="Name in metrics and files (the id unless given).")
    weight: PositiveFloat = Field(default=1.0, description="Share of the prompts, relative to the other environments.")

    @property
    def label(self) -> str:
        """The name in metrics and files: as given, else the id with everything unfit for a file name replaced."""
        return self.name or re.sub(r"[^A-Za-z0-9._-]+", "-", self.id).strip("-.")[:64]


class DatasetConfig(Section):
    path: NonEmpty | None = Field(default=None, description="A local file or folder of rows.")
    name: NonEmpty | None = Field(default=None, description="A hub data set; or give path.")
    split: NonEmpty = Field(default="train", description="Split to train on.")
    columns: dict[str, NonEmpty] = Field(
        default_factory=dict, description="Our column (prompt, answer, messages, completion) to theirs."
    )
    max_rows: PositiveInt | None = Field(default=None, description="Rows read at most; all unless given.")


class TemperatureSchedule(Section):
    start: NonNegativeFloat = Field(description="Temperature of the first step.")
    end: NonNegativeFloat = Field(description="Temperature of the last step.")
    schedule: Literal["linear", "cosine"] = Field(default="linear", description="Shape between start and end.")


def _temperature_tag(value: Any) -> str:
    return "schedule" if isinstance(value, dict | TemperatureSchedule) else "number"


Temperature = Annotated[
    Annotated[NonNegativeFloat, Tag("number")] | Annotated[TemperatureSchedule, Tag("schedule")],
    Discriminator(_temperature_tag),
]


class SamplingConfig(Section):
    temperature: Temperature = Field(default=1.0, description="A number, or {start, end, schedule} over the run.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Sample from the smallest set with this mass."
    )
    top_k: Annotated[int, Field(ge=-1)] = Field(
        default=-1, description="Sample from the k likeliest tokens; -1 from all."
    )
    min_p: Fraction = Field(default=0.0, description="Drop tokens less likely than this share of the likeliest.")
    max_tokens: PositiveInt | None = Field(
        default=None, description="Longest completion (half of seq_len unless given)."
    )
    min_tokens: NonNegativeInt = Field(default=0, description="No end of sequence before so many tokens.")
    stop: Strings = Field(default_factory=list, description="Strings that end a completion.")
    seed: NonNegativeInt | None = Field(default=None, description="Seed of sampling (train.seed unless given).")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed to the chat template.")
    system_prompt: str | None = Field(default=None, description="Replaces the environment's system prompt.")


class EvalSamplingConfig(Section):
    temperature: NonNegativeFloat | None = Field(default=None, description="As in training unless given; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(default=None, description="As in training unless given.")
    top_k: Annotated[int, Field(ge=-1)] | None = Field(default=None, description="As in training unless given.")
    min_p: Fraction | None = Field(default=None, description="As in training unless given.")
    max_tokens: PositiveInt | None = Field(default=None, description="As in training unless given.")
    min_tokens: NonNegativeInt | None = Field(default=None, description="As in training unless given.")
    stop: Strings | None = Field(default=None, description="As in training unless given.")
    seed: NonNegativeInt | None = Field(default=None, description="As in training unless given.")


class AdvantageConfig(Section):
    mean: Literal["group", "batch", "none"] = Field(default="group", description="What is subtracted from a reward.")
    std: Literal["group", "batch", "none"] | None = Field(
        default=None, description="What the difference is divided by (none for masked, group otherwise, unless given)."
    )
    leave_one_out: bool = Field(default=False, description="Leave a rollout out of its own group's mean (RLOO).")
    eps: PositiveFloat = Field(default=1e-6, description="Added to the standard deviation.")
    function: UserCode | None = Field(default=None, description="module:function that estimates advantages instead.")


class RewardConfig(Section):
    scale: float = Field(default=1.0, description="Rewards are multiplied by this.")
    bias: float = Field(default=0.0, description="Added after scaling.")
    clip: Annotated[list[float], Field(min_length=2, max_length=2), BeforeValidator(_clip_bounds)] | None = Field(
        default=None,
        description="Bounds of the reward after scale and bias: [low, high], or one number for both signs.",
    )
    parts: dict[str, float] = Field(
        default_factory=dict, description="Weight of each named reward part (1 unless given)."
    )
    function: UserCode | None = Field(
        default=None, description="module:function that scores instead of the environment."
    )
    timeout_s: PositiveFloat = Field(default=10.0, description="Seconds a reward may take from when its work starts.")
    workers: PositiveInt = Field(default=2, description="Worker processes that run reward code.")
    isolated: bool = Field(
        default=False,
        description="For rewards that run what a model wrote: each in a fresh process without network or privileges.",
    )


class TruncatedConfig(Section):
    type: Literal["keep", "mask", "zero", "overlong"] = Field(
        default="keep",
        description="What a completion cut at max_tokens counts: as it is, not at all, reward 0, or a penalty.",
    )
    tokens: PositiveInt | None = Field(
        default=None, description="overlong: the penalty grows over the last so many tokens."
    )
    factor: PositiveFloat | None = Field(default=None, description="overlong: penalty at max_tokens (1 unless given).")


class GroupsConfig(Section):
    uniform: Literal["refill", "skip", "keep"] | None = Field(
        default=None,
        description="Groups whose rewards are all equal: replaced (refill), left out (skip) or trained on (keep).",
    )
    max_refill: NonNegativeInt = Field(
        default=3, description="Batches sampled again at most to replace uniform groups."
    )
    filter: UserCode | None = Field(default=None, description="module:function that says whether a group is kept.")


class BufferConfig(Section):
    easy_threshold: float | None = Field(default=None, description="Prompts with a mean reward above are easy.")
    hard_threshold: float | None = Field(default=None, description="Prompts with a mean reward below are hard.")
    easy_fraction: Fraction | None = Field(
        default=None, description="How often an easy prompt is drawn, relative to others."
    )
    hard_fraction: Fraction | None = Field(
        default=None, description="How often a hard prompt is drawn, relative to others."
    )


class EvalConfig(Section):
    env: Annotated[list[EnvConfig], Field(min_length=1), BeforeValidator(_env_list)] | None = Field(
        default=None, description="Environments to evaluate on, their eval split (those of training unless given)."
    )
    interval: PositiveInt = Field(
        default=10, description="Steps between evaluations; the last step is always evaluated."
    )
    interval_epochs: PositiveInt | None = Field(
        default=None, description="Passes over the prompts between evaluations; or give interval."
    )
    interval_seconds: PositiveFloat | None = Field(
        default=None, description="Seconds between evaluations; or give interval."
    )
    at_start: bool = Field(default=True, description="Evaluate before the first step.")
    num_examples: PositiveInt = Field(default=64, description="Prompts of one evaluation.")
    rollouts_per_example: PositiveInt = Field(default=1, description="Rollouts a prompt.")
    sampling: EvalSamplingConfig = Field(
        default_factory=EvalSamplingConfig, description="What differs from orch.sampling."
    )
    keep_best: bool = Field(default=False, description="Keep the checkpoint of the best evaluation.")
    stop_after: PositiveInt | None = Field(
        default=None, description="Stop after so many evaluations without a better one."
    )


class ClientConfig(Section):
    base_url: NonEmpty = Field(default="http://127.0.0.1:8000/v1", description="Address of a remote engine.")
    timeout: PositiveFloat = Field(default=600.0, description="Seconds one request may take.")
    api_key_var: Name | None = Field(default=None, description="Environment variable that holds the key.")


class OrchConfig(Section):
    model: OrchModelConfig = Field(
        default_factory=OrchModelConfig, description="The model as the orchestrator names it."
    )
    output_dir: NonEmpty = Field(
        default="./outputs", description="Where rollouts are exchanged; equal to train.output_dir."
    )
    env: Annotated[list[EnvConfig], Field(min_length=1), BeforeValidator(_env_list)] = Field(
        description="The environments trained on; `dataset` where only orch.dataset is given."
    )
    dataset: DatasetConfig | None = Field(default=None, description="Rows for environments that read a data set.")
    batch_size: PositiveInt = Field(default=128, description="Rollouts a step.")
    rollouts_per_example: PositiveInt = Field(
        default=16, description="Rollouts a prompt, the group; divides batch_size."
    )
    seq_len: PositiveInt | None = Field(
        default=None, description="Longest prompt plus completion (train.sequence_len unless given)."
    )
    max_steps: PositiveInt | None = Field(default=None, description="Steps to train; equal to train.max_steps.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How completions are drawn.")
    weight_sync_interval: NonNegativeInt = Field(
        default=1, description="Steps between weight syncs; more than 1 overlaps sampling and training, 0 never syncs."
    )
    max_async_level: NonNegativeInt = Field(default=0, description="Steps sampling may run ahead of training.")
    max_off_policy_steps: NonNegativeInt | None = Field(
        default=None,
        description="Older rollouts are dropped (max_async_level + max(weight_sync_interval, 1) - 1 unless given).",
    )
    advantage: Annotated[AdvantageConfig, BeforeValidator(_function_section)] = Field(
        default_factory=AdvantageConfig, description="How rewards become advantages; or module:function."
    )
    reward: Annotated[RewardConfig, BeforeValidator(_function_section)] = Field(
        default_factory=RewardConfig, description="What becomes of a reward; or module:function."
    )
    truncated: Annotated[TruncatedConfig, BeforeValidator(_truncated_section)] = Field(
        default_factory=TruncatedConfig, description="Completions cut at max_tokens: a word, or {type, tokens, factor}."
    )
    groups: GroupsConfig = Field(default_factory=GroupsConfig, description="Groups that teach nothing.")
    buffer: BufferConfig = Field(default_factory=BufferConfig, description="Draws easy and hard prompts less often.")
    eval: EvalConfig | None = Field(default=None, description="Held-out evaluation; none unless given.")
    client: ClientConfig = Field(default_factory=ClientConfig, description="The way to a remote engine.")
    deadline_s: PositiveFloat = Field(default=600.0, description="No wait in the loop is longer than this.")
    sync_deadline_s: PositiveFloat = Field(default=600.0, description="A weight sync takes no longer than this.")

    @model_validator(mode="before")
    @classmethod
    def _reads_its_data(cls, data: Any) -> Any:
        """Data and no environment: the one that reads data."""
        if isinstance(data, dict) and data.get("dataset") and "env" not in data:
            return {**data, "env": [{"id": "dataset"}]}
        return data

    @property
    def env_lists(self) -> list[tuple[str, list[EnvConfig]]]:
        """Key and environments of every place that names some."""
        evaluated = self.eval.env if self.eval is not None else None
        return [("orch.env", self.env), *([("orch.eval.env", evaluated)] if evaluated else [])]
