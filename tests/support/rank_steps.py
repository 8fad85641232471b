"""`rank_steps.py FOLDER WORLD=PORT …` forks the ranks of each world, which take the same step on the same groups.

Rank 0 writes the result with full tensors: the gradient of every parameter, the norm before clipping, and the weights
afterwards. Then it saves, and continues from the checkpoint of a world of another size.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from shoal.core.learn import Learner, LearnSettings
from shoal.core.losses import LOSSES
from shoal.core.metrics import Tally
from shoal.core.objective import Objective
from shoal.core.terms import KLPenalty
from shoal.core.types import Completion, Prompt, Rollout, RolloutGroup, Span, Turn
from shoal.models import lora
from shoal.models.decoder import Decoder
from shoal.models.sharded import ShardedDecoder
from shoal.runs.run_dir import SHARDS
from shoal.signals.advantages import AdvantageNormalizer
from shoal.trainer.checkpoint import load_state, save_shards, save_state
from shoal.trainer.optimizer import AdamSettings, MasterAdamW, Schedule
from shoal.trainer.policy import Reference, TrainedPolicy
from shoal.trainer.process_ranks import ProcessRanks
from support.models import VOCABULARY, lora_decoder, small_decoder

# Prompt and completion lengths. Two minibatches of five and three rows of different lengths: of four ranks, one
# has two rows in the first minibatch and none in the second.
GROUPS = [(5, (9, 3)), (7, (4, 2)), (16, (13, 1)), (11, (2, 7)), (14, (9, 15)), (3, (26, 8))]
CASES = ("qwen2", "llama-tied", "qwen3-lora")
SAVED = ("llama-tied", "qwen3-lora")
# Which world saved, and which one continues: with which weights, and how many ranks.
RESTARTS = [
    ("fsdp-2", "fsdp", 1),
    ("fsdp-2", "none", 1),
    ("fsdp-2", "fsdp", 4),
    ("fsdp-1", "fsdp", 2),
    ("none-1", "fsdp", 2),
]
LIMIT_S = 200.0


class NotedAdamW(MasterAdamW):
    """Keeps the gradient and its norm before clipping."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noted: dict[str, torch.Tensor] = {}

    def clip(self, max_norm: float) -> torch.Tensor:
        number = sum(name.startswith("norm/") for name in self.noted)
        for name, master in self.masters.items():
            assert master.grad is not None, name
            self.noted[f"{number}/{name}"] = master.grad.detach().clone()
        norm = super().clip(max_norm)
        self.noted[f"norm/{number}"] = norm.double()
        return norm


def make_groups() -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    groups = []
    for index, (prompt, completions) in enumerate(GROUPS):
        ids = rng.integers(3, VOCABULARY, prompt).tolist()
        rollouts = []
        for number, length in enumerate(completions):
            drawn, logprobs = rng.integers(3, VOCABULARY, length).tolist(), (-4 + rng.normal(size=length)).tolist()
            completion = Completion("r", drawn, logprobs, [Span(0, length, 0)], "stop")
            rollouts.append(
                Rollout(Prompt("env", index, []), number, [Turn(ids, completion, 1.0)], reward=rng.normal())
            )
        groups.append(RolloutGroup(Prompt("env", index, []), rollouts))
    return groups


def make_policy(case: str, sharded: bool, ranks: ProcessRanks) -> TrainedPolicy:
    name, kind, _ = case.partition("-lora")
    # Adapters of rank 2: of four ranks, two have no part of a matrix that is sharded over its rank.
    whole = lora_decoder(name, 0, torch.float64, rank=2) if kind else small_decoder(name, 0, torch.float64)
    decoder: Decoder = ShardedDecoder(whole, ranks.mesh) if sharded else whole
    optimizer = NotedAdamW(lora.trained_parameters(decoder.model), AdamSettings())
    if kind:
        wrapped: Any = decoder.model
        reference = Reference(decoder, lambda: lora.as_reference(wrapped))
    else:
        other = small_decoder(name, 1, torch.float64)
        reference = Reference(ShardedDecoder(other, ranks.mesh, frozen=True) if sharded else other)
    summing = None if sharded else ranks.sum_gradients
    return TrainedPolicy(decoder, optimizer, Schedule(1e-2, 10), 0.1, reference, summing)


