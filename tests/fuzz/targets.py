"""The readers of files from outside, as functions of the file's bytes.

Each target accepts any bytes: the reader returns or raises a ShoalError. Used by run.py (atheris) and test_readers.py.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from shoal.core.errors import ShoalError
from shoal.models.served_weights import FolderWeights
from shoal.models.tokenizer import load_tokenizer
from shoal.rollout.remote.norm_noise import write_noisy_norms
from shoal.runs.history import HISTORY, restore_history
from shoal.runs.journal import LineWriter, damaged_lines, encode_line, read_lines
from shoal.runs.run_dir import read_status
from shoal.runs.weight_files import describe

LARGE = (0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**64 - 1)
CUT = 3  # the step to which the journal is truncated


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="shoal-fuzz-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def journal(data: bytes) -> None:
    with _folder() as folder:
        path, copy = folder / "journal.jsonl", folder / HISTORY / "journal.jsonl"
        path.write_bytes(data)
        copy.parent.mkdir()
        records, damaged = list(read_lines(path)), damaged_lines(path)
        assert len(records) + len(damaged) == data.count(b"\n")
        writer = LineWriter(path)
        writer.cut_to(CUT)
        assert all(record.get("step", 0) <= CUT for record in read_lines(path))
        restore_history(writer, folder, CUT)  # without a copy
        assert path.read_bytes().count(b"\n") == len(list(read_lines(path)))
        stored = b"".join(encode_line({"step": step}) for step in range(1, CUT + 1))
        copy.write_bytes(stored)
        restore_history(writer, folder, CUT)
        assert path.read_bytes() == stored
        writer.close()
        (folder / "status.json").write_bytes(data)
        with contextlib.suppress(ShoalError):
            read_status(folder)


def safetensors(data: bytes) -> None:
    with _folder() as folder:
        (folder / "model.safetensors").write_bytes(data)
        (folder / "config.json").write_text('{"rms_norm_eps": 1e-6}')
        with contextlib.suppress(ShoalError):
            weights = FolderWeights(describe(folder, 1, "full"))
            for name in weights.shapes:
                weights.tensor(name)
            weights.close()
        with contextlib.suppress(ShoalError):
            write_noisy_norms(folder, folder / "noisy", 0.1, 1, 1)


def gguf(data: bytes) -> None:
    """Metadata and tokenizer only: with another number of layers, a file is valid but does not fit into memory."""
    with _folder() as folder:
        file = folder / "model.gguf"
        file.write_bytes(data)
        with contextlib.suppress(ShoalError):
            load_tokenizer(str(file))


TARGETS: dict[str, Callable[[bytes], None]] = {"journal": journal, "safetensors": safetensors, "gguf": gguf}


def seeds() -> dict[str, list[bytes]]:
    """Valid files as starting points for mutations."""
    lines = [{"step": step, "version": step, "rollout_ids": [f"sums/{step}/0/0/1"]} for step in range(1, 6)]
    status = {"state": "running", "run_id": "a", "binding": {"model": "m"}}
    journals = [b"".join(map(encode_line, lines)), json.dumps(status).encode(), b'{"step": 2}\n{"step": "3"}\n[1]\n']
    return {"journal": journals, "safetensors": [_safetensors()], "gguf": [_gguf()]}


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """One to four changes: flipped bits, other bytes, a truncation, a repeated part, a large number."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, len(changed) + 1))
        kind = int(rng.integers(0, 5))
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            changed[at : at + int(rng.integers(0, 8))] = rng.bytes(int(rng.integers(0, 8)))
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed[at:at] = changed[max(0, at - int(rng.integers(1, 40))) : at]
        else:
            number = LARGE[int(rng.integers(len(LARGE)))]
            changed[at : at + 8] = struct.pack("<Q", number)
    return bytes(changed)


def _safetensors() -> bytes:
    content = np.ones(4, np.float32).tobytes()
    names = ("model.layers.0.input_layernorm.weight", "model.norm.weight")
    header = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * (i + 1)]} for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content * len(names)


def _gguf() -> bytes:
    from gguf import GGUFWriter

    with _folder() as folder:
        file = folder / "tiny.gguf"
        writer = GGUFWriter(str(file), "llama")
        writer.add_block_count(1)
        writer.add_context_length(32)
        writer.add_embedding_length(8)
        writer.add_feed_forward_length(16)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "ab", "<|end|>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)
        writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
        writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
        writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file.read_bytes()
