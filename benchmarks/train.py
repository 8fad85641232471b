"""Packed training: 64 sequences of 384 tokens in one row, forward and backward, then the optimizer apart.

    python benchmarks/train.py OUT.json [--shape …] [--sequences 64] [--length 384] [--modules] [--only …] [--smoke]

Every token but the first of a sequence is in the loss, so 6·N operations a token, N all parameters, is what there is to
do; `fraction` is that over the measured bf16 rate, which is the MFU. Adapters need 4·N, for the base has no gradient.
--modules adds the model's own modules, as they are and with torch.compile on each layer, whose first step compiles.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from limits import Rates
from machine import print_table, write_result
from workload import TINY, begin, free, load, parser, peak_gib, reset_peak, wait

from shoal.core.batching import Packing, make_batches
from shoal.core.losses import LOSSES
from shoal.core.objective import Objective
from shoal.core.types import Row, Sample
from shoal.models import attention, fused
from shoal.models.decoder import Decoder
from shoal.models.lora import LoraSettings, trained_parameters
from shoal.trainer.optimizer import AdamSettings, MasterAdamW, Schedule
from shoal.trainer.policy import TrainedPolicy

WARM_UP, REPEATS = 2, 5


@dataclass(frozen=True)
class Variant:
    name: str
    lora_rank: int | None = None
    recompute: bool = False
    own_modules: bool = False
    compiled: bool = False


VARIANTS = [Variant("full"), Variant("full, recompute", recompute=True), Variant("LoRA r16", lora_rank=16)]
MODULES = [
    Variant("full, its own modules", own_modules=True),
    Variant("full, its own modules compiled", own_modules=True, compiled=True),
    Variant("full, few kernels compiled", compiled=True),
]


def one_row(sequences: int, length: int, vocabulary: int) -> Row:
    """Random tokens with the log-probs of a model with random weights, so that ratios stay near 1."""
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
    (batch,) = make_batches(samples, Packing(sequences * length, "token-mean", length, 1, False))
    (row,) = batch.rows
    return row


def make_policy(decoder: Decoder) -> TrainedPolicy:
    optimizer = MasterAdamW(trained_parameters(decoder.model), AdamSettings())
    return TrainedPolicy(decoder, optimizer, Schedule(1e-6, 1000))


def prepare(decoder: Decoder, variant: Variant) -> None:
    decoder.recompute(variant.recompute)
    if variant.compiled:
        # The layout of a micro-batch is computed once, in the first layer, with NumPy.
        attention.upload = torch.compiler.disable(attention.upload)
        # Layers differ by their index only, which must not trigger a compilation.
        torch._dynamo.config.allow_unspec_int_on_nn_module = True  # type: ignore[attr-defined]
        torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
    if variant.own_modules:
        decoder.fused = None
        if variant.compiled:
            for layer in decoder.body.layers:  # type: ignore[union-attr]
                layer.compile()
    elif variant.compiled:
        fused.run_layer = torch.compile(fused.run_layer)


def timed(policy: TrainedPolicy, row: Row) -> tuple[list[float], list[float]]:
    """Seconds of forward and backward, and of the optimizer step, for each run; warm-up runs first."""
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
    return forward_backward, optimizer


def measure(shape: str, variant: Variant, size: tuple[int, int], rates: Rates) -> dict[str, Any]:
    loaded = load(shape, LoraSettings(variant.lora_rank) if variant.lora_rank else None)
    prepare(loaded.decoder, variant)
    policy = make_policy(loaded.decoder)
    row = one_row(*size, loaded.decoder.vocab_size)
    every, every_optimizer = timed(policy, row)
    forward_backward = every[WARM_UP:]
    seconds, step_s = statistics.median(forward_backward), statistics.median(every_optimizer[WARM_UP:])
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
        "first_s": every[0],
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
    made.add_argument("--modules", action="store_true", help="also the model's own modules, plain and compiled")
    made.add_argument(
        "--only", nargs="+", choices=[v.name for v in (*VARIANTS, *MODULES)], help="of these, those named"
    )
    asked = made.parse_args()
    rates, result = begin(asked.smoke)
    shape, size = (TINY, (8, 16)) if asked.smoke else (asked.shape, (asked.sequences, asked.length))
    result |= {"sequences": size[0], "length": size[1]}
    variants = [*VARIANTS, *(MODULES if asked.modules else [])]
    for variant in variants if asked.only is None else [v for v in variants if v.name in asked.only]:
        result["rows"].append(measure(shape, variant, size, rates))
        write_result(asked.out, result)
        free()
    columns = ["name", "tokens_per_s", "limit_operations", "fraction", "seconds", "optimizer_s", "optimizer_fraction",
               "memory_gib", "first_s"]  # fmt: skip
    print_table("training", result["rows"], columns)


if __name__ == "__main__":
    main()
