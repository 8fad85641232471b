"""`main(Config(…))` on a tiny model: windows, checkpoints and resume, the reference, data from files and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ArgumentError, Interrupted
from shoal.recipes.config import Config, DeployConfig, InfraConfig, WeightSyncConfig, WeightSyncScope
from shoal.recipes.rl_loop import main
from support.folders import write_model

ROWS = [{"prompt": f"Shout {word}", "answer": "A"} for word in ["shoal", "river", "stone", "cloud", "ember", "maple"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


def shouting(completion: str, answer: str) -> float:
    assert answer == "A"
    return sum(c.isupper() for c in completion) / max(len(completion), 1)


def config(model: str, folder: Path, **given: Any) -> Config:
    small: dict[str, Any] = {
        "log_path": str(folder), "base_model": model, "dataset": ROWS, "deployment": DeployConfig(model),
        "max_completion_tokens": 6, "max_seq_len": 64, "learning_rate": 1e-3, "completions_per_prompt": 4,
    }  # fmt: skip
    return Config(**{**small, **given})


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def untimed(folder: Path) -> list[dict[str, Any]]:
    timed = ("time/", "throughput/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines(folder, "metrics.jsonl")]


def versions(folder: Path, step: int) -> set[int]:
    """Weight versions that sampled the tokens of a step."""
    return {span[2] for line in lines(folder, f"rollouts/step_{step:06d}.jsonl") for span in line["spans"]}


@pytest.mark.parametrize(
    ("interval", "drawn_by"), [(1, [{0}, {1}, {2}, {3}]), (2, [{0}, {0}, {2}, {2}]), (0, [{0}, {0}, {0}, {0}])]
)
def test_windows(model: str, tmp_path: Path, interval: int, drawn_by: list[set[int]]):
    """1 syncs every step, 2 samples two steps and then syncs, 0 keeps the initial weights."""
    sync = WeightSyncConfig(weight_sync_interval=interval)
    main(config(model, tmp_path, weight_sync=sync, max_rows=4), shouting)
    assert [versions(tmp_path, step) for step in (1, 2, 3, 4)] == drawn_by


def test_stopped_run_continues_by_itself(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sync = WeightSyncConfig(dcp_save_interval=1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    main(config(model, whole, weight_sync=sync), shouting)
    from shoal.core.loop import Loop

    ordinary = Loop._record

    async def stop_after_three(self: Any, *arguments: Any) -> None:
        await ordinary(self, *arguments)
        if self.progress.step == 3:
            self.interrupt()

    monkeypatch.setattr(Loop, "_record", stop_after_three)
    with pytest.raises(Interrupted):
        main(config(model, parts, weight_sync=sync), shouting)
    monkeypatch.undo()
    assert [line["step"] for line in untimed(parts)] == [1, 2, 3]
    main(config(model, parts, weight_sync=sync), shouting)
    assert untimed(parts) == untimed(whole)


def test_without_an_interval_nothing_is_saved_and_a_used_path_is_refused(model: str, tmp_path: Path):
    main(config(model, tmp_path, max_rows=1), shouting)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert (tmp_path / "final" / "model.safetensors").is_file()
    with pytest.raises(ArgumentError, match=r"Config: log_path: .* already holds a run; .*dcp_save_interval above 0"):
        main(config(model, tmp_path), shouting)


def test_reference_of_full_fine_tuning_and_of_lora(model: str, tmp_path: Path):
    none = main(config(model, tmp_path / "none", max_rows=1), shouting)
    frozen = InfraConfig(training_shape_id="cpu-fp32", ref_training_shape_id="cpu-fp32")
    full = main(config(model, tmp_path / "full", max_rows=2, infra=frozen), shouting)
    lora = main(config(model, tmp_path / "lora", max_rows=2, lora_rank=4), shouting)
    assert "policy/kl_ref" not in untimed(none)[0]
    for folder in (full, lora):
        first, second = (line["policy/kl_ref"] for line in untimed(folder))
        assert first == pytest.approx(0, abs=1e-6) and second > 1e-6


def test_deployment_with_its_own_weights_gives_the_same_run(model: str, tmp_path: Path):
    one = main(config(model, tmp_path / "trainer", max_rows=2), shouting)
    own = DeployConfig(model, WeightSyncScope.PER_DEPLOYMENT)
    other = main(config(model, tmp_path / "deployment", max_rows=2, deployment=own), shouting)
    assert untimed(one) == untimed(other)


def test_rows_come_from_files_as_well(model: str, tmp_path: Path):
    """All rows of a file are trained, with or without a second file: the recipe has no evaluation."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    by_name = main(config(model, tmp_path / "file", dataset=str(tmp_path / "data"), max_rows=2), shouting)
    by_hand = main(config(model, tmp_path / "rows", max_rows=2), shouting)
    assert untimed(by_name) == untimed(by_hand)


def test_rows_without_a_reward_are_refused(model: str, tmp_path: Path):
    with pytest.raises(ArgumentError, match=r"main: reward_fn: is required, because the rows have no get_reward"):
        main(config(model, tmp_path))


def test_invalid_configuration_file_is_reported(tmp_path: Path):
    rows = [{"prompt": "a"}]
    with pytest.raises(ArgumentError, match=r"^Config: base_model: is required; write Config\(base_model=…\)$"):
        Config(log_path="x", dataset=rows)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"must be a WeightSyncConfig, not .*Config\(dcp_save_interval=5\)"):
        Config(log_path="x", base_model="m", dataset=rows, weight_sync={"dcp_save_interval": 5})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"weight_sync_scope: must be a WeightSyncScope, not 'per_trainer'; write"):
        DeployConfig(weight_sync_scope="per_trainer")  # type: ignore[arg-type]
    config = Config(log_path=__file__, base_model="m", dataset=rows, deployment=DeployConfig(tokenizer_model="m"))
    with pytest.raises(ArgumentError, match=r"^main: config: must be a Config, not a function"):
        main(shouting, config)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^main: reward_fn: judge .*'gold', which is not a column"):

        def judge(completion, gold):
            return 1.0

        main(config, judge)
    with pytest.raises(ArgumentError, match=r"^Config: log_path: '.*' is a file; use a folder"):
        main(config, len)
