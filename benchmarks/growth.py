"""Growth of costs: with sequences (32 → 2,048), context (512 → 16k, 128 sequences) and group size (4 → 64, of 512).

python benchmarks/growth.py OUT.json [--shape qwen2.5-0.5b] [--smoke]

Every row has the limits of its size, so the table separates necessary from unnecessary growth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from limits import Rates
from machine import print_table, write_result
from workload import TINY, Loaded, begin, free, load, make_engine, parser, requests, time_engine


@dataclass(frozen=True)
class Point:
    axis: str  # the varied size
    value: int
    sequences: int
    prompts: int
    prompt_tokens: int
    new: int


def points(smoke: bool) -> list[Point]:
    sequences = [8, 16] if smoke else [32, 64, 128, 256, 512, 1024, 2048]
    contexts = [64, 128] if smoke else [512, 1024, 2048, 4096, 8192, 16384]
    groups = [4, 8] if smoke else [4, 8, 16, 32, 64]
    prompt, new, tail = (16, 8, 8) if smoke else (128, 128, 64)
    many, wide = (8, 16) if smoke else (128, 512)
    return [
        *(Point("sequences", n, n, n, prompt, new) for n in sequences),
        # One prompt for all sequences: the cache that decoding reads grows here, not the prefill.
        *(Point("context", n, many, 1, n - tail, tail) for n in contexts),
        *(Point("group", n, wide, wide // n, prompt, 2 * new) for n in groups),
    ]


def measure(loaded: Loaded, point: Point, rates: Rates) -> dict[str, Any]:
    engine = make_engine(loaded, point.sequences, point.prompt_tokens + point.new)
    work = requests(loaded.decoder.vocab_size, point.prompts, point.prompt_tokens, [point.new] * point.sequences)
    timing = time_engine(engine, work, repeats=2)
    decode = loaded.shape.decode([(point.prompt_tokens, point.new)] * point.sequences, point.sequences)
    drawn = timing.tokens - timing.sequences
    return {
        **point.__dict__,
        **timing.row(),
        "decode_step_ms": 1e3 * (timing.seconds - timing.prefill_s) / (point.new - 1),
        **decode.limits(rates, drawn, timing.decode_tokens_per_s),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shape", default="qwen2.5-0.5b")
    asked = made.parse_args()
    rates, result = begin(asked.smoke)
    result["shape"] = TINY if asked.smoke else asked.shape
    loaded = load(result["shape"])
    for point in points(asked.smoke):
        result["rows"].append(measure(loaded, point, rates))
        write_result(asked.out, result)
        free()
    columns = ["axis", "value", "decode_tokens_per_s", "decode_step_ms", "limit_bytes", "limit_operations", "fraction",
               "tokens_per_s", "prefill_s", "memory_gib"]  # fmt: skip
    print_table("growth (limits and fraction: decoding alone)", result["rows"], columns)


if __name__ == "__main__":
    main()
