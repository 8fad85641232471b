"""The `orch` section: environments, batches, sampling, rewards, evaluation.

Used by build/ and the orchestrator. Checks across keys are in rules.py and section_rules.py.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

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
    UserCode,
)


def _env_list(value: Any) -> Any:
    """`env: reverse-text` and `env: {id: …}` are lists with one element."""
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
    name: NonEmpty | None = Field(default=None, description="Model name in requests; must equal train.model.")
    lora_adapter: Name | None = Field(
        default=None,
        description="Name of the trained adapter on the server; vLLM and SGLang append the version. Default: default.",
    )
    lora_rank: PositiveInt | None = Field(default=None, description="Rank of the adapter; must equal train.lora_rank.")
    lora_alpha: PositiveInt | None = Field(
        default=None, description="Scale of the adapter; must equal train.lora_alpha."
    )


def _steps_as_numbers(value: Any) -> Any:
    """In JSON, the keys of a mapping are texts."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: item for key, item in value.items()}


WeightSchedule = Annotated[
    dict[NonNegativeInt, NonNegativeFloat], Field(min_length=1), BeforeValidator(_steps_as_numbers)
]
Weight = Annotated[
    Annotated[PositiveFloat, Tag("number")] | Annotated[WeightSchedule, Tag("schedule")],
    Discriminator(lambda value: "schedule" if isinstance(value, dict) else "number"),
]


