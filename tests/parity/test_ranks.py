"""One step on one batch is the same step for 1, 2 and 4 ranks, with full and with sharded weights, in float64.

Real processes over gloo. The batch has rows of different lengths: two for the first optimizer step and five for the
second, so that some ranks have no row and one has more than the others. Checkpoints load with another number of ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.commands import run_within
from support.ports import free_port
from support.rank_steps import CASES, RESTARTS, SAVED

SUPPORT = Path(__file__).parents[1] / "support"
WORLDS = (1, 2, 4)
LIMIT_S = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All ranks take their steps at the same time. Each writes one file per case."""
    folder = tmp_path_factory.mktemp("steps")
    path = os.pathsep.join([str(SUPPORT.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    worlds = [f"{world}={free_port()}" for world in WORLDS]
    run_within(LIMIT_S, [sys.executable, str(SUPPORT / "rank_steps.py"), str(folder), *worlds], folder, env)
    return folder


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("sharding", ("none", "fsdp"))
@pytest.mark.parametrize("case", CASES)
def test_step_is_unchanged(folder: Path, case: str, sharding: str, world: int):
    one = load_file(folder / f"{case}-none-1.safetensors")
    found = load_file(folder / f"{case}-{sharding}-{world}.safetensors")
    assert found.keys() == one.keys()
    for name, expected in one.items():
        # Sums in another order differ in their last digits. The tolerance of a small entry depends on the large ones.
        largest = expected.abs().max().item()
        torch.testing.assert_close(
            found[name], expected, rtol=1e-12, atol=1e-12 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", CASES)
def test_step_is_identical(folder: Path, case: str):
    """Two clipped optimizer steps with gradients in all weights, which change every trained weight."""
    found = load_file(folder / f"{case}-fsdp-4.safetensors")
    trained = [name.removeprefix("0/") for name in found if name.startswith("0/")]
    assert len(trained) == sum(name.startswith("1/") for name in found) > 10
    assert all(found[f"{number}/{name}"].abs().sum() > 0 for number in (0, 1) for name in trained)
    for number in (0, 1):
        squares = sum((found[f"{number}/{name}"] ** 2).sum() for name in trained)
        assert found[f"norm/{number}"].item() == pytest.approx(float(squares) ** 0.5, rel=1e-12)
        assert found[f"norm/{number}"] > 0.1  # the clipping limit


@pytest.mark.parametrize(("saved", "sharding", "world"), RESTARTS)
@pytest.mark.parametrize("case", SAVED)
def test_checkpoint_loads_with_another_number_of_ranks(folder: Path, case: str, saved: str, sharding: str, world: int):
    written = load_file(folder / f"{case}-{saved}-state.safetensors")
    loaded = load_file(folder / f"{case}-{saved}-to-{sharding}-{world}.safetensors")
    assert loaded.keys() == written.keys()
    assert {name.split("/")[0] for name in written} == {"master", "step", "exp_avg", "exp_avg_sq"}
    for name, tensor in written.items():
        assert torch.equal(loaded[name], tensor), name


def test_every_rank_writes_its_own_shards_and_no_pickle(folder: Path):
    """Two ranks hold half of everything each."""
    files = sorted((folder / "llama-tied-fsdp-2" / "shards").iterdir())
    assert len(files) == 2 and all(file.suffix == ".safetensors" for file in files)
    whole = (folder / "llama-tied-fsdp-2-state.safetensors").stat().st_size
    assert all(0.45 < file.stat().st_size / whole < 0.6 for file in files)
