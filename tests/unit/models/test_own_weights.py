"""Weights of a server: a published version replaces them in place, and a bad version changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.core.errors import EngineError, ModelError, StorageError
from shoal.models.decoder import Decoder
from shoal.models.lora import LoraSettings, attach
from shoal.models.served_weights import FolderWeights, WeightLoader
from shoal.runs.weight_files import describe, verify, version_hash
from support.engines import greedy
from support.models import as_decoder, lora_decoder, random_prompts, small_model
from support.servers import save

PROMPTS = random_prompts(1, 9, 14)


def lora_server(rank: int) -> tuple[Decoder, WeightLoader]:
    """The model of a server with adapters enabled and none loaded."""
    base = as_decoder(small_model("qwen3", seed=3))
    decoder = Decoder(attach(base.model, LoraSettings(rank=rank)))
    return decoder, WeightLoader(decoder, rank)


def numbers(decoder: Decoder) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in decoder.model.parameters()]


def unchanged(decoder: Decoder, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(numbers(decoder), before, strict=True))


@pytest.mark.parametrize("name", ("qwen3", "llama-tied", "gemma3"))
def test_full_version_replaces_every_tensor_in_place(name: str, tmp_path: Path):
    theirs, decoder = small_model(name, seed=1), as_decoder(small_model(name, seed=2))
    places = [parameter.data_ptr() for parameter in decoder.model.parameters()]
    manifest = describe(save(theirs, tmp_path / "v"), 5, "full")
    assert WeightLoader(decoder).replace(manifest) == version_hash(manifest)
    assert [parameter.data_ptr() for parameter in decoder.model.parameters()] == places
    assert unchanged(decoder, [p.detach() for p in theirs.parameters()])


def test_version_in_several_files(tmp_path: Path):
    theirs, decoder = small_model("qwen3", seed=1), as_decoder(small_model("qwen3", seed=2))
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    WeightLoader(decoder).replace(describe(tmp_path, 1, "full"))
    assert unchanged(decoder, [p.detach() for p in theirs.parameters()])


@pytest.mark.parametrize("rank", (4, 16), ids=("just enough room", "padded"))
def test_adapter_output_equals_peft(rank: int, tmp_path: Path):
    theirs = lora_decoder(seed=3, rank=4, alpha=24)
    manifest = describe(save(theirs.model, tmp_path / "v"), 2, "lora")
    decoder, own = lora_server(rank)
    bare = greedy(decoder, PROMPTS, 20)
    own.replace(manifest)
    assert greedy(decoder, PROMPTS, 20) == greedy(theirs, PROMPTS, 20) != bare
    own.clear_adapter()
    assert greedy(decoder, PROMPTS, 20) == bare


def test_smaller_adapter_clears_the_previous_adapter(tmp_path: Path):
    wide = describe(save(lora_decoder(seed=3).model, tmp_path / "wide"), 1, "lora")
    narrow_model = lora_decoder(seed=3, target_modules=("q_proj",))
    narrow = describe(save(narrow_model.model, tmp_path / "narrow"), 2, "lora")
    decoder, own = lora_server(8)
    own.replace(wide)
    own.replace(narrow)
    assert greedy(decoder, PROMPTS, 20) == greedy(narrow_model, PROMPTS, 20)


def test_full_version_removes_the_adapter(tmp_path: Path):
    decoder, own = lora_server(8)
    own.replace(describe(save(lora_decoder(seed=3).model, tmp_path / "lora"), 1, "lora"))
    own.replace(describe(save(small_model("qwen3", seed=9), tmp_path / "full"), 2, "full"))
    assert greedy(decoder, PROMPTS, 20) == greedy(as_decoder(small_model("qwen3", seed=9)), PROMPTS, 20)


def flip(folder: Path) -> None:
    """One bit of one number, in the middle of the last file."""
    file = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ("full", "lora"))
def test_flipped_bit_is_detected_before_replacement(kind: Any, tmp_path: Path):
    theirs = small_model("qwen3", seed=1) if kind == "full" else lora_decoder(seed=1).model
    manifest = describe(save(theirs, tmp_path / "v"), 5, kind)
    decoder, own = lora_server(8)
    before = numbers(decoder)
    flip(tmp_path / "v")
    with pytest.raises(StorageError, match=r"safetensors: .*checksum"):
        own.replace(manifest)
    assert unchanged(decoder, before)


def other_shape(folder: Path) -> dict[str, Any]:
    return describe(save(small_model("qwen3", seed=1, intermediate_size=64), folder), 5, "full")


def too_few(folder: Path) -> dict[str, Any]:
    save(small_model("qwen3", seed=1), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "layers.1" not in name}, folder / "model.safetensors")
    return describe(folder, 5, "full")


def too_wide(folder: Path) -> dict[str, Any]:
    return describe(save(lora_decoder(seed=1, rank=12).model, folder), 5, "lora")


def dora(folder: Path) -> dict[str, Any]:
    save(lora_decoder(seed=1).model, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    return describe(folder, 5, "lora")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (other_shape, r"shape \[64, 64\], expected \[128, 64\]"),
        (too_few, r"this server's model: 11 tensors are missing, such as model.layers.1"),
        (too_wide, r"rank 12 exceeds infer.max_lora_rank \(8\)"),
        (dora, "use_dora, which this server does not support"),
    ],
)
def test_weights_of_something_else_are_refused_whole(make: Any, says: str, tmp_path: Path):
    manifest = make(tmp_path / "v")
    decoder, own = lora_server(8)
    before = numbers(decoder)
    with pytest.raises(ModelError, match=says):
        own.replace(manifest)
    assert unchanged(decoder, before)


def test_server_without_adapter_slots_names_the_option(tmp_path: Path):
    manifest = describe(save(lora_decoder(seed=1).model, tmp_path / "v"), 5, "lora")
    with pytest.raises(ModelError, match=r"infer.enable_lora=true"):
        WeightLoader(as_decoder(small_model("qwen3"))).replace(manifest)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"files": {}}, "lists no files"),
        ({"files": {"../x": {"bytes": 1, "digest": ""}}}, "is not a file name"),
        ({"files": {"a.bin": {"bytes": 4}}}, "bytes and digest"),
        ({"files": {"a.bin": {"bytes": 5, "digest": ""}}}, "4 bytes, but the manifest lists 5"),
        ({"files": {"gone.bin": {"bytes": 5, "digest": ""}}}, "cannot be read"),
    ],
)
def test_manifest_without_digests_is_refused(change: dict[str, Any], says: str, tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(b"fish")
    with pytest.raises(StorageError, match=says):
        verify({**describe(tmp_path, 1, "full"), **change})


def test_hash_is_of_the_version_and_every_file(tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(b"fish")
    (tmp_path / "b.bin").write_bytes(b"")
    one = describe(tmp_path, 1, "full")
    assert one["files"]["b.bin"] == {
        "bytes": 0,
        "digest": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    (tmp_path / "b.bin").write_bytes(b"!")
    other, later = describe(tmp_path, 1, "full"), describe(tmp_path, 2, "full")
    assert verify(other) == version_hash(other) and verify(later) == version_hash(later)
    assert len({version_hash(manifest) for manifest in (one, other, later)}) == 3


def test_partial_version_is_rejected(tmp_path: Path):
    """A disk that fails after the verification: half is replaced, so the engine must not sample."""

    class Failing(FolderWeights):
        def tensor(self, name: str) -> torch.Tensor:
            if "norm" in name:
                raise OSError("input/output error")
            return super().tensor(name)

    decoder = as_decoder(small_model("qwen3", seed=2))
    manifest = describe(save(small_model("qwen3", seed=1), tmp_path / "v"), 5, "full")
    with pytest.raises(EngineError, match=r"only in part \(input/output error\); restart the server"):
        WeightLoader(decoder, readers={"filesystem": Failing}).replace(manifest)
