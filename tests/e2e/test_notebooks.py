"""The CPU notebook runs in a new kernel, and its committed outputs are consistent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "first_run_on_a_cpu.ipynb"


def rewards_of(notebook: Any) -> tuple[float, float]:
    """The held-out reward before and after, as the notebook prints it."""
    outputs = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    found = re.search(r"([\d.]+) before, ([\d.]+) after", "".join(outputs))
    assert found is not None, outputs
    return float(found[1]), float(found[2])


def test_committed_outputs_are_those_of_one_run_from_top_to_bottom() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    before, after = rewards_of(notebook)
    assert after > before + 0.1
    assert not re.search(r"/(home|tmp|root|work)/", NOTEBOOK.read_text()), "no path of the machine that ran it"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_notebook_runs_in_a_fresh_kernel_and_the_model_improves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    before, after = rewards_of(notebook)
    assert after > before + 0.1
    assert (tmp_path / "outputs" / "initials" / "report.html").exists()
