"""A policy that is saved and loaded continues bit for bit. Load errors are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.build.model import PolicyFiles
from shoal.core.errors import NonFiniteError, StorageError
from shoal.models.chat import Chat
from shoal.models.sampler_view import SamplerView
from shoal.trainer.checkpoint import COUNTS_FILE, STATE_FILE, export_weights, load_state, save_state
from shoal.trainer.optimizer import Schedule
from shoal.trainer.policy import TrainedPolicy
from support.models import TOKENIZER, lora_decoder, small_decoder
from support.training import grpo, make_policy, pack, random_samples, weights

ROWS = pack(random_samples(0, (4, 8), (10, 6))).rows
MAKERS = {
    "full": small_decoder,
    "lora": lora_decoder,
    "lora with dropout": lambda **kw: lora_decoder(dropout=0.3, **kw),
    "qlora fp8": lambda **kw: lora_decoder(stored="fp8", **kw),
    "qlora fp4": lambda **kw: lora_decoder(stored="fp4", **kw),
}


def make(maker: str, dtype: torch.dtype) -> TrainedPolicy:
    return make_policy(MAKERS[maker](dtype=dtype), Schedule(1e-2, 8, "cosine"))


def train(policy: TrainedPolicy, steps: int) -> list[dict[str, float]]:
    outcomes = []
    for _ in range(steps):
        policy.forward_backward(ROWS, grpo())
        outcomes.append(policy.optim_step())
    return outcomes


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("maker", MAKERS)
def test_loaded_policy_continues_bit_for_bit(maker: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    undisturbed = make(maker, dtype)
    torch.manual_seed(2)
    train(undisturbed, 3)
    save_state(undisturbed, tmp_path)
    expected = train(undisturbed, 3)

    torch.manual_seed(1)
    resumed = make(maker, dtype)
    torch.manual_seed(999)
    load_state(resumed, tmp_path)
    assert resumed.optimizer_steps == 3
    assert train(resumed, 3) == expected
    for (name, one), other in zip(weights(undisturbed.decoder).items(), weights(resumed.decoder).values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_nonfinite_weights_are_not_saved(bad: float, tmp_path: Path) -> None:
    policy = make("full", torch.float32)
    with torch.no_grad():
        next(iter(policy.optimizer.masters.values())).view(-1)[3] = bad
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        save_state(policy, tmp_path)
    assert not list(tmp_path.iterdir())


def test_loading_writes_in_place(tmp_path: Path) -> None:
    policy = make("full", torch.float32)
    save_state(policy, tmp_path)
    other = make("full", torch.float32)
    pointers = [p.data_ptr() for p in other.decoder.model.parameters()]
    train(other, 1)
    load_state(other, tmp_path)
    assert [p.data_ptr() for p in other.decoder.model.parameters()] == pointers
    assert all(torch.equal(value, weights(policy.decoder)[name]) for name, value in weights(other.decoder).items())


def spoil(folder: Path, how: str) -> None:
    file = folder / (COUNTS_FILE if how == "counts" else STATE_FILE)
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: 10 if how == "counts" else 1000])


@pytest.mark.parametrize("how", ("missing", "cut", "counts"))
def test_checkpoint_that_cannot_be_read(how: str, tmp_path: Path) -> None:
    policy = make("full", torch.float32)
    save_state(policy, tmp_path)
    spoil(tmp_path, how)
    with pytest.raises(StorageError, match="could not be loaded"):
        load_state(policy, tmp_path)


def test_checkpoint_of_another_model(tmp_path: Path) -> None:
    save_state(make("full", torch.float32), tmp_path)
    with pytest.raises(StorageError, match="another model"):
        load_state(make("lora", torch.float32), tmp_path)


def test_export_holds_the_trained_adapter_alone(tmp_path: Path) -> None:
    """Other slots (the sampler's, the reference's) are not exported."""
    policy = make("lora", torch.float32)
    SamplerView(policy.decoder, "snapshot")
    export_weights(policy, TOKENIZER, tmp_path)
    assert (tmp_path / "adapter_config.json").exists() and (tmp_path / "tokenizer_config.json").exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert not list(tmp_path.rglob("*.bin")) and not list(tmp_path.rglob("*.pt")), "safetensors only"


def test_export_of_a_full_model_has_no_adapter(tmp_path: Path) -> None:
    export_weights(make("full", torch.float32), TOKENIZER, tmp_path)
    names: set[Any] = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names and "adapter_config.json" not in names


@pytest.mark.parametrize("maker", ("full", "tied", "lora", "qlora fp8"))
def test_snapshot_equals_a_save(maker: str, tmp_path: Path) -> None:
    """Training continues between the copy and the write."""
    torch.manual_seed(1)
    tied = make_policy(small_decoder(tie_word_embeddings=True), Schedule(1e-2, 8, "cosine"))
    policy = tied if maker == "tied" else make(maker, torch.float32)
    train(policy, 2)
    files = PolicyFiles(policy, Chat(TOKENIZER))
    for name in ("saved", "written"):
        (tmp_path / name).mkdir()
    files.save(tmp_path / "saved")
    write = files.snapshot()
    train(policy, 2)
    write(tmp_path / "written")
    saved, written = (contents(tmp_path / name) for name in ("saved", "written"))
    assert saved == written and Path(STATE_FILE) in saved


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
