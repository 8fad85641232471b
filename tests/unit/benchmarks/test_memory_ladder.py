"""The memory ladder: the search, the outcomes of runs, and the capped device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.config.model_names import SHAPES
from support.pages import ROOT

MODULES = ("memory_ladder", "capped_gpu", "peak_memory", "workload", "limits", "machine", "grpo_step", "random_text")


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import memory_ladder

    yield memory_ladder
    for name in MODULES:
        sys.modules.pop(name, None)


def test_shapes_are_known_and_sorted_by_size(ladder: Any):
    from limits import ModelShape

    from shoal.models.random_models import shape_config

    assert set(ladder.SHAPES) < set(SHAPES)
    sizes = [ModelShape.of(shape_config(name)).parameters for name in ladder.SHAPES]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("fitting", range(8))
def test_search_finds_the_largest_shape_in_three_runs(ladder: Any, fitting: int):
    tried: list[str] = []

    def trains(shape: str) -> bool:
        tried.append(shape)
        return ladder.SHAPES.index(shape) < fitting

    assert ladder.largest(ladder.SHAPES, trains) == (ladder.SHAPES[fitting - 1] if fitting else None)
    assert len(tried) == 3 and len(set(tried)) == 3


STEPS = [{"time/step": value} for value in (9.0, 2.0, 4.0)]


@pytest.mark.parametrize(
    ("code", "log", "steps", "result"),
    [
        (0, "done", STEPS, "trains"),
        (0, "done", STEPS[:2], "error"),
        (2, "the run does not fit into 7.4 GiB: weights 12 GiB; use train.lora", [], "refused before loading"),
        (3, "CUDA out of memory while training", STEPS[:1], "stopped"),
        (70, "torch.OutOfMemoryError: CUDA out of memory.", [], "out of memory"),
        (2, "unknown key train.lorra", [], "error"),
        (None, "step 1", STEPS[:1], "error"),
    ],
)
def test_outcomes(ladder: Any, code: int | None, log: str, steps: list[dict[str, float]], result: str):
    found = ladder.outcome(code, f"start\n{log}\n", steps)
    assert found["result"] == result
    assert found.get("step_s") == (3.0 if result == "trains" else None)


def test_the_message_of_the_memory_plan_is_recognised(ladder: Any):
    """The words come from the source; a change there must be followed here."""
    source = (ROOT / "src" / "shoal" / "build" / "memory_plan.py").read_text("utf-8")
    model = (ROOT / "src" / "shoal" / "build" / "model.py").read_text("utf-8")
    assert "does not fit into" in source and "not enough memory" in model
    assert {"does not fit", "not enough memory"} <= set(ladder.MEMORY_WORDS)


@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
def test_shoal_accepts_the_arguments(ladder: Any, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from shoal.config.load import load_run
    from shoal.config.rules import check_run

    monkeypatch.chdir(ROOT)
    loaded = load_run(overrides=ladder.arguments("smollm2-135m", mode, tmp_path, smoke=False))
    check_run(loaded.config).raise_errors(loaded.origins)
    assert loaded.config.orch.batch_size == 128 and loaded.config.train.sequence_len == 640


def test_a_capped_device_reports_its_size(ladder: Any):
    from capped_gpu import capped_info

    assert capped_info(140, 150, 16) == (6, 16)
    assert capped_info(100, 150, 16) == (0, 16)
