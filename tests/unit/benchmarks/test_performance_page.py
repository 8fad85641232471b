"""docs/performance.md equals the page generated from the recorded results, and names missing results and missed
targets.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def write_page(results: Path, out: Path) -> str:
    command = [sys.executable, "benchmarks/performance.py", "--results", results, "--out", out, "--no-plots"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return out.read_text("utf-8")


def train_row(tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {
        "name": "full", "shape": "qwen2.5-0.5b", "tokens": 24_576, "tokens_per_s": tokens_per_s, "limit_bytes": 2e7,
        "limit_operations": 260_000.0, "fraction": tokens_per_s / 260_000.0, "optimizer_s": 0.005,
        "optimizer_fraction": 0.7, "tokens_per_s_with_optimizer": tokens_per_s, "memory_gib": 30.0, **more,
    }  # fmt: skip


def save(folder: Path, name: str, rows: list[dict[str, Any]], smoke: bool = False) -> None:
    machine = {"date": "2000-01-01", "cores": 1, "python": "3.11", "torch": "2.11", "gpu": "a GPU"}
    rates = {"bytes_per_s": 4e12, "operations_per_s": 8e14}
    found = {"machine": machine, "command": "python x", "smoke": smoke, "rates": rates, "rows": rows}
    (folder / name).write_text(json.dumps(found), "utf-8")


def goal(page: str, work: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {work}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_page_is_current(tmp_path: Path):
    written = write_page(ROOT / "benchmarks" / "results", tmp_path / "page.md")
    current = (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert written == current, "run python benchmarks/performance.py"


def test_pages_without_results_have_no_figures(tmp_path: Path):
    page = write_page(tmp_path, tmp_path / "page.md")
    assert page.count("| not measured yet |") == 23
    assert page.count("Not measured yet: ") == 8


@pytest.mark.parametrize(
    ("rate", "verdict"), [(110_000.0, "below"), (120_000.0, "exceeded"), (130_000.0, "target reached")]
)
def test_goal_is_compared(tmp_path: Path, rate: float, verdict: str):
    save(tmp_path, "train.json", [train_row(rate)])
    cells = goal(write_page(tmp_path, tmp_path / "page.md"), "packed training")
    assert cells[1:] == [
        f"{rate:,.0f} tok/s",
        "260,000 tok/s",
        f"{100 * rate / 260_000:.0f} %",
        "115,000 tok/s",
        "50 % of the limit",
        verdict,
    ]


def test_smoke_run_is_not_a_measurement(tmp_path: Path):
    save(tmp_path, "train.json", [train_row(130_000.0)], smoke=True)
    save(tmp_path, "train_a.json", [train_row(110_000.0)])
    save(tmp_path, "train_b.json", [train_row(120_000.0), train_row(9.0, name="LoRA r16")])
    page = write_page(tmp_path, tmp_path / "page.md")
    assert goal(page, "packed training")[-1] == "below"
    assert "| LoRA r16 |" in page and "120,000" not in page and "train.json" not in page.split("## Machines")[1]
