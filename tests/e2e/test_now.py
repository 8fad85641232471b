"""Commands show their current operation. The tests read it from heartbeats every few milliseconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from .helpers.processes import WarmPython
from .helpers.runs import Run

NewRun = Callable[..., Run]
HASTY = (
    "import sys; from shoal.watch.console import BaseConsole; from shoal.cli.entry import main; "
    "BaseConsole.__init__.__kwdefaults__['heartbeat_s'] = 0.002; sys.exit(main(sys.argv[1:]))"
)
STARTING = "starting"


def progress_lines(warm: WarmPython, folder: Path, *words: str) -> list[str]:
    """All operations that the command printed, without repetition and without their progress."""
    command = warm.run(["-c", HASTY, *words], folder, python=True)
    assert command.wait() == 0, command.text()
    shown = re.findall(r"^… (.*?) ?(?:\(.*\))?$", command.text(), re.MULTILINE)
    return [text for text, _ in groupby(shown)]


def in_order(shown: list[str], *wanted: str) -> None:
    rest = iter(shown)
    for text in wanted:
        assert text in rest, f"{text!r} is not where it belongs in {shown}"


def test_grpo_shows_progress_from_loading_to_the_report(new_run: NewRun, model: Path) -> None:
    run = new_run(train={"max_steps": 2, "save_steps": 1}, orch={"eval": {"interval": 1, "num_examples": 16}})
    shown = progress_lines(run.warm, run.folder, "grpo", "run.yaml")
    in_order(
        shown,
        f"working; now: loading {model}",
        "step 0/2 done; now: evaluation after step 0",
        "step 0/2 done; now: rollouts of step 1",
        "step 0/2 done; now: training of step 1",
        "step 1/2 done; now: rollouts of step 2",
        "step 2/2 done; now: saving the checkpoint of step 2",
        "step 2/2 done; now: writing the final weights",
        "step 2/2 done; now: writing the report",
    )
    assert not any(STARTING in text for text in shown if text.startswith("step")), shown
    shown = progress_lines(
        run.warm, run.folder, "grpo", "run.yaml", "--resume", "train.max_steps=3", "orch.max_steps=3"
    )
    in_order(shown, f"working; now: loading {model}", "step 2/3 done; now: rollouts of step 3")
    assert not any("step 1" in text or STARTING in text for text in shown if text.startswith("step")), shown


def test_supervised_training_shows_steps_and_saves(
    warm: WarmPython, raw_model: Path, tasks_file: Path, tmp_path: Path
) -> None:
    rows = ["--dataset", str(tasks_file), "--output-dir", "out", "--max-steps", "3"]
    shown = progress_lines(
        warm, tmp_path, "sft", "--model", str(raw_model), *rows, "train.save_steps=2", "train.sequence_len=256"
    )
    in_order(
        shown,
        f"working; now: loading {raw_model}",
        "step 0/3 done; now: training of step 1",
        "step 1/3 done; now: training of step 2",
        "step 2/3 done; now: saving the checkpoint of step 2",
        "step 2/3 done; now: training of step 3",
        "step 3/3 done; now: saving the checkpoint of step 3",
        "step 3/3 done; now: writing the final weights",
        "step 3/3 done; now: writing the report",
    )
    assert not any(STARTING in text for text in shown if text.startswith("step")), shown


def test_evaluation_and_export_show_progress(warm: WarmPython, model: Path, tmp_path: Path) -> None:
    shown = progress_lines(
        warm, tmp_path, "eval", str(model), "--env", "arithmetic", "--num-examples", "16", "--max-tokens", "8"
    )
    in_order(shown, f"working; now: loading {model}", f"working; now: evaluation of {model}")
    assert "working; now: writing published" in progress_lines(warm, tmp_path, "export", str(model), "published")
    assert "working; now: writing made" in progress_lines(warm, tmp_path, "make-model", "tiny", "made")
