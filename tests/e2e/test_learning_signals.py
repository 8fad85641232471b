"""Learning signals besides one reward per rollout: a killed run and the split layout give the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .helpers.processes import WarmPython
from .helpers.runs import Run, assert_same_run, assert_trained_once, base_config, fingerprint
from .helpers.split import InOne, compared, split_config, split_run

BONUS = {"coef": 0.01, "target": 9.0, "delta": 0.01, "top_fraction": 0.5}  # the target is above any entropy: it rises
SIGNALS: dict[str, dict[str, Any]] = {
    "entropy": {"train": {"loss": {"type": "vespo", "entropy": BONUS}}, "orch": {"advantage": {"std": "mean"}}},
}


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_killed_run_continues_with_its_signals(tmp_path: Path, warm: WarmPython, model: Path, kind: str) -> None:
    def run_of(name: str) -> Run:
        config = base_config(model)
        for section, values in SIGNALS[kind].items():
            config[section] |= values
        return Run(tmp_path / name, warm).write(config)

    undisturbed, killed = run_of("undisturbed"), run_of("killed")
    command = undisturbed.grpo()
    assert command.wait() == 0, command.text()
    assert killed.start(kill_at=("written:step_000003.jsonl", 1)).wait() == -9
    command = killed.grpo("--resume")
    assert command.wait() == 0, command.text()
    assert_trained_once(killed, 4)
    assert_same_run(killed, fingerprint(undisturbed))
    if kind == "entropy":
        coefs = [step["policy/entropy_coef"] for step in killed.steps()]
        assert coefs == pytest.approx([0.0, 0.02, 0.03, 0.04])


@pytest.mark.parametrize("kind", SIGNALS)
def test_split_equals_one_process(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne, kind: str) -> None:
    with split_run(tmp_path, warm, split_config(model, **SIGNALS[kind])) as run:
        run.start_all()
        assert run.end() == dict.fromkeys(run.processes, 0)
        wanted, found = in_one(**SIGNALS[kind]), compared(run)
        for name, value in wanted.items():
            assert found[name] == value, f"{name} differs"
