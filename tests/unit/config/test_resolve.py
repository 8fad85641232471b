"""Derived defaults, the text of config.yaml, and changes that a resume allows."""

from pathlib import Path

import pytest

from shoal.config.load import load_run, load_supervised
from shoal.config.resolve import (
    BINDING_KEYS,
    as_data,
    as_yaml,
    difference,
    forbidden_changes,
    resolve_run,
    resolve_supervised,
)
from shoal.config.rules import check_run
from shoal.config.schema import DpoConfig, RunConfig
from shoal.core.losses import GRPO, LOSSES, Masked


def run(*overrides: str) -> RunConfig:
    config = load_run(overrides=["train.model=m", "train.max_steps=8", "orch.env=arithmetic", *overrides]).config
    assert check_run(config).errors == []
    return resolve_run(config)


def test_derived_defaults():
    config = run("train.sequence_len=512", "orch.batch_size=32", "train.seed=5", "orch.weight_sync_interval=3")
    assert config.orch.seq_len == config.infer.max_model_len == 512
    assert config.orch.sampling.max_tokens == 256
    assert config.orch.sampling.seed == 5
    assert config.orch.max_off_policy_steps == 2
    assert config.infer.max_num_seqs == 32
    assert run("orch.batch_size=1024").infer.max_num_seqs == 1024, "the memory plan lowers it if needed"
    assert config.infer.model == config.orch.model.name == "m"
    assert config.orch.max_steps == 8
    assert config.train.save_steps == 10


def test_peer_error_may_name_the_run():
    config = load_run(
        overrides=["orch.model.name=m", "orch.max_steps=8", "orch.env=arithmetic", "orch.seq_len=128"]
    ).config
    resolved = resolve_run(config)
    assert (resolved.train.model, resolved.train.max_steps, resolved.train.sequence_len) == ("m", 8, 128)


def test_defaults_of_the_loss():
    masked, grpo = run(), run("train.loss.type=ppo")
    assert (masked.orch.advantage.std, grpo.orch.advantage.std) == ("none", "group")
    assert isinstance(masked.train.loss, Masked) and masked.train.loss.token_mask_high == 8.0
    assert grpo.train.loss == GRPO(aggregation="token-mean", clip_low=0.2, clip_high=0.2)
    assert as_data(run("train.loss={type: grpo, clip_low: 0.1}"))["train"]["loss"]["clip_high"] == 0.1
    assert run("train.loss.type=gspo").train.loss.aggregation == "seq-mean-token-mean"
    assert run("train.loss.ratio_type=sequence").train.loss.aggregation == "seq-mean-token-mean"


def test_reference_of_preference_training():
    keys = ["train.model=m", "train.max_steps=2", "dataset.path=d.jsonl"]

    def resolved(*overrides: str) -> str:
        config = resolve_supervised(load_supervised(DpoConfig, None, [*keys, *overrides]).config)
        assert resolve_supervised(config) == config
        return config.train.reference

    assert (resolved(), resolved("train.lora=true")) == ("frozen", "adapter-off")
    assert resolved("train.lora=true", "train.reference=frozen") == "frozen"


def test_reference_and_kl():
    assert run().train.reference == "none"
    assert run("train.loss={type: grpo, kl: {beta: 0.1}}").train.reference == "frozen"
    assert run("train.lora=true", "train.loss={type: grpo, kl: {beta: 0.1}}").train.reference == "adapter-off"
    assert run("train.loss={type: grpo, kl: {beta: 0.1, in: reward}}").train.loss.kl.estimator == "k1"


def test_groups_and_truncation():
    assert run().orch.groups.uniform == "refill"
    assert run("orch.advantage.std=batch").orch.groups.uniform == "keep"
    assert run("orch.advantage.mean=batch").orch.groups.uniform == "keep"  # masked: no std
    for divides_by_its_own_spread in (["train.loss.type=grpo"], ["orch.advantage.std=group"]):
        assert run("orch.advantage.mean=batch", *divides_by_its_own_spread).orch.groups.uniform == "refill"
    truncated = run("orch.truncated=overlong", "orch.sampling.max_tokens=50").orch.truncated
    assert (truncated.tokens, truncated.factor) == (10, 1.0)


