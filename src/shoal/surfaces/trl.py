"""TRL's `GRPOTrainer`: a call with `args=GRPOConfig(…)`, translated to the schema with TRL's meaning and defaults.

A field of TRL does exactly what it does there, or it is refused, or a notice names the difference.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from shoal.core.section import IN_MEMORY
from shoal.surfaces.grpo_config import DEFAULTS, KEYS, GRPOConfig
from shoal.surfaces.names import Key, KeyRow, KeyTable, Translation, rows_of
from shoal.surfaces.trainer import COMPLETIONS_SHOWN, GENERATION_KEYS, LABEL, NESTED, put_resume
from shoal.surfaces.trl_loss import put_advantage, put_correction, put_loss

TRAINER = KeyTable(
    "TRL: arguments of `GRPOTrainer`",
    (
        KeyRow("from trl import GRPOTrainer", "`from shoal import GRPOTrainer`"),
        KeyRow("from trl import GRPOConfig", "`from shoal import GRPOConfig`", "has the same fields and defaults"),
        KeyRow(
            "model", "train.model", "pass a name or a transformers model as `model=`, and an adapter as `adapter_path=`"
        ),
        KeyRow(
            "reward_funcs",
            (),
            "pass the same functions as `reward_funcs=`; they are called once per group. A completion for which all of "
            "them return None is not trained; in TRL its advantage is 0, and its tokens are in the denominators",
        ),
        KeyRow("args", "`args=GRPOConfig(…)`", "without `args`, Shoal's own arguments and defaults apply"),
        KeyRow("train_dataset", "orch.env", "pass it as `train_dataset=`"),
        KeyRow("eval_dataset", "orch.eval", "pass it as `eval_dataset=`, with `eval_strategy`"),
        KeyRow(
            "processing_class",
            (),
            "`processing_class=` with `args`, otherwise `tokenizer=`; the default is the tokenizer of the model",
        ),
        KeyRow(
            "reward_processing_classes",
            (),
            "use a function that calls the reward model, or a judge over HTTP",
            refused=True,
        ),
        KeyRow("callbacks", (), "read the files of the run directory", refused=True),
        KeyRow(
            "optimizers",
            (),
            "use `optim` and `lr_scheduler_type` with `args`, otherwise `optimizer=` and `lr_scheduler=`",
            refused=True,
        ),
        KeyRow("quantization_config", ("train.qlora_bnb", "train.qlora_fp8", "train.qlora_fp4"), refused=True),
        KeyRow(
            "peft_config",
            ("train.lora", "train.lora_rank", "train.lora_alpha", "train.lora_dropout", "train.lora_target_modules"),
            "`peft_config=LoraConfig(…)` with `args`, otherwise `lora=True, lora_rank=…`; by default all linear layers "
            "get adapters",
        ),
        KeyRow("tools", "orch.env", "write a multi-turn environment", refused=True),
        KeyRow("rollout_func", "orch.env", "write your own environment", refused=True),
        KeyRow(
            "environment_factory",
            (),
            "pass the same class, function or dictionary; see [environments.md](../environments.md#from-trl)",
        ),
    ),
)

FIELDS = KeyTable(
    "TRL: fields of `GRPOConfig`",
    rows_of(KEYS),
    intro=(
        "All fields have TRL's defaults. A field without a key has no effect on the result. If such a field is set, a "
        "notice reports this."
    ),
    columns=("Field", "Configuration key"),
)

# For documentation only: `shoal dpo` has no Python class. Fields of both configurations are in FIELDS.
DPO = KeyTable(
    "TRL: fields of `DPOConfig`",
    (
        KeyRow("trl dpo, DPOTrainer", "`shoal dpo`", "[preference-data.md](../preference-data.md) shows a run"),
        KeyRow("model", "train.model"),
        KeyRow("ref_model", "train.reference", "a copy of `train.model`, or the model without the adapter"),
        KeyRow("train_dataset", "dataset.path", "or `dataset.name`; rows with prompt, chosen and rejected"),
        KeyRow("eval_dataset", note="metrics cover the pairs of each step", refused=True),
        KeyRow("peft_config", "train.lora", "set `train.lora: true` and `train.lora_rank`"),
        KeyRow("beta", "loss.beta"),
        KeyRow("loss_type", "loss.type", "`sigmoid`, `robust`, `hinge` and `ipo`; others are not supported"),
        KeyRow(
            'loss_type=["sigmoid", "sft"]',
            "loss.sft_weight",
            "the weight of sft if that of the other loss is 1. Its mean covers a step, in TRL a micro-batch. Other "
            "combinations are not supported",
        ),
        KeyRow("loss_weights", "loss.sft_weight", "only together with the loss type sft"),
        KeyRow(
            "label_smoothing",
            "loss.label_smoothing",
            "the same for `robust`. TRL 1.16 does not use it for sigmoid; in Shoal it selects conservative DPO there",
        ),
        KeyRow("max_length", "train.sequence_len", "a pair with a longer side is skipped; in TRL it is truncated"),
        KeyRow("truncation_mode", note="nothing is truncated"),
        KeyRow(
            "precompute_ref_log_probs",
            note="reference_logprobs are computed in each step, which gives the same loss",
        ),
        KeyRow("precompute_ref_batch_size", note="the memory plan sets the size of a pass"),
        KeyRow("reference_free", note="TRL 1.16 does not have it either", refused=True),
        KeyRow("sync_ref_model", note="the reference is always the initial model", refused=True),
        KeyRow("ref_model_mixup_alpha, ref_model_sync_steps", note="only for sync_ref_model", refused=True),
        KeyRow("f_divergence_type", note="the divergence is always reverse_kl", refused=True),
        KeyRow("f_alpha_divergence_coef", note="only for f_divergence_type", refused=True),
        KeyRow("ld_alpha", note="all tokens of a completion have the same weight", refused=True),
        KeyRow("use_weighting", note="all pairs have the same weight", refused=True),
        KeyRow("discopop_tau", note="only for the loss type discopop", refused=True),
        KeyRow("router_aux_loss_coef", note="there is no router auxiliary loss", refused=True),
        KeyRow("disable_dropout", note="dropout is always off"),
        KeyRow("padding_free, pad_to_multiple_of", note="rows are packed, not padded"),
        KeyRow("per_device_train_batch_size", "batch_size", "counts the pairs of an optimizer step"),
        KeyRow("gradient_accumulation_steps", "batch_size", "multiply per_device_train_batch_size by it"),
        KeyRow("learning_rate", "train.learning_rate", "the default is 5e-6, in TRL 1e-6"),
        KeyRow("num_train_epochs, max_steps", ("train.epochs", "train.max_steps"), "one of them is required"),
        KeyRow("dataset_num_proc", note="rows are read in one process"),
        KeyRow("activation_offloading", "train.recompute", "activations are recomputed instead"),
        KeyRow("model_init_kwargs", "train.recipe", "only dtype"),
        KeyRow("trust_remote_code", note="Shoal does not run code from model repositories", refused=True),
        KeyRow("pad_token", note="rows are packed, not padded"),
    ),
    intro=(
        "`shoal dpo dpo.yaml` has keys instead of a Python class. Fields that `GRPOConfig` has too, such as those of "
        "the optimizer, have the same keys of `train`."
    ),
    columns=("Field", "Configuration key"),
)

OUTPUT_DIR = "trainer_output"
CONTEXT = 2048
WITH_ARGS = ("model", "train_dataset", "reward_funcs", "eval_dataset", "args", "processing_class", "peft_config",
             "environment_factory", "overrides")  # fmt: skip
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine", "constant": "constant",
              "constant_with_warmup": "constant"}  # fmt: skip
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "auto": None}
# PEFT's options of an adapter that Shoal has not: name → the value that has no effect.
_PEFT_UNUSED = {"bias": "none", "use_rslora": False, "use_dora": False, "modules_to_save": None, "rank_pattern": {},
                "alpha_pattern": {}, "layers_to_transform": None, "target_parameters": None}  # fmt: skip


def translate(config: GRPOConfig, given: Mapping[str, Any], processes: int = 1) -> Translation:
    """The schema values of a call with `args`. `given` holds the arguments of GRPOTrainer."""
    to = Translation("GRPOTrainer", DEFAULTS)
    fields = {name: getattr(config, name) for name in KEYS}
    _check_unused(to, fields)
    to.put("model", "train.model", given["model"] if isinstance(given["model"], str) else IN_MEMORY)
    to.put("train_dataset", "orch.env", [{"id": IN_MEMORY, "name": LABEL}])
    to.put("output_dir", "train.output_dir", str(fields["output_dir"] or OUTPUT_DIR))
    to.data["orch"]["groups"] = {"uniform": "keep"}  # TRL trains on all groups; their tokens are in the denominators
    to.put_declared(KEYS, fields)
    updates = _batch(to, fields, processes)
    _length(to, fields, updates)
    _sampling(to, fields)
    put_loss(to, fields, updates, processes)
    put_advantage(to, fields)
    _schedule(to, fields, updates)
    _precision(to, fields)
    _saving(to, fields, updates)
    _evaluation(to, fields, given["eval_dataset"], updates)
    _engine(to, fields)
    _sharding(to, fields)
    _adapter(to, given["peft_config"])
    _environment(to, fields, given)
    put_resume(to, fields["resume_from_checkpoint"], str(fields["output_dir"] or OUTPUT_DIR))
    return to


def _check_unused(to: Translation, fields: Mapping[str, Any]) -> None:
    """Refuse fields that Shoal does not support, and give a notice for those without an effect."""
    for name, value in fields.items():
        key = KEYS[name]
        if value == DEFAULTS[name] or (key.refused and not value and not isinstance(value, float)):
            continue
        if key.refused and value != getattr(_Neutral, name, DEFAULTS[name]):
            to.refuse(name, f"{value!r} is not supported", key.note)
        elif not key.keys and not key.composed:
            to.notices.append(f"{name}: has no effect: {key.note}")


class _Neutral:
    """Values of refused fields that mean the same as the default."""

    router_aux_loss_coef = 0.0
    shuffle_dataset = None


def _whole(to: Translation, fields: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        to.refuse(name, f"must be a whole number of at least {least}, not {value!r}")
        return max(least, 1)
    return value


def _batch(to: Translation, fields: Mapping[str, Any], processes: int) -> int:
    """Put the batch of one step, and return the optimizer updates per step."""
    per_pass = _whole(to, fields, "per_device_train_batch_size") * processes
    accumulated, iterations = (_whole(to, fields, name) for name in ("gradient_accumulation_steps", "num_iterations"))
    group = _whole(to, fields, "num_generations", 2)
    size, passes = fields["generation_batch_size"], fields["steps_per_generation"]
    if size is not None and passes is not None:
        to.refuse("generation_batch_size", "cannot be combined with steps_per_generation", "keep one of them")
    elif size is not None and (_whole(to, fields, "generation_batch_size") % per_pass or size < per_pass):
        to.refuse("generation_batch_size", f"is {size}, not a multiple of the rollouts of one pass ({per_pass})")
    elif size is not None:
        passes = size // per_pass
    passes = accumulated if passes is None or "generation_batch_size" in to.refused else passes
    if not isinstance(passes, int) or passes < 1 or max(passes, accumulated) % min(passes, accumulated):
        to.refuse("steps_per_generation", f"is {passes}, neither a multiple nor a divisor of "
                  f"gradient_accumulation_steps ({accumulated})")  # fmt: skip
        passes = accumulated
    if passes < accumulated and (
        fields["scale_rewards"] == "batch" or fields["multi_objective_aggregation"] == "normalize_then_sum"
    ):
        to.notices.append("steps_per_generation: statistics of the batch cover an update, in TRL a generation batch")
    if passes < accumulated and iterations > 1:
        to.refuse("num_iterations", "is not supported with fewer steps_per_generation than gradient_accumulation_steps")
    rollouts, minibatches = per_pass * max(passes, accumulated), max(1, passes // accumulated)
    if rollouts % group == 0 and minibatches > rollouts // group:
        to.refuse("steps_per_generation", f"makes {minibatches} updates of {rollouts // group} groups, but an update "
                  "of Shoal has whole groups", "lower it")  # fmt: skip
    to.put("per_device_train_batch_size", "orch.batch_size", rollouts)
    to.put("steps_per_generation", "train.minibatches", minibatches)
    return iterations * minibatches


def _length(to: Translation, fields: Mapping[str, Any], updates: int) -> None:
    steps, epochs = fields["max_steps"], fields["num_train_epochs"]
    if isinstance(steps, int) and steps > 0:
        to.put("max_steps", "train.max_steps", _steps(to, "max_steps", steps, updates))
    elif float(epochs) != int(epochs):
        to.refuse("num_train_epochs", f"must be a whole number, not {epochs!r}", "use max_steps")
        to.data["train"]["epochs"] = 1
    else:
        to.put("num_train_epochs", "train.epochs", int(epochs))


def _steps(to: Translation, name: str, value: int, updates: int) -> int:
    """Steps of Shoal for a number of optimizer updates."""
    if value % updates:
        to.refuse(name, f"is {value} optimizer updates, but a step has {updates} of them (num_iterations × "
                  "steps_per_generation / gradient_accumulation_steps)", "use a multiple")  # fmt: skip
    return max(1, value // updates)


def _sampling(to: Translation, fields: Mapping[str, Any]) -> None:
    tokens, context = fields["max_completion_length"], fields["vllm_max_model_length"]
    if context is None:
        context = max(CONTEXT, 2 * tokens) if isinstance(tokens, int) else CONTEXT
    to.put("vllm_max_model_length", "train.sequence_len", context)
    to.also["orch.seq_len"] = "vllm_max_model_length"
    to.put("top_k", "orch.sampling.top_k", -1 if fields["top_k"] in (0, None) else fields["top_k"])
    to.pick("generation_kwargs", fields["generation_kwargs"], GENERATION_KEYS)
    if fields["mask_truncated_completions"]:
        to.put("mask_truncated_completions", "orch.truncated", {"type": "mask"})
    if fields["log_completions"]:
        shown = fields["num_completions_to_print"]
        to.put("log_completions", "train.show_completions", COMPLETIONS_SHOWN if shown is None else shown)


def _schedule(to: Translation, fields: Mapping[str, Any], updates: int) -> None:
    kind, warmup, more = fields["lr_scheduler_type"], fields["warmup_steps"], dict(fields["lr_scheduler_kwargs"] or {})
    kind = getattr(kind, "value", kind)
    if kind not in _SCHEDULES:
        to.refuse("lr_scheduler_type", f"{kind!r} is not supported", f"use one of {', '.join(_SCHEDULES)}")
        return
    to.put("lr_scheduler_type", "train.lr_scheduler_type", _SCHEDULES[kind])
    if kind == "cosine_with_min_lr":
        rate = more.pop("min_lr_rate", None)
        rate = more.pop("min_lr") / fields["learning_rate"] if rate is None and "min_lr" in more else rate
        to.put("lr_scheduler_kwargs", "train.final_lr_fraction", rate)
    if more:
        to.refuse("lr_scheduler_kwargs", f"{', '.join(more)}: not supported with {kind}", "remove it")
    if warmup and kind == "constant":
        to.notices.append("warmup_steps: has no effect with lr_scheduler_type constant; use constant_with_warmup")
    elif warmup and warmup < 1:
        to.put("warmup_steps", "train.warmup_ratio", warmup)
    else:
        to.put("warmup_steps", "train.warmup_steps", _steps(to, "warmup_steps", int(warmup), updates) if warmup else 0)
    optimizer = _OPTIMIZERS.get(getattr(fields["optim"], "value", fields["optim"]))
    if optimizer is None:
        to.refuse("optim", f"{fields['optim']!r} is not supported", f"use one of {', '.join(_OPTIMIZERS)}")
    else:
        to.put("optim", "train.optimizer", optimizer)


def _precision(to: Translation, fields: Mapping[str, Any]) -> None:
    options = dict(fields["model_init_kwargs"] or {})
    dtype = str(options.pop("dtype", options.pop("torch_dtype", "auto"))).removeprefix("torch.")
    options.pop("attn_implementation", None)  # every implementation computes the same attention
    if options:
        to.refuse("model_init_kwargs", f"{', '.join(options)}: not supported", "pass a model object")
    if dtype not in _DTYPES:
        to.refuse("model_init_kwargs", f"dtype {dtype} cannot be trained", "use float32 or bfloat16")
    recipe = {True: "bf16", False: "fp32", None: _DTYPES.get(dtype)}[fields["bf16"]]
    if recipe is not None:
        to.put("bf16", "train.recipe", recipe)
    if not fields["gradient_checkpointing"]:
        to.put("gradient_checkpointing", "train.recompute", False)
    if fields["use_cpu"]:
        to.put("use_cpu", "train.device", "cpu")


def _saving(to: Translation, fields: Mapping[str, Any], updates: int) -> None:
    every, strategy, kept = fields["save_steps"], fields["save_strategy"], fields["save_total_limit"]
    strategy = getattr(strategy, "value", strategy)
    to.put("logging_steps", "train.logging_steps", _rounded(fields["logging_steps"], updates))
    to.put("save_total_limit", "train.save_total_limit", 10**6 if kept is None else kept)
    if strategy == "epoch":
        to.put("save_strategy", "train.save_epochs", 1)
    elif strategy in ("steps", "no"):
        to.put("save_steps", "train.save_steps", _rounded(every, updates) if strategy == "steps" else 0)
    else:
        to.refuse("save_strategy", f"{strategy!r} is not supported", "use steps, epoch or no")


def _rounded(steps: Any, updates: int) -> Any:
    """Steps of Shoal for a number of updates, rounded up. Other values are left to the schema."""
    return math.ceil(steps / updates) if isinstance(steps, int | float) and steps >= 1 else steps


def _evaluation(to: Translation, fields: Mapping[str, Any], held_out: Any, updates: int) -> None:
    strategy = getattr(fields["eval_strategy"], "value", fields["eval_strategy"])
    if strategy == "no":
        if held_out is not None:
            to.notices.append("eval_dataset: is only used by test() unless eval_strategy is steps or epoch")
        return
    if strategy not in ("steps", "epoch"):
        to.refuse("eval_strategy", f"must be no, steps or epoch, not {strategy!r}")
    if held_out is None or len(held_out) == 0:
        to.refuse("eval_strategy", "needs an eval_dataset", "set it, or remove eval_strategy")
        return
    if strategy == "epoch":
        to.put("eval_strategy", "orch.eval.interval_epochs", 1)
    else:
        every = fields["logging_steps"] if fields["eval_steps"] is None else fields["eval_steps"]
        to.put("eval_steps", "orch.eval.interval", _rounded(every, updates))
    to.put("eval_dataset", "orch.eval.num_examples", len(held_out))
    to.put("eval_on_start", "orch.eval.at_start", fields["eval_on_start"])
    group = fields["num_generations_eval"] or fields["num_generations"]
    to.put("num_generations_eval", "orch.eval.rollouts_per_example", group)


def _engine(to: Translation, fields: Mapping[str, Any]) -> None:
    if fields["vllm_mode"] != "colocate":
        to.refuse("vllm_mode", f"{fields['vllm_mode']!r} is not supported by GRPOTrainer", KEYS["vllm_mode"].note)
    if not fields["use_vllm"]:
        return
    to.put("use_vllm", "infer.engine", "vllm")
    to.put("use_vllm", "infer.in_process", True)
    to.put("vllm_gpu_memory_utilization", "infer.gpu_memory_utilization", fields["vllm_gpu_memory_utilization"])
    to.put("vllm_tensor_parallel_size", "infer.tp", fields["vllm_tensor_parallel_size"])
    if fields["vllm_model_impl"] != "vllm":
        to.put("vllm_model_impl", "infer.engine_args.model_impl", fields["vllm_model_impl"])
    if fields["vllm_enable_sleep_mode"]:
        to.put("vllm_enable_sleep_mode", "infer.engine_args.enable_sleep_mode", True)
    if fields["vllm_importance_sampling_correction"]:
        put_correction(to, fields)


def _sharding(to: Translation, fields: Mapping[str, Any]) -> None:
    asked = fields["fsdp"]
    if not asked:
        return
    parts = {str(getattr(part, "value", part)) for part in (asked if isinstance(asked, list) else str(asked).split())}
    if asked is not True and not {"full_shard"} <= parts <= {"full_shard", "auto_wrap"}:
        to.refuse("fsdp", f"{asked!r} is not supported", "use True, 'full_shard' or 'full_shard auto_wrap'")
    to.put("fsdp", "train.sharding", "fsdp")


def _adapter(to: Translation, peft: Any) -> None:
    """`peft_config`: a LoraConfig of PEFT."""
    if peft is None:
        return
    if not hasattr(peft, "lora_alpha"):
        to.refuse("peft_config", f"must be a LoraConfig, not a {type(peft).__name__}")
        return
    for name, neutral in _PEFT_UNUSED.items():
        if getattr(peft, name, neutral) not in (neutral, None):
            to.refuse(f"peft_config.{name}", "is not supported", "remove it")
    to.put("peft_config", "train.lora", True)
    for name, value in (("rank", peft.r), ("alpha", peft.lora_alpha), ("dropout", peft.lora_dropout)):
        to.put(f"peft_config.{'r' if name == 'rank' else f'lora_{name}'}", f"train.lora_{name}", value)
    layers = peft.target_modules
    if isinstance(layers, str) and layers != "all-linear":
        to.refuse("peft_config.target_modules", "a regular expression is not supported", "use a list of names")
    elif layers is not None and not isinstance(layers, str):
        to.put("peft_config.target_modules", "train.lora_target_modules", sorted(layers))
    elif layers is None:
        to.notices.append("peft_config.target_modules: is not set, so all linear layers have an adapter")


def _environment(to: Translation, fields: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    calls = fields["max_tool_calling_iterations"]
    if given.get("environment_factory") is None:
        if calls is not None:
            to.refuse("max_tool_calling_iterations", "is not used without environment_factory", "remove it")
        return
    if calls is not None and (not isinstance(calls, int) or calls < 0):
        to.refuse("max_tool_calling_iterations", f"must be a whole number of at least 0, not {calls!r}")
    if given["train_dataset"] is None and not (isinstance(fields["max_steps"], int) and fields["max_steps"] > 0):
        to.refuse("max_steps", "is needed without a train_dataset", "set the number of optimizer updates")
    to.notices.append(
        "max_completion_length: limits each answer; a whole conversation is limited by vllm_max_model_length "
        f"({to.data['train'].get('sequence_len')} tokens)"
    )
    if given["reward_funcs"] is not None:
        to.notices.append(
            "reward_funcs: are called once per rollout, in its environment process, with lists of length 1"
        )


def in_own_arguments(name: str, keys: Mapping[str, Key]) -> str | None:
    """Where GRPOTrainer without `args` has a name of TRL or of an optimizer, as a sentence; None if it has none."""
    rows = {row.theirs: row for table in (TRAINER, FIELDS) for row in table.rows}
    for outer, known in NESTED.items():
        if name in known and name not in rows:
            field = next((field for field, key in KEYS.items() if key.to == known[name]), None)
            return f"use {outer}={{{name!r}: …}}" + (f", or {field} in args=GRPOConfig(…)" if field else "")
    row = rows.get(name)
    if row is None:
        return None
    arguments = [argument for target in row.keys for argument, key in keys.items() if target in key.keys]
    where = ", or pass args=GRPOConfig(…)" if name in KEYS else ""
    if row.refused or not row.keys:
        return f"TRL's {name} is not supported: {row.note}" if row.refused else f"TRL's {name}: {row.note}"
    nested = {key: f"{outer}={{{inner!r}: …}}" for outer, known in NESTED.items() for inner, key in known.items()}
    if arguments:
        return f"TRL's {name} is {nested.get(row.keys[0], arguments[0])} in Shoal{where}"
    return f"TRL's {name} is overrides=['{row.keys[0]}=…'] in Shoal{where}"


def in_args(name: str, keys: Mapping[str, Key]) -> str:
    """The field of GRPOConfig for an argument of GRPOTrainer, or another place for it, as a sentence."""
    rows = {row.theirs: row for row in TRAINER.rows}
    if name in rows and rows[name].refused:
        return f"TRL's {name} is not supported: {rows[name].note}"
    own = {"reward_weights": "reward_weights", "tokenizer": "processing_class", "optimizer_args": "learning_rate",
           "lora": "peft_config", "lora_rank": "peft_config", "lora_alpha": "peft_config"}  # fmt: skip
    wanted = keys[name].keys if name in keys else ()
    field = name if name in KEYS else own.get(name)
    field = field or next((f for f, key in KEYS.items() if set(wanted) & set(key.keys)), None)
    if field is None:
        near = difflib.get_close_matches(name, KEYS, n=1)
        return f"did you mean {near[0]} in GRPOConfig?" if near else "remove it, or use overrides"
    return f"use {'peft_config' if field == 'peft_config' else f'GRPOConfig({field}=…)'}"