async def here(work: Any, *arguments: Any) -> Any:
    return work(*arguments)


def make_learner(policy: TrainedPolicy, ranks: ProcessRanks) -> Learner:
    settings = LearnSettings(
        token_budget=30,
        aggregation="token-mean",
        max_tokens=32,
        minibatches=2,
        recompute_old=True,
        needs_reference=True,
    )
    objective = Objective(LOSSES["grpo"](kl=KLPenalty(beta=0.1)))
    return Learner(policy, AdvantageNormalizer(), objective, settings, here, ranks)


def take_step(policy: TrainedPolicy, ranks: ProcessRanks) -> dict[str, torch.Tensor]:
    tally = Tally()
    learned = asyncio.run(make_learner(policy, ranks).learn(make_groups(), tally))
    optimizer: Any = policy.optimizer
    found = {
        **optimizer.noted,
        **{f"weights/{name}": p.detach() for name, p in policy.decoder.model.named_parameters()},
    }
    found |= {f"logprobs/{name}": torch.tensor(values) for name, values in learned.policy_logprobs.items()}
    for name in ("policy/loss", "policy/entropy", "policy/kl_ref", "mismatch/k3"):
        found[f"metric/{name}"] = torch.tensor(tally.reduce()[name], dtype=torch.float64)
    return found


def write(file: Path, tensors: dict[str, torch.Tensor], ranks: ProcessRanks) -> None:
    whole = {name: ranks.gather_full(tensor).contiguous().clone() for name, tensor in tensors.items()}
    if ranks.rank == 0:
        save_file(whole, file)


def save(policy: TrainedPolicy, folder: Path, ranks: ProcessRanks) -> None:
    """As the loop does it: all ranks write their shards, then rank 0 writes the rest."""
    folder.mkdir(exist_ok=True)
    if policy.passes_together:
        save_shards(policy, folder / SHARDS, ranks.cpu_group)
    if ranks.rank == 0:
        save_state(policy, folder)


def load_saved(folder: Path, saved: str, sharding: str, ranks: ProcessRanks) -> None:
    """A new policy continues from the checkpoint of another world, once it exists."""
    deadline = time.monotonic() + LIMIT_S
    while not (folder / f"{saved}.done").exists():
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {saved}"
        time.sleep(0.1)
    policy = make_policy(saved.rsplit("-", 2)[0], sharding == "fsdp", ranks)
    load_state(policy, folder / saved)
    assert policy.optimizer_steps == 2
    write(folder / f"{saved}-to-{sharding}-{ranks.world}.safetensors", policy.optimizer.state(), ranks)


def main(folder: Path) -> None:
    ranks = ProcessRanks(LIMIT_S, 2, "cpu")
    for case in CASES:
        for sharding in ("none", "fsdp"):
            policy = make_policy(case, sharding == "fsdp", ranks)
            name = f"{case}-{sharding}-{ranks.world}"
            write(folder / f"{name}.safetensors", take_step(policy, ranks), ranks)
            if case in SAVED:
                save(policy, folder / name, ranks)
                write(folder / f"{name}-state.safetensors", policy.optimizer.state(), ranks)
                if ranks.rank == 0:
                    (folder / f"{name}.done").touch()
    for case in SAVED:
        for saved, sharding, world in RESTARTS:
            if world == ranks.world:
                load_saved(folder, f"{case}-{saved}", sharding, ranks)
    ranks.close()


def start_rank(folder: Path, rank: int, world: int, port: str) -> int:
    """The process of one rank, with the variables of a launcher and the modules that this process imported."""
    pid = os.fork()
    if pid != 0:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    code = 1
    try:
        main(folder)
        code = 0
    except BaseException:
        print(f"rank {rank} of {world}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    worlds = [word.split("=") for word in sys.argv[2:]]
    pids = [
        start_rank(Path(sys.argv[1]), rank, int(world), port) for world, port in worlds for rank in range(int(world))
    ]
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(any(codes))
