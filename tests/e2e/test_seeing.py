"""Output of a real run for people: a report for every outcome, live findings, tracker files with other metric names."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from .helpers.processes import wait_until
from .helpers.runs import Run

NewRun = Callable[..., Run]


def test_finding_is_shown_during_the_run_and_by_doctor(new_run: NewRun) -> None:
    """Every completion is truncated after two tokens."""
    run = new_run(train={"max_steps": 6}, orch={"sampling": {"max_tokens": 2}, "groups": {"max_refill": 0}})
    command = run.grpo()
    told = [event for event in run.events("health") if event["data"]["check"] == "truncated"]
    assert [event["step"] for event in told] == [3], "once, after three steps in a row"
    assert "warning: " in command.text() and "raise orch.sampling.max_tokens" in command.text()
    doctor = run.warm.run(["doctor", "out", "--json"], run.folder)
    findings = {finding["check"]: finding for finding in json.loads(doctor.text())}
    assert findings["truncated"]["steps"][0] == 1 and findings["truncated"]["metric"] == "completion/truncated_frac"


@pytest.mark.parametrize("end", ["finished", "interrupted", "stopped"])
def test_report_is_written_for_every_outcome(new_run: NewRun, end: str) -> None:
    loss = {"type": "my_code:nan_loss"} if end == "stopped" else {"type": "grpo"}
    run = new_run(train={"max_steps": 4 if end == "finished" else 300, "save_steps": 50, "loss": loss})
    command = run.start()
    if end == "interrupted":
        wait_until(lambda: (run.path / "rollouts/step_000002.jsonl").is_file(), 60, "two steps")
        command.send(signal.SIGINT)
    assert command.wait() == {"finished": 0, "interrupted": 130, "stopped": 3}[end], command.text()
    assert run.status()["state"] == end
    page = (run.path / "report.html").read_text()
    assert f'"state":"{end}"' in page and 'id="groups-0-1"' in page


def test_supervised_run_has_a_report_too(model, raw_model) -> None:
    assert '"sft/loss"' in (model.parent / "report.html").read_text()


def test_refused_run_leaves_no_report(new_run: NewRun) -> None:
    run = new_run(train={"lora": True, "lora_target_modules": ["no_such_layer"]})
    assert run.grpo().wait() == 2
    assert not (run.path / "report.html").exists() and not (run.path / "status.json").exists()


def test_tracker_metric_names_differ_from_file_names(new_run: NewRun) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed (pip install 'shoal[dev]')")
    run = new_run(train={"report_to": "tensorboard", "metric_names": "trl", "log_completions": 2})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    (file,) = (run.path / "logs/tensorboard").glob("events.*")
    data = file.read_bytes()
    assert b"train/reward" in data and b"train/completions/mean_length" in data and b"reward/mean" not in data
    assert b"completions" in data and b"<reversed_text>" not in data, "markup in a table is escaped"
    assert all("reward/mean" in step and "train/reward" not in step for step in run.steps())


def test_keys_for_trackers_need_a_tracker(new_run: NewRun) -> None:
    run = new_run(train={"metric_names": "verl"})
    command = run.grpo()
    assert command.wait() == 2
    assert "train.metric_names: applies to trackers, but train.report_to is empty" in command.text()
