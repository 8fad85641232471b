"""Files, overrides and references of the launcher, and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.core.losses import Decoupled
from shoal.launcher import load_config
from shoal.launcher.local import main
from shoal.launcher.read import AllocationError, parse_allocation

BASE = "experiment_name: exp\nactor:\n  path: Qwen/Qwen2.5-0.5B-Instruct\n"


def read(folder: Path, *words: str, text: str = BASE):
    (folder / "file.yaml").write_text(text)
    return load_config(["--config", str(folder / "file.yaml"), *words])


def test_reference_follows_an_override(tmp_path: Path):
    text = BASE + "trial_name: ${experiment_name}-lr${actor.lr}\nseed: ${gconfig.n_samples}\n"
    config = read(tmp_path, "experiment_name=e2", "actor.lr=0.001", "gconfig.n_samples=2", text=text).run
    assert config.train.output_dir == "outputs/e2/e2-lr0.001"
    assert config.train.seed == 2, "a value that is only a reference keeps its type"
    assert read(tmp_path, text=BASE + "seed: ${gconfig.n_samples}\n").run.train.seed == 4, "or has a default"


def test_environment_variables_work_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_LR", "3e-6")
    assert read(tmp_path, "actor.lr=${MY_LR}").run.train.learning_rate == 3e-6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["actor.lrr=1"], ["command line: actor.lrr: unknown key", "`actor.lr`"]),
        (["lr=1"], ["lr: unknown key", "`actor.lr`"]),
        (["actor.lr=abc"], ["command line: actor.lr: must be a number"]),
        (["actor.lr=true"], ["actor.lr: must be a number"]),
        (["gconfig.n_samples=0"], ["gconfig.n_samples: must be a whole number of at least 1"]),
        (["gconfig.n_samples=1"], ["gconfig.n_samples", "a group of one"]),
        (["train_dataset.batch_size=2.5"], ["train_dataset.batch_size: must be a whole number"]),
        (["train_dataset.num_workers=-1"], ["train_dataset.num_workers: must be a number of processes"]),
        (["gconfig.max_new_tokens=6000"], ["gconfig.max_new_tokens: is 6000", "mb_spec.max_tokens_per_mb (5120)"]),
        (["actor.adv_norm=batches"], ["actor.adv_norm", "group", "batch", "none"]),
        (["actor.use_decoupled_loss=1"], ["actor.use_decoupled_loss: must be true or false, not 1"]),
        (["actor.use_decoupled_loss=false", "actor.behav_imp_weight_cap=3"], ["behav_imp_weight_cap: ", "grpo"]),
        (["saver.mode=maybe"], ["saver.mode: must be one of disabled"]),
        (["saver.freq_steps=1", "saver.freq_secs=9"], ["saver.freq_secs: cannot be combined with saver.freq_steps"]),
        (["mb_spec.max_tokens_per_mb=1", "actor.mb_spec.max_tokens_per_mb=2"], ["max_tokens_per_mb: is 2 but"]),
        (["gconfig.n_samples=1"], ["or actor.group_reward_norm=false"]),
        (["train_dataset.path=./odd"], ["train_dataset.path: there is no split \"train\" in \"./odd\""]),
        (["experiment_name=a/b"], ["experiment_name: \"a/b\" is not a valid folder"]),
        (["actor.path=${actor.path}"], ["actor.path: ${actor.path} refers to itself"]),
        (["trial_name=${total_train_steps}"], ["trial_name: ${total_train_steps} is not set"]),
        (["seed=${NO_SUCH_VARIABLE_HERE}"], ["NO_SUCH_VARIABLE_HERE is not set"]),
        (["actor.path=./missing"], ["actor.path: \"./missing\" does not exist"]),
        (["allocation_mode=sglang.d1p1t1+d1p1t1"], ["allocation_mode: sglang is not installed", "embedded:d1|fsdp:d1"]),
        (["nonsense"], ["nonsense: is neither key=value nor a known flag"]),
        (["stats_logger.wandb.mode=loud"], ["stats_logger.wandb.mode: must be disabled, online or offline"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_one_line_names_the_key(
    words: list[str],
    says: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").write_text(BASE)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "questions.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "script.py").write_text(
        "from shoal.launcher import load_config, train\n\n\ndef main(args):\n    train(load_config(args))\n"
    )
    assert main(["script.py", "--config", "file.yaml", "--dry-run", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("shoal: error: ") and len(err.splitlines()) == 1, err
    assert all(word in err for word in says), err


def test_error_location_is_the_line_of_the_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"file\.yaml:4: actor\.lr: must be a number"):
        read(tmp_path, text=BASE + "  lr: fast\n")
    with pytest.raises(ConfigError, match=r"file\.yaml:4: gconfg\.n_samples: unknown key; did you mean `gconfig"):
        read(tmp_path, text=BASE + "gconfg: {n_samples: 3}\n")
    with pytest.raises(ConfigError, match=r"experiment_name: is required"):
        read(tmp_path, text="actor: {path: a/b}\n")
    with pytest.raises(ConfigError, match=r"actor\.path: is required"):
        read(tmp_path, text="experiment_name: a\n")


def test_ratio_cap_in_a_file_allows_switching_the_loss(tmp_path: Path):
    """The shipped file sets it for its loss. One override turns this off, and the notice names the omitted key."""
    text = BASE + "  use_decoupled_loss: true\n  behav_imp_weight_cap: 5.0\n"
    read_ = read(tmp_path, "actor.use_decoupled_loss=false", text=text)
    assert read_.run.train.loss.type == "grpo"
    said = "actor.behav_imp_weight_cap: no effect while actor.use_decoupled_loss is false"
    assert said in read_.translated.notices
    assert said not in read(tmp_path, text=text).translated.notices
    decoupled = read(tmp_path, text=text).run.train.loss
    assert isinstance(decoupled, Decoupled) and decoupled.cap == 5.0


def test_null_is_left_out(tmp_path: Path):
    text = BASE + "saver: {freq_epochs: 1, freq_steps: null, freq_secs: null}\nrecover:\n"
    assert read(tmp_path, text=text).run.train.save_epochs == 1


@pytest.mark.parametrize(
    ("argv", "says"), [(["file.yaml"], "Python script"), (["s.py"], "--config"), (["s.py", "--config"], "--config")]
)
def test_wrong_arguments(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    assert says in capsys.readouterr().err


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "gconfig.n_samples" in out and "orch.rollouts_per_example" in out


def test_script_without_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file.yaml").write_text(BASE)
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert main([str(tmp_path / "empty.py"), "--config", str(tmp_path / "file.yaml")]) == 2
    assert "has no 'main'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "gpus"),
    [("embedded:d1|fsdp:d1", 1), ("embedded.d2p1t1+d2p1t1", 2), ("d4", 4), ("fsdp:d2", 2), ("fsdp:d3|embedded:d3", 3)],
)
def test_allocations_that_work(text: str, gpus: int):
    sharded = {"train.sharding": "fsdp"} if gpus > 1 else {}
    assert parse_allocation(text).schema_values() == {"infer.engine": "embedded", "train.gpus": gpus, **sharded}


@pytest.mark.parametrize(
    ("text", "engine", "replicas", "ranks"),
    [("sglang.d1p1t1+d1p1t1", "sglang", 1, 1), ("vllm:d1t2+fsdp:d1", "vllm", 1, 2), ("vllm:d2+d1", "vllm", 2, 1)],
)
def test_allocations_with_a_server(text: str, engine: str, replicas: int, ranks: int):
    assert parse_allocation(text).schema_values() == {
        "infer.engine": engine,
        "infer.dp": replicas,
        "infer.tp": ranks,
        "infer.gpu_memory_utilization": 0.5,
        "train.gpus": 1,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vllm:d2t1|fsdp:d2", "d2: with vllm the launcher trains in one process; use d1"),
        ("sglang.d1p2t1+d1", "p2: sglang supports d and t only; use p1 and more t"),
        ("vllm:d2|fsdp:d1", "share devices"),
        ("embedded:d1+fsdp:d1p2", "p2: the trainer has no pipeline parallelism"),
        ("embedded:d1+e4d1", "e4: the trainer has no expert parallelism"),
        ("embedded:d1+d1t2", "t2: the trainer has no tensor parallelism"),
        ("embedded:d1t2+d1", "t2: the embedded engine does not split a model"),
        ("embedded:d2+d1", "training devices, but d is 2 and 1"),
        ("sglang:d1", "has no part for training"),
        ("megatron:d1+d1", "there is no backend 'megatron'"),
        ("d1+d1", "needs one part for the engine"),
        ("embedded:x1+d1", "unknown dimension 'x'"),
        ("embedded:d1d2+d1", "d must appear once"),
        ("embedded:d0+d1", "count of at least 1"),
        ("a+b+c", "is not a backend with dimensions"),
        ("embedded:d1+d1+d1", "has 3 parts"),
        ("", "needs a backend"),
        (3, "needs a backend"),
    ],
)
def test_allocations_that_do_not(text: object, says: str):
    with pytest.raises(AllocationError) as caught:
        parse_allocation(text)
    assert says in str(caught.value)
