"""GGUF files are converted once: the second load is equal, damaged entries are converted again, several runs may
start.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from shoal.models.gguf import cache_folder
from shoal.models.load import load_model

WIDTH, HIDDEN, VOCAB = 32, 64, 48


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Llama in fp16, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    draw = np.random.default_rng(0)
    shapes = {f"attn_{kind}": (WIDTH, WIDTH) for kind in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH), "ffn_down": (WIDTH, HIDDEN)}
    tensors = {f"blk.0.{name}.weight": draw.normal(0, 0.1, shape) for name, shape in shapes.items()}
    norms = ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
    tensors |= {name: np.ones(WIDTH) for name in norms}
    tensors |= {name: draw.normal(0, 0.1, (VOCAB, WIDTH)) for name in ("token_embd.weight", "output.weight")}
    for name, values in tensors.items():
        writer.add_tensor(name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_model(str(path), dtype, torch.device("cpu")).state_dict()


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def entries() -> list[str]:
    return sorted(path.name for path in cache_folder().iterdir())


def test_second_load_reads_the_conversion(file: Path) -> None:
    first = load(file)
    (entry,) = entries()
    marked = (cache_folder() / entry / "model.safetensors").stat().st_mtime_ns
    assert_equal(load(file), first)
    assert (cache_folder() / entry / "model.safetensors").stat().st_mtime_ns == marked
    assert next(iter(load(file, torch.bfloat16).values())).dtype == torch.bfloat16
    assert len(entries()) == 2, "one per dtype"
    file.write_bytes(file.read_bytes() + bytes(32))
    load(file)
    assert len(entries()) == 3, "another file has another digest"


@pytest.mark.parametrize("how", ["flipped", "short", "missing", "no digests"])
def test_damaged_cache_entry_is_converted_again(file: Path, how: str) -> None:
    first = load(file)
    (entry,) = entries()
    weights = cache_folder() / entry / "model.safetensors"
    if how == "flipped":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif how == "short":
        weights.write_bytes(weights.read_bytes()[:-4])
    else:
        (weights if how == "missing" else weights.with_name("digests.json")).unlink()
    assert_equal(load(file), first)
    assert entries() == [entry]


def test_runs_that_start_together(file: Path) -> None:
    workers = [multiprocessing.get_context("fork").Process(target=load, args=(file,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(entries()) == 1, "no leftovers"
    load(file)


def test_unwritable_cache_is_not_an_error(file: Path) -> None:
    cache_folder().parent.mkdir(parents=True)
    cache_folder().write_text("a file where the folder should be")
    assert load(file)
