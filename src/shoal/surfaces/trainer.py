"""Translates a call of `GRPOTrainer` to the schema, and checks the arguments that are Python objects.

Called by grpo_trainer.py, whose signature declares the arguments.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from shoal.core.section import IN_MEMORY
from shoal.surfaces.names import Key, Translation

LABEL = "dataset"  # the environment's name in metrics and files
DEFAULT_STEPS = 100
COMPLETIONS_SHOWN = 4
VLLM_MEMORY = 0.5
RATE = 1e-5
ORDER = "GRPOTrainer(model, train_dataset, reward_funcs)"
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
# Usual arguments of vllm.LLM.
VLLM_ARGS = frozenset((
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "dtype", "quantization", "revision",
    "seed", "gpu_memory_utilization", "kv_cache_memory_bytes", "swap_space", "cpu_offload_gb", "enforce_eager",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill",
    "enable_sleep_mode", "enable_lora", "max_lora_rank", "max_loras", "kv_cache_dtype", "block_size",
    "disable_log_stats", "disable_custom_all_reduce", "distributed_executor_backend", "load_format", "model_impl",
    "trust_remote_code", "tokenizer", "tokenizer_mode", "compilation_config", "hf_overrides", "attention_config",
    "limit_mm_per_prompt", "logprobs_mode", "max_logprobs", "enable_expert_parallel", "attention_backend",
    "async_scheduling",
))  # fmt: skip
NESTED = {"optimizer_args": OPTIMIZER_KEYS, "generation_args": GENERATION_KEYS}
OPTIMIZERS = {"adamw": "adamw", "adamw_8bit": "adamw_8bit", "adamw8bit": "adamw_8bit"}


def translate(
    keys: Mapping[str, Key],
    given: Mapping[str, Any],
    processes: int = 1,
    defaults: Mapping[str, Any] | None = None,
) -> Translation:
    """The schema values of a call of GRPOTrainer. `given` holds every argument, defaults included."""
    to = Translation("GRPOTrainer", {"optimizer_args['lr']": RATE, **(defaults or {})})
    to.put("model", "train.model", given["model"] if isinstance(given["model"], str) else IN_MEMORY)
    to.put("train_dataset", "orch.env", [{"id": IN_MEMORY, "name": LABEL}])
    to.data["train"]["loss"] = {"type": "grpo", "aggregation": "seq-mean-token-mean"}
    to.put_declared(keys, given)
    to.also["orch.seq_len"] = "max_seq_len"
    _length(to, given)
    _batch(to, given, processes)
    _sampling(to, given)
    _optimizer(to, given)
    _evaluation(to, given)
    if given["wandb_project"] is not None and not given["enable_wandb"]:
        to.refuse("wandb_project", "is not used without enable_wandb=True", "set it, or remove wandb_project")
    _engine(to, given)
    put_resume(to, given["resume_from_checkpoint"], given["output_dir"])
    return to


def optimizer_name(optimizer: Any) -> str:
    """`train.optimizer` for a name, a class such as torch.optim.AdamW, or an instance."""
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", type(optimizer).__name__)
    if name.lower() not in OPTIMIZERS:
        raise ValueError(f"{name} is not known; use AdamW, or 'adamw_8bit'")
    return OPTIMIZERS[name.lower()]


def completions_shown(shown: Any) -> int:
    if not isinstance(shown, bool | int):
        raise ValueError(f"must be True, False or a number, not {_shown(shown)}")
    return COMPLETIONS_SHOWN if shown is True else int(shown)


def _dictionary(to: Translation, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    if given[name] is not None and not isinstance(given[name], Mapping):
        to.refuse(name, f"must be a dictionary, not {_shown(given[name])}")
        return {}
    return dict(given[name] or {})


def _length(to: Translation, given: Mapping[str, Any]) -> None:
    if given["num_epochs"] is None:
        to.put("num_steps", "train.max_steps", given["num_steps"])
        return
    if given["num_steps"] != DEFAULT_STEPS:
        to.refuse("num_epochs", f"cannot be combined with num_steps ({given['num_steps']})", "keep one of them")
    to.put("num_epochs", "train.epochs", given["num_epochs"])


def _batch(to: Translation, given: Mapping[str, Any], processes: int) -> None:
    """batch_size is prompts per process; orch.batch_size is rollouts per step."""
    for name in ("batch_size", "group_size"):
        if not isinstance(given[name], int) or isinstance(given[name], bool) or given[name] < 1:
            to.refuse(name, f"must be a whole number of at least 1, not {given[name]!r}")
            to.data.setdefault("orch", {}).pop("rollouts_per_example", None)
            return
    to.put("batch_size", "orch.batch_size", given["batch_size"] * given["group_size"] * processes)


def _sampling(to: Translation, given: Mapping[str, Any]) -> None:
    arguments = _dictionary(to, given, "generation_args")
    if arguments.pop("do_sample", True) is not True:
        to.refuse("generation_args['do_sample']", "must be True: a group of equal completions has no training signal")
    for name, own in (("temperature", "sampling_temperature"), ("max_new_tokens", "max_new_tokens")):
        if name in arguments:
            to.refuse(f"generation_args[{name!r}]", "has its own argument", f"use {own}=…")
            del arguments[name]
    to.pick("generation_args", arguments, GENERATION_KEYS)


def _optimizer(to: Translation, given: Mapping[str, Any]) -> None:
    arguments = {"lr": RATE, **_dictionary(to, given, "optimizer_args")}
    betas = arguments.pop("betas", None)
    if betas is not None and (not _is_list(betas) or len(betas) != 2):
        to.refuse("optimizer_args['betas']", f"must be two numbers, not {_shown(betas)}")
    elif betas is not None:
        to.put("optimizer_args['betas']", "train.adam_beta1", betas[0])
        to.put("optimizer_args['betas']", "train.adam_beta2", betas[1])
    to.pick("optimizer_args", arguments, {**OPTIMIZER_KEYS, "betas": ""})
    scheduler = given["lr_scheduler"]
    if isinstance(scheduler, str):
        to.put("lr_scheduler", "train.lr_scheduler_type", scheduler)
    elif scheduler is not None and not isinstance(scheduler, Mapping):
        to.refuse(
            "lr_scheduler",
            "must be a name or a dictionary",
            "use constant, cosine, linear, wsd, or {'type': …, 'warmup_steps': …}",
        )
    else:
        to.pick("lr_scheduler", scheduler, SCHEDULER_KEYS)


def _evaluation(to: Translation, given: Mapping[str, Any]) -> None:
    held_out, every = given["eval_dataset"], given["eval_steps"]
    if every is None:
        return
    if held_out is None or len(held_out) == 0:
        to.refuse("eval_steps", "needs an eval_dataset", "set it, or remove eval_steps")
        return
    to.put("eval_steps", "orch.eval.interval", every)
    to.put("eval_dataset", "orch.eval.num_examples", len(held_out))


def _engine(to: Translation, given: Mapping[str, Any]) -> None:
    arguments = _dictionary(to, given, "vllm_args")
    if not given["use_vllm"]:
        for name in ("vllm_args", "vllm_enable_sleep"):
            if given[name]:
                to.refuse(name, "is not used without use_vllm=True", f"set it, or remove {name}")
        return
    to.put("use_vllm", "infer.engine", "vllm")
    to.put("use_vllm", "infer.in_process", True)
    for name in arguments.keys() - VLLM_ARGS:  # vLLM may be missing here; it checks the names without a near one
        if near := difflib.get_close_matches(str(name), VLLM_ARGS, n=1):
            to.refuse(f"vllm_args[{name!r}]", "is not known", f"did you mean {near[0]}?")
    own = {"gpu_memory_utilization": "infer.gpu_memory_utilization", "tensor_parallel_size": "infer.tp"}
    for name, value in {"gpu_memory_utilization": VLLM_MEMORY, **arguments}.items():
        to.put(f"vllm_args[{name!r}]", own.get(name, f"infer.engine_args.{name}"), value)
    if given["vllm_enable_sleep"]:
        to.put("vllm_enable_sleep", "infer.engine_args.enable_sleep_mode", True)


def put_resume(to: Translation, wanted: Any, output_dir: str) -> None:
    """True, or a path in the run directory. The run continues from its newest valid checkpoint."""
    if isinstance(wanted, str | Path):
        folder = Path(output_dir).resolve()
        if folder not in (Path(wanted).resolve(), *Path(wanted).resolve().parents):
            to.refuse(
                "resume_from_checkpoint", f"{str(wanted)!r} is not in output_dir", "set output_dir to the run directory"
            )
    if wanted:
        to.put("resume_from_checkpoint", "train.resume_from_checkpoint", True)


# What stands for an argument of the wrong kind, so that the others are checked as well.
STAND_INS: dict[str, Any] = {"model": "model", "train_dataset": (), "eval_dataset": ({},), "overrides": ()}


def object_problems(given: Mapping[str, Any]) -> dict[str, str]:
    """Argument → what is wrong, for objects of the wrong kind. The schema checks the other arguments."""
    held_out, weights, overrides = (given[name] for name in ("eval_dataset", "reward_weights", "overrides"))
    found = {
        "model": _model_problem(given["model"]),
        "train_dataset": _items_problem(given["train_dataset"]) if not owns_data(given) else None,
        "environment_factory": _factory_problem(given["environment_factory"]),
        "eval_dataset": None if held_out is None else _items_problem(held_out),
        "reward_funcs": _rewards_problem(given["reward_funcs"]),
    }
    if weights is not None and not _is_list(weights):
        found["reward_weights"] = f"must be a list of numbers, not {_shown(weights)}"
    if not _is_list(overrides):
        found["overrides"] = f"must be a list such as ['train.seed=3'], not {_shown(overrides)}"
    return {name: problem for name, problem in found.items() if problem is not None}


def owns_data(given: Mapping[str, Any]) -> bool:
    """True if the tasks come from `reset` of the environment."""
    return given["train_dataset"] is None and given["environment_factory"] is not None


def _factory_problem(factory: Any) -> str | None:
    for made in factory.values() if isinstance(factory, Mapping) else () if factory is None else (factory,):
        if not callable(made):
            return f"must be a class or a function that returns an environment, not {_shown(made)}"
    return None


def _model_problem(model: Any) -> str | None:
    if isinstance(model, str) or hasattr(model, "parameters"):
        return None
    if model is None:
        return "is required: a folder, a hub id or a transformers model"
    if callable(model) or hasattr(model, "__len__"):
        return f"is {_shown(model)}, not a model; the order is {ORDER}"
    return f"must be a folder, a hub id or a transformers model, not {_shown(model)}"


def _items_problem(items: Any) -> str | None:
    if items is None:
        return "is required: a list of items or a datasets.Dataset"
    if isinstance(items, str | bytes):
        return f"is text ({items!r}), not items; load them, e.g. datasets.load_dataset({items!r}, split='train')"
    if callable(items) or hasattr(items, "parameters"):
        return f"is {_shown(items)}, not items; the order is {ORDER}"
    if isinstance(items, Mapping) or not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        return f"must be a list of items or a datasets.Dataset, not {_shown(items)}"
    return None


def _rewards_problem(functions: Any) -> str | None:
    if functions is not None and not callable(functions) and not isinstance(functions, str) and not _is_list(functions):
        return f"must be a function, or a list of them, not {_shown(functions)}"
    for function in list(functions) if _is_list(functions) else []:
        if isinstance(function, Mapping):
            return f"holds rows, not functions; the order is {ORDER}"
        if not callable(function) and not isinstance(function, str):
            return f"holds {_shown(function)}, which is not a function"
    return None


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    kind = type(value).__name__
    return "a function" if kind in ("function", "builtin_function_or_method") else f"{_article(kind)} {kind}"


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"
