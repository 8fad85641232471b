"""Every field of the recipe's Config has a visible effect. A field without a row fails."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from shoal.config.resolve import as_data
from shoal.config.schema import LAYOUTS
from shoal.core.errors import ArgumentError
from shoal.core.losses import LOSSES
from shoal.recipes import config as configs
from shoal.recipes.config import (
    KEYS,
    POLICY_LOSSES,
    Config,
    DeployConfig,
    InfraConfig,
    WeightSyncConfig,
    WeightSyncScope,
    translate,
)

MODEL = "org/model"
INNER = {
    "deployment": configs.DeployConfig, "infra": configs.InfraConfig, "weight_sync": configs.WeightSyncConfig,
    "tis": configs.TISConfig, "wandb": configs.WandBConfig, **configs.LOSS_OBJECTS,
}  # fmt: skip


def inner(kind: str, **values: Any) -> dict[str, Any]:
    given = {"tokenizer_model": MODEL, **values} if kind == "deployment" else values
    return {kind: INNER[kind](**given)}


def parameters(loss: str, **values: Any) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The cases of a loss whose parameters have the names of the schema."""
    return {
        f"{loss}.{name}": ({"policy_loss": loss, **inner(loss, **{name: value})}, {f"train.loss.{name}": value})
        for name, value in values.items()
    }


