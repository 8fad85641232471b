"""The RL recipe: `main(Config(…), reward_fn)` trains a whole run. The other names are the parts of a custom loop.

`main` translates `Config` to the schema and calls shoal.api.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal import api
from shoal.build.load import PythonObjects, Run
from shoal.build.signals import outside_event_loop
from shoal.core.errors import ArgumentError
from shoal.core.types import Task
from shoal.envs.datasets import DatasetSpec, read_train, to_messages
from shoal.envs.items import ItemEnvironment, judges_itself
from shoal.envs.user_code import load_object
from shoal.recipes.clients import AdamParams, DeploymentSampler, ForwardBackward, PolicyClient, ReferenceClient
from shoal.recipes.config import (
    KEYS,
    LOSS_OBJECTS,
    CISPOConfig,
    Config,
    DAPOConfig,
    DeployConfig,
    DROConfig,
    GSPOConfig,
    InfraConfig,
    ISConfig,
    ReinforceConfig,
    TISConfig,
    WandBConfig,
    WeightSyncConfig,
    WeightSyncScope,
    check_config,
    is_path,
    translate,
)
from shoal.recipes.datums import Datum, PromptGroup, SampledCompletion, build_grpo_datums, make_grpo_loss_fn
from shoal.recipes.infra import Infra, check_tokenizers, setup_infra
from shoal.rewards.functions import RewardFunctions
from shoal.runs.run_dir import is_used
from shoal.surfaces.names import names_by_key, one_line_if_uncaught, replace_keys
from shoal.surfaces.trainer import LABEL

RewardFn = Callable[..., Any] | str


def in_memory(config: Config, reward_fn: RewardFn | None) -> bool:
    return reward_fn is not None or not isinstance(config.dataset, str)


def environment_of(config: Config, reward_fn: RewardFn | None) -> ItemEnvironment:
    """The environment of the rows, scored by `reward_fn` or by their own get_reward."""
    rows = read_rows(config)
    if reward_fn is None:
        if len(rows) and not judges_itself(rows[0]):
            raise ArgumentError("main: reward_fn: is required, because the rows have no get_reward(completion)")
        return ItemEnvironment(rows, name=LABEL)
    function = load_object(reward_fn) if isinstance(reward_fn, str) else reward_fn
    return ItemEnvironment(rows, name=LABEL, rewards=RewardFunctions([function]))


def read_rows(config: Config) -> Sequence[Any]:
    """At most `max_rows` rows of the dataset. Each has a `prompt`."""
    data = config.dataset
    if not isinstance(data, str):
        return [data[index] for index in range(min(len(data), config.max_rows or len(data)))]
    path = data if is_path(data) else None
    spec = DatasetSpec(path, None if path else data, max_rows=config.max_rows)
    tasks = read_train(spec, ("prompt",), _task)
    return [{**task.data, "prompt": task.messages} for task in tasks]


def _task(row: Any) -> Task:
    return Task(to_messages(row["prompt"]), {key: value for key, value in row.items() if key != "prompt"})


__all__ = [
    "AdamParams",
    "CISPOConfig",
    "Config",
    "DAPOConfig",
    "DROConfig",
    "Datum",
    "DeployConfig",
    "DeploymentSampler",
    "ForwardBackward",
    "GSPOConfig",
    "ISConfig",
    "Infra",
    "InfraConfig",
    "PolicyClient",
    "PromptGroup",
    "ReferenceClient",
    "ReinforceConfig",
    "SampledCompletion",
    "TISConfig",
    "WandBConfig",
    "WeightSyncConfig",
    "WeightSyncScope",
    "build_grpo_datums",
    "main",
    "make_grpo_loss_fn",
    "setup_infra",
]


def __getattr__(name: str) -> type:
    """Classes with loss parameters that are not imported above, such as `SAPOConfig`."""
    for parameters in LOSS_OBJECTS.values():
        if parameters.__name__ == name:
            return parameters
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(config: Config, reward_fn: RewardFn | None = None) -> Path:
    """Train, and return the run directory, which is `log_path`.

    `reward_fn` scores completions: `f(completion, answer)` with any columns by name, or TRL's
    `f(prompts, completions, **columns)`. Without it, `get_reward` of the rows is used, or answers of a dataset are
    graded as math. With `dcp_save_interval` above 0 a stopped run continues.
    """
    with one_line_if_uncaught(_reword_main):
        return _run(config, reward_fn)


def _run(config: Config, reward_fn: RewardFn | None) -> Path:
    check_config("main", config)
    if config.dataset is None:
        raise ArgumentError("Config: dataset: is required by main; name a file, a folder or a hub dataset")
    objects = in_memory(config, reward_fn)
    run, notices = translate(config, in_memory=objects)
    environments = {LABEL: environment_of(config, reward_fn)} if objects else {}
    check_tokenizers(config)
    if Path(config.log_path).is_file():
        raise ArgumentError(f"Config: log_path: {config.log_path!r} is a file; use a folder")
    used = is_used(Path(config.log_path))
    resume = used and config.weight_sync.dcp_save_interval > 0
    if used and not resume:
        raise ArgumentError(
            f"Config: log_path: {config.log_path!r} already holds a run; choose another folder, or set "
            "weight_sync.dcp_save_interval above 0 to continue it"
        )
    again = "run the same script again: main continues from log_path"
    job = Run(run, resume, PythonObjects(environments), tuple(notices), again, _reword)
    return outside_event_loop(lambda: api.train(job))


def _reword(text: str) -> str:
    return replace_keys(text, names_by_key(KEYS))


def _reword_main(text: str) -> str:
    return _reword(text).replace("reward_funcs:", "main: reward_fn:")
