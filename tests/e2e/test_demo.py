"""The demo as a newcomer runs it: GRPO lifts the held-out reward well above the warm start, in three closing lines."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.demo import _prepare_folder, held_out

LEAST_LIFT = 0.15
LIMIT_S = 300.0


@pytest.mark.timeout(900)
def test_demo_seed_1(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "shoal", "demo", "--dir", str(folder), "--seed", "1"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, env=environment, check=False)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    before, after = held_out(folder / "grpo")
    assert after - before >= LEAST_LIFT, f"{before:.3f} -> {after:.3f}"
    assert seconds < LIMIT_S
    reward, where, following = done.stdout.splitlines()[-3:]
    assert f"{before:.3f}" in reward and f"{after:.3f}" in reward
    assert str(folder / "grpo") in where and (folder / "grpo" / "report.html").stat().st_size > 100_000
    suggested = shlex.split(following.removeprefix("try next: ").split(", or ")[0])
    assert suggested[0] == "shoal" and main([*suggested[1:], "--dry-run"]) == 0
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert again.returncode == 0 and again.stdout.splitlines()[-3] == reward, "a finished demo says the same again"


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the demo says when it will not run there; nothing in the folder may change."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["demo", "--dir", str(folder), *arguments]) == 2
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return capsys.readouterr().err


def test_a_used_folder_is_never_taken_for_another_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    _prepare_folder(folder, 1)
    message = refusal(folder, capsys, "--seed", "2")
    assert "another --seed" in message and "--dir" in message
    file = folder / "grpo.yaml"
    file.write_text(file.read_text().replace("max_steps: 240", "max_steps: 9"))
    assert "edited" in refusal(folder, capsys, "--seed", "1")


def test_a_folder_of_something_else_and_a_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    assert "not empty" in refusal(tmp_path, capsys)
    assert "is a file" in refusal(tmp_path / "thesis.tex", capsys)