OTHER_LOSSES = {
    **parameters("decoupled", cap=2.0, dual_clip=3.0),
    "decoupled.eps_clip": (
        {"policy_loss": "decoupled", **inner("decoupled", eps_clip=0.1)}, {"train.loss.clip_low": 0.1},
    ),
    "decoupled.eps_clip_high": (
        {"policy_loss": "decoupled", **inner("decoupled", eps_clip_high=0.3)}, {"train.loss.clip_high": 0.3},
    ),
    **parameters(
        "masked", kl_tau=0.1, adv_tau=0.5, ratio_type="sequence", token_mask_low=0.5, token_mask_high=2.0,
        geo_mask_low=0.5, geo_mask_high=2.0, sequence_mask_low=0.5, sequence_mask_high=2.0,
    ),
    "masked.sequence_clip_high": (
        {"policy_loss": "masked", **inner("masked", ratio_type="sequence", sequence_clip_high=5.0)},
        {"train.loss.sequence_clip_high": 5.0},
    ),
    **parameters("dppo", mask_low=0.1, mask_high=0.1, kl_tau=0.1),
    **parameters("sapo", tau_pos=2.0, tau_neg=2.0),
    **parameters("vespo", k_pos=1.0, rate_pos=1.0, k_neg=1.0, rate_neg=1.0),
}  # fmt: skip
# Field → (arguments of Config, {schema key: value}).
IN_THE_CONFIGURATION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "log_path": ({"log_path": "elsewhere"}, {"train.output_dir": "elsewhere"}),
    "base_model": ({"base_model": "org/other"}, {"train.model": "org/other"}),
    "dataset": ({"dataset": "org/data"}, {"orch.dataset.name": "org/data"}),
    "lora_rank": ({"lora_rank": 4}, {"train.lora": True, "train.lora_rank": 4, "train.loss.kl.beta": 0.001}),
    "max_seq_len": ({"max_seq_len": 4096}, {"train.sequence_len": 4096}),
    "learning_rate": ({"learning_rate": 2e-5}, {"train.learning_rate": 2e-5}),
    "kl_beta": ({"kl_beta": 0.1, "lora_rank": 4}, {"train.loss.kl.beta": 0.1}),
    "completions_per_prompt": ({"completions_per_prompt": 8}, {"orch.rollouts_per_example": 8}),
    "max_completion_tokens": ({"max_completion_tokens": 64}, {"orch.sampling.max_tokens": 64}),
    "temperature": ({"temperature": 0.5}, {"orch.sampling.temperature": 0.5}),
    "epochs": ({"epochs": 3}, {"train.epochs": 3}),
    "max_rows": ({"max_rows": 7}, {"orch.dataset.max_rows": 7}),
    "prompt_groups_per_step": ({"prompt_groups_per_step": 3}, {"orch.batch_size": 12}),
    "policy_loss": ({"policy_loss": "dro"}, {"train.loss.type": "dro"}),
    "eps_clip": ({"eps_clip": 0.1}, {"train.loss.clip_low": 0.1}),
    "eps_clip_high": ({"eps_clip_high": 0.4}, {"train.loss.clip_high": 0.4}),
    "ratio_log_cap": ({"ratio_log_cap": 5.0}, {"train.loss.ratio_log_cap": 5.0}),
    "ppo_n_minibatches": ({"ppo_n_minibatches": 2}, {"train.minibatches": 2}),
    "tis": ({"tis": None}, {"train.loss.correction.type": "none"}),
    "tis.cap": (inner("tis", cap=2.0), {"train.loss.correction.cap": 2.0}),
    "tis.level": (inner("tis", level="sequence"), {"train.loss.correction.level": "sequence"}),
    "importance_sampling.ratio_low": (
        {"policy_loss": "importance_sampling", **inner("importance_sampling", ratio_low=0.5)},
        {"train.loss.ratio_low": 0.5},
    ),
    "importance_sampling.ratio_high": (
        {"policy_loss": "importance_sampling", **inner("importance_sampling", ratio_high=2.0)},
        {"train.loss.ratio_high": 2.0},
    ),
    "reinforce.ratio": (
        {"policy_loss": "reinforce", **inner("reinforce", ratio="none")}, {"train.loss.ratio": "none"},
    ),
    "dapo.eps_clip": ({"policy_loss": "dapo", **inner("dapo", eps_clip=0.1)}, {"train.loss.clip_low": 0.1}),
    "dapo.eps_clip_high": ({"policy_loss": "dapo", **inner("dapo", eps_clip_high=0.3)}, {"train.loss.clip_high": 0.3}),
    "dapo.dual_clip": ({"policy_loss": "dapo", **inner("dapo", dual_clip=3.0)}, {"train.loss.dual_clip": 3.0}),
    "dro.beta": ({"policy_loss": "dro", **inner("dro", beta=0.2)}, {"train.loss.quad_beta": 0.2}),
    "gspo.eps_clip": ({"policy_loss": "gspo", **inner("gspo", eps_clip=1e-3)}, {"train.loss.clip_low": 1e-3}),
    "gspo.eps_clip_high": (
        {"policy_loss": "gspo", **inner("gspo", eps_clip_high=2e-3)}, {"train.loss.clip_high": 2e-3},
    ),
    "cispo.ratio_low": ({"policy_loss": "cispo", **inner("cispo", ratio_low=0.5)}, {"train.loss.ratio_low": 0.5}),
    "cispo.ratio_high": ({"policy_loss": "cispo", **inner("cispo", ratio_high=3.0)}, {"train.loss.ratio_high": 3.0}),
    **OTHER_LOSSES,
    "infra.training_shape_id": (
        inner("infra", training_shape_id="cpu-bf16"), {"train.device": "cpu", "train.recipe": "bf16"},
    ),
    "infra.ref_training_shape_id": (
        inner("infra", ref_training_shape_id="cpu-fp32"), {"train.reference": "frozen", "train.loss.kl.beta": 0.001},
    ),
    "deployment.weight_sync_scope": (
        inner("deployment", weight_sync_scope=WeightSyncScope.PER_DEPLOYMENT), {"infer.weights": "own"},
    ),
    "weight_sync.weight_sync_interval": (
        inner("weight_sync", weight_sync_interval=4), {"orch.weight_sync_interval": 4, "orch.max_off_policy_steps": 3},
    ),
    "weight_sync.dcp_save_interval": (inner("weight_sync", dcp_save_interval=5), {"train.save_steps": 5}),
    "weight_sync.weight_sync_timeout": (inner("weight_sync", weight_sync_timeout=30.0), {"orch.sync_deadline_s": 30.0}),
    "weight_sync.dcp_timeout": (inner("weight_sync", dcp_timeout=40.0), {"train.save_deadline_s": 40.0}),
    "wandb": (inner("wandb"), {"train.report_to": ["wandb"]}),
    "wandb.project": (inner("wandb", project="fish"), {"train.report_project": "fish"}),
    "wandb.run_name": (inner("wandb", run_name="one"), {"train.report_name": "one"}),
    "seed": ({"seed": 3}, {"train.seed": 3}),
    "overrides": ({"overrides": ["orch.sampling.top_p=0.9"]}, {"orch.sampling.top_p": 0.9}),
}  # fmt: skip
ELSEWHERE = {
    "deployment.tokenizer_model": "test_infra: test_tokenizers_must_agree",
    "deployment.deployment_id": "test_attach: test_killed_loop_is_continued_by_another_process",
    "infra.trainer_id": "test_infra: test_running_trainer_is_found_again",
    "infra.ref_trainer_id": "test_attach: test_reference_can_be_a_process",
}


def config(**given: Any) -> Config:
    values = {"log_path": "out", "base_model": MODEL, "dataset": "org/rows", "deployment": DeployConfig(MODEL)}
    return Config(**{**values, **given})


def resolved(**given: Any) -> dict[str, Any]:
    return as_data(translate(config(**given))[0])


