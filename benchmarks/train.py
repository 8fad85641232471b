"""Packed training: 64 sequences of 384 tokens in one row, forward and backward, then the optimizer apart.

    python benchmarks/train.py OUT.json [--shape qwen2.5-0.5b] [--sequences 64] [--length 384] [--smoke]

Every token but the first of a sequence is in the loss, so 6·N operations a token, N all parameters, is what there is to
do; `fraction` is that over the measured bf16 rate, which is the MFU. Adapters need 4·N, for the base has no gradient.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from limits import Rates
from machine import print_table, write_result
from workload import TINY, begin, free, load, parser, peak_gib, reset_peak, wait

from shoal.algorithms.losses import LOSSES
from shoal.algorithms.objective import Objective
from shoal.batching.pack import make_batches
from shoal.models.decoder import Decoder
from shoal.models.lora import LoraSettings, trained_parameters
from shoal.trainer.optimizer import AdamSettings, MasterAdamW
from shoal.trainer.policy import TrainedPolicy
from shoal.trainer.schedule import Schedule
from shoal.types import Row, Sample

WARM_UP, REPEATS = 2, 5


@dataclass(frozen=True)
class Variant:
    name: str
    lora_rank: int | None = None
    recompute: bool = False


VARIANTS = [Variant("full"), Variant("full, recompute", recompute=True), Variant("LoRA r16", lora_rank=16)]


def one_row(sequences: int, length: int, vocabulary: int) -> Row:
    """Random tokens with the log-probs a model of random weights gives them, so that ratios stay near 1."""
    rng = np.random.default_rng(0)
    mask = np.arange(length) > 0
    ones = np.ones(length, dtype=np.float32)
    logprob = np.float32(-np.log(vocabulary))
    samples = [
        [
            Sample(
                rollout_id=f"random/{i // 8}/0/0/{i}",
                group_id=f"random/{i // 8}/0/0",
                token_ids=rng.integers(0, vocabulary, length),
                loss_mask=mask,
                sampler_logprobs=np.where(mask, logprob, 0).astype(np.float32),
                temperatures=ones,
                advantages=ones * np.float32(rng.normal()),
            )
        ]
        for i in range(sequences)
    ]
    (batch,) = make_batches(samples, token_budget=sequences * length, aggregation="token-mean", max_tokens=length)
    (row,) = batch.rows
    return row


def make_policy(decoder: Decoder) -> TrainedPolicy:
    optimizer = MasterAdamW(trained_parameters(decoder.model), AdamSettings())
    return TrainedPolicy(decoder, optimizer, Schedule(1e-6, 1000))


def timed(policy: TrainedPolicy, row: Row) -> tuple[list[float], list[float]]:
    """Seconds of forward and backward, and of the optimizer step, each run."""
    objective = Objective(LOSSES["grpo"]())
    forward_backward, optimizer = [], []
    for number in range(WARM_UP + REPEATS):
        if number == WARM_UP:
            reset_peak()
        wait()
        start = time.perf_counter()
        policy.forward_backward([row], objective)
        wait()
        middle = time.perf_counter()
        policy.optim_step()
        wait()
        forward_backward.append(middle - start)
        optimizer.append(time.perf_counter() - middle)
    return forward_backward[WARM_UP:], optimizer[WARM_UP:]


def measure(shape: str, variant: Variant, size: tuple[int, int], rates: Rates) -> dict[str, Any]:
    loaded = load(shape, LoraSettings(variant.lora_rank) if variant.lora_rank else None)
    loaded.decoder.recompute(variant.recompute)
    policy = make_policy(loaded.decoder)
    row = one_row(*size, loaded.decoder.vocab_size)
    forward_backward, optimizer = timed(policy, row)
    seconds, step_s = statistics.median(forward_backward), statistics.median(optimizer)
    trained = sum(p.numel() for p in policy.optimizer.parameters.values())
    adapters = trained if variant.lora_rank else 0
    work = loaded.shape.train(row.tokens, adapters)
    return {
        "name": variant.name,
        "shape": shape,
        "path": loaded.path,
        "tokens": row.tokens,
        "parameters": loaded.shape.parameters,
        "trained_parameters": trained,
        "tokens_per_s": row.tokens / seconds,
        **work.limits(rates, row.tokens, row.tokens / seconds),
        "bytes": work.bytes,
        "operations": work.operations,
        "seconds": seconds,
        "all_seconds": forward_backward,
        "optimizer_s": step_s,
        "optimizer_fraction": loaded.shape.optimizer_bytes(trained) / rates.bytes_per_s / step_s,
        "tokens_per_s_with_optimizer": row.tokens / (seconds + step_s),
        "memory_gib": peak_gib(),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shape", default="qwen2.5-0.5b")
    made.add_argument("--sequences", type=int, default=64)
    made.add_argument("--length", type=int, default=384)
    asked = made.parse_args()
    rates, result = begin(asked.smoke)
    shape, size = (TINY, (8, 16)) if asked.smoke else (asked.shape, (asked.sequences, asked.length))
    result |= {"sequences": size[0], "length": size[1]}
    for variant in VARIANTS:
        result["rows"].append(measure(shape, variant, size, rates))
        write_result(asked.out, result)
        free()
    columns = ["name", "tokens_per_s", "limit_operations", "fraction", "seconds", "optimizer_s", "optimizer_fraction",
               "memory_gib"]  # fmt: skip
    print_table("training", result["rows"], columns)


if __name__ == "__main__":
    main()
