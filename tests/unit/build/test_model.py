"""What is said of a loaded model before the first step."""

from __future__ import annotations

from pathlib import Path

from shoal.build.model import load
from shoal.build.trainee import _notices
from shoal.config.schema import TrainConfig
from shoal.orchestrator.ranks import Alone
from support.models import small_model
from support.servers import save


def test_nobody_is_told_that_a_cpu_has_no_kernels(tmp_path: Path) -> None:
    """In no layout: the trainer of a split run says what the loop of one process does."""
    train = TrainConfig(model=str(save(small_model("qwen3"), tmp_path / "model")), device="cpu", max_steps=1)
    model = load(train)
    assert model.path == "its own modules: there is no Triton for this device"
    assert _notices(model, Alone()) == model.notices
    assert not [line for line in model.notices if "training:" in line]
