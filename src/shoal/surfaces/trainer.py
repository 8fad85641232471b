"""Surface 2, `GRPOTrainer`: its arguments in the schema, and the translation of a call. Called by grpo_trainer.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.config.base import IN_MEMORY
from shoal.surfaces import trl
from shoal.surfaces.table import Row, Table, Translation

LABEL = "dataset"  # the environment's name in metrics and files
DEFAULT_STEPS = 100
COMPLETIONS_SHOWN = 4
VLLM_MEMORY = 0.5
GENERATION_KEYS = {
    "top_p": "orch.sampling.top_p",
    "top_k": "orch.sampling.top_k",
    "min_p": "orch.sampling.min_p",
    "min_tokens": "orch.sampling.min_tokens",
    "min_new_tokens": "orch.sampling.min_tokens",
    "stop": "orch.sampling.stop",
    "stop_strings": "orch.sampling.stop",
    "seed": "orch.sampling.seed",
    "chat_template_kwargs": "orch.sampling.chat_template_kwargs",
    "system_prompt": "orch.sampling.system_prompt",
}
OPTIMIZER_KEYS = {
    "lr": "train.learning_rate",
    "eps": "train.adam_epsilon",
    "weight_decay": "train.weight_decay",
}
SCHEDULER_KEYS = {
    "type": "train.lr_scheduler_type",
    "warmup_steps": "train.warmup_steps",
    "warmup_ratio": "train.warmup_ratio",
    "final_lr_fraction": "train.final_lr_fraction",
}
_NESTED = {"optimizer_args": OPTIMIZER_KEYS, "generation_args": GENERATION_KEYS}
OPTIMIZERS = {"adamw": "adamw", "adamw_8bit": "adamw_8bit", "adamw8bit": "adamw_8bit"}

ARGUMENTS = Table(
    "`GRPOTrainer`: arguments",
    (
        Row("model", "train.model", "a name, or a transformers model that is trained in place"),
        Row("train_dataset", "orch.env", "items with `get_reward`, rows, or a `datasets.Dataset`"),
        Row("reward_funcs", (), "run in the reward workers; `get_reward` of the items unless given"),
        Row("reward_weights", (), "the weights of several reward functions, as `orch.reward.parts`"),
        Row("eval_dataset", "orch.eval.num_examples", "its rows are the held-out prompts"),
        Row("eval_steps", "orch.eval.interval"),
        Row("num_steps", "train.max_steps"),
        Row("num_epochs", "train.epochs", "instead of num_steps"),
        Row("group_size", "orch.rollouts_per_example"),
        Row("batch_size", "orch.batch_size", "prompts a process × group_size × processes"),
        Row("ppo_steps", "train.ppo_epochs"),
        Row("clip_eps", "train.loss.clip_low", "clip_high follows it"),
        Row("kl_penalty", "train.loss.kl.beta", "k3"),
        Row("sampling_temperature", "orch.sampling.temperature"),
        Row("max_new_tokens", "orch.sampling.max_tokens"),
        Row("max_seq_len", "train.sequence_len"),
        Row("generation_args", tuple(dict.fromkeys(GENERATION_KEYS.values()))),
        Row("optimizer", "train.optimizer"),
        Row("optimizer_args", (*OPTIMIZER_KEYS.values(), "train.adam_beta1", "train.adam_beta2")),
        Row("lr_scheduler", tuple(SCHEDULER_KEYS.values()), "a word, or a dictionary of these"),
        Row("max_grad_norm", "train.max_grad_norm"),
        Row("output_dir", "train.output_dir"),
        Row("saving_steps", "train.save_steps"),
        Row("logging_steps", "train.logging_steps"),
        Row("seed", "train.seed"),
        Row("log_completions", "train.show_completions", f"True is {COMPLETIONS_SHOWN}"),
        Row("enable_wandb", "train.report_to"),
        Row("wandb_project", "train.report_project"),
        Row("use_accelerate", (), "the processes that `accelerate launch` started train together"),
        Row("use_vllm", ("infer.engine", "infer.in_process")),
        Row("vllm_args", ("infer.gpu_memory_utilization", "infer.tp", "infer.engine_args")),
        Row("vllm_enable_sleep", "infer.engine_args.enable_sleep_mode"),
        Row("lora", "train.lora"),
        Row("lora_rank", "train.lora_rank"),
        Row("lora_alpha", "train.lora_alpha"),
        Row("lora_dropout", "train.lora_dropout"),
        Row("lora_target_modules", "train.lora_target_modules"),
        Row("adapter_path", "train.adapter_path"),
        Row("resume_from_checkpoint", "train.resume_from_checkpoint"),
        Row("tokenizer", (), "the tokenizer of a model given as an object; its own unless given"),
        Row("device", "train.device"),
        Row("overrides", (), "any other key of the schema, as on the command line"),
    ),
    intro="`from shoal import GRPOTrainer`. Loss `grpo`, group mean and std, `seq-mean-token-mean`, KL k3.",
    columns=("argument", "schema key"),
)


def from_trl(name: str) -> str | None:
    """What a name of TRL's is here, as a sentence; None where TRL has no such name."""
    rows = {row.theirs: row for table in (trl.TRAINER, trl.FIELDS, trl.INHERITED) for row in table.rows}
    row = rows.get(name)
    if row is None:
        return None
    arguments = [ours.theirs for key in row.keys for ours in ARGUMENTS.rows if key in ours.keys]
    if row.keys and arguments:
        nested = {key: f"{outer}={{{inner!r}: …}}" for outer, known in _NESTED.items() for inner, key in known.items()}
        return f"what TRL calls so is {nested.get(row.keys[0], arguments[0])} here"
    if row.keys:
        return f"what TRL calls so is overrides=['{row.keys[0]}=…'] here" + (f" ({row.note})" if row.note else "")
    return f"what TRL calls so has no counterpart here: {row.note}"


