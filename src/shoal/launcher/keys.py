"""The keys of the launcher's files: schema keys, defaults and conversions. A default of None is that of the schema.

translate.py and read.py work through this table. docs/launcher.md and docs/coming-from/areal.md have it as a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.surfaces.names import Key

MODES_ON = ("auto", "on", "fault", "resume")
MODES_OFF = ("disabled", "off")


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _choose(yes: str, no: str) -> Callable[[Any], str]:
    return lambda value: yes if _flag(value) else no


def _workers(value: Any) -> int:
    """0 is valid for a data loader, but rewards need at least one worker process."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("must be a number of processes, 0 or more")
    return max(1, value)


def _switch(value: Any) -> bool:
    if value not in (*MODES_ON, *MODES_OFF):
        raise ValueError(f"must be one of {', '.join((*MODES_OFF, *MODES_ON))}")
    return value in MODES_ON


def _wandb(value: Any) -> list[str]:
    if value not in ("disabled", "online", "offline"):
        raise ValueError("must be disabled, online or offline")
    return [] if value == "disabled" else ["wandb"]


_SAVE = {"epochs": "train.save_epochs", "steps": "train.save_steps", "secs": "train.save_seconds"}
_EVAL = {"epochs": "orch.eval.interval_epochs", "steps": "orch.eval.interval", "secs": "orch.eval.interval_seconds"}

KEYS: dict[str, Key] = {
    "experiment_name": Key("train.output_dir", composed=True),
    "trial_name": Key("train.output_dir", default="trial0", composed=True),
    "seed": Key("train.seed"),
    "allocation_mode": Key(
        ("infer.engine", "train.gpus", "train.sharding"), default="embedded:d1|fsdp:d1", composed=True
    ),
    "total_train_epochs": Key("train.epochs", default=5, composed=True),
    "total_train_steps": Key("train.max_steps", composed=True),
    "tokenizer_path": Key("train.model", composed=True),
    "ref.path": Key("train.model", composed=True),
    "actor.path": Key("train.model"),
    "actor.lr": Key("train.learning_rate", default=1.70e-5),
    "actor.eps_clip": Key(("train.loss.clip_low", "train.loss.clip_high"), default=0.4),
    "actor.reward_scaling": Key("orch.reward.scale", default=10.0, composed=True),
    "actor.reward_bias": Key("orch.reward.bias"),
    "actor.kl_ctl": Key(("train.loss.kl.beta", "train.loss.kl.in"), default=0.0, composed=True),
    "actor.ppo_n_minibatches": Key("train.minibatches", default=1),
    "actor.recompute_logprob": Key("train.recompute_old", default=True, convert=_flag),
    "actor.use_decoupled_loss": Key("train.loss.type", default=True, convert=_choose("decoupled", "grpo")),
    "actor.behav_imp_weight_cap": Key("train.loss.cap", default=5.0, composed=True),
    "actor.group_reward_norm": Key("orch.advantage.mean", default=True, convert=_choose("group", "batch")),
    "actor.adv_norm": Key("orch.advantage.std", default="batch"),
    "actor.mb_spec.max_tokens_per_mb": Key("train.sequence_len", composed=True),
    "mb_spec.max_tokens_per_mb": Key("train.sequence_len", default=5120, composed=True),
    "gconfig.n_samples": Key("orch.rollouts_per_example", default=4),
    "gconfig.max_new_tokens": Key("orch.sampling.max_tokens", default=512),
    "gconfig.temperature": Key("orch.sampling.temperature", default=1.0),
    "train_dataset.path": Key(("orch.dataset.path", "orch.dataset.name"), default="openai/gsm8k", composed=True),
    "train_dataset.batch_size": Key("orch.batch_size", default=8, composed=True),
    "train_dataset.num_workers": Key("orch.reward.workers", convert=_workers),
    "rollout.max_concurrent_rollouts": Key("infer.max_num_seqs"),
    "rollout.max_head_offpolicyness": Key("orch.max_async_level", default=0),
    "rollout.engine_python": Key("infer.engine_python"),
    "rollout.base_url": Key("orch.client.base_url"),
    "rollout.port": Key("infer.port"),
    "saver.mode": Key(tuple(_SAVE.values()), default="auto", convert=_switch, composed=True),
    **{f"saver.freq_{unit}": Key(to, composed=True) for unit, to in _SAVE.items()},
    "recover.mode": Key("train.resume_from_checkpoint", default="disabled", convert=_switch),
    **{f"recover.freq_{unit}": Key(to, composed=True) for unit, to in _SAVE.items()},
    "evaluator.mode": Key("orch.eval", default="auto", convert=_switch, composed=True),
    **{f"evaluator.freq_{unit}": Key(to, composed=True) for unit, to in _EVAL.items()},
    "stats_logger.wandb.mode": Key("train.report_to", default="disabled", convert=_wandb),
    "stats_logger.wandb.wandb_api_key": Key("train.report_to", composed=True),
}


def table() -> str:
    """The table in docs/launcher.md."""

    def cell(value: object) -> str:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return f"`{text}`".replace("|", "\\|")

    rows = ["| Key | Default | Sets |", "|---|---|---|"]
    for name, key in KEYS.items():
        default = "" if key.default is None else cell(key.default)
        rows.append(f"| `{name}` | {default} | {', '.join(map(cell, key.keys))} |")
    return "\n".join(rows)
