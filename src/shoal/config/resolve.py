"""Fills in the defaults that depend on other keys, writes configurations as YAML, and compares two of them.

`resolve_run` is called once, after rules.py. build/ and config.yaml get its result.
"""

from __future__ import annotations

from typing import Any, TypeVar

import yaml

from shoal.config.fields import mark_of, walk_keys
from shoal.config.infer import InferConfig
from shoal.config.orch import EvalConfig, OrchConfig
from shoal.config.problems import redact, show
from shoal.config.rules import advantage_std, run_seq_len
from shoal.config.schema import DpoConfig, RunConfig, SftConfig, SupervisedConfig
from shoal.config.train import TrainConfig
from shoal.config.yaml_text import CoreLoader
from shoal.core.losses import keeps_uniform
from shoal.core.section import Section

Supervised = TypeVar("Supervised", bound=SupervisedConfig)
DEFAULT_SAVE_STEPS = 10
MAX_NUM_SEQS = 256  # of a server; the embedded engine follows the rollouts of a step, as far as memory allows
MAX_SLOTS = 4096
# Keys that a resumed run cannot change: they define the prompts, the sampling and the meaning of the weights.
BINDING_KEYS = {
    key.dotted for root in (RunConfig, SftConfig, DpoConfig) for key in walk_keys(root) if mark_of(key.info, "binding")
}


class CoreDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or YAML 1.2 would parse as a number."""


for _first, _resolvers in CoreLoader.yaml_implicit_resolvers.items():
    for _tag, _pattern in _resolvers:
        CoreDumper.add_implicit_resolver(_tag, _pattern, [_first])


def resolve_run(config: RunConfig) -> RunConfig:
    """The run with every derived default filled in. Idempotent."""
    seq_len = run_seq_len(config)
    steps = config.train.max_steps or config.orch.max_steps
    train = _resolve_train(config.train, config)
    train = _with(train, sequence_len=seq_len, max_steps=steps)
    orch = _resolve_orch(config, seq_len, train)
    return _with(config, train=train, infer=_resolve_infer(config, seq_len, train), orch=orch)


def resolve_supervised(config: Supervised) -> Supervised:
    train = _resolve_saving(config.train)
    if isinstance(config, DpoConfig) and train.reference == "auto":
        train = _with(train, reference=_reference_of(train))
    return _with(config, train=train)


def _reference_of(train: TrainConfig) -> str:
    """The reference that needs the least memory."""
    return "adapter-off" if train.lora else "frozen"


def _with(section: Any, **changes: Any) -> Any:
    """A copy with these values, which then count as set."""
    return section.model_copy(update=changes) if changes else section


def _resolve_saving(train: TrainConfig) -> TrainConfig:
    changes: dict[str, Any] = {}
    if train.save_steps is None and train.save_epochs is None and train.save_seconds is None:
        changes["save_steps"] = DEFAULT_SAVE_STEPS
    if train.warmup_steps is None and train.warmup_ratio is None:
        changes["warmup_steps"] = 0
    return _with(train, **changes)


def _resolve_train(train: TrainConfig, config: RunConfig) -> TrainConfig:
    train = _resolve_saving(train)
    adapter = config.orch.model
    changes: dict[str, Any] = {"loss": train.loss.resolved()}
    changes["model"] = train.model or config.infer.model or adapter.name
    for name in ("lora_rank", "lora_alpha"):
        if name not in train.model_fields_set and getattr(adapter, name) is not None:
            changes[name] = getattr(adapter, name)
    if train.reference == "auto":
        changes["reference"] = _reference_of(train) if train.loss.kl.beta > 0 else "none"
    return _with(train, **changes)


def _resolve_infer(config: RunConfig, seq_len: int, train: TrainConfig) -> InferConfig:
    infer = config.infer
    return _with(
        infer,
        model=train.model,
        output_dir=train.output_dir,
        max_model_len=infer.max_model_len or seq_len,
        max_num_seqs=infer.max_num_seqs
        or min(config.orch.batch_size, MAX_SLOTS if infer.engine == "embedded" else MAX_NUM_SEQS),
        enable_lora=train.lora,
        max_lora_rank=(infer.max_lora_rank or train.lora_rank) if train.lora else infer.max_lora_rank,
    )


def _resolve_orch(config: RunConfig, seq_len: int, train: TrainConfig) -> OrchConfig:
    orch = config.orch
    names: dict[str, Any] = {"name": train.model}
    if train.lora:
        adapter = orch.model.lora_adapter or "default"
        names.update(lora_adapter=adapter, lora_rank=train.lora_rank, lora_alpha=train.lora_alpha)
    std = advantage_std(config)
    uniform = "keep" if keeps_uniform(orch.advantage.mean, std) or train.teacher is not None else "refill"
    max_tokens = orch.sampling.max_tokens or max(1, seq_len // 2)
    seed = train.seed if orch.sampling.seed is None else orch.sampling.seed
    stale = orch.max_async_level + max(orch.weight_sync_interval, 1) - 1
    stale_unset = orch.max_off_policy_steps is None and orch.weight_sync_interval > 0
    return _with(
        orch,
        model=_with(orch.model, **names),
        output_dir=train.output_dir,
        env=[_with(env, name=env.label) for env in orch.env],
        seq_len=seq_len,
        max_steps=train.max_steps or orch.max_steps,
        sampling=_with(orch.sampling, max_tokens=max_tokens, seed=seed),
        max_off_policy_steps=stale if stale_unset else orch.max_off_policy_steps,
        advantage=orch.advantage if orch.advantage.function else _with(orch.advantage, std=std),
        groups=_with(orch.groups, uniform=orch.groups.uniform or uniform),
        truncated=_resolve_truncated(orch, max_tokens),
        eval=_resolve_eval(orch, max_tokens, seed),
    )


def _resolve_truncated(orch: OrchConfig, max_tokens: int) -> Any:
    if orch.truncated.type != "overlong":
        return orch.truncated
    tokens = orch.truncated.tokens or max(1, max_tokens // 5)
    return _with(orch.truncated, tokens=tokens, factor=orch.truncated.factor or 1.0)


def _resolve_eval(orch: OrchConfig, max_tokens: int, seed: int) -> EvalConfig | None:
    if orch.eval is None:
        return None
    ours = orch.sampling
    temperature = ours.temperature if isinstance(ours.temperature, float | int) else ours.temperature.end
    training = {
        **{name: getattr(ours, name) for name in ("top_p", "top_k", "min_p", "min_tokens", "stop")},
        "temperature": temperature, "max_tokens": max_tokens, "seed": seed,
    }  # fmt: skip
    unset = {name: value for name, value in training.items() if getattr(orch.eval.sampling, name) is None}
    envs = [_with(env, name=env.label) for env in orch.eval.env or orch.env]
    return _with(orch.eval, env=envs, sampling=_with(orch.eval.sampling, **unset))


def as_data(config: Section, *, secrets: bool = False) -> dict[str, Any]:
    """Plain data with the keys of the files. Secrets are hidden by default."""
    data = config.model_dump(by_alias=True)
    return data if secrets else redact(data)


def as_yaml(config: Section, *, secrets: bool = False) -> str:
    """The text of config.yaml. It loads as the same configuration."""
    return yaml.dump(
        as_data(config, secrets=secrets), Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=120
    )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat.update(_flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def binding_data(config: Section) -> dict[str, Any]:
    """The values that a resumed run cannot change: dotted key → value."""
    flat = _flatten(as_data(config))
    return {
        key: value
        for key, value in flat.items()
        if any(key == bound or key.startswith(bound + ".") for bound in BINDING_KEYS)
    }


def difference(old: Section, new: Section) -> dict[str, tuple[Any, Any]]:
    """Key → (old, new) for every difference, in the order of the schema."""
    before, after = _flatten(as_data(old)), _flatten(as_data(new))
    keys = list(dict.fromkeys([*before, *after]))
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def difference_lines(old: Section, new: Section) -> list[str]:
    return [f"{key}: {show(before)} → {show(after)}" for key, (before, after) in difference(old, new).items()]


def forbidden_changes(old: Section, new: Section) -> list[str]:
    """The changes that prevent a resume, as lines."""
    before, after = binding_data(old), binding_data(new)
    keys = list(dict.fromkeys([*before, *after]))
    changed = [key for key in keys if before.get(key) != after.get(key)]
    # Other interfaces rename this key to an argument that counts prompts.
    unit = {"orch.batch_size": " rollouts"}
    return [f"{key}: {show(before.get(key))} → {show(after.get(key))}{unit.get(key, '')}" for key in changed]
