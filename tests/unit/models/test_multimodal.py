"""A checkpoint with a vision tower: its text part is trained, the rest is carried unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from models.families import build
from shoal.build import model as building
from shoal.build.load import PythonObjects
from shoal.config.train import TrainConfig
from shoal.models.multimodal import other_parts
from support.models import TOKENIZER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint("gemma3", tmp_path)


def checkpoint(family: str, folder: Path) -> Path:
    build(family).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps({"size": 28}))
    return folder


def settings(folder: Path, **values: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {"model": str(folder / "model"), "device": "cpu", "learning_rate": 1e-2, **values}
    )


def is_vision(name: str) -> bool:
    return any(part in name for part in ("vision", "visual", "projector"))


def stepped(train: TrainConfig, loaded: building.LoadedModel) -> building.PolicyFiles:
    """One step with arbitrary gradients of everything that is trained."""
    policy = building.make_policy(train, loaded, 1)
    for master in policy.optimizer.masters.values():
        master.grad = torch.ones_like(master)
    policy.optim_step()
    return building.PolicyFiles(policy, loaded.chat)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl_moe", "qwen3_5_moe"])
def test_only_the_text_part_is_trained_and_all_of_it_is_saved(family: str, tmp_path: Path) -> None:
    folder = checkpoint(family, tmp_path)
    train = settings(folder)
    loaded = building.load(train)
    before = {name: p.detach().clone() for name, p in loaded.decoder.model.named_parameters()}
    stepped(train, loaded).export(folder / "final")
    assert json.loads((folder / "final" / "preprocessor_config.json").read_text())["size"] == 28
    saved = AutoModelForImageTextToText.from_pretrained(folder / "final")
    changed = {name for name, p in saved.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if not is_vision(name)}


@pytest.mark.parametrize("targets", [None, ["q_proj", "fc1"]], ids=["all-linear", "named"])
def test_adapters_are_not_on_the_vision_part(folder: Path, targets: list[str] | None) -> None:
    loaded = building.load(settings(folder, lora=True, lora_target_modules=targets))
    adapted = {name for name, p in loaded.decoder.model.named_parameters() if p.requires_grad}
    assert adapted and not any(map(is_vision, adapted))
    stepped(settings(folder, lora=True), loaded).export(folder / "final")
    assert "vision_tower" in json.loads((folder / "final" / "adapter_config.json").read_text())["exclude_modules"]


def test_model_object_regains_requires_grad(folder: Path) -> None:
    model = build("gemma3")
    loaded = building.load(settings(folder), given=PythonObjects(model=model))
    assert other_parts(model) == ["model.vision_tower", "model.multi_modal_projector"]
    assert not any(p.requires_grad for name, p in model.named_parameters() if is_vision(name))
    building.release(loaded)
    assert all(p.requires_grad for p in model.parameters())
