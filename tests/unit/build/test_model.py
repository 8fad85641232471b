"""What is said of a loaded model before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.build.model import explain_oom, load, make_policy
from shoal.config.train import TrainConfig
from shoal.core.errors import HardwareError, StoppedByPolicy
from shoal.core.ranks import SingleProcess
from shoal.models import load as loading
from shoal.split.trainer_process import _notices
from shoal.trainer import optimizer
from support.models import small_model
from support.servers import save


def test_what_does_not_fit_is_refused_with_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, and the masters of what is trained; while training it is no bug either."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    train = TrainConfig(model=str(save(small_model("qwen3"), tmp_path / "model")), device="cpu", max_steps=1)
    model = load(train)
    monkeypatch.setattr(optimizer, "MasterAdamW", fail)
    with pytest.raises(HardwareError, match=r"for the fp32 copy of what is trained; try a smaller model, adapters"):
        make_policy(train, model, 1)
    monkeypatch.setattr(loading, "load_model", fail)
    with pytest.raises(HardwareError, match=r"not enough memory for the weights of .*/model; try a smaller model"):
        load(train)
    with pytest.raises(StoppedByPolicy, match=r"ran out of memory while training; lower it, then resume"):
        explain_oom("lower it", fail)
    assert explain_oom("lower it", len, "ab") == 2


def test_nobody_is_told_that_a_cpu_has_no_kernels(tmp_path: Path) -> None:
    """In no layout: the trainer of a split run says what the loop of one process does."""
    train = TrainConfig(model=str(save(small_model("qwen3"), tmp_path / "model")), device="cpu", max_steps=1)
    model = load(train)
    assert model.path.startswith("model modules: ")
    assert _notices(model, SingleProcess()) == model.notices
    assert not [line for line in model.notices if "training:" in line]
