"""Sharded weights on a CUDA device over NCCL with one process: the same code and collectives as for several.

test_ranks.py tests several ranks over gloo. This file tests the backend, the kernels and the graphs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from shoal.models import fused
from shoal.models.decoder import Decoder
from shoal.models.sampler_view import SamplerView
from shoal.models.sharded import ShardedDecoder
from shoal.trainer.policy import TrainedPolicy
from shoal.trainer.process_ranks import ProcessRanks
from support.commands import run_within
from support.engines import ask, make_engine, run
from support.models import TOKENIZER, as_decoder, lora_decoder, random_prompts, small_model
from support.training import grpo, make_policy, pack, random_samples

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPES = ((3, 40), (90, 20), (1, 70), (12, 1), (30, 64))
ROOT = Path(__file__).parents[2]
START_S = 90.0  # three of them end before pytest's own limit
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=1")


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    ranks = ProcessRanks(120.0, 1, DEVICE)
    yield ranks
    ranks.close()
    torch.set_float32_matmul_precision(precision)


def on_device(kind: str, dtype: torch.dtype) -> Decoder:
    model = lora_decoder(dtype=dtype).model if kind == "lora" else small_model(kind, dtype=dtype)
    decoder = as_decoder(model.to(DEVICE)) if kind != "lora" else Decoder(model.to(DEVICE))
    fused.attach(decoder, decoder.verify())
    return decoder


def gradient(policy: TrainedPolicy) -> Tensor:
    for row in pack(random_samples(2, *SHAPES), 130).rows:
        policy.forward_backward([row], grpo())
    policy.forward_backward([], grpo())  # a rank without a row adds nothing
    grads: list[Any] = [master.grad for master in policy.optimizer.masters.values()]
    whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    return torch.cat([grad.flatten().double().cpu() for grad in whole])


def test_backend_is_nccl(ranks: ProcessRanks) -> None:
    assert ranks.mesh.device_type == "cuda"
    assert "cuda:nccl" in torch.distributed.get_backend_config()


@pytest.mark.parametrize("recompute", (False, True), ids=("kept", "recomputed"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("kind", ("qwen3", "llama-tied", "gemma2", "lora"))
def test_gradient_is_that_of_whole_weights(ranks: ProcessRanks, kind: str, dtype: torch.dtype, recompute: bool) -> None:
    """fp32 to rounding. In bf16, shards keep fp32 gradients, while full weights round theirs."""
    plain, sharded = on_device(kind, dtype), ShardedDecoder(on_device(kind, dtype), ranks.mesh)
    assert (sharded.fused is None) == (plain.fused is None) and sharded.dtype == dtype
    plain.recompute(recompute)
    sharded.recompute(recompute)
    expected, found = gradient(make_policy(plain)), gradient(make_policy(sharded))
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert (found - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("kind", ("qwen3", "lora"))
def test_graphs_read_gathered_weights(ranks: ProcessRanks, kind: str) -> None:
    """Captured once over the full copy. After optimizer steps on the shards, graphs sample with the new weights."""
    whole = on_device(kind, torch.float32)
    sharded = ShardedDecoder(whole, ranks.mesh)
    policy = make_policy(sharded)
    view = SamplerView.of_shards(sharded, whole, ranks.gather_full)
    view.refresh(0)
    requests = [ask(f"{i}", prompt, seed=i, max_tokens=24) for i, prompt in enumerate(random_prompts(7, 5, 60))]
    engine = make_engine(whole, view, slots=16, context_tokens=192, graphs=DEVICE == "cuda")
    before = run(engine, requests)
    places = [parameter.data_ptr() for parameter in whole.model.parameters()]
    for version in (1, 2):
        policy.forward_backward(pack(random_samples(4, *SHAPES)).rows, grpo())
        policy.optim_step()
        view.refresh(version)
    assert [parameter.data_ptr() for parameter in whole.model.parameters()] == places
    after = run(engine, requests)
    fresh = run(make_engine(whole, view, slots=16, context_tokens=192, graphs=False), requests)
    for name, answer in after.items():
        assert answer.token_ids == fresh[name].token_ids
        np.testing.assert_allclose(answer.logprobs, fresh[name].logprobs, rtol=0, atol=1e-4)
        assert answer.logprobs != before[name].logprobs
    rows = pack(random_samples(4, *SHAPES)).rows
    for ours, theirs in zip(
        policy.logprobs(rows).read()[1], make_policy_of(whole).logprobs(rows).read()[1], strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def make_policy_of(whole: Decoder) -> TrainedPolicy:
    """Only reads. The full copy has no gradients afterwards."""
    whole.model.requires_grad_(True)
    return make_policy(whole)


def config(model: Path, sharding: str) -> dict[str, Any]:
    return {
        "train": {
            "model": str(model), "output_dir": f"out-{sharding}", "device": DEVICE, "sharding": sharding,
            "max_steps": 3, "learning_rate": 1e-4, "sequence_len": 128, "save_steps": 2,
            "loss": {"type": "grpo", "kl": {"beta": 0.01}},
        },
        "orch": {
            "env": [{"id": "reverse-text", "args": {"system_prompt": "Reverse.", "min_len": 3, "max_len": 6}}],
            "batch_size": 16, "rollouts_per_example": 4, "sampling": {"max_tokens": 16},
            "reward": {"function": "my_code:digits"}, "deadline_s": 80,
        },
    }  # fmt: skip


def shoal(folder: Path, model: Path, sharding: str, *arguments: str, launcher: Sequence[str] = ()) -> str:
    """Run `shoal grpo`. Most of the time is the import of torch and the compilation of kernels."""
    file = folder / f"{sharding}.yaml"
    file.write_text(yaml.safe_dump(config(model, sharding)))
    code = ROOT / "tests" / "e2e" / "helpers" / "user_code"
    path = os.pathsep.join([str(ROOT / "src"), str(code), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, *launcher, "-m", "shoal", "grpo", str(file), *arguments]
    return run_within(START_S, command, folder, {**os.environ, "PYTHONPATH": path})


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_run_under_torchrun(tmp_path: Path) -> None:
    """Three steps with shards and with full weights: the same first rollouts. Then two more steps from the checkpoint.

    torchrun starts the first run. One process needs no launcher, so the other two start directly.
    """
    model = tmp_path / "model"
    small_model("qwen3").save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    said = shoal(tmp_path, model, "fsdp", launcher=TORCHRUN)
    shoal(tmp_path, model, "none")
    if DEVICE == "cuda":
        assert "graph" in said, said[-3000:]  # the decoding path as text
    ours, theirs = (lines(tmp_path / f"out-{name}" / "metrics.jsonl") for name in ("fsdp", "none"))
    first, other = (next(line for line in run if line["step"] == 1) for run in (ours, theirs))
    assert first["reward/mean"] == other["reward/mean"]
    assert first["policy/entropy"] == pytest.approx(other["policy/entropy"], rel=1e-2)
    assert first["optim/grad_norm"] == pytest.approx(other["optim/grad_norm"], rel=5e-2)
    assert all(line["mismatch/k3"] < 1e-2 for line in ours if line["step"] > 0)
    shoal(tmp_path, model, "fsdp", "--resume", "train.max_steps=5")
    assert [line["step"] for line in lines(tmp_path / "out-fsdp" / "journal.jsonl")] == [1, 2, 3, 4, 5]
    assert list((tmp_path / "out-fsdp" / "checkpoints" / "step_000005" / "shards").glob("*.safetensors"))
    assert (tmp_path / "out-fsdp" / "final" / "model.safetensors").is_file()
