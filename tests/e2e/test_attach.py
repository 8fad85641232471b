"""Attach by id from another process: a deployment that outlives a killed loop, a trainer's checkpoints, and a
reference process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import ArgumentError, EngineError, RunLockedError
from shoal.recipes.attach import Server
from shoal.recipes.clients import AdamParams, ForwardOnlyError
from shoal.recipes.config import Config, DeployConfig, InfraConfig, WeightSyncConfig, WeightSyncScope
from shoal.recipes.datums import Datum, PromptGroup, build_grpo_datums
from shoal.recipes.infra import Infra, setup_infra
from shoal.runs.files import find_holder

from .helpers.processes import WarmPython, alive, environment, wait_until

REWARDS = [0.0, 1.0]
LOOP = """
import os, signal, sys
from e2e.test_attach import config, sample, step, write_sample
from shoal.recipes.infra import setup_infra
infra = setup_infra(config(sys.argv[1], sys.argv[2], lora_rank=int(sys.argv[3])))
step(infra)
write_sample(infra, "first.json")
os.kill(os.getpid(), signal.SIGKILL)
"""


def config(model: str, log_path: str, **given: Any) -> Config:
    deployment = DeployConfig(model, WeightSyncScope.PER_DEPLOYMENT, deployment_id="pond")
    shape = {"training_shape_id": "cpu-fp32", "trainer_id": "carp"}
    values = {"log_path": log_path, "base_model": model, "deployment": deployment, "infra": InfraConfig(**shape)}
    saving = WeightSyncConfig(dcp_save_interval=1)
    small = {"max_completion_tokens": 5, "max_seq_len": 64, "tis": None, "weight_sync": saving}
    return Config(**{**values, **small, **given})


def sample(infra: Infra, **sampling: Any) -> list[PromptGroup]:
    return [PromptGroup(asyncio.run(infra.sampler.sample_with_tokens("Shout fish", 2, seed=3, **sampling)), REWARDS)]


def step(infra: Infra) -> None:
    def imitate(_: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(logprobs).mean(), {}

    infra.policy.forward_backward_custom(build_grpo_datums(sample(infra)), imitate)
    infra.policy.optim_step(AdamParams(learning_rate=0.05, weight_decay=0.0))
    asyncio.run(infra.sync_weights())


def write_sample(infra: Infra, file: str) -> None:
    server = infra._deployment
    assert isinstance(server, Server)
    datums = [datum.sample.token_ids.tolist() for datum in build_grpo_datums(sample(infra))]
    logprobs = [values.tolist() for values in infra.policy.forward(build_grpo_datums(sample(infra)))]
    found = {"version": infra.sampler.version, "pid": server.pid, "tokens": datums, "logprobs": logprobs}
    Path(file).write_text(json.dumps(found))


def assert_synced(infra: Infra) -> None:
    """The server samples with the weights of the policy."""
    for datum, values in zip(datums := build_grpo_datums(sample(infra)), infra.policy.forward(datums), strict=True):
        sampler = np.array(datum.sampler_logprobs[1:], dtype=float)
        np.testing.assert_allclose(values[datum.loss_mask], sampler[datum.loss_mask], atol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The log_path. No server is left running below it."""
    yield tmp_path / "run"
    for lock in tmp_path.rglob("infer.lock"):
        if (holder := find_holder(lock.parent, lock.name)) is not None:
            os.kill(holder["pid"], signal.SIGKILL)
            raise AssertionError(f"{lock} is still held")


@pytest.mark.long("starts a loop, kills it, and attaches three times")
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_killed_loop_is_continued_by_another_process(
    warm: WarmPython, raw_model: Path, folder: Path, tmp_path: Path, lora_rank: int
):
    model, tests = str(raw_model), str(Path(__file__).parents[1])
    (tmp_path / "loop.py").write_text(LOOP)
    path = os.pathsep.join([tests, str(Path(tests) / "e2e")])
    env = environment(PYTHONPATH=path, OMP_NUM_THREADS="1")
    killed = warm.start(["loop.py", model, str(folder), str(lora_rank)], tmp_path, env=env, python=True, spares=1)
    assert killed.wait() == -signal.SIGKILL, killed.text()
    first = json.loads((tmp_path / "first.json").read_text())
    assert first["version"] == 1 and alive(first["pid"])
    token = folder / "deployments" / "pond" / "handshake" / "infer.token"
    assert token.stat().st_mode & 0o777 == 0o600

    named = config(model, str(folder), lora_rank=lora_rank)
    with setup_infra(named) as infra:
        assert infra.policy.version == infra.sampler.version == 1
        sample(infra)  # the seed of a sample contains the number of the call
        write_sample(infra, str(tmp_path / "second.json"))
        second = json.loads((tmp_path / "second.json").read_text())
        assert second["pid"] == first["pid"] and second["tokens"] == first["tokens"]
        np.testing.assert_array_equal(np.concatenate(second["logprobs"]), np.concatenate(first["logprobs"]))
        step(infra)
        assert infra.policy.version == infra.sampler.version == 2
        assert_synced(infra)
    assert alive(first["pid"])

    with pytest.raises(ArgumentError, match=r"'pond' is running with infer.max_model_len 64, not 32"):
        setup_infra(replace(named, max_seq_len=32))
    fresh = replace(named, infra=InfraConfig(training_shape_id="cpu-fp32"))
    with setup_infra(fresh) as infra:  # another trainer takes over, at a lower version
        assert infra.sampler.version == 0
        assert_synced(infra)
        with pytest.raises(RunLockedError, match=r"deployment 'pond' is used by another process"):
            Server("deployments", "pond", infra._trainer.run, {})
        infra.close_deployment()
    wait_until(lambda: not alive(first["pid"]), 10, "the end of the server")


def test_reference_can_be_a_process(warm: WarmPython, raw_model: Path, folder: Path, tmp_path: Path):
    """Its log-probs equal those of a frozen copy, also at another temperature."""
    model = str(raw_model)
    keys = {"model": model, "output_dir": str(folder / "trainers" / "ref"), "recipe": "fp32", "sequence_len": 64}
    server = warm.start(
        ["grpo-train", *(f"train.{key}={value}" for key, value in keys.items()), "--forward-only"],
        tmp_path, env=environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    local = InfraConfig("cpu-fp32", "cpu-fp32")
    beside = config(model, str(folder), infra=local, deployment=DeployConfig(model), temperature=0.7)
    apart = replace(beside, infra=replace(local, ref_trainer_id="ref"))
    wait_until(lambda: "serving" in server.text() or not server.running(), 60, "the reference")
    with setup_infra(beside, needs_reference=True) as one, setup_infra(apart, needs_reference=True) as other:
        assert one.reference is not None and other.reference is not None
        step(other)
        datums = build_grpo_datums(sample(other))
        expected = one.reference.forward(datums)
        for ours, theirs in zip(other.reference.forward(datums), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert max(abs(a - b).max() for a, b in zip(other.policy.forward(datums), expected, strict=True)) > 1e-3
        with pytest.raises(ArgumentError, match=r"sampled with top_k, top_p or min_p"):
            other.reference.forward(build_grpo_datums(sample(other, top_k=4)))
        with pytest.raises(ForwardOnlyError):
            other.reference.optim_step(AdamParams())
        server.kill()
        with pytest.raises(EngineError, match=r"the trainer 'ref' has ended"):
            other.reference.forward(datums)
