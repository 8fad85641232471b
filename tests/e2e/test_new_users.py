"""Typical mistakes of the first hour end with one helpful line, and the last line of a run names its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from shoal.watch.report.data import collect_overview

from .helpers.processes import WarmPython
from .helpers.runs import Run

NewRun = Callable[..., Run]


def said(warm: WarmPython, folder: Path, code: int, *words: str) -> str:
    command = warm.run(list(words), folder)
    assert command.wait() == code, command.text()
    return command.text()


def test_last_line_names_the_report_and_the_weights(new_run: NewRun):
    run = new_run(train={"max_steps": 1})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    last = command.text().splitlines()[-1]
    assert last == "finished after step 1; the report is out/report.html; the trained weights are in out/final"
    assert (run.path / "report.html").is_file() and (run.path / "final" / "config.json").is_file()
    about = collect_overview(run.path)["about"]
    assert about["Device"].startswith("CPU, ") and f"torch {version('torch')}" in about["Versions"]


@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": None, "epochs": 1}], ids=["steps", "epochs"])
def test_finished_run_is_extended_by_one_override(new_run: NewRun, length: dict):
    """config.yaml contains the number of steps several times or in epochs. One override replaces all of them."""
    rows = {"dataset": {"path": "rows.jsonl"}, "env": [{"id": "dataset", "args": {"reward": "my_code:digits"}}]}
    run = new_run(train=length, orch=rows)
    (run.folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(10)))
    assert run.grpo().wait() == 0
    before = run.status()["step"]
    command = run.warm.run(["grpo", "out/config.yaml", "--resume", f"train.max_steps={before + 1}"], run.folder)
    assert command.wait() == 0, command.text()
    assert [step["step"] for step in run.steps()] == list(range(1, before + 2))


def test_evaluation_without_rewards_fails(warm: WarmPython, model: Path, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from shoal.envs import SingleTurn, ask\n\n\nclass Mine(SingleTurn):\n"
        "    def tasks(self, split):\n        return [ask(f'say {n}') for n in range(8)]\n\n"
        "    def reward(self, task, messages):\n        return task.data['answer']\n"
    )
    asked = ["eval", str(model), "--env", "mine.py:Mine", "--num-examples", "3"]
    text = said(warm, tmp_path, 3, *asked, "--max-tokens", "8")
    assert "none of 3 rollouts got a reward: KeyError: 'answer' (mine.py:" in text and "nan" not in text
    text = said(warm, tmp_path, 4, *asked, "--max-tokens", "8", "--out", "/proc/x")
    assert "could not create /proc/x: no folder can be created there" in text and "none of 3" not in text, "immediately"
    text = said(warm, tmp_path, 2, *asked, "--max-tokens", "100000")
    assert "--max-tokens" in text and "100000 leaves no room for a prompt in the" in text


def test_export_of_a_missing_source_is_refused_offline(warm: WarmPython, tmp_path: Path):
    """A misspelled folder looks like the name of a hub model."""
    for name in ("outputs/fnal", "nothing-here"):
        text = said(warm, tmp_path, 2, "export", name, "published")
        assert f"source: {name!r} is neither a folder nor a model in the hub cache" in text
    assert not (tmp_path / "published").exists()


def test_run_directory_serves_as_model_or_file(new_run: NewRun):
    run = new_run(train={"max_steps": 1})
    command = run.grpo()
    assert command.wait() == 0
    assert "for 1 step in out" in command.text()
    text = said(run.warm, run.folder, 2, "grpo", "out", "--resume")
    assert "out: is a directory, not a configuration file; did you mean out/config.yaml?" in text
    text = said(run.warm, run.folder, 2, "grpo", "run.yaml", "train.model=out", "train.output_dir=next")
    assert 'train.model: "out" is a run directory, not a model; use its weights: "out/final"' in text
    assert not (run.folder / "next").exists()
    (run.path / "final" / "config.json").rename(run.path / "final" / "adapter_config.json")  # as runs write adapters
    text = said(run.warm, run.folder, 2, "grpo", "run.yaml", "train.model=out", "train.output_dir=next")
    assert "use its base model, with train.lora=true and train.adapter_path=out/final" in text


def test_existing_model_is_not_overwritten(warm: WarmPython, tmp_path: Path):
    text = said(warm, tmp_path, 2, "make-model", "tiny", ".")
    assert "cannot be replaced; name a folder in it" in text
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    said(warm, tmp_path, 0, "make-model", "tiny", "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "config.json").is_file()


def test_unwritable_export_folder_or_model(warm: WarmPython, model: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for words in (["export", str(model)], ["make-model", "tiny"]):
        for folder in ("/proc/foo/bar", "file/x"):
            text = said(warm, tmp_path, 4, *words, folder)
            assert f"shoal: error: {folder}: cannot be written: " in text and "name another folder" in text
        assert "file: exists already; name another folder" in said(warm, tmp_path, 2, *words, "file")


def test_interrupted_model_export_is_absent_and_repeated(warm: WarmPython, tmp_path: Path):
    words = ["make-model", "tiny", "models/tiny"]
    command = warm.start(words, tmp_path, kill_at=("folder:synced", 1))
    assert command.wait() == -9 and not (tmp_path / "models" / "tiny").exists(), command.text()
    said(warm, tmp_path, 0, *words)
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == ["tiny"]
    assert "exists already" in said(warm, tmp_path, 2, *words)


def test_folder_that_cannot_be_made(new_run: NewRun):
    command = new_run(train={"output_dir": "/proc/foo"}).grpo()
    assert command.wait() == 4, command.text()
    (line,) = [line for line in command.text().splitlines() if "error" in line]
    assert line.startswith("shoal: error: could not create /proc/foo: no folder can be created there; choose another")
