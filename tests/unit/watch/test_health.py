"""The health rules on short series, on run directories and during a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.config.resolve import as_yaml, resolve_run
from shoal.config.schema import RunConfig
from shoal.runs.events import EventLog
from shoal.runs.run_dir import RunDir
from shoal.watch import glossary
from shoal.watch.health import LiveHealth, check_rows, diagnose
from shoal.watch.health_rules import RULES

HEALTHY = {
    "reward/mean": 0.5, "reward/std": 0.3, "reward/error_frac": 0.0, "reward/timeout_frac": 0.0,
    "group/mixed_frac": 0.6, "group/all_good_frac": 0.2, "group/all_bad_frac": 0.2, "policy/entropy": 0.8,
    "policy/kl_ref": 0.02, "policy/clip_frac": 0.01, "mismatch/k3": 1e-4, "mismatch/ratio_max": 1.5, "masked": 0.05,
    "optim/skipped": 0.0, "completion/length_mean": 100.0, "completion/truncated_frac": 0.05, "time/step": 10.0,
    "time/idle": 0.5,
}  # fmt: skip


def rows(count: int, bad_from: int = 10**6, bad_to: int = 10**6, **bad: float) -> list[dict[str, Any]]:
    """Healthy steps, with `bad` in place of some values in the given steps."""
    return [{"step": step, **HEALTHY, **(bad if bad_from <= step <= bad_to else {})} for step in range(1, count + 1)]


def named(name: str, value: float) -> dict[str, float]:
    return {name: value}


def test_healthy_run_has_no_findings() -> None:
    assert check_rows(rows(60), {}) == []
    assert check_rows([], {}) == []


@pytest.mark.parametrize(
    ("check", "metric", "value", "words"),
    [
        ("masked", "masked", 0.62, "62% of the tokens"),
        ("truncated", "completion/truncated_frac", 0.83, "83% of the completions are truncated"),
        ("mixed", "group/mixed_frac", 0.1, "only 10% of the groups"),
        ("mismatch", "mismatch/k3", 0.02, "k3 is 0.02"),
        ("entropy", "policy/entropy", 0.04, "collapsed from 0.8 to 0.04"),
        ("length-collapse", "completion/length_mean", 20.0, "shrank from 100 to 20 tokens"),
        ("kl", "policy/kl_ref", 0.5, "KL is 0.5 nats"),
        ("reward-errors", "reward/error_frac", 0.1, "10% of the rollouts had an error"),
        ("reward-flat", "reward/std", 0.0, "rewards of the step are equal"),
        ("idle", "time/idle", 4.0, "idle for 40% of the step"),
        ("ratio", "mismatch/ratio_max", 300.0, "300 times as likely"),
    ],
)
def test_each_problem_is_reported_with_metric_steps_and_remedy(
    check: str, metric: str, value: float, words: str
) -> None:
    (finding,) = check_rows(rows(40, 20, 29, **named(metric, value)), {})
    assert (finding.check, finding.metric, finding.steps, finding.count) == (check, metric, (20, 29), 10)
    assert words in finding.what and finding.remedy and finding.level == "warning"
    assert finding.where == "steps 20–29" and metric in finding.sentence


@pytest.mark.parametrize("metric", ["mismatch/k3", "mismatch/ratio_max"])
def test_sampler_noise_is_not_reported_as_mismatch(metric: str) -> None:
    noisy = {metric: 300.0, "noise/sigma": 0.05}
    assert check_rows(rows(40, 20, 29, **noisy), {}) == []
    (finding,) = check_rows(rows(40, 20, 29, **{**noisy, "noise/sigma": 0.0}), {})
    assert finding.metric == metric


def test_equal_rewards_suggest_easier_or_harder_prompts() -> None:
    flat = {"reward/std": 0.0}
    (low,) = check_rows(rows(40, 20, 29, **flat), {})
    (full,) = check_rows(rows(40, 20, 29, **flat, **{"group/all_good_frac": 0.7}), {})
    assert "easier prompts" in low.remedy and "harder prompts" in full.remedy


def test_entropy_may_collapse_in_supervised_training() -> None:
    for loss in ("sft/loss", "dpo/loss"):
        falling = [{"step": step, loss: 9.0 / step, "policy/entropy": 9.0 / step} for step in range(1, 60)]
        assert check_rows(falling, {}) == []


def test_finding_names_the_worst_step() -> None:
    """The last step had 98 %; a finding of 100 % must name the step it refers to."""
    cut = [0.9, 1.0, 0.95, 0.98]
    (finding,) = check_rows([{"step": i + 1, **HEALTHY, "completion/truncated_frac": cut[i]} for i in range(4)], {})
    assert "100%" in finding.what and "step 2" in finding.what
    assert finding.where == "steps 1–4"


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.patience == 3], ids=lambda rule: rule.check)
def test_two_bad_steps_are_not_yet_a_problem(rule: Any) -> None:
    worse = {"policy/entropy": 0.0, "completion/length_mean": 1.0, "group/mixed_frac": 0.0, "reward/std": 0.0}
    value = worse.get(rule.metric, 1e6)
    assert [f for f in check_rows(rows(40, 20, 21, **named(rule.metric, value)), {}) if f.check == rule.check] == []


@pytest.mark.parametrize(
    ("good", "bad", "side", "remedy"),
    [(0.0, 1.0, "too hard", glossary.EASIER_PROMPTS), (1.0, 0.0, "too easy", glossary.HARDER_PROMPTS)],
)
def test_zero_variance_groups_suggest_easier_or_harder_prompts(good: float, bad: float, side: str, remedy: str) -> None:
    flat = {"group/mixed_frac": 0.0, "group/all_good_frac": good, "group/all_bad_frac": bad}
    (finding,) = check_rows(rows(40, 20, 29, **flat), {})
    assert f"prompts are {side}" in finding.what and finding.remedy == remedy


def test_teacher_needs_no_rewards_that_differ() -> None:
    flat = {"reward/std": 0.0, "group/mixed_frac": 0.0, "group/all_bad_frac": 1.0}
    assert {f.check for f in check_rows(rows(40, 20, 29, **flat), {})} == {"reward-flat", "mixed"}
    assert check_rows(rows(40, 20, 29, **flat, **{"teacher/kl": 2.0}), {}) == []


def test_failed_rewards_give_no_finding_about_the_prompts() -> None:
    failing = {"group/mixed_frac": 0.0, "group/all_good_frac": 0.0, "group/all_bad_frac": 0.0, "reward/error_frac": 1.0}
    assert [f.check for f in check_rows(rows(40, 20, 29, **failing), {})] == ["reward-errors"]


def test_length_blow_up_requires_truncation() -> None:
    longer = {"completion/length_mean": 400.0}
    assert check_rows(rows(40, 20, 40, **longer), {}) == []
    (finding,) = check_rows(rows(40, 20, 40, **longer, **named("completion/truncated_frac", 0.4)), {})
    assert finding.check == "length-blow-up" and "from 100 to 400 tokens and 40%" in finding.what


def test_one_skipped_step_is_reported() -> None:
    (finding,) = check_rows(rows(10, 4, 4, **named("optim/skipped", 1.0)), {})
    assert finding.check == "skipped" and finding.where == "step 4"


def test_run_of_one_step_can_have_findings() -> None:
    (finding,) = check_rows(rows(1, 1, 1, **named("masked", 0.9)), {})
    assert finding.check == "masked" and finding.where == "step 1"


def test_settings_without_effect_are_notices() -> None:
    quiet = [{**row, "policy/clip_frac": 0.0, "correction/capped_frac": 0.0} for row in rows(25)]
    findings = check_rows(quiet, {"train": {"ppo_epochs": 1, "minibatches": 1}})
    assert [(f.check, f.level, f.steps[0]) for f in findings] == [
        ("inert-clip", "notice", 20),
        ("inert-cap", "notice", 20),
    ]
    assert [f.check for f in check_rows(quiet, {"train": {"ppo_epochs": 2, "minibatches": 1}})] == ["inert-cap"]


def test_reward_fell_below_its_start() -> None:
    values = [0.5] * 10 + [0.9] * 10 + [0.1] * 15
    series = [{**row, "reward/mean": value} for row, value in zip(rows(35), values, strict=True)]
    (finding,) = check_rows(series, {})
    assert finding.check == "reward-fell" and "from 0.9" in finding.what


class Memory:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def append_event(self, record: Mapping[str, Any]) -> None:
        self.events.append(dict(record))


def config(rate: float = 5e-6) -> RunConfig:
    train = {"model": "m/m", "max_steps": 9, "learning_rate": rate}
    return resolve_run(RunConfig.model_validate({"train": train, "orch": {"env": [{"id": "arithmetic"}]}}))


def test_live_health_repeats_warnings_rarely(tmp_path: Path) -> None:
    store = Memory()
    health = LiveHealth(tmp_path, config(), EventLog(store))
    for row in rows(160, 5, 30, **named("masked", 0.8)) + [
        {**r, "step": r["step"] + 160} for r in rows(20, 1, 20, **named("masked", 0.8))
    ]:
        health.check(row["step"], {name: value for name, value in row.items() if name != "step"})
    assert [(e["step"], e["kind"], e["data"]["check"]) for e in store.events] == [
        (7, "health", "masked"),
        (163, "health", "masked"),
    ]
    assert store.events[0]["data"]["steps"] == [5, 7] and "lower train.learning_rate" in store.events[0]["message"]


def test_resumed_run_does_not_repeat_warnings(tmp_path: Path) -> None:
    store = Memory()
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        for row in rows(10, 4, 10, **named("masked", 0.8)):
            run_dir.append_metrics(row["step"], {k: v for k, v in row.items() if k != "step"})
        health = LiveHealth(run_dir.path, config(), EventLog(store))
        health.check(11, {**HEALTHY, "masked": 0.8})
    assert store.events == [], "the steps before the resume had reported it"


def test_run_directory_is_diagnosed_from_its_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDir.create(path, as_yaml(config(rate=0.5)), {}) as run_dir:
        for row in rows(12, 6, 12, **named("completion/truncated_frac", 0.9)):
            run_dir.append_metrics(row["step"], {k: v for k, v in row.items() if k != "step"})
        events = EventLog(run_dir)
        events.warn("sink", "wandb failed; training continues without it")
        events.warn("sink", "wandb is too slow")
        run_dir.write_status(
            "stopped", step=12, reason="five steps", resumable=True, next_command="shoal grpo x --resume"
        )
    findings = diagnose(path)
    assert [(f.check, f.level) for f in findings] == [
        ("ended", "warning"), ("truncated", "warning"), ("sink", "warning"), ("config", "notice"),
    ]  # fmt: skip
    assert findings[0].remedy == "continue with shoal grpo x --resume"
    assert findings[2].what == "wandb is too slow (2 times)" and "login" in findings[2].remedy
    assert findings[3].what.startswith("train.learning_rate: 0.5 is unusual")


def test_killed_run_is_reported(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run", "", {}).close()
    (finding,) = diagnose(tmp_path / "run")
    assert finding.check == "ended" and "killed" in finding.what


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    """Readers skip damaged lines, so without these findings a damaged run would look healthy."""
    path = tmp_path / "run"
    with RunDir.create(path, as_yaml(config()), {}) as run_dir:
        for step in (1, 2, 3):
            run_dir.append_metrics(step, HEALTHY)
            run_dir.append_journal(step, {})
        run_dir.write_status("finished", step=3, reason="finished", resumable=False)
    whole = (path / "metrics.jsonl").read_bytes()
    assert not [finding for finding in diagnose(path) if finding.check == "damaged"]
    lines = whole.splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(lines[0] + b"\xb5\x00[[\n" + lines[2] + b'{"step": 4')
    said = [finding.what for finding in diagnose(path) if finding.check == "damaged"]
    assert said == [
        "metrics.jsonl is damaged: 1 line cannot be read, the first is line 2",
        "metrics.jsonl is missing 1 step of journal.jsonl",
    ], "a partial last line is not damage"
    (path / "metrics.jsonl").write_bytes(b"\x93" * 40)
    (path / "config.yaml").write_bytes(b"\x93" * 40)
    (path / "journal.jsonl").write_bytes(b"[" * 100_000 + b"\n" + (path / "journal.jsonl").read_bytes())
    said = [finding.what for finding in diagnose(path) if finding.check == "damaged"]
    assert said == [
        "journal.jsonl is damaged: 1 line cannot be read, the first is line 1",
        "metrics.jsonl is missing 3 steps of journal.jsonl",
        "config.yaml contains no configuration",
    ]
