"""Judges keys against each other before anything loads: contradictions and inert knobs are errors, advice is a notice.

Called by the CLI, the launcher and the Python surfaces with a validated config. The rules of one section are in
check_train.py, check_loss.py and check_orch.py; here is what needs two sections, and the entry points.
"""

from __future__ import annotations

from shoal.config.base import given
from shoal.config.catalogue import LOSS_CATALOGUE
from shoal.config.check_loss import check_loss
from shoal.config.check_orch import check_dataset, check_orch, check_uniform
from shoal.config.check_train import check_train, model_problem
from shoal.config.problems import Findings, show
from shoal.config.schema import InferConfig, OrchConfig, RunConfig, SftConfig, TrainConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EMBEDDED_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # train.recipe → infer.dtype
# Keys that only a vLLM or SGLang server obeys, and what the embedded engine does instead.
SERVER_ONLY = {
    "tp": "a model is not split",
    "dp": "there is one engine a training process, see train.gpus",
    "max_loras": "it serves the adapter that is trained",
    "enable_prefix_caching": "a group's prompt is always computed once",
    "kv_cache_dtype": "the cache has the precision of train.recipe",
    "engine_python": "it runs inside the training process",
    "in_process": "it always does",
    "start_deadline_s": "there is no server to wait for",
}
# Keys that decide how a server is started, and so say nothing to one that runs already.
STARTED_ONLY = (
    "tp", "dp", "max_num_seqs", "max_loras", "max_lora_rank", "gpu_memory_utilization", "enable_prefix_caching",
    "kv_cache_dtype", "dtype", "engine_args", "host", "port",
)  # fmt: skip
GRPO_ONLY = (
    "loss", "reference", "recompute_old", "noise_scheduler", "ppo_epochs", "minibatches", "weight_broadcast",
    "rollout_transport", "log_completions", "show_completions",
)  # fmt: skip


def check_run(config: RunConfig) -> Findings:
    """Everything that can be said about a co-located run without loading it."""
    findings = Findings()
    check_common(config, findings)
    _check_colocated(config, findings)
    _advise_reward(config, findings)
    return findings


def check_common(config: RunConfig, findings: Findings) -> None:
    """What holds in any layout."""
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


def check_section(name: str, section: TrainConfig | InferConfig | OrchConfig) -> Findings:
    """One process of the split layout; what the others name is compared when they first meet."""
    findings = Findings()
    model = section.model.name if isinstance(section, OrchConfig) else section.model
    if model is None:
        key = "orch.model.name" if name == "orch" else f"{name}.model"
        findings.error(key, "is required but not set", "name the model's folder, hub id or GGUF file")
    if isinstance(section, TrainConfig):
        check_train(section, findings)
        check_loss(section, findings)
    elif isinstance(section, OrchConfig):
        check_orch(section, findings)
    else:
        _check_infer(section, findings)
    return findings


def check_sft(config: SftConfig) -> Findings:
    findings = Findings()
    train = config.train
    for name in given(train, *GRPO_ONLY):
        findings.error(f"train.{name}", "is not used by supervised training", "remove it")
    if train.model is None:
        findings.error("train.model", "is required but not set", "name the model's folder, hub id or GGUF file")
    if train.max_steps is None and train.epochs is None:
        findings.error("train.max_steps", "how long to train is not set", "set train.max_steps or train.epochs")
    check_train(train, findings, supervised=True)
    check_dataset(config.dataset, "dataset", findings)
    return findings


def _check_models(config: RunConfig, findings: Findings) -> None:
    named = [("train.model", config.train.model), ("infer.model", config.infer.model)]
    named = [(key, model) for key, model in [*named, ("orch.model.name", config.orch.model.name)] if model is not None]
    if not named:
        findings.error("train.model", "is required but not set", "name the model's folder, hub id or GGUF file")
        return
    first_key, first = named[0]
    if first_key != "train.model" and (problem := model_problem(first)) is not None:
        findings.error(first_key, *problem)
    for key, model in named[1:]:
        if model != first:
            findings.error(
                key, f"names another model than {first_key}: {show(model)} and {show(first)}", "make them equal"
            )


