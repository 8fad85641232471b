"""Every key of the launcher has its effect: each row sets one key and names the change in the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.config.resolve import resolve_run
from shoal.config.rules import check_run
from shoal.config.schema import RunConfig
from shoal.core.errors import ConfigError
from shoal.launcher import load_config
from shoal.launcher.read import KEYS, table

BASE = "experiment_name: exp\nactor: {path: Qwen/Qwen2.5-0.5B-Instruct}\n"
See = Callable[[Any], Any]  # of a RunConfig; parameters of a loss depend on its type


def load(folder: Path, *overrides: str, text: str = BASE) -> RunConfig:
    file = folder / "file.yaml"
    file.write_text(text)
    translated = load_config(["--config", str(file), *overrides]).translated
    loaded = translated.loaded
    try:
        check_run(loaded.config).raise_errors(loaded.origins)
    except ConfigError as error:
        raise ConfigError(translated.wording(str(error))) from None
    return resolve_run(loaded.config)


# key → (override, inspected value, the value without the key, the value with it)
ROWS: dict[str, tuple[str, See, Any, Any]] = {
    "experiment_name": ("other", lambda c: c.train.output_dir, "outputs/exp/trial0", "outputs/other/trial0"),
    "trial_name": ("t7", lambda c: c.train.output_dir, "outputs/exp/trial0", "outputs/exp/t7"),
    "seed": ("5", lambda c: (c.train.seed, c.orch.sampling.seed), (0, 0), (5, 5)),
    "allocation_mode": ("embedded:d2|fsdp:d2", lambda c: c.train.gpus, 1, 2),
    "total_train_epochs": ("2", lambda c: c.train.epochs, 5, 2),
    "total_train_steps": ("7", lambda c: (c.train.max_steps, c.train.epochs), (None, 5), (7, None)),
    "actor.path": ("Qwen/Qwen3-0.6B", lambda c: c.train.model, "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B"),
    "actor.lr": ("1e-6", lambda c: c.train.learning_rate, 1.7e-5, 1e-6),
    "actor.eps_clip": (".2", lambda c: (c.train.loss.clip_low, c.train.loss.clip_high), (0.4, 0.4), (0.2, 0.2)),
    "actor.reward_scaling": ("3", lambda c: c.orch.reward.scale, 1.0, 3.0),
    "actor.reward_bias": ("-.5", lambda c: c.orch.reward.bias, 0.0, -0.5),
    "actor.kl_ctl": (
        ".01",
        lambda c: (c.train.loss.kl.beta, c.train.loss.kl.where, c.train.reference),
        (0.0, "loss", "none"),
        (0.01, "reward", "frozen"),
    ),
    "actor.ppo_n_minibatches": ("2", lambda c: c.train.minibatches, 1, 2),
    "actor.use_decoupled_loss": ("false", lambda c: c.train.loss.type, "decoupled", "grpo"),
    "actor.behav_imp_weight_cap": ("2", lambda c: c.train.loss.cap, 5.0, 2.0),
    "actor.group_reward_norm": ("false", lambda c: c.orch.advantage.mean, "group", "batch"),
    "actor.adv_norm": ("group", lambda c: c.orch.advantage.std, "batch", "group"),
    "actor.mb_spec.max_tokens_per_mb": ("2560", lambda c: c.train.sequence_len, 5120, 2560),
    "mb_spec.max_tokens_per_mb": ("2560", lambda c: c.infer.max_model_len, 5120, 2560),
    "gconfig.n_samples": ("2", lambda c: (c.orch.rollouts_per_example, c.orch.batch_size), (4, 32), (2, 16)),
    "gconfig.max_new_tokens": ("256", lambda c: c.orch.sampling.max_tokens, 512, 256),
    "gconfig.temperature": (".7", lambda c: c.orch.sampling.temperature, 1.0, 0.7),
    "train_dataset.batch_size": ("2", lambda c: c.orch.batch_size, 32, 8),
    "train_dataset.num_workers": ("4", lambda c: c.orch.reward.workers, 2, 4),
    "rollout.max_concurrent_rollouts": ("6", lambda c: c.infer.max_num_seqs, 32, 6),
    "rollout.max_head_offpolicyness": ("2", lambda c: c.orch.max_async_level, 0, 2),
    "saver.mode": ("disabled", lambda c: (c.train.save_steps, c.train.save_epochs), (10, None), (None, 5)),
    "saver.freq_epochs": ("2", lambda c: (c.train.save_epochs, c.train.save_steps), (None, 10), (2, None)),
    "saver.freq_steps": ("3", lambda c: c.train.save_steps, 10, 3),
    "saver.freq_secs": ("60", lambda c: c.train.save_seconds, None, 60),
    "recover.mode": ("auto", lambda c: c.train.resume_from_checkpoint, False, True),
    "evaluator.freq_epochs": ("1", lambda c: c.orch.eval and c.orch.eval.interval_epochs, None, 1),
    "evaluator.freq_steps": ("4", lambda c: c.orch.eval and c.orch.eval.interval, None, 4),
    "evaluator.freq_secs": ("90", lambda c: c.orch.eval and c.orch.eval.interval_seconds, None, 90),
    "stats_logger.wandb.mode": ("offline", lambda c: c.train.report_to, [], ["wandb"]),
}  # fmt: skip
# Keys whose effect needs another key, or is a refusal, have a function below instead.
APART = {
    "tokenizer_path": "test_other_paths_are_refused",
    "ref.path": "test_other_paths_are_refused",
    "actor.recompute_logprob": "test_recompute_logprob",
    "train_dataset.path": "test_data_is_a_folder_or_a_name",
    "recover.freq_epochs": "test_recover_has_its_own_frequency",
    "recover.freq_steps": "test_recover_has_its_own_frequency",
    "recover.freq_secs": "test_recover_has_its_own_frequency",
    "evaluator.mode": "test_disabled_evaluator_evaluates_nothing",
    "stats_logger.wandb.wandb_api_key": "test_key_reaches_only_wandb",
    "rollout.engine_python": "test_server_is_started_or_attached_to",
    "rollout.base_url": "test_server_is_started_or_attached_to",
    "rollout.port": "test_server_is_started_or_attached_to",
}


def test_every_key_has_a_row():
    assert set(ROWS) | set(APART) == set(KEYS) and not set(ROWS) & set(APART)
    assert all(name in globals() for name in APART.values())


@pytest.mark.parametrize("key", ROWS)
def test_key_changes_the_run(key: str, tmp_path: Path):
    value, see, without, with_it = ROWS[key]
    assert see(load(tmp_path)) == without
    assert see(load(tmp_path, f"{key}={value}")) == with_it


def test_command_line_overrides_both_spellings_in_the_file(tmp_path: Path):
    text = "experiment_name: exp\nactor:\n  path: a/b\n  mb_spec: {max_tokens_per_mb: 5120}\n"
    assert load(tmp_path, "mb_spec.max_tokens_per_mb=2560", text=text).train.sequence_len == 2560
    assert load(tmp_path, "actor.mb_spec.max_tokens_per_mb=640", text=text).train.sequence_len == 640


def test_file_and_command_line_are_equivalent(tmp_path: Path):
    nested = "actor: {lr: 1e-6, path: a/b}\nexperiment_name: exp\ngconfig:\n  n_samples: 2\n"
    assert load(tmp_path, text=nested) == load(tmp_path, "actor.lr=1e-6", "actor.path=a/b", "gconfig.n_samples=2")


def test_table_names_keys_of_the_schema():
    from shoal.config.fields import walk_keys

    known = {key.dotted for key in walk_keys(RunConfig)}
    for key, row in KEYS.items():
        assert row.keys and set(row.keys) <= known, key


def test_page_has_the_table():
    page = (Path(__file__).parents[3] / "docs" / "launcher.md").read_text(encoding="utf-8")
    assert table() in page


def test_server_is_started_or_attached_to(tmp_path: Path):
    with_server = "allocation_mode=vllm:d1t2+d1"
    started = load(tmp_path, with_server, f"rollout.engine_python={sys.executable}", "rollout.port=9000").infer
    assert (started.engine, started.engine_python, started.tp, started.port) == ("vllm", sys.executable, 2, 9000)
    attached = load(tmp_path, with_server, "rollout.base_url=http://gpu:9/v1")
    assert (attached.infer.engine, attached.infer.engine_python) == ("vllm", None)
    assert attached.orch.client.base_url == "http://gpu:9/v1"
    with pytest.raises(ConfigError, match=r"allocation_mode: vllm is not installed; .*rollout.engine_python=…"):
        load(tmp_path, with_server)
    with pytest.raises(
        ConfigError, match=r"rollout.engine_python: starts a server, but rollout.base_url names a running one"
    ):
        load(tmp_path, with_server, "rollout.base_url=http://gpu:9/v1", f"rollout.engine_python={sys.executable}")


def test_other_paths_are_refused(tmp_path: Path):
    same = load(tmp_path, "tokenizer_path=${actor.path}", "ref.path=${actor.path}", "actor.path=a/b")
    assert same.train.model == "a/b"
    for key in ("tokenizer_path", "ref.path"):
        with pytest.raises(ConfigError, match=f"{key}: .*other/model.* actor.path"):
            load(tmp_path, f"{key}=other/model")


def test_recompute_logprob(tmp_path: Path):
    assert load(tmp_path).train.recompute_old is True
    assert (
        load(tmp_path, "actor.use_decoupled_loss=false", "actor.recompute_logprob=false").train.recompute_old is False
    )
    with pytest.raises(ConfigError, match=r"actor\.recompute_logprob: is false, .*decoupled"):
        load(tmp_path, "actor.recompute_logprob=false")


def test_data_is_a_folder_or_a_name(tmp_path: Path):
    assert load(tmp_path).orch.dataset.name == "openai/gsm8k"  # type: ignore[union-attr]
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
    local = load(tmp_path, f"train_dataset.path={tmp_path}").orch.dataset
    assert local is not None and (local.path, local.name) == (str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"train_dataset\.path: .*does not exist"):
        load(tmp_path, "train_dataset.path=./nowhere")


@pytest.mark.parametrize(
    ("unit", "name"), (("epochs", "save_epochs"), ("steps", "save_steps"), ("secs", "save_seconds"))
)
def test_recover_has_its_own_frequency(tmp_path: Path, unit: str, name: str):
    assert getattr(load(tmp_path, "recover.mode=auto", f"recover.freq_{unit}=9").train, name) == 9
    assert getattr(load(tmp_path, f"recover.freq_{unit}=9").train, name) != 9, "recover is disabled"
    if unit != "steps":
        with pytest.raises(ConfigError, match=f"recover.freq_{unit}: cannot be combined with saver.freq_steps"):
            load(tmp_path, "recover.mode=auto", f"recover.freq_{unit}=9", "saver.freq_steps=2")


def test_disabled_evaluator_evaluates_nothing(tmp_path: Path):
    assert load(tmp_path, "evaluator.freq_steps=3").orch.eval is not None
    assert load(tmp_path, "evaluator.freq_steps=3", "evaluator.mode=disabled").orch.eval is None


def test_key_reaches_only_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.runs.secrets._added", set())
    file = tmp_path / "file.yaml"
    file.write_text(BASE)
    secret = "0123456789abcdef-canary"
    words = ["--config", str(file), "stats_logger.wandb.mode=online", f"stats_logger.wandb.wandb_api_key={secret}"]
    config = load_config(words)
    assert config.translated.environment == {"WANDB_MODE": "online", "WANDB_API_KEY": secret}
    assert secret not in repr(config.run) and any("process list" in note for note in config.translated.notices)
    from shoal.runs.secrets import redact

    assert secret not in redact(f"key {secret}")


def test_another_environment_needs_no_data_set(tmp_path: Path):
    file = tmp_path / "file.yaml"
    file.write_text(
        "\n".join(line for line in BASE.splitlines() if "path: openai" not in line and "openai/gsm8k" not in line)
    )
    words = ["--config", str(file)]
    run = load_config(words, env="arithmetic").run
    assert run.orch.dataset is None and run.orch.env[0].id == "arithmetic"
    assert load_config(words).run.orch.dataset is not None
    with_data = load_config([*words, "train_dataset.path=org/data"], env="dataset").run
    assert with_data.orch.dataset is not None and with_data.orch.dataset.name == "org/data"


def test_num_workers_zero_is_accepted(tmp_path: Path):
    assert load(tmp_path, "train_dataset.num_workers=0").orch.reward.workers == 1
