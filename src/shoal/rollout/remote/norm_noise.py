"""QeRL noise for servers that read weights from a folder: writes the norm tensors with noise as safetensors.

Uses NumPy, so the process that controls a server needs no torch. The noise depends on (seed, version, tensor name). It
has the distribution of the embedded engine's noise, but not the same values.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from shoal.core.errors import ConfigError

PER_HEAD = ("q_norm", "k_norm")
WEIGHTS_FILE = "model.safetensors"
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@asynccontextmanager
async def noisy_norms(model: Path, scratch: Path, noise: tuple[float, int], version: int) -> AsyncIterator[Path]:
    """A temporary folder in `scratch` with only the norms; `noise` is (sigma, seed)."""
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".norms-", dir=scratch))
    try:
        await asyncio.to_thread(write_noisy_norms, model, folder, *noise, version)
        yield folder.resolve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_noisy_norms(model: Path, target: Path, sigma: float, seed: int, version: int) -> list[str]:
    """Write the input, post-attention and final norms of `model` with noise; returns their names.

    With sigma 0 they are unchanged, which removes earlier noise.
    """
    config = model / "config.json"
    if not config.is_file() or "rms_norm_eps" not in config.read_text("utf-8"):
        raise ConfigError(
            f"train.noise_scheduler: {model} has no RMSNorm to put noise on; turn the noise off, "
            "or use infer.engine embedded"
        )
    tensors = dict(_norms(model))
    if not tensors:
        raise ConfigError(f"train.noise_scheduler: no norm tensors in the *.safetensors of {model}; turn the noise off")
    target.mkdir(parents=True, exist_ok=True)
    noisy = {}
    for name, (dtype, values) in tensors.items():
        noise = sigma * normal(seed, version, name, values.shape) if sigma > 0 else 0.0
        noisy[name] = (dtype, (values.astype(np.float32) + noise).astype(np.float32))
    _write(target / WEIGHTS_FILE, noisy)
    (target / "config.json").write_bytes(config.read_bytes())
    return sorted(noisy)


def applied_sigma(model: Path, noisy: Path) -> float:
    """Standard deviation of the noise that is left in `noisy` after rounding to the precision of the files."""
    clean = dict(_norms(model))
    apart = [values.astype(np.float64) - clean[name][1] for name, (_, values) in _norms(noisy)]
    return float(np.sqrt(np.mean(np.concatenate([values.ravel() for values in apart]) ** 2)))


def normal(seed: int, version: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed}/{version}/{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).standard_normal(shape)


def is_noisy_norm(name: str, dimensions: int) -> bool:
    """The same choice as models.sampler_view.noisy_norms: every RMSNorm except those inside a head."""
    parts = name.split(".")
    owner = parts[-2] if len(parts) > 1 else ""
    return parts[-1] == "weight" and dimensions == 1 and "norm" in owner.lower() and owner not in PER_HEAD


def _norms(model: Path) -> Iterator[tuple[str, tuple[str, np.ndarray]]]:
    for path in sorted(model.glob("*.safetensors")):
        try:
            yield from _norms_of(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise ConfigError(f"train.noise_scheduler: {path} cannot be read as safetensors: {error}") from error


def _norms_of(path: Path) -> Iterator[tuple[str, tuple[str, np.ndarray]]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size:
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(length))
        for name, about in header.items():
            if name == "__metadata__" or not is_noisy_norm(name, len(about["shape"])):
                continue
            start, end = about["data_offsets"]
            if not 0 <= start <= end <= size:
                raise ValueError(f"the tensor {name} is outside the file")
            file.seek(8 + length + start)
            values = _decode(about["dtype"], file.read(end - start), name)
            yield name, (about["dtype"], values.reshape(about["shape"]))


def _decode(dtype: str, content: bytes, name: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype not in _NUMPY:
        raise ConfigError(
            f"train.noise_scheduler: norm {name} is stored as {dtype}, which does not support noise; turn it off"
        )
    return np.frombuffer(content, _NUMPY[dtype])


def _encode(dtype: str, values: np.ndarray) -> bytes:
    if dtype != "BF16":
        return np.ascontiguousarray(values, _NUMPY[dtype]).tobytes()
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
    return (rounded >> 16).astype("<u2").tobytes()


def _write(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    header, parts, offset = {}, [], 0
    for name, (dtype, values) in tensors.items():
        content = _encode(dtype, values)
        header[name] = {
            "dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + len(content)]
        }  # fmt: skip
        parts.append(content)
        offset += len(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