def _check_steps(config: RunConfig, findings: Findings) -> None:
    train, orch = config.train, config.orch
    if train.max_steps is not None and orch.max_steps is not None and train.max_steps != orch.max_steps:
        what = f"is {orch.max_steps} but train.max_steps is {train.max_steps}"
        findings.error("orch.max_steps", what, "make them equal, or leave one out")
    if train.epochs is not None and train.max_steps is None and orch.max_steps is not None:
        findings.error("orch.max_steps", f"excludes train.epochs ({train.epochs})", "keep one of the two")
    steps = train.max_steps or orch.max_steps
    if steps is None and train.epochs is None:
        findings.error("train.max_steps", "how long to train is not set", "set train.max_steps or train.epochs")
    if steps and train.warmup_steps and train.warmup_steps > steps:
        what = f"is {train.warmup_steps}, more than the steps of the run ({steps})"
        findings.error("train.warmup_steps", what, "lower it, or use train.warmup_ratio")
    if steps and train.noise_scheduler.enabled and train.noise_scheduler.num_stages > steps:
        stages = train.noise_scheduler.num_stages
        what = f"is {stages}, more than the steps of the run ({steps}), so some stages are skipped"
        findings.notice("train.noise_scheduler.num_stages", what)


def run_seq_len(config: RunConfig) -> int:
    """The context of the run: whichever side names it, else the default."""
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
        findings.error("orch.seq_len", what, "make them equal, or leave one out")
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
            findings.notice("train.lora", f"is false, so these have no effect: {', '.join(inert)}")
        return
    if infer.enable_lora is False:
        findings.error("infer.enable_lora", "is false but train.lora is true", "make them equal, or leave it out")
    for name in ("lora_rank", "lora_alpha"):
        ours, theirs = getattr(train, name), getattr(model, name)
        if name in train.model_fields_set and theirs is not None and ours != theirs:
            findings.error(f"orch.model.{name}", f"is {theirs} but train.{name} is {ours}", "make them equal")
    rank = train.lora_rank if "lora_rank" in train.model_fields_set else model.lora_rank or train.lora_rank
    if infer.max_lora_rank is not None and rank > infer.max_lora_rank:
        what = f"is {rank}, over infer.max_lora_rank ({infer.max_lora_rank})"
        findings.error("train.lora_rank", what, f"lower it or set infer.max_lora_rank={rank}")


def _check_infer(infer: InferConfig, findings: Findings) -> None:
    if infer.host not in LOOPBACK and infer.api_key_var is None:
        what = f"{show(infer.host)} can be reached from other machines and no key is set"
        findings.error("infer.host", what, "set infer.api_key_var to an environment variable, or use 127.0.0.1")
    if infer.engine == "sglang" and infer.engine_python is not None and infer.api_key_var is not None:
        what = "would stand on SGLang's command line, where everyone on the machine can read it"
        findings.error("infer.api_key_var", what, "start SGLang yourself and set orch.client.api_key_var")
    if infer.engine == "embedded":
        if infer.dtype not in ("auto", *EMBEDDED_DTYPES.values()):
            what = f"the embedded engine computes in {' or '.join(EMBEDDED_DTYPES.values())}, not {infer.dtype}"
            findings.error("infer.dtype", what, "use one of them, or set infer.engine to vllm or sglang")
        if infer.engine_args:
            what = f"the embedded engine takes no further arguments ({', '.join(infer.engine_args)})"
            findings.error("infer.engine_args", what, "remove them, or set infer.engine to vllm or sglang")
        for name in given(infer, *SERVER_ONLY):
            what = f"{show(getattr(infer, name))} cannot be had from the embedded engine ({SERVER_ONLY[name]})"
            findings.error(f"infer.{name}", what, "leave it out, or set infer.engine to vllm or sglang")


