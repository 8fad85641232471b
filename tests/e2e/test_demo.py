"""The demo as a newcomer runs it: GRPO lifts the held-out reward well above the warm start, and says so in three lines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.demo import held_out

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
    assert following.startswith("try next: shoal ")
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert again.returncode == 0 and again.stdout.splitlines()[-3] == reward, "a finished demo says the same again"
