"""The goals of the performance page: the required minimum, the target, the measurement, and whether it was reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from performance_tables import number, percent, seconds, table

if TYPE_CHECKING:
    from performance import Results


@dataclass(frozen=True)
class Goal:
    """`must` and `aim` are text. `exceeded` and `reached` are None if nothing was measured."""

    work: str
    must: str
    aim: str
    measured: str = "not measured yet"
    limit: str = ""
    fraction: str = ""
    exceeded: bool | None = None
    reached: bool | None = None
    word: str = "exceeded"

    def row(self) -> list[str]:
        verdict = "" if self.exceeded is None else "below"
        if self.exceeded:
            verdict = "target reached" if self.reached else self.word
        return [self.work, self.measured, self.limit, self.fraction, self.must, self.aim, verdict]


def goals_table(results: Results) -> str:
    found = [*_rollouts(results), *_rivals(results), *_mixed(results), *_train(results), *_steps(results)]
    heads = ["work", "measured", "limit", "fraction", "goal", "target", "result"]
    return table(heads, [goal.row() for goal in found])


def _tighter(row: dict[str, Any]) -> float:
    return min(row["limit_bytes"], row["limit_operations"])


def _rollouts(results: Results) -> Iterator[Goal]:
    cases = [("qwen2.5-0.5b", 128, 100e3, 0.5), ("qwen2.5-0.5b", 512, 250e3, 0.5), ("qwen3-0.6b", 128, 55e3, 0.8),
             ("qwen3-0.6b", 512, 85e3, 0.8)]  # fmt: skip
    for shape, count, must, aim in cases:
        work = f"rollout of {count} sequences, {shape} shape, 128 prompt + 256 new tokens"
        for which, group in (
            ("decode steps only", 1),
            ("groups of 8, with prefill", 8),
            ("distinct prompts, with prefill", 1),
        ):
            texts = (f"{work}, {which}", f"{number(must)} tok/s", f"{percent(aim)} of the limit")
            row = results.find("rollout", shape=shape, sequences=count, group=group)
            if row is None:
                yield Goal(*texts)
                continue
            part = {**row, **row["decode"], "tokens_per_s": row["decode_tokens_per_s"]} if "decode" in which else row
            yield _rate(texts, part, part["tokens_per_s"] > must, part["fraction"] >= aim)
    row = results.find("rollout", shape="qwen2.5-7b", sequences=64, group=1)
    texts = (
        "rollout of 64 sequences, qwen2.5-7b shape, 128 prompt + 256 new tokens, distinct prompts, with prefill",
        "60 % of the bandwidth limit",
        "80 % of the bandwidth limit",
    )
    share = row["tokens_per_s"] / row["limit_bytes"] if row else 0.0
    yield Goal(*texts) if row is None else _rate(texts, row, share > 0.6, share >= 0.8)


def _rate(texts: tuple[str, str, str], row: dict[str, Any], exceeded: bool, reached: bool) -> Goal:
    rate, limit = f"{number(row['tokens_per_s'])} tok/s", f"{number(_tighter(row))} tok/s"
    return Goal(*texts, rate, limit, percent(row["fraction"]), exceeded, reached)


def _rivals(results: Results) -> Iterator[Goal]:
    """128 sequences of the smallest shape. The table of the page has the others."""
    case = ("qwen2.5-0.5b", 128, 1)
    rows = [row for row in results.every["rollout"] if (row["shape"], row["sequences"], row["group"]) == case]
    for key, name, must, aim in (("generate", "transformers generate", 25, 50), ("vllm_logprobs", "vLLM", 3, 5)):
        texts = (f"speed-up over {name}, qwen2.5-0.5b shape, 128 sequences, same run", f"{must}×", f"{aim}×")
        ratio = next((row[f"{key}_ratio"] for row in rows if f"{key}_ratio" in row), None)
        yield (
            Goal(*texts)
            if ratio is None
            else Goal(*texts, f"{ratio:.1f}×", exceeded=ratio > must, reached=ratio >= aim)
        )


def _mixed(results: Results) -> Iterator[Goal]:
    texts = (
        "rate of mixed lengths, 512 prompts × 8 rollouts, relative to 512 sequences of equal length",
        "75 %",
        "88 %",
    )
    rows = [row for row in results.rows["mixed"] if "ratio" in row]
    if not rows:
        yield Goal(*texts)
        return
    best = max(rows, key=lambda row: row["ratio"])  # any concurrency is allowed
    said = f"{percent(best['ratio'])} ({number(best['tokens_per_s'])} tok/s, {best['slots']} slots)"
    limit = f"{number(_tighter(best))} tok/s"
    yield Goal(*texts, said, limit, percent(best["fraction"]), best["ratio"] > 0.75, best["ratio"] >= 0.88)


def _train(results: Results) -> Iterator[Goal]:
    texts = (
        "packed training, qwen2.5-0.5b shape, all weights, 64 sequences of 384 tokens",
        "115,000 tok/s",
        "50 % of the limit",
    )
    row = results.find("train", name="full", shape="qwen2.5-0.5b")
    yield Goal(*texts) if row is None else _rate(texts, row, row["tokens_per_s"] > 115e3, row["fraction"] >= 0.5)


def _steps(results: Results) -> Iterator[Goal]:
    cases = [("0.5b", "whole GRPO step, 0.5b shape, 16 prompts × 8 rollouts", 1.2, 0.8),
             ("smollm2-135m", "whole GRPO step, SmolLM2-135M, 16 prompts × 8 rollouts", 1.0, 0.6)]  # fmt: skip
    for name, work, must, aim in cases:
        row = results.find("grpo_step", name=name)
        yield _step((work, f"{must} s", f"{aim} s"), row, must, aim)
    row = results.find("grpo_step", name="0.5b")
    memory = row.get("memory") if row else None
    beyond = (
        "peak memory of the 0.5b step other than weights, gradient, optimizer and KV cache",
        "reported and within the plan",
        "",
    )
    if memory is None:
        yield Goal(*beyond)
    else:
        said, planned = f"{memory['beyond_gib']:.1f} of {memory['allocated_gib']:.1f} GiB", memory.get("planned_gib")
        within = None if planned is None else memory["allocated_gib"] <= planned
        yield Goal(
            *beyond, said, f"{planned:.1f} GiB planned" if planned else "", exceeded=within, word="within the plan"
        )
    row = results.find("grpo_step", name="7b-lora")
    yield _step(
        ("whole GRPO step, 7b shape, LoRA of rank 16, 16 prompts × 8 rollouts, one GPU", "runs", ""),
        row,
        float("inf"),
        0.0,
    )
    yield from _first_steps([row for row in results.every["grpo_step"] if row["name"] == "0.5b"])


def _step(texts: tuple[str, str, str], row: dict[str, Any] | None, must: float, aim: float) -> Goal:
    if row is None:
        return Goal(*texts)
    taken, least = row["step_s"], sum(row["least_s"].values())
    said = seconds(taken)
    if "prompt_tokens" in row:
        said += f" ({row['prompt_tokens']:.0f} prompt + {row['completion_tokens']:.0f} new tokens)"
    return Goal(*texts, said, seconds(least), percent(row["fraction"]), taken < must, taken <= aim)


def _first_steps(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    """From the first file that has each measurement."""
    for kind, must in (("warm", 20.0), ("cold", 90.0)):
        texts = (f"command to first optimizer step, 0.5b shape, {kind}", f"{must:.0f} s", "")
        row = next((row for row in rows if row["first_step_s"][kind]), None)
        if row is None:
            yield Goal(*texts)
            continue
        taken = row["first_step_s"][kind]
        yield Goal(*texts, f"{seconds(taken)} (`{row['file']}`)", exceeded=taken < must)
