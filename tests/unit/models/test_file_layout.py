"""Files that name, split or orient tensors unlike the modules: as published, and readable by a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.families import build
from shoal.core.errors import ModelError, StorageError
from shoal.models.decoder import Decoder
from shoal.models.load import adopt_model, load_model, read_converted
from shoal.models.precision import Precision
from shoal.models.served_weights import WeightLoader
from shoal.runs.weight_files import describe
from support.models import TOKENIZER


def load(folder: Path) -> Any:
    return load_model(str(folder), torch.float32, torch.device("cpu"))


def checkpoint(family: str, folder: Path, **build_arguments: Any) -> Path:
    build(family, **build_arguments).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def as_published(folder: Path) -> None:
    """The expert matrices of Qwen3-VL-MoE as the published checkpoints have them: [expert, in, out]."""
    path = folder / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def equal(ours: Any, theirs: Any) -> bool:
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("published", [True, False], ids=["published", "of transformers"])
def test_experts_are_saved_in_the_published_orientation(published: bool, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_vl_moe", tmp_path / "model")
    if published:
        as_published(folder)
    model = load(folder)
    model.save_pretrained(tmp_path / "saved")
    shapes = {
        name.rsplit(".", 1)[1]: tuple(tensor.shape)
        for name, tensor in load_file(tmp_path / "saved" / "model.safetensors").items()
        if "layers.0.mlp.experts" in name
    }
    assert shapes == {"gate_up_proj": (4, 64, 96), "down_proj": (4, 48, 64)}
    assert equal(load(tmp_path / "saved"), model)


def test_model_object_is_saved_in_the_published_orientation(tmp_path: Path) -> None:
    model: Any = adopt_model(build("qwen3_vl_moe"), Precision(torch.device("cpu"), torch.float32))
    model.save_pretrained(tmp_path)
    name = "gate_up_proj"
    found = next(t for key, t in load_file(tmp_path / "model.safetensors").items() if key.endswith(name))
    assert tuple(found.shape) == (4, 64, 96)


def test_version_is_not_read_from_pickle(tmp_path: Path) -> None:
    model = load(checkpoint("qwen3_moe", tmp_path / "model"))
    model.save_pretrained(tmp_path / "version")
    (tmp_path / "version" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "version" / "pytorch_model.bin")
    with pytest.raises(StorageError):
        read_converted(str(tmp_path / "version"), model)


def test_square_experts_are_refused(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_vl_moe", tmp_path, own={"moe_intermediate_size": 32, "sliding_window": None})
    with pytest.raises(ModelError, match="square"):
        load(folder)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe"])
def test_server_reads_a_version_as_the_trainer_writes_it(family: str, tmp_path: Path) -> None:
    theirs = load(checkpoint(family, tmp_path / "one", seed=1))
    theirs.save_pretrained(tmp_path / "version")
    ours = load(checkpoint(family, tmp_path / "two", seed=2))
    places = [parameter.data_ptr() for parameter in ours.parameters()]
    assert not equal(ours, theirs)
    WeightLoader(Decoder(ours)).replace(describe(tmp_path / "version", 1, "full"))
    assert equal(ours, theirs) and [parameter.data_ptr() for parameter in ours.parameters()] == places


@pytest.mark.parametrize("change", ["missing", "unknown", "smaller"])
def test_converted_version_that_does_not_fit_changes_nothing(change: str, tmp_path: Path) -> None:
    ours = load(checkpoint("qwen3_moe", tmp_path / "model"))
    ours.save_pretrained(tmp_path / "version")
    before = load(tmp_path / "model")
    tensors = load_file(tmp_path / "version" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    changed = {"missing": None, "unknown": tensors[name], "smaller": tensors[name][:1].clone()}[change]
    tensors = {key: tensor + 1 for key, tensor in tensors.items() if key != name}
    if changed is not None:
        tensors["other" if change == "unknown" else name] = changed
    save_file(tensors, tmp_path / "version" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError):
        WeightLoader(Decoder(ours)).replace(describe(tmp_path / "version", 1, "full"))
    assert equal(ours, before)