def at(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data.get(part) if data is not None else None
    return data


def all_fields() -> set[str]:
    found = set()
    for field in fields(Config):
        if field.name not in INNER or field.name in ("tis", "wandb"):
            found.add(field.name)
        if field.name in INNER:
            found |= {f"{field.name}.{inside.name}" for inside in fields(INNER[field.name])}
    return found


def test_every_field_has_a_row_here_and_in_the_documentation():
    assert {*IN_THE_CONFIGURATION, *ELSEWHERE} == all_fields()
    assert set(KEYS) == all_fields()
    assert all(is_dataclass(kind) for kind in INNER.values())


@pytest.mark.parametrize("field", IN_THE_CONFIGURATION)
def test_field_changes_its_setting(field: str):
    given, wanted = IN_THE_CONFIGURATION[field]
    data = resolved(**given)
    assert {key: at(data, key) for key in wanted} == wanted
    other = {"policy_loss": given["policy_loss"]} if "policy_loss" in given and field != "policy_loss" else {}
    before = resolved(**other)
    assert any(at(before, key) != value for key, value in wanted.items())
    assert field == "overrides" or set(KEYS[field].keys) & set(wanted)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_runs_with_the_surfaces_defaults(loss: str):
    data = resolved(policy_loss=loss)
    assert at(data, "train.loss.type") == loss
    assert at(data, "train.loss.correction.type") == ("tis" if LOSSES[loss].takes_correction else "none")
    assert at(data, "train.loss.aggregation") == ("seq-mean-token-mean" if loss == "gspo" else "token-mean")
    assert (at(data, "orch.advantage.mean"), at(data, "orch.advantage.std")) == (
        "group",
        "none" if loss == "masked" else "group",
    )
    assert at(data, "orch.groups.uniform") == "skip"
    assert at(data, "train.save_steps") == 0


def test_full_fine_tuning_without_a_reference_says_once_that_the_kl_is_off():
    run, notices = translate(config())
    assert run.train.loss.kl.beta == 0 and run.train.reference == "none"
    assert [line for line in notices if "KL is off" in line] == [
        "kl_beta: there is no reference (infra.ref_training_shape_id is unset), so the KL is off"
    ]
    assert not [line for line in translate(config(policy_loss="dapo"))[1] if "KL" in line]


def test_lora_has_its_base_as_reference():
    assert translate(config(lora_rank=4))[0].train.reference == "adapter-off"
    assert translate(config(lora_rank=4, kl_beta=0.0))[0].train.reference == "none"


WRONG = {
    "tokenizer": ({"deployment": DeployConfig()}, "Config: deployment.tokenizer_model: is required"),
    "loss": ({"policy_loss": "grop"}, "Config: policy_loss: there is no loss 'grop'; did you mean grpo?"),
    "kl": ({"kl_beta": 0.1}, "Config: kl_beta: is 0.1, but full fine-tuning has no reference"),
    "kl of dapo": ({"kl_beta": 0.1, "policy_loss": "dapo", "lora_rank": 2}, "dapo has no KL term"),
    "ref with lora": (
        {"lora_rank": 2, "infra": InfraConfig(ref_training_shape_id="cpu-fp32")},
        "infra.ref_training_shape_id: is not used with LoRA",
    ),
    "shape": (
        {"infra": InfraConfig(training_shape_id="cpu-fp23")},
        "infra.training_shape_id: there is no shape 'cpu-fp23'; did you mean cpu-fp32?",
    ),
    "ref elsewhere": (
        {"infra": InfraConfig(training_shape_id="cpu-fp32", ref_training_shape_id="1xgpu-bf16")},
        "infra.ref_training_shape_id: is 1xgpu-bf16, on another device",
    ),
    "knob of another loss": ({"dro": configs.DROConfig(0.1)}, "Config: dro: is not used with policy_loss 'grpo'"),
    "eps_clip": ({"policy_loss": "cispo", "eps_clip": 0.3}, "Config: eps_clip: is for grpo and dapo, not for cispo"),
    "cap": ({"policy_loss": "dro", "ratio_log_cap": 5.0}, "ratio_log_cap: is not used by dro"),
    "tis of reinforce": ({"policy_loss": "reinforce", "tis": configs.TISConfig(2.0)}, "Config: tis: reinforce has no"),
    "groups": ({"prompt_groups_per_step": 0}, "prompt_groups_per_step: must be a whole number of at least 1, not 0"),
    "interval": ({"weight_sync": WeightSyncConfig(-1)}, "Config: weight_sync.weight_sync_interval: "),
    "rate": ({"learning_rate": "fast"}, "Config: learning_rate: "),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_field_is_named_in_one_line(case: str):
    given, said = WRONG[case]
    with pytest.raises(ValueError) as caught:
        translate(config(**given))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_misspelled_field_suggests_the_nearest():
    with pytest.raises(ArgumentError, match="Config: temprature: is not an argument; did you mean temperature"):
        config(temprature=1.0)
    with pytest.raises(ArgumentError, match="WeightSyncConfig: interval"):
        WeightSyncConfig(interval=1)  # type: ignore[call-arg]


def test_shapes_are_keys_of_the_train_section():
    from shoal.config.train import TrainConfig

    for layout in LAYOUTS.values():
        assert TrainConfig(**dict(layout.settings)).device == layout.device
