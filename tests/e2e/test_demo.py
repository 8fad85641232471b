"""The demo: GRPO raises the held-out reward well above the warm start, and three closing lines report it."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.cli.entry import main
from shoal.demo import _prepare_folder, held_out

from .helpers.processes import WarmPython

LEAST_LIFT = 0.15
LIMIT_S = 300.0


def closing_lines(output: str, folder: Path) -> tuple[float, float]:
    """Check the three closing lines of a demo; returns the held-out reward before and after."""
    before, after = held_out(folder / "grpo")
    reward, where, following = output.splitlines()[-3:]
    assert f"{before:.3f}" in reward and f"{after:.3f}" in reward
    assert str(folder / "grpo") in where and (folder / "grpo" / "report.html").stat().st_size > 100_000
    suggested = shlex.split(following.removeprefix("try next: ").split(", or ")[0])
    assert suggested[0] == "shoal" and main([*suggested[1:], "--dry-run"]) == 0
    return before, after


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_demo_seed_1(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "shoal", "demo", "--dir", str(folder), "--seed", "1"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, env=environment, check=False)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    before, after = closing_lines(done.stdout, folder)
    assert after - before >= LEAST_LIFT, f"{before:.3f} -> {after:.3f}"
    assert seconds < LIMIT_S
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    reward = done.stdout.splitlines()[-3]
    assert again.returncode == 0 and again.stdout.splitlines()[-3] == reward, "a finished demo prints the same again"


# `shoal demo` with fewer and smaller steps: an eighth of the work.
SHORT = """
import sys
from shoal import demo
from shoal.cli import main

plan = demo._grpo
def short(folder, seed):
    config = plan(folder, seed)
    config["orch"] |= {"batch_size": 64, "eval": {"interval": 30, "num_examples": 50}}
    return config

demo.GRPO_STEPS, demo.WARM_UP_STEPS, demo._grpo = 30, 40, short
sys.exit(main(["demo", *sys.argv[1:]]))
"""


def test_short_demo_learns_and_is_reproducible(warm: WarmPython, tmp_path: Path) -> None:
    command = ["-c", SHORT, "--dir", "demo", "--seed", "1"]
    done = warm.run(command, tmp_path, python=True)
    assert done.wait() == 0, done.text()
    with contextlib.chdir(tmp_path):
        before, after = closing_lines(done.text(), Path("demo"))
    assert after > before, f"{before:.3f} -> {after:.3f}"
    again = warm.run(command, tmp_path, python=True)
    assert again.wait() == 0 and again.text().splitlines()[-3] == done.text().splitlines()[-3]


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a demo that refuses the folder. The folder must not change."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["demo", "--dir", str(folder), *arguments]) == 2
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return capsys.readouterr().err


def test_used_folder_is_not_reused_by_a_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    _prepare_folder(folder, 1)
    message = refusal(folder, capsys, "--seed", "2")
    assert "another --seed" in message and "--dir" in message
    file = folder / "grpo.yaml"
    file.write_text(file.read_text().replace("max_steps: 240", "max_steps: 9"))
    assert "edited" in refusal(folder, capsys, "--seed", "1")


def test_foreign_folder_and_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    assert "not empty" in refusal(tmp_path, capsys)
    assert "is a file" in refusal(tmp_path / "thesis.tex", capsys)
