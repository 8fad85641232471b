"""Data of the report: new rows of metrics.jsonl, and the configuration as differences from the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config.load import load_run, load_supervised
from shoal.config.resolve import as_yaml, resolve_run, resolve_supervised
from shoal.config.schema import DpoConfig
from shoal.runs.run_dir import RunDir
from shoal.watch.report.data import MetricsTail, _downsample, config_changes, describe_config


def test_tail_returns_new_rows_only(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        tail = MetricsTail(run_dir.path)
        assert tail.after(0) == []
        for step in (1, 2, 3):
            run_dir.append_metrics(step, {"reward/mean": float(step)})
        assert [row["step"] for row in tail.after(1) or []] == [2, 3]
        assert tail.after(3) == []
        run_dir.cut_to(1)
        assert tail.after(3) is None, "cut back: the page must reload"
        assert [row["step"] for row in tail.after(0) or []] == [1]


def test_changes_are_the_keys_that_the_user_set(tmp_path: Path) -> None:
    written = "train: {model: m/m, max_steps: 9, sequence_len: 256}\norch: {env: [{id: arithmetic}], batch_size: 64}\n"
    (tmp_path / "given.yaml").write_text(written)
    config = resolve_run(load_run(str(tmp_path / "given.yaml")).config)
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    changes = config_changes(tmp_path)
    assert changes is not None
    found = {change["key"]: (change["value"], change["default"]) for change in changes}
    assert found.pop("orch.env")[0][0]["id"] == "arithmetic"
    assert found == {
        "train.model": ("m/m", None), "train.max_steps": (9, None), "train.sequence_len": (256, 2048),
        "orch.batch_size": (64, 128),
    }, "derived keys are not among them"  # fmt: skip


def test_changes_of_a_preference_run(tmp_path: Path) -> None:
    keys = ["train.model=m/m", "dataset.path=d", "loss.beta=0.3"]
    config = resolve_supervised(load_supervised(DpoConfig, None, keys).config)
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    found = {change["key"]: change["value"] for change in config_changes(tmp_path) or []}
    assert found == {"train.model": "m/m", "loss.beta": 0.3}
    assert describe_config(tmp_path)["Algorithm"] == "DPO with the loss sigmoid"


def test_configuration_of_another_version_is_not_compared(tmp_path: Path) -> None:
    assert config_changes(tmp_path) is None
    (tmp_path / "config.yaml").write_text("train: {no_such_key: 1}\norch: {env: [{id: arithmetic}]}\n")
    assert config_changes(tmp_path) is None


@pytest.mark.parametrize("length", [0, 1, 2, 79, 80, 81, 240, 1000])
def test_curve_of_the_list_of_runs_has_the_first_and_the_last_value(length: int) -> None:
    """The list prints both: with a mean at its start, it showed another first reward than the report."""
    values = [None, *(float(step * step) for step in range(length))]
    curve = _downsample(values)
    assert len(curve) <= 80 and curve[:1] == values[1:2] and curve[-1:] == values[1:][-1:]
    assert curve == sorted(curve) and (length > 80 or curve == values[1:])


def test_header_names_model_environments_algorithm_and_learning_rate(tmp_path: Path) -> None:
    assert describe_config(tmp_path) == {}
    written = "train: {model: m/m, max_steps: 9, learning_rate: 5.0e-6}\n"
    written += "orch: {env: [{id: arithmetic}, {id: 'a:B', name: words}]}\n"
    (tmp_path / "given.yaml").write_text(written)
    (tmp_path / "config.yaml").write_text(as_yaml(resolve_run(load_run(str(tmp_path / "given.yaml")).config)))
    about = describe_config(tmp_path)
    assert list(about) == ["Model", "Environments", "Algorithm", "Learning rate"]
    assert (about["Model"], about["Environments"], about["Learning rate"]) == ("m/m", "arithmetic, words", "5e-06")
    assert about["Algorithm"] == load_run(str(tmp_path / "config.yaml")).config.train.loss.type
    (tmp_path / "config.yaml").write_text("train: {model: m/m, loss: {type: masked}}\ndataset: {path: a}\n")
    assert describe_config(tmp_path)["Algorithm"] == "supervised fine-tuning", "which has no loss.type"
    (tmp_path / "config.yaml").write_text("train: {model: m/m, loss: 3}\norch: 7\n")
    assert describe_config(tmp_path) == {"Model": "m/m"}, "a damaged configuration is no error"
