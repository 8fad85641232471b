"""Rollouts of mixed lengths, as in training: 512 prompts, 8 samples each, geometric lengths.

python benchmarks/mixed.py OUT.json [--slots 1024 4096] [--shape qwen2.5-0.5b] [--smoke]

The length of a sequence is its max_tokens, from a geometric distribution (mean 256, at most 2,048). The rate is
compared with 512 sequences of equal length in the same run, in groups of eight and with different prompts. The prompt
of a group is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from limits import Rates
from machine import print_table, write_result
from workload import TINY, Loaded, begin, free, load, make_engine, parser, requests, time_engine


@dataclass(frozen=True)
class Case:
    prompts: int = 512
    group: int = 8
    prompt_tokens: int = 128
    mean: int = 256
    longest: int = 2048
    equal_sequences: int = 512  # the rate to compare with: this many sequences of `mean` tokens

    def lengths(self) -> list[int]:
        drawn = np.random.default_rng(0).geometric(1 / self.mean, self.prompts * self.group)
        return np.minimum(drawn, self.longest).tolist()


SMOKE = Case(prompts=4, group=4, prompt_tokens=16, mean=8, longest=32, equal_sequences=8)


def equal_lengths(loaded: Loaded, case: Case, rates: Rates, group: int) -> dict[str, Any]:
    """The rate of 512 sequences with the mean length, `group` of which share a prompt."""
    count, prompt, prompts = case.equal_sequences, case.prompt_tokens, case.equal_sequences // group
    engine = make_engine(loaded, count, prompt + case.mean)
    timing = time_engine(engine, requests(loaded.decoder.vocab_size, prompts, prompt, [case.mean] * count))
    work = loaded.shape.decode([(prompt, case.mean)] * count, count) + loaded.shape.prefill([prompt] * prompts, count)
    return {
        "name": f"{count} sequences of {case.mean}, {f'groups of {group}' if group > 1 else 'distinct prompts'}",
        "slots": count,
        "tokens": timing.tokens,
        **timing.row(),
        **work.limits(rates, timing.tokens, timing.tokens_per_s),
    }


def mixed_lengths(
    loaded: Loaded, case: Case, slots: int, rates: Rates, equal: dict[str, Any], distinct: dict[str, Any]
) -> dict[str, Any]:
    lengths, prompt = case.lengths(), case.prompt_tokens
    engine = make_engine(loaded, slots, prompt + case.longest)
    work = requests(loaded.decoder.vocab_size, case.prompts, prompt, lengths)
    timing = time_engine(engine, work, repeats=3)
    least = loaded.shape.decode([(prompt, new) for new in lengths], slots)
    least += loaded.shape.prefill([prompt] * case.prompts, len(lengths))
    return {
        "name": f"{case.prompts} × {case.group}, mixed",
        "slots": slots,
        "tokens": timing.tokens,
        "mean_length": float(np.mean(lengths)),
        "longest": max(lengths),
        **timing.row(),
        **least.limits(rates, timing.tokens, timing.tokens_per_s),
        "ratio": timing.tokens_per_s / equal["tokens_per_s"],
        "distinct_ratio": timing.tokens_per_s / distinct["tokens_per_s"],
        "decode_ratio": timing.decode_tokens_per_s / equal["decode_tokens_per_s"],
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--slots", nargs="+", type=int, default=[1024, 4096], help="sequences decoded at once")
    made.add_argument("--shape", default="qwen2.5-0.5b")
    asked = made.parse_args()
    rates, result = begin(asked.smoke)
    case = SMOKE if asked.smoke else Case()
    loaded = load(TINY if asked.smoke else asked.shape)
    result |= {"shape": TINY if asked.smoke else asked.shape, "case": case.__dict__}
    for group in (case.group, 1):
        result["rows"].append(equal_lengths(loaded, case, rates, group))
        free()
    for slots in [8] if asked.smoke else asked.slots:
        free()
        result["rows"].append(mixed_lengths(loaded, case, slots, rates, *result["rows"][:2]))
        write_result(asked.out, result)
    columns = ["name", "slots", "tokens_per_s", "ratio", "distinct_ratio", "decode_tokens_per_s", "decode_ratio",
               "limit_bytes", "limit_operations", "fraction", "prefill_s", "memory_gib"]  # fmt: skip
    print_table("mixed lengths", result["rows"], columns)


if __name__ == "__main__":
    main()
