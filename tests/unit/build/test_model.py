"""Notices about a loaded model before the first step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.build.model import check_same_tokens, explain_oom, load, make_policy
from shoal.config.train import TeacherConfig, TrainConfig
from shoal.core.errors import ConfigError, HardwareError, StoppedByPolicy
from shoal.core.ranks import SingleProcess
from shoal.models import load as loading
from shoal.split.trainer_process import _notices
from shoal.trainer import optimizer
from support.models import small_model
from support.servers import save


def test_model_that_does_not_fit_is_refused_with_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, and master weights of trained ones. Out of memory during training is not a bug either."""

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


def test_cpu_runs_have_no_kernel_notice(tmp_path: Path) -> None:
    """In both layouts: the trainer of a split run prints the notices of the loop in one process."""
    train = TrainConfig(model=str(save(small_model("qwen3"), tmp_path / "model")), device="cpu", max_steps=1)
    model = load(train)
    assert model.path.startswith("model modules: ")
    assert _notices(model, SingleProcess()) == model.notices
    assert not [line for line in model.notices if "training:" in line]


def test_adapter_teacher_scores_as_in_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    from shoal.models.lora import LoraSettings, attach
    from support.training import pack, random_samples

    base = save(small_model("qwen3"), tmp_path / "model")
    adapted = attach(small_model("qwen3"), LoraSettings(4, 8, 0.0, None, None))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    teacher = TeacherConfig(adapter=str(tmp_path / "adapter"))
    train = TrainConfig(model=str(base), device="cpu", max_steps=1, recipe="fp32", teacher=teacher)
    model = load(train)
    policy = make_policy(train, model, 1)
    rows = pack(random_samples(0, (4, 6), (3, 5)), share_prefixes=False).rows
    _, found = policy.teacher_logprobs(rows).read()
    plain = PeftModel.from_pretrained(small_model("qwen3"), str(tmp_path / "adapter"))
    assert model.teacher_bytes > 0 and all(not p.requires_grad for p in policy.teacher.model.parameters())  # type: ignore[union-attr]
    for row, values in zip(rows, found, strict=True):
        for first, last in zip(row.segment_starts, row.segment_starts[1:], strict=False):
            ids = torch.tensor(row.token_ids[first:last])[None]
            with torch.no_grad():
                logprobs = torch.log_softmax(plain(input_ids=ids).logits[0] / 1.0, -1)
            expected = logprobs[range(len(ids[0]) - 1), ids[0, 1:]].numpy()
            at = row.loss_mask[first:last][1:]
            np.testing.assert_allclose(values[first:last][1:][at], expected[at], atol=1e-5)


def test_teacher_with_another_tokenizer_is_refused() -> None:
    class Tokens:
        def __init__(self, **vocabulary: int) -> None:
            self.get_vocab = lambda: vocabulary

    check_same_tokens(Tokens(a=0, b=1), Tokens(a=0, b=1))
    with pytest.raises(
        ConfigError, match=r"train.teacher.model: .* 2 tokens differ, for example 'b' \(2 there, 1 here\)"
    ):
        check_same_tokens(Tokens(a=0, b=2, c=1), Tokens(a=0, b=1))
