"""Rollout speed of the embedded engine: random weights of known shapes, with log-probs.

python benchmarks/rollout.py OUT.json [--shapes …] [--sequences …] [--prompt 128] [--new 256] [--generate] [--vllm]
    [--eager] [--smoke]

Prompts are different, and then in groups of eight as in GRPO. `tokens_per_s` covers the time from the first prompt to
the last token. `decode_tokens_per_s` excludes the prefill. --generate and --vllm measure transformers' generate and
vLLM with the same weights and prompts in the same run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import rivals
from limits import Rates
from machine import print_table, write_result
from workload import TINY, Loaded, begin, free, generate, load, make_engine, parser, requests, time_engine

DENSE = ("qwen2.5-0.5b", "qwen3-0.6b", "qwen2.5-7b")
CASES = {"qwen2.5-0.5b": [128, 512], "qwen3-0.6b": [128, 512], "qwen2.5-7b": [64], "gemma-3-4b": [64, 128],
         "qwen3.5-0.8b": [128, 512], "gpt-oss-20b": [128], "qwen3-30b-a3b": [128]}  # fmt: skip
PROMPT, NEW, GROUP = 128, 256, 8
PARITY_SEQUENCES, PARITY_NEW = 16, 64


@dataclass(frozen=True)
class Case:
    sequences: int
    prompt: int
    new: int
    group: int = 1  # sequences of one prompt
    graphs: bool = True

    @property
    def prompts(self) -> int:
        return self.sequences // self.group


def measure(loaded: Loaded, case: Case, rates: Rates) -> dict[str, Any]:
    count, prompts = case.sequences, case.prompts
    engine = make_engine(loaded, count, case.prompt + case.new, case.graphs)
    work = requests(loaded.decoder.vocab_size, prompts, case.prompt, [case.new] * count)
    timing = time_engine(engine, work, repeats=3 if case.graphs else 1)
    decode = loaded.shape.decode([(case.prompt, case.new)] * count, count)
    prefill = loaded.shape.prefill([case.prompt] * prompts, count)
    return {
        "sequences": count,
        "group": case.group,
        "prompt": case.prompt,
        "new": case.new,
        "path": engine.path,
        **timing.row(),
        **(prefill + decode).limits(rates, timing.tokens, timing.tokens_per_s),
        "decode": decode.limits(rates, timing.tokens - count, timing.decode_tokens_per_s)
        | {"bytes": decode.bytes, "operations": decode.operations, "seconds": timing.seconds - timing.prefill_s},
        "prefill": {
            "tokens_per_s": prompts * case.prompt / timing.prefill_s,
            **prefill.limits(rates, prompts * case.prompt, prompts * case.prompt / timing.prefill_s),
            "bytes": prefill.bytes,
            "operations": prefill.operations,
        },
    }


def parity(loaded: Loaded) -> dict[str, float]:
    """The same requests with graphs and eagerly: how long the tokens agree, and the difference of log-probs."""
    count, new = PARITY_SEQUENCES, PARITY_NEW
    work = requests(loaded.decoder.vocab_size, count, PROMPT, [new] * count)
    ours, theirs = (generate(make_engine(loaded, count, PROMPT + new, graphs), work)[1] for graphs in (True, False))
    same, gaps = [], []
    for name, mine in ours.items():
        other = theirs[name]
        pairs = enumerate(zip(mine.token_ids, other.token_ids, strict=True))
        agree = next((i for i, (a, b) in pairs if a != b), new)
        same.append(agree)
        gaps += [abs(a - b) for a, b in zip(mine.logprobs[:agree], other.logprobs[:agree], strict=True)]
    return {
        "new_tokens": new,
        "mean_tokens_until_different": sum(same) / count,
        "mean_logprob_gap": sum(gaps) / max(1, len(gaps)),
    }


def add_ratios(row: dict[str, Any], found: dict[str, Any]) -> None:
    """The figures of another system and the ratio of Shoal's rate to it, both from first prompt to last token."""
    for name, rate in found.items():
        row[name] = rate
        if name.endswith("tokens_per_s") and rate:
            row[name.replace("tokens_per_s", "ratio")] = row["tokens_per_s"] / rate


def run_shape(shape: str, counts: list[int], asked: Any, rates: Rates) -> list[dict[str, Any]]:
    prompt, new = (16, 16) if asked.smoke else (asked.prompt, asked.new)
    loaded = load(shape)
    rows: list[dict[str, Any]] = []
    for group in (1, GROUP):
        for count in counts:
            rows.append({"shape": shape, **measure(loaded, Case(count, prompt, new, group), rates)})
            free()
    rows[0]["parity_graphs_eager"] = parity(loaded)
    if asked.eager:
        eager = measure(loaded, Case(counts[0], prompt, new, graphs=False), rates)
        rows[0]["eager_tokens_per_s"] = eager["tokens_per_s"]
    if asked.generate:
        add_ratios(rows[0], rivals.transformers_generate(loaded.decoder, counts[0], prompt, new))
    if asked.vllm:
        with rivals.saved(loaded.decoder) as folder:
            vocabulary = loaded.decoder.vocab_size
            del loaded
            free()
            prompts = {count: requests(vocabulary, count, prompt, [new] * count) for count in counts}
            for row, found in zip(rows, rivals.vllm(folder, prompts, new, asked.vllm_path), strict=False):
                add_ratios(row, found)
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shapes", nargs="+", choices=list(CASES), default=list(DENSE))
    made.add_argument("--sequences", nargs="+", type=int, help="numbers of sequences, instead of those of each shape")
    made.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    made.add_argument("--new", type=int, default=NEW, help="tokens of a completion")
    made.add_argument("--generate", action="store_true", help="also time transformers' generate")
    made.add_argument("--vllm", action="store_true", help="also time vLLM, which has to be installed")
    made.add_argument("--vllm-path", metavar="FOLDER", help="where vLLM is installed, if apart")
    made.add_argument("--eager", action="store_true", help="also time decoding without graphs")
    asked = made.parse_args()
    cases = {TINY: [8, 16]} if asked.smoke else {shape: asked.sequences or CASES[shape] for shape in asked.shapes}
    rates, result = begin(asked.smoke)
    for shape, counts in cases.items():
        if any(count % GROUP for count in counts):
            raise SystemExit(f"--sequences: groups of {GROUP} are timed too, so each must be a multiple of it")
        result["rows"] += run_shape(shape, counts, asked, rates)
        write_result(asked.out, result)
        free()
    columns = ["shape", "sequences", "group", "tokens_per_s", "limit_bytes", "limit_operations", "fraction",
               "decode_tokens_per_s", "prefill_s", "generate_ratio", "vllm_logprobs_ratio", "vllm_ratio"]  # fmt: skip
    print_table("rollout", result["rows"], columns)


if __name__ == "__main__":
    main()
