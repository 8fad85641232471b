"""The trackers with the real packages, offline: logged values are read back from their files."""

from __future__ import annotations

import importlib
import json
import sqlite3
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError
from shoal.core.types import Prompt, Rollout, RolloutGroup
from shoal.runs.run_dir import RunDir, read_metrics
from shoal.watch.observer import Sinks, check_sinks, open_sinks
from shoal.watch.trackers import COLUMNS, TrackerRun, alias, as_markdown, completion_rows, rename

ROWS = [{"reward/mean": 0.25, "optim/lr": 1e-5, "eval/a/mean": 0.5}, {"reward/mean": 0.75, "optim/lr": 2e-5}]


def group(index: int, rewards: list[float], text: str = "answer") -> RolloutGroup:
    prompt = Prompt("letters", index, [{"role": "user", "content": f"question {index}"}])
    rollouts = [
        Rollout(
            prompt, i, [], reward=reward, parts={"style": reward}, advantage=reward - 0.5,
            messages=[*prompt.messages, {"role": "assistant", "content": f"{text} {index}.{i}"}],
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    return RolloutGroup(prompt, rollouts)


GROUPS = [group(0, [0.0, 1.0]), group(1, [0.5, 0.25, 1.0])]


def log_two_steps(path: Path, name: str, **settings: Any) -> dict[str, int]:
    """Log through `open_sinks`, as a run does. Returns the counts of the tracker."""
    problems: list[str] = []
    with RunDir.create(path, "", {}) as run_dir:
        run = TrackerRun(path, project="shoal-tests", name="two steps", config={"train": {"seed": 3}}, **settings)
        sinks = open_sinks([name], run_dir, run, on_problem=lambda _, message, __: problems.append(message))
        for step, metrics in enumerate(ROWS, start=1):
            sinks.log(step, metrics)
            sinks.log_completions(step, GROUPS)
        counts = sinks.close(timeout_s=60)[name]
    assert not problems, problems
    assert [row["reward/mean"] for row in read_metrics(path)] == [0.25, 0.75], "metrics.jsonl has Shoal's own names"
    return counts


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (pip install 'shoal[dev]')")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    secret = "0123456789abcdef0123456789abcdef0123canary"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setattr("sys.argv", ["script.py", f"stats_logger.wandb.wandb_api_key={secret}", "max_steps=3"])
    counts = log_two_steps(tmp_path / "run", "wandb", completions=4)
    assert counts == {"sent": 4, "failed": 0, "dropped": 0, "unsent": 0}
    (written,) = (tmp_path / "run/logs/wandb").glob("offline-run-*/run-*.wandb")
    names = (b"reward/mean", b"eval/a/mean", b"completions")
    deadline = time.monotonic() + 60  # its own service process writes the file, in its own time
    while not all(name in written.read_bytes() for name in names):
        assert time.monotonic() < deadline, written.read_bytes()[:200]
        time.sleep(0.1)
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not [file for file in files if secret.encode() in file.read_bytes()]
    assert sys.argv[1].endswith(secret), "the script's own arguments are as they were"
    tables = list((tmp_path / "run/logs/wandb").glob("offline-run-*/files/media/table/completions_*.json"))
    assert len(tables) == 2
    table = json.loads(sorted(tables)[0].read_text())
    assert table["columns"] == list(COLUMNS) and [row[3] for row in table["data"]] == [
        "answer 0.0", "answer 1.0", "answer 0.1", "answer 1.1",
    ]  # fmt: skip


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed (pip install 'shoal[dev]')")
    counts = log_two_steps(tmp_path / "run", "tensorboard", completions=2)
    assert counts["sent"] == 4 and counts["failed"] == 0
    (file,) = (tmp_path / "run/logs/tensorboard").glob("events.*")
    scalars, texts = read_events(file)
    assert scalars["reward/mean"] == [(1, 0.25), (2, 0.75)]
    assert scalars["eval/a/mean"] == [(1, 0.5)]
    assert len(texts) == 2 and "| letters | question 0 | answer 0.0 |" in texts[0]


def read_events(file: Path) -> tuple[dict[str, list[tuple[int, float]]], list[str]]:
    """TensorBoard's files are length-prefixed records: 8 bytes of length, 4 of checksum, the event, 4 of checksum."""
    Event = importlib.import_module("tensorboardX.proto.event_pb2").Event

    scalars: dict[str, list[tuple[int, float]]] = {}
    texts, data, at = [], file.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 12 + length + 4
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts.append(value.tensor.string_val[0].decode())
            else:
                scalars.setdefault(value.tag, []).append((event.step, round(value.simple_value, 6)))
    return scalars, texts


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed (pip install 'shoal[dev]')")
    counts = log_two_steps(tmp_path / "run", "trackio", completions=3)
    assert counts["sent"] == 4 and counts["failed"] == 0
    (database,) = (tmp_path / "trackio").glob("*shoal-tests*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    told = [(step, json.loads(text)) for step, text in rows]
    assert [(step, m["reward/mean"]) for step, m in told if "reward/mean" in m] == [(1, 0.25), (2, 0.75)]
    assert sum("completions" in m for _, m in told) == 2


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed (pip install 'shoal[dev]')")
    counts = log_two_steps(tmp_path / "run", "mlflow", completions=2)
    assert counts["sent"] == 4 and counts["failed"] == 0
    client = mlflow.MlflowClient((tmp_path / "run/logs/mlflow").as_uri())
    experiment = client.get_experiment_by_name("shoal-tests")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(1, 0.25), (2, 0.75)]
    assert run.info.status == "FINISHED"
    assert len(client.list_artifacts(run.info.run_id, "completions")) == 2


def log_once(path: Path, name: str, step: int) -> str:
    """One process of a run: the first one, or a resumed one. Returns the id in status.json."""
    with RunDir.resume(path) if (path / "status.json").exists() else RunDir.create(path, "", {}) as run_dir:
        run = TrackerRun(path, project="shoal-tests", run_id=run_dir.status["run_id"])
        problems: list[str] = []
        sinks = open_sinks([name], run_dir, run, on_problem=lambda _, message, __: problems.append(message))
        sinks.log(step, {"reward/mean": step / 10})
        sinks.close(timeout_s=60)
        assert not problems, problems
        return run_dir.status["run_id"]


def test_resumed_run_continues_its_mlflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed (pip install 'shoal[dev]')")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for folder, step in (("a", 1), ("a", 2), ("b", 1)):
        log_once(tmp_path / folder, "mlflow", step)
    client = mlflow.MlflowClient((tmp_path / "store").as_uri())
    runs = client.search_runs([client.get_experiment_by_name("shoal-tests").experiment_id])
    told = [client.get_metric_history(run.info.run_id, "reward/mean") for run in runs]
    steps = sorted(sorted(point.step for point in history) for history in told)
    assert steps == [[1], [1, 2]], "two runs, the first of them in two parts"
    assert {run.info.status for run in runs} == {"FINISHED"}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "no API key"),
        ({"WANDB_API_KEY": "too-short"}, "not an API key"),
        ({"WANDB_API_KEY": "k" * 40}, None),
        ({"WANDB_MODE": "offline"}, None),
        ({"NETRC": "netrc"}, None),
    ],
)
def test_wandb_key_is_checked_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment, says):
    pytest.importorskip("wandb", reason="wandb is not installed (pip install 'shoal[dev]')")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "k" * 40)
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path / value) if name == "NETRC" else value)
    if says is None:
        check_sinks(["wandb"])
        return
    with pytest.raises(ConfigError, match=f"wandb.*{says}"):
        check_sinks(["wandb"])


