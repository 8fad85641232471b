"""Checks keys against each other before anything loads. Contradictions and unused keys are errors, advice is a notice.

Called by the CLI, the launcher and the Python surfaces with a validated configuration. Rules inside one section are in
section_rules.py. This file has the entry points, the rules across sections, and the merge of the sections that the
processes of a split run exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.fields import given, marked
from shoal.config.infer import InferConfig
from shoal.config.load import validate
from shoal.config.loss_rules import check_adapter_off, check_loss, check_replay
from shoal.config.model_names import model_problem, shape_of
from shoal.config.orch import OrchConfig
from shoal.config.problems import Findings, Origins, redact, show
from shoal.config.schema import SECTIONS, DpoConfig, RunConfig, SupervisedConfig
from shoal.config.section_rules import (
    check_dataset,
    check_orch,
    check_train,
    check_uniform,
    port_of,
)
from shoal.config.train import TrainConfig
from shoal.core.section import Section

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EMBEDDED_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # train.recipe → infer.dtype
SERVER_ONLY = marked(InferConfig, "server_only")
STARTED_ONLY = marked(InferConfig, "started_only")
GRPO_ONLY = marked(TrainConfig, "grpo_only")
NOT_SFT = marked(TrainConfig, "not_sft")
WRITE_SHAPE = "write them with `shoal make-model DIR --shape NAME`, and use the folder"
SPLIT_ONLY = {"train": marked(TrainConfig, "split_only"), "infer": marked(InferConfig, "split_only")}
REMOTE_ONLY = {"infer": marked(InferConfig, "remote_only"), "orch": marked(OrchConfig, "remote_only")}


def check_run(config: RunConfig) -> Findings:
    """All checks of a co-located run that need no model."""
    findings = Findings()
    check_common(config, findings)
    check_replay(config.train, config.orch, config.infer.engine != "embedded", findings)
    _check_colocated(config, findings)
    _advise_reward(config, findings)
    return findings


def check_common(config: RunConfig, findings: Findings) -> None:
    """Checks for every layout."""
    check_train(config.train, findings)
    check_loss(config.train, findings, config.orch)
    check_orch(config.orch, findings)
    _check_infer(config.infer, findings)
    if config.orch.advantage.std is None:
        check_uniform(config.orch, advantage_std(config), findings)
    _check_models(config, findings)
    _check_steps(config, findings)
    _check_lengths(config, findings)
    _check_adapters(config, findings)


def check_section(section: TrainConfig | InferConfig | OrchConfig) -> Findings:
    """Checks for one process of the split layout. The sections are compared when the processes connect."""
    findings = Findings()
    name = next(name for name, kind in SECTIONS.items() if isinstance(section, kind))
    model = section.model.name if isinstance(section, OrchConfig) else section.model
    key = "orch.model.name" if name == "orch" else f"{name}.model"
    if model is None:
        findings.error(key, "is required but not set", "set it to a model folder, a hub id or a GGUF file")
    elif shape_of(model) is not None:
        findings.error(key, f"{show(model)} has no files, which other processes need", WRITE_SHAPE)
    elif name != "train" and (problem := model_problem(model)) is not None:
        findings.error(key, *problem)
    if isinstance(section, TrainConfig):
        check_train(section, findings)
        check_loss(section, findings)
    elif isinstance(section, OrchConfig):
        check_orch(section, findings)
    else:
        _check_infer(section, findings)
    return findings


def check_supervised(config: SupervisedConfig) -> Findings:
    """All checks of `shoal sft` and `shoal dpo` that need no model."""
    findings = Findings()
    train = config.train
    preference = isinstance(config, DpoConfig)
    for name in given(train, *GRPO_ONLY, *(() if preference else NOT_SFT)):
        other = "; the loss of DPO has its own section, loss" if preference and name == "loss" else ""
        findings.error(f"train.{name}", f"is not used by {config.training}", f"remove it{other}")
    if preference:
        _check_preference(train, findings)
    if train.model is None:
        findings.error("train.model", "is required but not set", "set it to a model folder, a hub id or a GGUF file")
    if train.max_steps is None and train.epochs is None:
        findings.error("train.max_steps", "is not set, and neither is train.epochs", "set one of them")
    check_train(train, findings, supervised=True)
    check_dataset(config.dataset, "dataset", findings)
    return findings


def _check_preference(train: TrainConfig, findings: Findings) -> None:
    if train.reference == "none":
        what = "is none, but the loss compares the policy with a reference"
        findings.error("train.reference", what, "remove it, or set it to frozen")
    check_adapter_off(train, findings)
    if train.lora and train.lora_dropout > 0:
        what = f"is {train.lora_dropout:g}, but preference training computes all log-probs without dropout"
        findings.error("train.lora_dropout", what, "remove it")


def _check_models(config: RunConfig, findings: Findings) -> None:
    named = [("train.model", config.train.model), ("infer.model", config.infer.model)]
    named = [(key, model) for key, model in [*named, ("orch.model.name", config.orch.model.name)] if model is not None]
    if not named:
        findings.error("train.model", "is required but not set", "set it to a model folder, a hub id or a GGUF file")
        return
    first_key, first = named[0]
    if shape_of(first) is not None and config.infer.engine != "embedded":
        findings.error(first_key, f"{show(first)} has no files, which {config.infer.engine} needs", WRITE_SHAPE)
    if first_key != "train.model" and (problem := model_problem(first)) is not None:
        findings.error(first_key, *problem)
    for key, model in named[1:]:
        if model != first:
            findings.error(key, f"is {show(model)} but {first_key} is {show(first)}", "make them equal")


def _check_steps(config: RunConfig, findings: Findings) -> None:
    train, orch = config.train, config.orch
    if train.max_steps is not None and orch.max_steps is not None and train.max_steps != orch.max_steps:
        what = f"is {orch.max_steps} but train.max_steps is {train.max_steps}"
        findings.error("orch.max_steps", what, "make them equal, or remove one")
    if train.epochs is not None and train.max_steps is None and orch.max_steps is not None:
        findings.error("orch.max_steps", f"cannot be combined with train.epochs ({train.epochs})", "keep one of them")
    steps = train.max_steps or orch.max_steps
    if steps is None and train.epochs is None:
        findings.error("train.max_steps", "is not set, and neither is train.epochs", "set one of them")
    if steps and train.warmup_steps and train.warmup_steps > steps:
        what = f"is {train.warmup_steps}, more than the number of steps ({steps})"
        findings.error("train.warmup_steps", what, "lower it, or use train.warmup_ratio")
    if steps and train.noise_scheduler.enabled and train.noise_scheduler.num_stages > steps:
        stages = train.noise_scheduler.num_stages
        what = f"is {stages}, more than the number of steps ({steps}), so some stages are skipped"
        findings.notice("train.noise_scheduler.num_stages", what)


def run_seq_len(config: RunConfig) -> int:
    """The context length: from orch.seq_len, infer.max_model_len or train.sequence_len, in this order."""
    if config.orch.seq_len is not None:
        return config.orch.seq_len
    if config.infer.max_model_len is not None and "sequence_len" not in config.train.model_fields_set:
        return min(config.infer.max_model_len, config.train.sequence_len)
    return config.train.sequence_len


def _check_lengths(config: RunConfig, findings: Findings) -> None:
    train, orch, infer = config.train, config.orch, config.infer
    seq_len = run_seq_len(config)
    if "sequence_len" in train.model_fields_set and orch.seq_len is not None and train.sequence_len != orch.seq_len:
        what = f"is {orch.seq_len} but train.sequence_len is {train.sequence_len}"
        findings.error("orch.seq_len", what, "make them equal, or remove one")
    if infer.max_model_len is not None and seq_len > infer.max_model_len:
        key = "orch.seq_len" if orch.seq_len is not None else "train.sequence_len"
        what = f"is {seq_len}, longer than infer.max_model_len ({infer.max_model_len})"
        findings.error(key, what, "lower it or raise infer.max_model_len")
    _check_max_tokens("orch.sampling.max_tokens", orch.sampling.max_tokens, seq_len, findings)
    if orch.eval is not None:
        _check_max_tokens("orch.eval.sampling.max_tokens", orch.eval.sampling.max_tokens, seq_len, findings)


def _check_max_tokens(key: str, max_tokens: int | None, seq_len: int, findings: Findings) -> None:
    if max_tokens is not None and max_tokens >= seq_len:
        what = f"is {max_tokens}, which leaves no room for a prompt in seq_len ({seq_len})"
        findings.error(key, what, f"set it below {seq_len}, or raise orch.seq_len")


def _check_adapters(config: RunConfig, findings: Findings) -> None:
    train, infer, model = config.train, config.infer, config.orch.model
    if not train.lora:
        inert = [f"infer.{name}" for name in given(infer, "enable_lora", "max_lora_rank") if getattr(infer, name)]
        inert += [f"orch.model.{name}" for name in given(model, "lora_adapter", "lora_rank", "lora_alpha")]
        if inert:
            findings.notice("train.lora", f"is false, so these keys have no effect: {', '.join(inert)}")
        return
    if infer.enable_lora is False:
        findings.error("infer.enable_lora", "is false but train.lora is true", "make them equal, or remove it")
    for name in ("lora_rank", "lora_alpha"):
        ours, theirs = getattr(train, name), getattr(model, name)
        if name in train.model_fields_set and theirs is not None and ours != theirs:
            findings.error(f"orch.model.{name}", f"is {theirs} but train.{name} is {ours}", "make them equal")
    rank = train.lora_rank if "lora_rank" in train.model_fields_set else model.lora_rank or train.lora_rank
    if infer.max_lora_rank is not None and rank > infer.max_lora_rank:
        what = f"is {rank}, above infer.max_lora_rank ({infer.max_lora_rank})"
        findings.error("train.lora_rank", what, f"lower it or set infer.max_lora_rank={rank}")


def _check_infer(infer: InferConfig, findings: Findings) -> None:
    if infer.host not in LOOPBACK and infer.api_key_var is None:
        what = f"{show(infer.host)} is reachable from other machines, but infer.api_key_var is not set"
        findings.error("infer.host", what, "set infer.api_key_var to an environment variable, or use 127.0.0.1")
    if infer.engine == "sglang" and infer.engine_python is not None and infer.api_key_var is not None:
        what = "would be visible to all users of this machine on the command line of SGLang"
        findings.error("infer.api_key_var", what, "start SGLang yourself and set orch.client.api_key_var")
    if infer.engine == "embedded":
        if infer.dtype not in ("auto", *EMBEDDED_DTYPES.values()):
            what = f"the embedded engine supports {' and '.join(EMBEDDED_DTYPES.values())}, not {infer.dtype}"
            findings.error("infer.dtype", what, "use one of them, or set infer.engine to vllm or sglang")
        if infer.engine_args:
            what = f"the embedded engine takes no engine arguments ({', '.join(infer.engine_args)})"
            findings.error("infer.engine_args", what, "remove them, or set infer.engine to vllm or sglang")
        for name in given(infer, *SERVER_ONLY):
            what = f"{show(getattr(infer, name))} is not supported by the embedded engine ({SERVER_ONLY[name]})"
            findings.error(f"infer.{name}", what, "remove it, or set infer.engine to vllm or sglang")


def _check_server(config: RunConfig, findings: Findings) -> None:
    """vLLM or SGLang next to the trainer: started by Shoal, started elsewhere, or in-process."""
    train, infer, orch = config.train, config.infer, config.orch
    client, python = given(orch.client, "base_url"), infer.engine_python
    if infer.in_process and (infer.engine != "vllm" or python is not None or client):
        what = "runs vLLM in the training process, so no server is started or used"
        findings.error(
            "infer.in_process", what, "set infer.engine to vllm, and remove infer.engine_python and orch.client"
        )
    elif python is not None and client:
        what = f"starts a server, but orch.client.base_url names a running one ({show(orch.client.base_url)})"
        findings.error("infer.engine_python", what, "keep one of them; infer.port sets the port of a started server")
    elif python is None and not infer.in_process:
        for name in given(infer, *STARTED_ONLY):
            if name != "max_num_seqs" and not (name == "max_lora_rank" and infer.max_lora_rank == train.lora_rank):
                what = (
                    f"applies to a server that Shoal starts, but this run uses the one at {show(orch.client.base_url)}"
                )
                findings.error(f"infer.{name}", what, "remove it, or set infer.engine_python")


def check_served(config: RunConfig, findings: Findings) -> None:
    """Features that vLLM and SGLang servers do not support, in any layout."""
    train, engine, sampling = config.train, config.infer.engine, config.orch.sampling
    if engine == "embedded":
        return
    if engine == "sglang" and train.noise_scheduler.enabled:
        what = "is not supported by SGLang"
        findings.error("train.noise_scheduler", what, "disable it, or set infer.engine to vllm or embedded")
    if train.quantised:
        what = f"a {engine} server would sample from the unquantised base"
        findings.error("infer.engine", what, "set it to embedded, or train without quantisation")
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        # Only the embedded engine reports which tokens a truncated distribution kept.
        what = f"truncated sampling cannot be replayed with infer.engine {engine}, so training would be biased"
        findings.error("orch.sampling", what, "set top_p: 1, top_k: -1 and min_p: 0, or set infer.engine to embedded")


def _check_colocated(config: RunConfig, findings: Findings) -> None:
    """Rejects keys of the split layout and of remote engines where they have no effect."""
    train, infer, orch = config.train, config.infer, config.orch
    for name, section in (("infer", infer), ("orch", orch)):
        if given(section, "output_dir") and section.output_dir != train.output_dir:
            what = f"is {show(section.output_dir)} but train.output_dir is {show(train.output_dir)}"
            findings.error(f"{name}.output_dir", what, "remove it: a co-located run has one directory")
    for section, names in SPLIT_ONLY.items():
        for name in given(getattr(config, section), *names):
            findings.error(f"{section}.{name}", "is only used by the split layout", "remove it, or add --layout split")
    if infer.engine == "embedded":
        for section, names in REMOTE_ONLY.items():
            for name in given(getattr(config, section), *names):
                what = "is not used: the embedded engine runs inside `shoal grpo`"
                findings.error(f"{section}.{name}", what, "remove it")
        dtype = infer.dtype
        if dtype in EMBEDDED_DTYPES.values() and EMBEDDED_DTYPES.get(train.recipe) != dtype:
            what = f"is {dtype}, but the embedded engine uses the trainer's weights (train.recipe {train.recipe})"
            findings.error("infer.dtype", what, "remove it and set train.recipe")
    else:
        _check_server(config, findings)
    check_served(config, findings)
    if infer.engine != "embedded" and given(infer, "weights"):
        findings.error("infer.weights", f"is not used: a {infer.engine} server always has its own copy", "remove it")
    served = infer.engine != "embedded" and not infer.in_process
    if served and train.device == "cpu" and infer.gpu_memory_utilization is not None:
        findings.error(
            "infer.gpu_memory_utilization", "applies to a server on a GPU, but train.device is cpu", "remove it"
        )


def _advise_reward(config: RunConfig, findings: Findings) -> None:
    reward = config.orch.reward
    moved = given(reward, "scale", "bias")
    std = advantage_std(config)
    if moved and reward.clip is None and std != "none":
        what = f"cancels out, because orch.advantage.std {std} divides by the standard deviation of the rewards"
        findings.notice(f"orch.reward.{moved[0]}", what)


def advantage_std(config: RunConfig) -> str:
    """The effective orch.advantage.std: as configured, else the default of the loss."""
    return config.orch.advantage.std or config.train.loss.default_advantage_std


def section_data(section: Section) -> dict[str, Any]:
    """The keys that were set, as plain data without secrets, for the other processes."""
    return redact(section.model_dump(by_alias=True, exclude_unset=True, mode="json"))


def merge_sections(name: str, own: Any, others: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The run as one process sees it. Each process reaches the shared folder under its own output_dir."""
    data: dict[str, Any] = {other: {**section, "output_dir": own.output_dir} for other, section in others.items()}
    data[name] = own.model_dump(by_alias=True, exclude_unset=True)
    return validate(RunConfig, data, Origins(default="handshake"))


def check_split(config: RunConfig) -> Findings:
    """All checks of a split run that need no model."""
    findings = Findings()
    check_common(config, findings)
    train, infer = config.train, config.infer
    check_replay(train, config.orch, infer.engine != "embedded" or train.quantised, findings)
    if given(infer, "weights"):
        findings.error("infer.weights", "is not used: a server always has its own copy", "remove it")
    asked, port = port_of(config.orch.client.base_url), infer.port
    if asked not in (None, port):  # a notice, not an error, since a proxy may forward the port
        what = f"has port {asked}, but grpo-infer listens on {port} (infer.port)"
        findings.notice("orch.client.base_url", what, "make them equal, unless a proxy forwards the port")
    if infer.engine == "embedded" and train.quantised:
        what = "is quantised in the trainer but not in grpo-infer, so their log-probs differ"
        findings.notice("train.model", f"{what}; old_logprobs are computed with a forward pass")
    if infer.engine != "embedded" and train.weight_broadcast.type != "filesystem":
        what = f"{infer.engine} servers read their weights from the shared folder"
        findings.error("train.weight_broadcast.type", what, "set it to filesystem, or set infer.engine to embedded")
    check_served(config, findings)
    return findings