def test_evaluation_takes_what_training_has():
    evaluation = run("orch.eval={sampling: {temperature: 0}}", "orch.sampling.max_tokens=50").orch.eval
    assert evaluation is not None and evaluation.env is not None
    assert [env.id for env in evaluation.env] == ["arithmetic"]
    assert (evaluation.sampling.temperature, evaluation.sampling.max_tokens) == (0, 50)
    assert evaluation.sampling.top_k == -1


def test_env_names_fit_in_file_names():
    assert run("orch.env=reasoning-gym:chain_sum").orch.env[0].name == "reasoning-gym-chain_sum"


@pytest.mark.parametrize(
    "overrides",
    [[f"train.loss.type={loss}"] for loss in LOSSES]
    + [
        ["train.lora=true", "orch.eval={}", "train.loss={type: grpo, kl: {beta: 0.1}, correction: {type: tis}}"],
        ["orch.weight_sync_interval=0", "train.loss.type=my.code:f"],
        ["orch.advantage=my.code:f", "orch.sampling.temperature={start: 1, end: 0.5}", "orch.truncated=overlong"],
        ["orch.advantage={mean: batch, std: batch}", "orch.env=reasoning-gym:chain_sum"],
        ["orch.sampling.stop=['1e-5', 'on', '~', '0x10', '']".replace(", ''", "")],
        ["infer.engine=vllm", "infer.engine_python=python3", "infer.tp=2", "train.loss.kl={beta: 0.1, in: reward}"],
    ],
    ids=str,
)
def test_config_yaml_runs_again_unchanged(overrides: list[str], tmp_path: Path):
    config = run(*overrides)
    file = tmp_path / "config.yaml"
    file.write_text(as_yaml(config))
    again = load_run(str(file)).config
    assert check_run(again).errors == []
    assert resolve_run(again) == config
    assert as_yaml(resolve_run(again)) == as_yaml(config)


def test_secrets_are_not_written_to_files():
    text = as_yaml(run("orch.env={id: 'my:env', args: {api_key: canary-1, max_tokens: 5, hf_token: canary-2}}"))
    assert "canary" not in text and "max_tokens: 5" in text and "api_key: '[hidden]'" in text


@pytest.mark.parametrize(
    "change",
    ["train.seed=1", "train.model=x", "orch.batch_size=64", "orch.rollouts_per_example=8", "orch.env=gsm8k",
     "orch.sampling.temperature=0.9", "train.loss.type=grpo", "train.lora=true"],
)  # fmt: skip
def test_resume_may_not_change(change: str):
    assert forbidden_changes(run(), run(change))


@pytest.mark.parametrize(
    "change", ["train.learning_rate=1e-6", "train.max_steps=9", "train.save_steps=2", "orch.eval={}"]
)
def test_resume_may_change(change: str):
    assert forbidden_changes(run(), run(change)) == []
    assert difference(run(), run(change))


def test_difference_names_old_and_new():
    assert difference(run(), run("train.learning_rate=1e-6")) == {"train.learning_rate": (5e-6, 1e-6)}
    assert difference(run(), run()) == {}


def test_keys_that_a_resumed_run_cannot_change():
    assert {
        "train.model", "train.seed", "train.sequence_len", "train.lora", "train.lora_rank", "train.lora_alpha",
        "train.lora_target_modules", "train.adapter_path", "train.loss.type", "orch.env", "orch.dataset",
        "orch.batch_size", "orch.rollouts_per_example", "orch.seq_len", "orch.sampling", "orch.reward.function",
        "orch.reward.parts", "orch.chat_template", "dataset", "batch_size", "chat_template", "loss.type",
    } == BINDING_KEYS  # fmt: skip