def translate(given: Mapping[str, Any], processes: int = 1) -> Translation:
    """What a call of GRPOTrainer means in the schema. `given` holds every argument, defaults included."""
    to = Translation("GRPOTrainer")
    name = given["model"] if isinstance(given["model"], str) else IN_MEMORY
    to.put("model", "train.model", name)
    to.put("train_dataset", "orch.env", [{"id": IN_MEMORY, "name": LABEL}])
    to.data["train"]["loss"] = {"type": "grpo", "aggregation": "seq-mean-token-mean"}
    plain = {
        "group_size": "orch.rollouts_per_example", "ppo_steps": "train.ppo_epochs", "clip_eps": "train.loss.clip_low",
        "kl_penalty": "train.loss.kl.beta", "sampling_temperature": "orch.sampling.temperature",
        "max_new_tokens": "orch.sampling.max_tokens", "max_seq_len": "train.sequence_len",
        "max_grad_norm": "train.max_grad_norm", "output_dir": "train.output_dir", "saving_steps": "train.save_steps",
        "logging_steps": "train.logging_steps", "seed": "train.seed", "lora": "train.lora",
        "lora_rank": "train.lora_rank", "lora_alpha": "train.lora_alpha", "lora_dropout": "train.lora_dropout",
        "lora_target_modules": "train.lora_target_modules", "adapter_path": "train.adapter_path",
        "device": "train.device",
    }  # fmt: skip
    to.put_all({argument: (key, given[argument]) for argument, key in plain.items()})
    to.also["orch.seq_len"] = "max_seq_len"
    _length(to, given)
    _batch(to, given, processes)
    _sampling(to, given)
    _optimizer(to, given)
    _evaluation(to, given)
    _watching(to, given)
    _engine(to, given)
    _resume(to, given)
    return to


def _length(to: Translation, given: Mapping[str, Any]) -> None:
    if given["num_epochs"] is None:
        to.put("num_steps", "train.max_steps", given["num_steps"])
        return
    if given["num_steps"] != DEFAULT_STEPS:
        to.refuse("num_epochs", f"excludes num_steps ({given['num_steps']}), which is set too", "keep one of them")
    to.put("num_epochs", "train.epochs", given["num_epochs"])


def _batch(to: Translation, given: Mapping[str, Any], processes: int) -> None:
    """batch_size counts prompts of one process, the schema's counts rollouts of a step."""
    for name in ("batch_size", "group_size"):
        if not isinstance(given[name], int) or isinstance(given[name], bool) or given[name] < 1:
            to.refuse(name, f"must be a whole number of at least 1, not {given[name]!r}")
    to.put("batch_size", "orch.batch_size", given["batch_size"] * given["group_size"] * processes)