class EnvConfig(Section):
    id: NonEmpty = Field(
        description="A built-in environment, reasoning-gym:TASK, verifiers:ID, or your own as module:function."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")
    name: Name | None = Field(default=None, description="Name in metrics and files. Default: the id.")
    weight: Weight = Field(
        default=1.0,
        description="Sampling weight relative to the other environments: a number, or a mapping from steps to weights, "
        "linear between them.",
    )

    @property
    def label(self) -> str:
        """The name in metrics and files: `name`, else the id with characters replaced that file names cannot have."""
        return self.name or re.sub(r"[^A-Za-z0-9._-]+", "-", self.id).strip("-.")[:64]

    def weight_at(self, step: int) -> float:
        """The weight of a step; steps count from 1. Before the first step of a schedule it has its first weight."""
        if isinstance(self.weight, float | int):
            return self.weight
        points = sorted(self.weight.items())
        for (before, low), (after, high) in pairwise(points):
            if before <= step <= after:
                return low + (high - low) * (step - before) / (after - before)
        return points[0][1] if step < points[0][0] else points[-1][1]


EnvList = Annotated[
    list[EnvConfig],
    Field(min_length=1),
    BeforeValidator(_env_list, json_schema_input_type=str | EnvConfig | list[str | EnvConfig]),
]


class DatasetConfig(Section):
    path: NonEmpty | None = Field(default=None, description="Local file or folder with rows.")
    name: NonEmpty | None = Field(default=None, description="Dataset on the hub. Alternative: path.")
    split: NonEmpty = Field(default="train", description="Split to train on.")
    columns: dict[str, NonEmpty] = Field(
        default_factory=dict,
        description="Mapping from Shoal's columns (prompt, answer, messages, completion, chosen, rejected) to "
        "those of the dataset.",
    )
    max_rows: PositiveInt | None = Field(default=None, description="Maximum number of rows to read. Default: all.")


class TemperatureSchedule(Section):
    start: NonNegativeFloat = Field(description="Temperature of the first step.")
    end: NonNegativeFloat = Field(description="Temperature of the last step.")
    schedule: Literal["linear", "cosine"] = Field(
        default="linear", description="Shape of the schedule between start and end."
    )

    def at(self, step: int, total_steps: int) -> float:
        """Temperature of a step; steps count from 1."""
        progress = min(1.0, (step - 1) / max(1, total_steps - 1))
        if self.schedule == "cosine":
            progress = 0.5 * (1 - math.cos(math.pi * progress))
        return self.start + (self.end - self.start) * progress


def _temperature_tag(value: Any) -> str:
    return "schedule" if isinstance(value, dict | TemperatureSchedule) else "number"


Temperature = Annotated[
    Annotated[NonNegativeFloat, Tag("number")] | Annotated[TemperatureSchedule, Tag("schedule")],
    Discriminator(_temperature_tag),
]


class SamplingConfig(Section):
    temperature: Temperature = Field(
        default=1.0, description="A number, or a schedule {start, end, schedule} over the run."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Nucleus sampling: keep the smallest set of tokens with this total probability."
    )
    top_k: Annotated[int, Field(ge=-1)] = Field(
        default=-1, description="Sample from the k most likely tokens; -1 = all tokens."
    )
    min_p: Fraction = Field(
        default=0.0, description="Drop tokens below this fraction of the highest token probability."
    )
    max_tokens: PositiveInt | None = Field(
        default=None, description="Maximum tokens per completion. Default: half of seq_len."
    )
    min_tokens: NonNegativeInt = Field(
        default=0, description="Minimum tokens before the end-of-sequence token is allowed."
    )
    stop: Strings = Field(default_factory=list, description="Strings that end a completion.")
    seed: NonNegativeInt | None = Field(default=None, description="Seed of sampling. Default: train.seed.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the chat template."
    )
    system_prompt: str | None = Field(default=None, description="Replaces the system prompt of the environment.")


class EvalSamplingConfig(Section):
    temperature: NonNegativeFloat | None = Field(default=None, description="Default: as in training. 0 = greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(default=None, description="Default: as in training.")
    top_k: Annotated[int, Field(ge=-1)] | None = Field(default=None, description="Default: as in training.")
    min_p: Fraction | None = Field(default=None, description="Default: as in training.")
    max_tokens: PositiveInt | None = Field(default=None, description="Default: as in training.")
    min_tokens: NonNegativeInt | None = Field(default=None, description="Default: as in training.")
    stop: Strings | None = Field(default=None, description="Default: as in training.")
    seed: NonNegativeInt | None = Field(default=None, description="Default: as in training.")


class AdvantageConfig(Section):
    mean: Literal["group", "batch", "none"] = Field(default="group", description="Mean subtracted from each reward.")
    std: Literal["group", "batch", "none", "mean"] | None = Field(
        default=None,
        description="Standard deviation to divide by, or mean = the group's mean (MaxRL). Default: none for masked, "
        "else group.",
    )
    leave_one_out: bool = Field(
        default=False, description="Exclude each rollout from the mean of its own group (RLOO)."
    )
    eps: PositiveFloat = Field(default=1e-6, description="Added to the standard deviation.")
    per_part: bool = Field(
        default=False, description="Normalise each named part of the reward by itself, then add them up (GDPO)."
    )
    rescale: bool = Field(
        default=False, description="With per_part: normalise the sums over the batch, as the last step of GDPO."
    )
    credit: Literal["outcome", "turn", "return", "token"] = Field(
        default="outcome",
        description="One advantage per rollout (outcome), per turn (turn: its own reward; return: those from it on) or "
        "per token.",
    )
    discount: Fraction = Field(default=1.0, description="With credit return or token: factor per turn or token.")
    function: UserCode | None = Field(default=None, description="Your own advantage estimator, as module:function.")


class RewardConfig(Section):
    scale: float = Field(default=1.0, description="Factor applied to rewards.")
    bias: float = Field(default=0.0, description="Added to rewards after scaling.")
    clip: (
        Annotated[
            list[float],
            Field(min_length=2, max_length=2),
            BeforeValidator(_clip_bounds, json_schema_input_type=float | list[float]),
        ]
        | None
    ) = Field(
        default=None,
        description="Bounds of the reward after scale and bias: [low, high], or one number x for [-x, x].",
    )
    max: float | None = Field(
        default=None,
        description="Highest possible reward, at which a prompt is solved. Default: max_reward of the environment.",
    )
    parts: dict[str, float] = Field(
        default_factory=dict,
        description="Weights of the named parts of the reward. Default: 1 for each part.",
        json_schema_extra={"binding": True},
    )
    function: UserCode | None = Field(
        default=None,
        description="Reward function (module:function) used instead of the environment's reward.",
        json_schema_extra={"binding": True},
    )
    timeout_s: PositiveFloat = Field(default=10.0, description="Time limit of one reward call, queueing excluded.")
    workers: PositiveInt = Field(default=2, description="Worker processes that run reward code.")
    isolated: bool | Literal["best-effort"] = Field(
        default=False,
        description="Isolate each reward call, for rewards that run code written by the model. best-effort: only where "
        "that works.",
    )


class StatefulConfig(Section):
    processes: PositiveInt = Field(
        default=64, description="Maximum number of stateful environments at a time; further rollouts wait."
    )
    timeout_s: PositiveFloat = Field(
        default=60.0, description="Time limit of one call of a stateful environment: reset, a turn's tools, reward."
    )


class TruncatedConfig(Section):
    type: Literal["keep", "mask", "zero", "overlong"] = Field(
        default="keep",
        description="Completions cut at max_tokens: keep the reward, mask them out, reward zero, or overlong penalty.",
    )
    tokens: PositiveInt | None = Field(
        default=None, description="overlong: the penalty grows linearly over this many last tokens."
    )
    factor: PositiveFloat | None = Field(default=None, description="overlong: penalty at max_tokens. Default: 1.")


class GroupsConfig(Section):
    uniform: Literal["refill", "skip", "keep"] | None = Field(
        default=None,
        description="Zero-variance groups: resample them (refill), leave them out (skip) or train on them (keep).",
    )
    max_refill: NonNegativeInt = Field(
        default=3, description="Maximum extra batches sampled per step to replace zero-variance groups."
    )
    filter: UserCode | None = Field(
        default=None, description="Function (module:function) that decides whether a group is kept."
    )


class ReplayConfig(Section):
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.25, description="Replayed groups per step, relative to the groups sampled: 0.25 = one for each four."
    )
    max_age: PositiveInt = Field(
        default=4, description="Largest age of a replayed group: weight versions since it was sampled."
    )
    times: PositiveInt = Field(default=1, description="How often a group is replayed at most.")


class BufferConfig(Section):
    easy_threshold: float | None = Field(default=None, description="Prompts with a mean reward above this are easy.")
    hard_threshold: float | None = Field(default=None, description="Prompts with a mean reward below this are hard.")
    easy_fraction: Fraction | None = Field(
        default=None, description="Sampling probability of an easy prompt relative to other prompts."
    )
    hard_fraction: Fraction | None = Field(
        default=None, description="Sampling probability of a hard prompt relative to other prompts."
    )
    zero_variance_fraction: Fraction | None = Field(
        default=None,
        description="Relative sampling probability of a prompt, for each of up to four zero-variance groups in a row.",
    )
    replay: ReplayConfig | None = Field(
        default=None,
        description="Train useful groups of earlier steps again, besides those of the step. Default: none.",
    )


class EvalConfig(Section):
    env: EnvList | None = Field(
        default=None,
        description="Environments to evaluate on, with their eval split. Default: the training environments.",
    )
    interval: PositiveInt = Field(
        default=10, description="Steps between evaluations; the last step is always evaluated."
    )
    interval_epochs: PositiveInt | None = Field(
        default=None, description="Epochs between evaluations. Alternative: interval."
    )
    interval_seconds: PositiveFloat | None = Field(
        default=None, description="Seconds between evaluations. Alternative: interval."
    )
    at_start: bool = Field(default=True, description="Evaluate before the first step.")
    num_examples: PositiveInt = Field(default=64, description="Prompts per evaluation.")
    rollouts_per_example: PositiveInt = Field(default=1, description="Rollouts per prompt.")
    sampling: EvalSamplingConfig = Field(
        default_factory=EvalSamplingConfig, description="Sampling settings that differ from orch.sampling."
    )
    keep_best: bool = Field(default=False, description="Keep the checkpoint with the best evaluation.")
    stop_after: PositiveInt | None = Field(
        default=None, description="Stop after this many evaluations without improvement."
    )


class ClientConfig(Section):
    base_url: NonEmpty = Field(default="http://127.0.0.1:8000/v1", description="Address of a remote engine.")
    timeout: PositiveFloat = Field(default=600.0, description="Timeout of one request in seconds.")
    api_key_var: Name | None = Field(default=None, description="Environment variable that holds the API key.")


class OrchConfig(Section):
    model: OrchModelConfig = Field(
        default_factory=OrchModelConfig, description="The served model, as named in requests."
    )
    output_dir: NonEmpty = Field(
        default="./outputs", description="Directory for the exchange of rollouts; must equal train.output_dir."
    )
    env: EnvList = Field(
        description="Environments to train on. Default with orch.dataset: the `dataset` environment.",
        json_schema_extra={"binding": True},
    )
    dataset: DatasetConfig | None = Field(
        default=None, description="Rows for environments that read a dataset.", json_schema_extra={"binding": True}
    )
    batch_size: PositiveInt = Field(default=128, description="Rollouts per step.", json_schema_extra={"binding": True})
    rollouts_per_example: PositiveInt = Field(
        default=16,
        description="Rollouts per prompt (the group size); must divide batch_size.",
        json_schema_extra={"binding": True},
    )
    seq_len: PositiveInt | None = Field(
        default=None,
        description="Maximum prompt plus completion tokens. Default: train.sequence_len.",
        json_schema_extra={"binding": True},
    )
    max_steps: PositiveInt | None = Field(
        default=None, description="Optimizer steps to train; must equal train.max_steps."
    )
    chat_template: NonEmpty | None = Field(
        default=None,
        description="Chat template that replaces the tokenizer's, also in final/: chatml, plain (for base models) or a "
        "file.",
        json_schema_extra={"binding": True},
    )
    chat_history: Literal["sampled", "template"] = Field(
        default="sampled",
        description="Earlier turns in a prompt: their sampled tokens, or what the chat template makes of them, such as "
        "without reasoning.",
    )
    sampling: SamplingConfig = Field(
        default_factory=SamplingConfig,
        description="Sampling settings for completions.",
        json_schema_extra={"binding": True},
    )
    weight_sync_interval: NonNegativeInt = Field(
        default=1, description="Steps between weight syncs. Above 1, sampling and training overlap. 0 = never sync."
    )
    max_async_level: NonNegativeInt = Field(default=0, description="Steps that sampling may run ahead of training.")
    max_off_policy_steps: NonNegativeInt | None = Field(
        default=None,
        description="Drop rollouts older than this. Default: max_async_level + max(weight_sync_interval, 1) - 1.",
    )
    advantage: Annotated[
        AdvantageConfig, BeforeValidator(_function_section, json_schema_input_type=str | AdvantageConfig)
    ] = Field(default_factory=AdvantageConfig, description="How rewards become advantages, or module:function.")
    reward: Annotated[RewardConfig, BeforeValidator(_function_section, json_schema_input_type=str | RewardConfig)] = (
        Field(default_factory=RewardConfig, description="Rewards and their scale, or the name of a reward function.")
    )
    truncated: Annotated[
        TruncatedConfig, BeforeValidator(_truncated_section, json_schema_input_type=str | TruncatedConfig)
    ] = Field(
        default_factory=TruncatedConfig,
        description="Completions cut at max_tokens: one word, or {type, tokens, factor}.",
    )
    stateful: StatefulConfig = Field(default_factory=StatefulConfig, description="Processes of stateful environments.")
    groups: GroupsConfig = Field(
        default_factory=GroupsConfig, description="Handling of groups without a training signal."
    )
    buffer: BufferConfig = Field(
        default_factory=BufferConfig, description="Sample easy and hard prompts less often; replay useful groups."
    )
    eval: EvalConfig | None = Field(default=None, description="Evaluation on held-out prompts. Default: none.")
    client: ClientConfig = Field(
        default_factory=ClientConfig,
        description="Connection to a remote engine.",
        json_schema_extra={"remote_only": True},
    )
    deadline_s: PositiveFloat = Field(default=600.0, description="Time limit for every wait in the training loop.")
    sync_deadline_s: PositiveFloat = Field(default=600.0, description="Time limit of a weight sync.")

    @model_validator(mode="before")
    @classmethod
    def _reads_its_data(cls, data: Any) -> Any:
        """A dataset without an environment uses the environment `dataset`."""
        if isinstance(data, dict) and data.get("dataset") and "env" not in data:
            return {**data, "env": [{"id": "dataset"}]}
        return data

    @property
    def replayed_groups(self) -> int:
        """Groups that a step replays at most."""
        groups = self.batch_size / self.rollouts_per_example
        return round(self.buffer.replay.fraction * groups) if self.buffer.replay is not None else 0

    @property
    def env_lists(self) -> list[tuple[str, list[EnvConfig]]]:
        """(key, environments) for every key that lists environments."""
        evaluated = self.eval.env if self.eval is not None else None
        return [("orch.env", self.env), *([("orch.eval.env", evaluated)] if evaluated else [])]
