"""The generated parts of README.md are up to date. Without results, cells are empty."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def written(results: Path, page: Path) -> str:
    page.write_text((ROOT / "README.md").read_text("utf-8"), "utf-8")
    command = [sys.executable, "benchmarks/readme_tables.py", "--results", str(results), "--page", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return page.read_text("utf-8")


def row(page: str, label: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {label}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_readme_is_current(tmp_path: Path):
    page = written(ROOT / "benchmarks" / "results", tmp_path / "README.md")
    assert page == (ROOT / "README.md").read_text("utf-8"), "run python benchmarks/readme_tables.py"


def test_device_without_a_result_has_empty_cells(tmp_path: Path):
    page = (ROOT / "README.md").read_text("utf-8")
    assert row(page, "NVIDIA T4")[1:] == [""] * 5
    assert all("benchmarks/results/" in cell for cell in row(page, "NVIDIA H200")[3:])
    assert "demo_cpu.json" in row(page, "2 CPU cores")[1]


def test_without_results_no_figure_remains(tmp_path: Path):
    page = written(tmp_path, tmp_path / "README.md")
    assert row(page, "One step, 0.5B")[1:] == [""] * 5
    assert row(page, "NVIDIA H200")[1:] == [""] * 5
    assert "tokens/s" not in page


def test_tutorial_shows_the_recorded_figures():
    page = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    recorded = json.loads((ROOT / "benchmarks" / "results" / "tutorial_cpu.json").read_text("utf-8"))
    first, last = (f"{value:.2f}".lstrip("0") for value in recorded["held_out"])
    assert f"from {first} to {last}" in " ".join(page.split())
    assert row(page, "Mean reward")[1:] == [f"{step['reward/mean']:.2f}" for step in recorded["steps"]]
    assert row(page, "Mean length")[1:] == [f"{step['completion/length_mean']:.0f}" for step in recorded["steps"]]
