"""`args=GRPOConfig(…)`: TRL's defaults, the meaning of each field, and refused fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal import GRPOConfig, GRPOTrainer
from shoal.config.resolve import as_data
from shoal.core.errors import ArgumentError
from shoal.surfaces.grpo_config import DEFAULTS, KEYS, REMOVED, RENAMED

TABLE = json.loads((Path(__file__).parents[2] / "fixtures" / "trl_1_16_defaults.json").read_text())
ROWS = [{"prompt": "a"}] * 4


def judge(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def trainer(*, eval_dataset: Any = None, peft_config: Any = None, overrides: Any = (), **fields: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model="org/model", reward_funcs=judge, args=GRPOConfig(**fields), train_dataset=ROWS,
        eval_dataset=eval_dataset, peft_config=peft_config, overrides=overrides,
    )  # fmt: skip


def at(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data[part]
    return data


def resolved(**given: Any) -> dict[str, Any]:
    return as_data(trainer(**given).config)


def test_defaults_of_every_field_are_trls():
    assert TABLE["defaults"] == DEFAULTS


def test_run_has_trls_defaults():
    wanted = {
        "train.output_dir": "trainer_output", "train.learning_rate": 1e-6, "train.lr_scheduler_type": "linear",
        "train.weight_decay": 0.0, "train.adam_beta2": 0.999, "train.max_grad_norm": 1.0, "train.warmup_steps": 0,
        "train.epochs": 3, "train.max_steps": None, "train.seed": 42, "train.save_steps": 500,
        "train.logging_steps": 10, "train.minibatches": 1, "train.ppo_epochs": 1, "train.sequence_len": 2048,
        "train.optimizer": "adamw", "train.reference": "none", "train.recipe": "auto", "train.recompute": "auto",
        "train.loss.type": "grpo", "train.loss.aggregation": "token-mean", "train.loss.clip_low": 0.2,
        "train.loss.clip_high": 0.2, "train.loss.kl.beta": 0.0, "train.loss.correction.type": "none",
        "orch.batch_size": 8, "orch.rollouts_per_example": 8, "orch.sampling.max_tokens": 512,
        "orch.sampling.temperature": 1.0, "orch.sampling.top_p": 1.0, "orch.sampling.top_k": -1,
        "orch.advantage.mean": "group", "orch.advantage.std": "group", "orch.advantage.eps": 1e-4,
        "orch.groups.uniform": "keep", "orch.eval": None, "orch.truncated.type": "keep", "infer.engine": "embedded",
    }  # fmt: skip
    data = resolved()
    assert {key: at(data, key) for key in wanted} == wanted
    assert trainer().notices == []


# The fields of a call → {schema key: value}.
TRANSLATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learning_rate": ({"learning_rate": 2e-6}, {"train.learning_rate": 2e-6}),
    "max_steps": ({"max_steps": 7}, {"train.max_steps": 7, "train.epochs": None}),
    "group": ({"num_generations": 4}, {"orch.rollouts_per_example": 4, "orch.batch_size": 8}),
    "accumulation": ({"gradient_accumulation_steps": 4}, {"orch.batch_size": 32, "train.minibatches": 1}),
    "generation": (
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 40,
         "warmup_steps": 4},
        {"orch.batch_size": 32, "train.minibatches": 2, "train.ppo_epochs": 2, "train.max_steps": 10,
         "train.warmup_steps": 1, "train.save_steps": 125},
    ),
    "generation_batch_size": ({"generation_batch_size": 16}, {"orch.batch_size": 16, "train.minibatches": 2}),
    "beta": (
        {"beta": 0.04},
        {"train.loss.kl.beta": 0.04, "train.loss.kl.estimator": "k3-unbiased", "train.reference": "frozen"},
    ),
    "k3": ({"beta": 0.04, "use_bias_correction_kl": False}, {"train.loss.kl.estimator": "k3"}),
    "delta": ({"delta": 4.0}, {"train.loss.type": "grpo", "train.loss.dual_clip": 4.0}),
    "epsilon_high": ({"epsilon_high": 0.28}, {"train.loss.clip_low": 0.2, "train.loss.clip_high": 0.28}),
    "grpo": ({"loss_type": "grpo"}, {"train.loss.aggregation": "seq-mean-token-mean"}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": False},
        {"train.loss.aggregation": "seq-mean-token-sum-norm", "orch.advantage.std": "none"},
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_neg": 1.1},
        {"train.loss.type": "sapo", "train.loss.tau_neg": 1.1, "train.loss.aggregation": "seq-mean-token-mean"},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.1},
        {"train.loss.type": "cispo", "train.loss.ratio_high": 5.0, "train.loss.ratio_low": 0.0,
         "train.loss.aggregation": "token-mean", "train.loss.kl.beta": 0.1},
    ),
    "sequence": (
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"train.loss.type": "gspo", "train.loss.clip_low": 3e-4, "train.loss.clip_high": 4e-4,
         "train.loss.aggregation": "token-mean"},
    ),
    "vespo": (
        {"loss_type": "vespo", "vespo_k_neg": 2.5, "vespo_lambda_pos": 0.0},
        {"train.loss.type": "vespo", "train.loss.k_pos": 2.0, "train.loss.rate_pos": 1e-4, "train.loss.k_neg": 2.5,
         "train.loss.rate_neg": 2.0, "train.loss.aggregation": "token-mean"},
    ),
    "entropy_coef": (
        {"entropy_coef": 0.01},
        {"train.loss.entropy.coef": 0.01, "train.loss.entropy.target": None, "train.loss.entropy.top_fraction": 1.0},
    ),
    "adaptive entropy": (
        {"use_adaptive_entropy": True, "entropy_coef_delta": 0.01},
        {"train.loss.entropy.coef": 0.0, "train.loss.entropy.target": 0.2, "train.loss.entropy.delta": 0.01,
         "train.loss.entropy.coef_min": 0.0, "train.loss.entropy.coef_max": 1.0},
    ),
    "top entropy": ({"top_entropy_quantile": 0.2}, {"train.loss.entropy.top_fraction": 0.2}),
    "objectives": (
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"orch.advantage.per_part": True, "orch.advantage.rescale": True, "orch.advantage.std": "group",
         "orch.advantage.eps": 1e-4, "orch.groups.uniform": "keep"},
    ),
    "fsdp": ({"fsdp": "full_shard auto_wrap"}, {"train.sharding": "fsdp"}),
    "fsdp as a flag": ({"fsdp": True}, {"train.sharding": "fsdp"}),
    "fsdp as a list": ({"fsdp": ["full_shard"]}, {"train.sharding": "fsdp"}),
    "batch std": ({"scale_rewards": "batch"}, {"orch.advantage.std": "batch", "orch.groups.uniform": "keep"}),
    "truncated": ({"mask_truncated_completions": True}, {"orch.truncated.type": "mask"}),
    "schedule": (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 0.1},
        {"train.lr_scheduler_type": "cosine", "train.final_lr_fraction": 0.1, "train.warmup_ratio": 0.1},
    ),
    "evaluation": (
        {"eval_strategy": "steps", "eval_dataset": ROWS[:2]},
        {"orch.eval.interval": 10, "orch.eval.num_examples": 2, "orch.eval.rollouts_per_example": 8,
         "orch.eval.at_start": False},
    ),
    "saving": ({"save_strategy": "no"}, {"train.save_steps": 0}),
    "top_k": ({"top_k": 50}, {"orch.sampling.top_k": 50}),
    "device": ({"bf16": True, "use_cpu": True}, {"train.recipe": "bf16", "train.device": "cpu"}),
    "seed": ({"seed": 3}, {"train.seed": 3}),
    "optim": ({"optim": "adamw_8bit"}, {"train.optimizer": "adamw_8bit"}),
    "report": (
        {"report_to": "tensorboard", "run_name": "one", "project": "fish"},
        {"train.report_to": ["tensorboard"], "train.report_name": "one", "train.report_project": "fish"},
    ),
    "length": ({"max_completion_length": 4096}, {"train.sequence_len": 8192, "orch.sampling.max_tokens": 4096}),
    "overrides": ({"overrides": ["orch.groups.uniform=refill"]}, {"orch.groups.uniform": "refill"}),
}  # fmt: skip


@pytest.mark.parametrize("case", TRANSLATED)
def test_field_has_the_meaning_of_trl(case: str):
    given, wanted = TRANSLATED[case]
    data = resolved(**given)
    assert {key: at(data, key) for key in wanted} == wanted


def test_peft_config():
    from peft import LoraConfig

    data = resolved(peft_config=LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj"]))
    assert [data["train"][name] for name in ("lora", "lora_rank", "lora_alpha", "lora_target_modules")] == [
        True, 8, 64, ["q_proj"],
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match=r"peft_config.use_rslora"):
        trainer(peft_config=LoraConfig(use_rslora=True))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "negative entropy_coef": ({"entropy_coef": -0.01}, "entropy_coef: must be at least 0, not -0.01"),
    "bonus and mask": (
        {"entropy_coef": 0.01, "top_entropy_quantile": 0.2},
        "top_entropy_quantile: cannot be combined with entropy_coef",
    ),
    "bonus of dr_grpo": ({"entropy_coef": 0.01, "loss_type": "dr_grpo"}, "entropy_coef: is not supported with dr_grpo"),
    "range": (
        {"use_adaptive_entropy": True, "entropy_coef": 2.0},
        "entropy_coef: is 2.0, outside entropy_coef_min (0.0) and entropy_coef_max (1.0)",
    ),
    "target of dr_grpo": (
        {"use_adaptive_entropy": True, "loss_type": "dr_grpo"},
        "use overrides=['train.loss.entropy.target=…'] to accept this",
    ),
    "no target": ({"use_adaptive_entropy": True, "entropy_target": None}, "entropy_target: must be a number, not None"),
    "quantile": ({"top_entropy_quantile": 0.0}, "top_entropy_quantile: must be greater than 0, not 0.0"),
    "objectives": ({"multi_objective_aggregation": "sum"}, "or normalize_then_sum, not 'sum'"),
    "sequence vespo": ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "importance_sampling_level: "),
    "vespo with delta": ({"loss_type": "vespo", "delta": 4.0}, "delta: is not supported with vespo"),
    "fsdp": ({"fsdp": "full_shard offload"}, "fsdp: 'full_shard offload' is not supported; use True"),
    "luspo": ({"loss_type": "luspo"}, "loss_type: 'luspo' is not supported"),
    "cispo's default": ({"loss_type": "cispo"}, "epsilon_high: must be at least 1, not 0.2"),
    "sequence sapo": ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "importance_sampling_level: "),
    "sequence kl": ({"importance_sampling_level": "sequence", "beta": 0.1}, "use_bias_correction_kl: "),
    "delta": ({"delta": 1.1}, "delta: is 1.1, below 1 + epsilon_high"),
    "batch": ({"num_generations": 3}, "num_generations: is 3, which does not divide"),
    "steps": ({"num_iterations": 3, "max_steps": 10}, "max_steps: is 10 optimizer updates, but a step has 3"),
    "epochs": ({"num_train_epochs": 0.5}, "num_train_epochs: must be a whole number"),
    "fp16": ({"fp16": True}, "fp16: True is not supported"),
    "server": ({"vllm_mode": "server"}, "vllm_mode: 'server' is not supported"),
    "deepspeed": ({"deepspeed": "zero3.json"}, "deepspeed: 'zero3.json' is not supported"),
    "hub": ({"push_to_hub": True}, "push_to_hub: True is not supported"),
    "optim": ({"optim": "lion"}, "optim: 'lion' is not supported"),
    "schedule": ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type: 'polynomial' is not supported"),
    "rate": ({"learning_rate": "fast"}, "learning_rate: must be a number, not \"fast\"; the default is 1e-06"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_field_is_refused_in_one_line(case: str):
    given, said = REFUSED[case]
    with pytest.raises(ArgumentError) as caught:
        trainer(**given)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_field_without_an_effect_gives_a_notice():
    assert [line.partition(":")[0] for line in trainer(torch_compile=True, dataloader_num_workers=4).notices] == [
        "torch_compile", "dataloader_num_workers",
    ]  # fmt: skip


ACCUMULATED = {"gradient_accumulation_steps": 2}
UPDATES = {"steps_per_generation": 2}
# Fields of a call → its notices. A call that equals TRL has none.
DIFFERENCES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "bonus": ({"entropy_coef": 0.01}, []),
    "bonus, micro-batches": (
        {"entropy_coef": 0.01, **ACCUMULATED},
        ["entropy_coef: the bonus is a mean over the tokens"],
    ),
    "bonus, sapo": (
        {"entropy_coef": 0.01, "loss_type": "sapo"},
        ["entropy_coef: the mean entropy gives each completion"],
    ),
    "bonus, top_p": ({"entropy_coef": 0.01, "top_p": 0.9}, ["entropy_coef: the entropy covers", "orch.sampling: is"]),
    "target": ({"use_adaptive_entropy": True}, []),
    "target, updates": (
        {"use_adaptive_entropy": True, **UPDATES},
        ["use_adaptive_entropy: the coefficient changes after"],
    ),
    "mask": ({"top_entropy_quantile": 0.2}, []),
    "mask, micro-batches": ({"top_entropy_quantile": 0.2, **ACCUMULATED}, ["top_entropy_quantile: the tokens are"]),
    "mask, updates": ({"top_entropy_quantile": 0.2, **UPDATES}, ["top_entropy_quantile: the entropies are those of"]),
    "vespo": ({"loss_type": "vespo"}, []),
    "objectives": ({"multi_objective_aggregation": "normalize_then_sum"}, []),
    "objectives, scale": (
        {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
        ["scale_rewards: has no effect with multi_objective_aggregation"],
    ),
    "batch std, generations": (
        {"scale_rewards": "batch", "steps_per_generation": 1, **ACCUMULATED},
        ["steps_per_generation: statistics of the batch cover an update"],
    ),
    "fsdp": ({"fsdp": True, "fsdp_config": {"version": 2}}, ["fsdp_config: has no effect: each decoder layer"]),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_notice_names_a_difference(case: str):
    given, said = DIFFERENCES[case]
    notices = trainer(per_device_train_batch_size=16, **given).notices
    assert len(notices) == len(said) and all(map(str.startswith, notices, said)), notices


def test_every_field_is_set_refused_or_explained():
    for name, key in KEYS.items():
        assert key.keys or key.note, name


def test_all_wrong_fields_are_reported_at_once_with_the_nearest_name():
    with pytest.raises(ArgumentError) as caught:
        GRPOConfig(lr=1e-5, num_generation=4, entropycoef=0.1)  # type: ignore[call-arg]
    first, second, third = str(caught.value).splitlines()
    assert first == "GRPOConfig: lr: is not an argument; did you mean learning_rate (default 1e-06)?"
    assert "num_generations (default 8)" in second and "entropy_coef (default 0.0)" in third
    with pytest.raises(ArgumentError) as caught:
        trainer(entropy_coef=-0.1, learning_rate=-1.0, num_generations=3, loss_type="luspo")
    lines = str(caught.value).splitlines()
    assert {line.split(": ")[1] for line in lines} == {
        "entropy_coef", "learning_rate", "num_generations", "loss_type",
    }  # fmt: skip


def test_removed_fields_name_their_replacement():
    with pytest.raises(ArgumentError) as caught:
        GRPOConfig(max_prompt_length=512, warmup_ratio=0.1, evaluation_strategy="steps")  # type: ignore[call-arg]
    first, second, third = str(caught.value).splitlines()
    assert "vllm_max_model_length" in first and "did you mean" not in first
    assert "warmup_steps below 1" in second and "did you mean eval_strategy" in third
    assert not set(REMOVED) & set(KEYS) and set(RENAMED.values()) <= set(KEYS)


def test_two_styles_are_not_mixed():
    with pytest.raises(ArgumentError) as caught:
        GRPOTrainer(
            "org/model", ROWS, judge, args=GRPOConfig(), group_size=8, clip_eps=0.1, lora=True, callbacks=[1],
        )  # fmt: skip
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["group_size", "clip_eps", "lora", "callbacks"]
    assert "GRPOConfig(num_generations=…)" in lines[0] and "peft_config" in lines[2]
    with pytest.raises(ArgumentError, match=r"peft_config: belongs to args"):
        GRPOTrainer("org/model", ROWS, judge, peft_config=object())


def test_trl_config_itself_is_named():
    with pytest.raises(ArgumentError, match=r"GRPOTrainer: args: must be a shoal.GRPOConfig, not a dict"):
        GRPOTrainer("org/model", ROWS, judge, args={"learning_rate": 1e-5})  # type: ignore[arg-type]