def _check_server(config: RunConfig, findings: Findings) -> None:
    """A vLLM or SGLang beside the trainer: started, attached to, or in the same process; one of them."""
    train, infer, orch = config.train, config.infer, config.orch
    client, python = given(orch.client, "base_url"), infer.engine_python
    if infer.in_process and (infer.engine != "vllm" or python is not None or client):
        what = "is vLLM in the training process, and no server is started or asked"
        findings.error("infer.in_process", what, "set infer.engine vllm, without engine_python and orch.client")
    elif python is not None and client:
        what = f"starts a server, but orch.client.base_url names one that runs ({show(orch.client.base_url)})"
        findings.error("infer.engine_python", what, "keep one of the two; infer.port says where it listens")
    elif python is None and not infer.in_process:
        for name in given(infer, *STARTED_ONLY):
            if name != "max_num_seqs" and not (name == "max_lora_rank" and infer.max_lora_rank == train.lora_rank):
                what = f"is for a server that Shoal starts; the one at {show(orch.client.base_url)} runs already"
                findings.error(f"infer.{name}", what, "remove it, or set infer.engine_python")


def check_served(config: RunConfig, findings: Findings) -> None:
    """What a vLLM or SGLang server cannot do for a run, in any layout."""
    train, engine, sampling = config.train, config.infer.engine, config.orch.sampling
    if engine == "embedded":
        return
    if engine == "sglang" and train.noise_scheduler.enabled:
        what = "noise cannot be put on the norms of an SGLang server"
        findings.error("train.noise_scheduler", what, "turn it off, or use infer.engine vllm or embedded")
    if train.quantised:
        what = f"a {engine} server would sample from the unquantised base"
        findings.error("infer.engine", what, "use infer.engine embedded, or train without quantisation")
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        # Only the embedded engine says which tokens a truncated distribution left.
        what = f"truncated sampling cannot be replayed with infer.engine {engine}, so training would be biased"
        findings.error("orch.sampling", what, "set top_p 1, top_k -1, min_p 0, or use infer.engine embedded")


def _check_colocated(config: RunConfig, findings: Findings) -> None:
    """Keys that only the split layout or a remote engine uses are refused where they would do nothing."""
    train, infer, orch = config.train, config.infer, config.orch
    for name, section in (("infer", infer), ("orch", orch)):
        if given(section, "output_dir") and section.output_dir != train.output_dir:
            what = f"is {show(section.output_dir)} but train.output_dir is {show(train.output_dir)}"
            findings.error(f"{name}.output_dir", what, "a co-located run has one directory: leave this out")
    split_only = [f"train.{name}" for name in given(train, "weight_broadcast", "rollout_transport", "deadline_s")]
    for key in split_only + [f"infer.{name}" for name in given(infer, "deadline_s")]:
        findings.error(key, "is only used by the split layout", "remove it, or add --layout split")
    if infer.engine == "embedded":
        inert = [f"infer.{name}" for name in given(infer, "host", "port", "api_key_var")]
        for key in inert + [f"orch.{name}" for name in given(orch, "client")]:
            findings.error(key, "is not used: the embedded engine runs inside `shoal grpo`", "remove it")
        _check_embedded_precision(train.recipe, infer.dtype, findings)
    else:
        _check_server(config, findings)
    check_served(config, findings)
    if infer.engine != "embedded" and given(infer, "weights"):
        findings.error("infer.weights", f"is not used: a {infer.engine} server always has its own copy", "remove it")
    served = infer.engine != "embedded" and not infer.in_process
    if served and train.device == "cpu" and infer.gpu_memory_utilization is not None:
        findings.error("infer.gpu_memory_utilization", "is for a server on a GPU, and train.device is cpu", "remove it")


def _advise_reward(config: RunConfig, findings: Findings) -> None:
    reward = config.orch.reward
    moved = given(reward, "scale", "bias")
    std = advantage_std(config)
    if moved and reward.clip is None and std != "none":
        what = f"cancels out: orch.advantage.std {std} divides by the spread of the rewards"
        findings.notice(f"orch.reward.{moved[0]}", what)


def advantage_std(config: RunConfig) -> str:
    """What advantages are divided by: as given, else what the loss calls for."""
    spec = LOSS_CATALOGUE.get(config.train.loss.type)
    return config.orch.advantage.std or (spec.default_advantage_std if spec is not None else "group")


def _check_embedded_precision(recipe: str, dtype: str, findings: Findings) -> None:
    if dtype in EMBEDDED_DTYPES.values() and EMBEDDED_DTYPES.get(recipe) != dtype:
        what = f"is {dtype}, but the embedded engine samples with the trainer's own weights (train.recipe {recipe})"
        findings.error("infer.dtype", what, "leave it out and set train.recipe")
