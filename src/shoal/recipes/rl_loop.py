"""The RL recipe: `main(Config(…), reward_fn)` is a whole run; the other names are the pieces to write one's own loop.

`main` is a translation onto the schema and a call of shoal.api; the pieces are the same policy, engine and losses.
"""

from __future__ import annotations

from pathlib import Path

from shoal import api, build
from shoal.errors import ArgumentError
from shoal.observability.run_dir import is_used
from shoal.orchestrator.signals import outside_event_loop
from shoal.recipes.clients import AdamParams, ForwardBackward, PolicyClient, ReferenceClient
from shoal.recipes.config import (
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
)
from shoal.recipes.data import RewardFn, environment_of, in_memory
from shoal.recipes.datums import (
    Datum,
    PromptGroup,
    SampledCompletion,
    build_grpo_datums,
    make_grpo_loss_fn,
)
from shoal.recipes.infra import Infra, check_tokenizers, setup_infra
from shoal.recipes.sampling import DeploymentSampler
from shoal.recipes.translate import LABEL, check_config, translate
from shoal.surfaces.recipe import FIELDS
from shoal.surfaces.uncaught import one_line_if_uncaught

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


def main(config: Config, reward_fn: RewardFn | None = None) -> Path:
    """Train as `config` says and return the run directory, which is `log_path`.

    `reward_fn` judges completions: `f(completion, answer)` with any columns by name, or TRL's
    `f(prompts, completions, **columns)`. Without it, rows judge themselves (`get_reward`), or the answers of a data set
    are graded as mathematics. With `dcp_save_interval` above 0 a run that stopped continues.
    """
    with one_line_if_uncaught(_in_their_words):
        return _run(config, reward_fn)


def _run(config: Config, reward_fn: RewardFn | None) -> Path:
    check_config("main", config)
    objects = in_memory(config, reward_fn)
    run, notices = translate(config, in_memory=objects)
    environments = {LABEL: environment_of(config, reward_fn)} if objects else {}
    check_tokenizers(config)
    if Path(config.log_path).is_file():
        raise ArgumentError(f"Config: log_path: {config.log_path!r} is a file; name a folder")
    used = is_used(Path(config.log_path))
    resume = used and config.weight_sync.dcp_save_interval > 0
    if used and not resume:
        raise ArgumentError(
            f"Config: log_path: {config.log_path!r} already holds a run; choose another folder, or set "
            "weight_sync.dcp_save_interval above 0 to continue it"
        )
    again = "run the same script again: main continues from log_path"
    given = build.Given(environments)
    return outside_event_loop(
        lambda: api.train(
            run, resume=resume, notices=notices, given=given, next_command=again, wording=FIELDS.in_their_words
        )
    )


def _in_their_words(text: str) -> str:
    return FIELDS.in_their_words(text).replace("reward_funcs:", "main: reward_fn:")