def _sampling(to: Translation, given: Mapping[str, Any]) -> None:
    arguments = dict(given["generation_args"] or {})
    if arguments.pop("do_sample", True) is not True:
        to.refuse("generation_args['do_sample']", "must be True: a group of equal completions teaches nothing")
    for name, own in (("temperature", "sampling_temperature"), ("max_new_tokens", "max_new_tokens")):
        if name in arguments:
            to.refuse(f"generation_args[{name!r}]", "has an argument of its own", f"give {own}=…")
    to.pick("generation_args", arguments, GENERATION_KEYS)


def _optimizer(to: Translation, given: Mapping[str, Any]) -> None:
    optimizer = given["optimizer"]
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", type(optimizer).__name__)
    if name.lower() not in OPTIMIZERS:
        to.refuse("optimizer", f"{name} is not known", "use AdamW, or 'adamw_8bit'")
    to.put("optimizer", "train.optimizer", OPTIMIZERS[name.lower()])
    arguments = {"lr": 1e-5, **(given["optimizer_args"] or {})}
    betas = arguments.pop("betas", None)
    if betas is not None:
        if len(betas) != 2:
            to.refuse("optimizer_args['betas']", f"are two numbers, not {len(betas)}")
        to.put("optimizer_args['betas']", "train.adam_beta1", betas[0])
        to.put("optimizer_args['betas']", "train.adam_beta2", betas[1])
    to.pick("optimizer_args", arguments, {**OPTIMIZER_KEYS, "betas": ""})
    scheduler = given["lr_scheduler"]
    if isinstance(scheduler, str):
        to.put("lr_scheduler", "train.lr_scheduler_type", scheduler)
    elif scheduler is not None and not isinstance(scheduler, Mapping):
        to.refuse(
            "lr_scheduler", "is an object", "name it: constant, cosine, linear, wsd, or {'type': …, 'warmup_steps': …}"
        )
    else:
        to.pick("lr_scheduler", scheduler, SCHEDULER_KEYS)


def _evaluation(to: Translation, given: Mapping[str, Any]) -> None:
    held_out, every = given["eval_dataset"], given["eval_steps"]
    if every is None:
        return
    if held_out is None or len(held_out) == 0:
        to.refuse("eval_steps", "needs an eval_dataset", "give one, or leave eval_steps out")
    to.put("eval_steps", "orch.eval.interval", every)
    to.put("eval_dataset", "orch.eval.num_examples", len(held_out))


def _watching(to: Translation, given: Mapping[str, Any]) -> None:
    shown = given["log_completions"]
    to.put("log_completions", "train.show_completions", COMPLETIONS_SHOWN if shown is True else int(shown or 0))
    if given["enable_wandb"]:
        to.put("enable_wandb", "train.report_to", ["wandb"])
    if given["wandb_project"] is not None:
        if not given["enable_wandb"]:
            to.refuse("wandb_project", "is not used without enable_wandb=True", "set it, or leave this out")
        to.put("wandb_project", "train.report_project", given["wandb_project"])


def _engine(to: Translation, given: Mapping[str, Any]) -> None:
    arguments = given["vllm_args"] or {}
    if not given["use_vllm"]:
        for name in ("vllm_args", "vllm_enable_sleep"):
            if given[name]:
                to.refuse(name, "is not used without use_vllm=True", "set it, or leave this out")
        return
    to.put("use_vllm", "infer.engine", "vllm")
    to.put("use_vllm", "infer.in_process", True)
    own = {"gpu_memory_utilization": "infer.gpu_memory_utilization", "tensor_parallel_size": "infer.tp"}
    for name, value in {"gpu_memory_utilization": VLLM_MEMORY, **arguments}.items():
        to.put(f"vllm_args[{name!r}]", own.get(name, f"infer.engine_args.{name}"), value)
    if given["vllm_enable_sleep"]:
        to.put("vllm_enable_sleep", "infer.engine_args.enable_sleep_mode", True)


def _resume(to: Translation, given: Mapping[str, Any]) -> None:
    """True, or the folder of the run: it continues from its newest good checkpoint."""
    wanted = given["resume_from_checkpoint"]
    if isinstance(wanted, str | Path):
        folder = Path(given["output_dir"]).resolve()
        if folder not in (Path(wanted).resolve(), *Path(wanted).resolve().parents):
            to.refuse(
                "resume_from_checkpoint", f"{str(wanted)!r} is not in output_dir", "set output_dir to the run's folder"
            )
    if wanted:
        to.put("resume_from_checkpoint", "train.resume_from_checkpoint", True)