def test_resumed_run_continues_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (pip install 'shoal[dev]')")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = {log_once(tmp_path / "run", "wandb", step) for step in (1, 2)}
    written = list((tmp_path / "run/logs/wandb").glob("offline-run-*"))
    assert written and len(ids) == 1 and all(f"-{next(iter(ids))}" in folder.name for folder in written)


def test_names_of_trl_and_verl() -> None:
    metrics = {
        "reward/mean": 0.5,
        "group/mixed_frac": 0.75,
        "reward/part/format": 1.0,
        "eval/gsm8k/mean": 0.3,
        "masked": 0.1,
    }
    assert rename("native", metrics, 7) == metrics
    assert rename("trl", metrics, 7) == {
        "train/reward": 0.5, "group/mixed_frac": 0.75, "train/rewards/format/mean": 1.0, "eval/gsm8k_reward": 0.3,
        "masked": 0.1, "train/global_step": 7, "train/frac_reward_zero_std": 0.25,
    }  # fmt: skip
    assert rename("verl", metrics, 7) == {
        "critic/rewards/mean": 0.5, "group/mixed_frac": 0.75, "critic/rewards/format/mean": 1.0,
        "val-core/gsm8k/reward/mean@1": 0.3, "masked": 0.1, "training/global_step": 7,
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["trl", "verl"])
def test_no_two_metrics_get_one_name(scheme: str) -> None:
    from shoal.watch.glossary import CATALOGUE

    # A supervised run has no policy/loss.
    together = [name for name in CATALOGUE if not name.startswith(("sft/", "dpo/"))]
    assert len({alias(scheme, name) for name in together}) == len(together)


def test_tracker_uses_the_requested_names(tmp_path: Path) -> None:
    class Collecting:
        rows: list[dict[str, float]] = []

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            self.rows.append(dict(metrics))

        def log_completions(self, step: int, rows: Sequence[Any]) -> None: ...

        def close(self) -> None: ...

    from shoal.watch.observer import ThreadedSink

    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        run = TrackerRun(run_dir.path, metric_names="verl")
        sinks = Sinks(run_dir, [ThreadedSink("memory", Collecting)], run)
        sinks.log(1, {"optim/lr": 0.5})
        sinks.close()
    assert Collecting.rows == [{"actor/lr": 0.5, "training/global_step": 1}]


def test_rows_are_taken_from_every_group_in_turn() -> None:
    rows = completion_rows(4, GROUPS, 4)
    assert [row["completion"] for row in rows] == ["answer 0.0", "answer 1.0", "answer 0.1", "answer 1.1"]
    assert rows[1] == {
        "step": 4, "env": "letters", "prompt": "question 1", "completion": "answer 1.0", "reward": 0.5,
        "parts": "style 0.5", "advantage": 0.0, "status": "ok",
    }  # fmt: skip
    assert completion_rows(4, [], 4) == []


def test_markup_and_newlines_stay_inside_their_cell() -> None:
    nasty = group(0, [1.0], text="a|b\n<script>x</script> `code`")
    (_, _, line) = as_markdown(completion_rows(1, [nasty], 1)).splitlines()
    assert line.count("|") == len(COLUMNS) + 1 and "<" not in line and "`" not in line
