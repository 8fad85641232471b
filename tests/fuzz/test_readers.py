"""The deterministic part of the fuzzing: mutations of valid files with fixed seeds. `make fuzz` runs the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import ModelError
from shoal.models.load import load_model

from .targets import TARGETS, mutate, seeds

COUNTS = {"journal": 300, "safetensors": 300, "gguf": 25}
SEEDS = seeds()


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_file_raises_storage_error(name: str):
    rng = np.random.Generator(np.random.Philox(key=7))
    for number in range(COUNTS[name]):
        data = mutate(SEEDS[name][number % len(SEEDS[name])], rng)
        try:
            TARGETS[name](data)
        except Exception as error:
            raise AssertionError(f"{name}, mutation {number}: {data[:300]!r}") from error


@pytest.mark.parametrize("name", TARGETS)
def test_undamaged_files_can_be_read(name: str):
    for data in SEEDS[name]:
        TARGETS[name](data)


def test_gguf_file_without_all_tensors_is_refused(tmp_path: Path):
    """transformers would initialise them with random numbers."""
    (tmp_path / "part.gguf").write_bytes(SEEDS["gguf"][0])
    with pytest.raises(ModelError, match="lacks"):
        load_model(str(tmp_path / "part.gguf"), torch.float32, torch.device("cpu"))
