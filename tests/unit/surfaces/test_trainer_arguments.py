"""Every argument of GRPOTrainer has a visible effect: on a key of the resolved configuration, or on an object."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from shoal.config.resolve import as_data
from shoal.core.errors import ArgumentError
from shoal.grpo_trainer import KEYS, GRPOTrainer
from shoal.runs.journal import read_lines
from shoal.surfaces.trainer import translate

SIGNATURE = inspect.signature(GRPOTrainer.__init__).parameters
NAMES = [name for name in SIGNATURE if name not in ("self", "unknown")]
HELD_OUT = [{"prompt": "a"}, {"prompt": "b"}]

# Argument → (arguments of the call, {schema key: value}). Keys of the resolved configuration.
IN_THE_CONFIGURATION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({"model": "some/other"}, {"train.model": "some/other"}),
    "train_dataset": ({}, {"orch.env": [{"id": "python-object", "args": {}, "name": "dataset", "weight": 1.0}]}),
    "eval_dataset": ({"eval_dataset": HELD_OUT, "eval_steps": 5}, {"orch.eval.num_examples": 2}),
    "eval_steps": ({"eval_dataset": HELD_OUT, "eval_steps": 5}, {"orch.eval.interval": 5}),
    "num_steps": ({"num_steps": 7}, {"train.max_steps": 7}),
    "num_epochs": ({"num_epochs": 3}, {"train.epochs": 3, "train.max_steps": None}),
    "group_size": ({"group_size": 6}, {"orch.rollouts_per_example": 6, "orch.batch_size": 6}),
    "batch_size": ({"batch_size": 3}, {"orch.batch_size": 12}),
    "ppo_steps": ({"ppo_steps": 2}, {"train.ppo_epochs": 2}),
    "clip_eps": ({"clip_eps": 0.3}, {"train.loss.clip_low": 0.3, "train.loss.clip_high": 0.3}),
    "kl_penalty": ({"kl_penalty": 0.05}, {"train.loss.kl.beta": 0.05, "train.reference": "frozen"}),
    "sampling_temperature": ({"sampling_temperature": 0.9}, {"orch.sampling.temperature": 0.9}),
    "max_new_tokens": ({"max_new_tokens": 32}, {"orch.sampling.max_tokens": 32}),
    "max_seq_len": ({"max_seq_len": 512}, {"train.sequence_len": 512, "orch.seq_len": 512}),
    "generation_args": (
        {"generation_args": {"top_p": 0.9, "min_new_tokens": 2, "stop_strings": ["."], "do_sample": True}},
        {"orch.sampling.top_p": 0.9, "orch.sampling.min_tokens": 2, "orch.sampling.stop": ["."]},
    ),
    "optimizer": ({"optimizer": "adamw_8bit"}, {"train.optimizer": "adamw_8bit"}),
    "optimizer_args": (
        {"optimizer_args": {"lr": 2e-5, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}},
        {"train.learning_rate": 2e-5, "train.adam_beta1": 0.8, "train.adam_beta2": 0.95, "train.adam_epsilon": 1e-6,
         "train.weight_decay": 0.1},
    ),
    "lr_scheduler": (
        {"lr_scheduler": {"type": "cosine", "warmup_steps": 4, "final_lr_fraction": 0.1}},
        {"train.lr_scheduler_type": "cosine", "train.warmup_steps": 4, "train.final_lr_fraction": 0.1},
    ),
    "max_grad_norm": ({"max_grad_norm": 0.5}, {"train.max_grad_norm": 0.5}),
    "output_dir": ({"output_dir": "elsewhere"}, {"train.output_dir": "elsewhere"}),
    "saving_steps": ({"saving_steps": 3}, {"train.save_steps": 3}),
    "logging_steps": ({"logging_steps": 5}, {"train.logging_steps": 5}),
    "seed": ({"seed": 11}, {"train.seed": 11, "orch.sampling.seed": 11}),
    "log_completions": ({"log_completions": True}, {"train.show_completions": 4}),
    "enable_wandb": ({"enable_wandb": True}, {"train.report_to": ["wandb"]}),
    "wandb_project": ({"enable_wandb": True, "wandb_project": "fish"}, {"train.report_project": "fish"}),
    "use_vllm": ({"use_vllm": True}, {"infer.engine": "vllm", "infer.gpu_memory_utilization": 0.5}),
    "vllm_args": (
        {"use_vllm": True,
         "vllm_args": {"gpu_memory_utilization": 0.3, "tensor_parallel_size": 2, "enforce_eager": True}},
        {"infer.gpu_memory_utilization": 0.3, "infer.tp": 2, "infer.engine_args": {"enforce_eager": True}},
    ),
    "vllm_enable_sleep": (
        {"use_vllm": True, "vllm_enable_sleep": True}, {"infer.engine_args": {"enable_sleep_mode": True}},
    ),
    "lora": ({"lora": True}, {"train.lora": True}),
    "lora_rank": ({"lora": True, "lora_rank": 4}, {"train.lora_rank": 4}),
    "lora_alpha": ({"lora": True, "lora_alpha": 8}, {"train.lora_alpha": 8}),
    "lora_dropout": ({"lora": True, "lora_dropout": 0.1}, {"train.lora_dropout": 0.1}),
    "lora_target_modules": (
        {"lora": True, "lora_target_modules": ["q_proj"]}, {"train.lora_target_modules": ["q_proj"]},
    ),
    "resume_from_checkpoint": ({"resume_from_checkpoint": True}, {"train.resume_from_checkpoint": True}),
    "device": ({"device": "cpu"}, {"train.device": "cpu"}),
    "overrides": ({"overrides": ["train.loss.type=dapo"]}, {"train.loss.type": "dapo"}),
}  # fmt: skip
# Arguments that are objects or concern this process. Other tests check their effects.
ELSEWHERE = {
    **dict.fromkeys(("args", "processing_class", "peft_config"), "test_trl_config"),
    "adapter_path": "test_grpo_trainer: test_start_adapter_must_exist",
    "environment_factory": "e2e/test_stateful: test_environment_factory_of_trl",
    "reward_funcs": "test_grpo_trainer: test_model_object_and_trl_rewards",
    "reward_weights": "test_grpo_trainer: test_model_object_and_trl_rewards",
    "tokenizer": "test_grpo_trainer: test_model_object_and_trl_rewards",
    "use_accelerate": "e2e/test_accelerate: test_two_processes_train_one_model",
}


def call(**given: Any) -> dict[str, Any]:
    """Every argument as in a call."""
    values: dict[str, Any] = {
        name: SIGNATURE[name].default for name in NAMES if SIGNATURE[name].default is not inspect.Parameter.empty
    }
    return {**values, "model": "org/model", "train_dataset": HELD_OUT, **given}


def resolved(**given: Any) -> dict[str, Any]:
    config, _ = translate(KEYS, call(**given)).config(given.get("overrides", ()))
    return as_data(config)


def at(data: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        data = data[part] if data is not None else None  # type: ignore[assignment]
    return data


def test_every_argument_has_a_row_here_and_in_the_documentation():
    assert {*IN_THE_CONFIGURATION, *ELSEWHERE} == set(NAMES)
    assert list(KEYS) == NAMES


@pytest.mark.parametrize("argument", IN_THE_CONFIGURATION)
def test_argument_changes_its_setting(argument: str):
    given, wanted = IN_THE_CONFIGURATION[argument]
    data, before = resolved(**given), resolved()
    assert {key: at(data, key) for key in wanted} == wanted
    if argument != "train_dataset":
        assert any(at(before, key) != value for key, value in wanted.items())


@pytest.mark.parametrize("argument", KEYS)
def test_documented_keys_are_the_translated_keys(argument: str):
    if argument in ELSEWHERE or argument == "overrides":
        return
    translation = translate(KEYS, call(**IN_THE_CONFIGURATION[argument][0]))
    set_by_it = {key for key, name in translation.arguments.items() if name.split("[")[0] == argument}
    free = {key for key in set_by_it if key.startswith("infer.engine_args.")}
    assert set_by_it - free <= set(KEYS[argument].keys), set_by_it
    assert set_by_it, "an argument without an effect"


def test_defaults_are_those_of_the_surface():
    data = resolved()
    wanted = {
        "train.max_steps": 100, "orch.rollouts_per_example": 4, "orch.batch_size": 4, "train.ppo_epochs": 1,
        "train.loss.type": "grpo", "train.loss.clip_low": 0.2, "train.loss.aggregation": "seq-mean-token-mean",
        "train.loss.kl.estimator": "k3", "train.loss.kl.beta": 0.0, "orch.sampling.temperature": 0.7,
        "orch.sampling.max_tokens": 256, "train.learning_rate": 1e-5, "train.optimizer": "adamw",
        "train.max_grad_norm": 1.0, "orch.advantage.mean": "group", "orch.advantage.std": "group",
        "infer.engine": "embedded", "train.lora": False, "orch.eval": None,
    }  # fmt: skip
    assert {key: at(data, key) for key in wanted} == wanted


def test_batch_size_counts_the_prompts_of_a_process():
    config, _ = translate(KEYS, call(batch_size=3, group_size=4), processes=2).config()
    assert (config.orch.batch_size, config.orch.rollouts_per_example) == (24, 4)


WRONG = {
    "clip_eps": ({"clip_eps": -1.0}, "GRPOTrainer: clip_eps: "),
    "group of one": ({"group_size": 1}, "GRPOTrainer: group_size: is 1, and in a group of one"),
    "not a number": ({"batch_size": "4"}, "GRPOTrainer: batch_size: must be a whole number of at least 1, not '4'"),
    "a boolean": ({"max_new_tokens": True}, "GRPOTrainer: max_new_tokens: "),
    "temperature 0": ({"sampling_temperature": 0.0}, "GRPOTrainer: sampling_temperature: 0 makes all"),
    "no room": ({"max_new_tokens": 2048}, "GRPOTrainer: max_new_tokens: is 2048, which leaves no room"),
    "steps and epochs": ({"num_steps": 5, "num_epochs": 1}, "num_epochs: cannot be combined with num_steps (5)"),
    "generation": ({"generation_args": {"topp": 1}}, "generation_args['topp']: is not known; did you mean top_p?"),
    "own argument": ({"generation_args": {"temperature": 1.0}}, "use sampling_temperature=…"),
    "optimizer": ({"optimizer": "lion"}, "GRPOTrainer: optimizer: lion is not known; use AdamW"),
    "optimizer_args": ({"optimizer_args": {"learning_rate": 1}}, "optimizer_args['learning_rate']: is not known"),
    "lr": ({"optimizer_args": {"lr": -1}}, "GRPOTrainer: optimizer_args['lr']: "),
    "scheduler": ({"lr_scheduler": "cosin"}, "GRPOTrainer: lr_scheduler: "),
    "scheduler object": ({"lr_scheduler": object()}, "GRPOTrainer: lr_scheduler: must be a name"),
    "eval_steps": ({"eval_steps": 5}, "GRPOTrainer: eval_steps: needs an eval_dataset"),
    "wandb_project": ({"wandb_project": "x"}, "wandb_project: is not used without enable_wandb=True"),
    "vllm_args": ({"vllm_args": {"a": 1}}, "vllm_args: is not used without use_vllm=True"),
    "vllm's typo": (
        {"use_vllm": True, "vllm_args": {"tensor_paralel_size": 2}},
        "vllm_args['tensor_paralel_size']: is not known; did you mean tensor_parallel_size?",
    ),
    "sleep": ({"vllm_enable_sleep": True}, "vllm_enable_sleep: is not used without use_vllm=True"),
    "resume": ({"resume_from_checkpoint": "other/place"}, "resume_from_checkpoint: 'other/place' is not in output_dir"),
    "overrides": ({"overrides": ["train.loss.typ=dapo"]}, "train.loss.typ"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_named_in_one_line(case: str):
    given, said = WRONG[case]
    with pytest.raises(ArgumentError) as caught:
        translate(KEYS, call(**given)).config(given.get("overrides", ()))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_warnings_use_argument_names(tmp_path: Path):
    """Warnings of a step name schema keys. The author of a script sees argument names instead."""
    from shoal.recipes.rl_loop import _reword
    from shoal.runs.events import EventLog
    from shoal.runs.run_dir import RunDir

    said = "completions are cut; raise orch.sampling.max_tokens, or lower train.learning_rate"
    cases = (
        (translate(KEYS, call()).reword, "raise max_new_tokens, or lower optimizer_args['lr']"),
        (_reword, "raise max_completion_tokens, or lower learning_rate"),
    )
    for number, (wording, wanted) in enumerate(cases):
        with RunDir.create(tmp_path / str(number), "", {}) as run_dir:
            EventLog(run_dir, None, wording).warn("health", said)
            (event,) = read_lines(run_dir.path / "events.jsonl")
        assert event["message"] == f"completions are cut; {wanted}"
