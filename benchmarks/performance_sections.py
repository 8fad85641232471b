"""The sections of the performance page, one a benchmark: how to read it, then tables given as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from performance_ahead import asynchronous, many_rollouts
from performance_tables import Column, Row, gib, number, percent, seconds, table_of

if TYPE_CHECKING:
    from performance import Results

RIVALS = {"generate": "transformers generate", "vllm_logprobs": "vLLM, log-probs", "vllm": "vLLM, no log-probs"}
PHASES = ("rollout", "reward", "train", "sync", "idle")
MEMORY: Column = ("memory", lambda r: gib(r["memory_gib"]))
FRACTION: Column = ("fraction", lambda r: percent(r["fraction"]))
TOTAL: Column = ("total tok/s", lambda r: number(r["tokens_per_s"]))
DECODE: Column = ("decode tok/s", lambda r: number(r["decode_tokens_per_s"]))

ROLLOUT: list[Column] = [
    ("shape", lambda r: r["shape"]),
    ("sequences", lambda r: number(r["sequences"])),
    ("of a prompt", lambda r: number(r["group"])),
    ("prompt + new", lambda r: f"{r['prompt']} + {r['new']}"),
    TOTAL,
    ("by bytes", lambda r: number(r["limit_bytes"])),
    ("by operations", lambda r: number(r["limit_operations"])),
    FRACTION,
    DECODE,
    ("fraction", lambda r: percent(r["decode"]["fraction"])),
    ("prefill", lambda r: seconds(r["prefill_s"])),
    ("fraction", lambda r: percent(r["prefill"]["fraction"])),
    MEMORY,
]
PARITY: list[Column] = [
    ("shape", lambda r: r["shape"]),
    ("tokens until different", lambda r: f"{r['mean_tokens_until_different']:.0f} of {r['new_tokens']}"),
    ("mean log-prob gap", lambda r: f"{r['mean_logprob_gap']:.1e}"),
]
RIVAL: list[Column] = [
    ("shape", lambda r: r["shape"]),
    ("sequences", lambda r: number(r["sequences"])),
    ("other", lambda r: r["other"]),
    ("its tok/s", lambda r: number(r["rate"])),
    ("Shoal tok/s", lambda r: number(r["tokens_per_s"])),
    ("ratio", lambda r: f"{r['ratio']:.1f}×"),
]
MIXED: list[Column] = [
    ("work", lambda r: r["name"]),
    ("slots", lambda r: number(r["slots"])),
    TOTAL,
    ("of equal lengths in groups", lambda r: percent(r.get("ratio"))),
    ("of distinct prompts", lambda r: percent(r.get("distinct_ratio"))),
    DECODE,
    ("of equal lengths", lambda r: percent(r.get("decode_ratio"))),
    FRACTION,
    MEMORY,
]
TRAIN: list[Column] = [
    ("trained", lambda r: r["name"]),
    ("shape", lambda r: r["shape"]),
    ("tokens", lambda r: number(r["tokens"])),
    ("tok/s", lambda r: number(r["tokens_per_s"])),
    ("limit", lambda r: number(min(r["limit_bytes"], r["limit_operations"]))),
    FRACTION,
    ("optimizer", lambda r: seconds(r["optimizer_s"])),
    ("fraction", lambda r: percent(r["optimizer_fraction"])),
    ("tok/s with it", lambda r: number(r["tokens_per_s_with_optimizer"])),
    MEMORY,
]
STEP: list[Column] = [
    ("run", lambda r: r["name"]),
    ("prompt + new", lambda r: f"{r['prompt_tokens']:.0f} + {r['completion_tokens']:.0f}"),
    ("step", lambda r: seconds(r["step_s"])),
    *((phase, lambda r, phase=phase: seconds(r["split_s"][phase])) for phase in PHASES),
    ("least", lambda r: seconds(sum(r["least_s"].values()))),
    FRACTION,
    ("bytes", lambda r: percent(r["fraction_bytes"])),
    ("operations", lambda r: percent(r["fraction_operations"])),
]
STEP_MEMORY: list[Column] = [
    ("run", lambda r: r["name"]),
    ("peak", lambda r: gib(r["memory"]["allocated_gib"])),
    ("reserved", lambda r: gib(r["memory"]["reserved_gib"])),
    ("planned", lambda r: gib(r["memory"].get("planned_gib"))),
    ("weights and optimizer", lambda r: gib(r["memory"]["weights_and_optimizer_gib"])),
    ("cache", lambda r: gib(r["memory"]["cache_gib"])),
    ("beyond", lambda r: gib(r["memory"]["beyond_gib"])),
]
FIRST_STEP: list[Column] = [
    ("run", lambda r: r["name"]),
    ("of", lambda r: f"`{r['file']}`"),
    ("cold", lambda r: seconds(r["first_step_s"]["cold"])),
    ("warm", lambda r: seconds(r["first_step_s"]["warm"])),
]
QUICKSTART: list[Column] = [
    ("shape", lambda r: r["shape"]),
    ("steps", lambda r: number(r["steps"])),
    ("all of it", lambda r: seconds(r["seconds"])),
    ("step", lambda r: seconds(r["step_s"])),
    ("rollout", lambda r: seconds(r["rollout_s"])),
    ("train", lambda r: seconds(r["train_s"])),
    ("reward", lambda r: f"{r['reward_first']:.3f} → {r['reward_last']:.3f}"),
    ("k3", lambda r: f"{r['k3']:.1e}"),
]
SUPERVISED: Column = ("supervised step", lambda r: seconds(r["supervised_step_s"]))
GROWTH: list[Column] = [
    DECODE,
    ("limit", lambda r: number(min(r["limit_bytes"], r["limit_operations"]))),
    FRACTION,
    ("a step", lambda r: seconds(r["decode_step_ms"] / 1e3)),
    TOTAL,
    ("prefill", lambda r: seconds(r["prefill_s"])),
    MEMORY,
]
AXES = {
    "sequences": "Sequences decoded at once.",
    "context": "Context, at 128 sequences of one prompt.",
    "group": "Rollouts a prompt, 512 sequences in all: larger groups have fewer prompts to compute.",
}


def rollouts(results: Results) -> Iterator[str]:
    rows = results.rows["rollout"]
    yield """Every token with its log-prob. The total is from the first prompt to the last token, best of three runs;
decoding leaves out the prefill, which is timed apart. Prompts are distinct, or of eight sequences each, as GRPO draws
them: a group's prompt is computed once. What is to be reached was set beside a prototype's decode steps."""
    yield table_of(rows, ROLLOUT)
    yield "![Decode, prefill and training below the roof of bandwidth and operations](images/performance_roofline.svg)"
    yield """Graphs against eager decoding of the same requests: tokens until the first difference, and the gap of
log-probs before it."""
    yield table_of([{**row, **row["parity_graphs_eager"]} for row in rows if "parity_graphs_eager" in row], PARITY)
    others: list[Row] = [
        {**row, "other": name, "rate": row[f"{key}_tokens_per_s"], "ratio": row[f"{key}_ratio"]}
        for row in results.every["rollout"]
        for key, name in RIVALS.items()
        if f"{key}_ratio" in row
    ]
    if not others:
        yield "Against others: not measured yet (`--generate`, `--vllm`)."
        return
    yield """Against others in the same run, same weights and prompts, prefill included. `generate` reports no
log-probs. Where it was timed over fewer tokens, the rest is carried on at the same step. It launches kernel by kernel,
so its rate is the host's: the machines of two runs differ threefold."""
    yield table_of(others, RIVAL)


def mixed(results: Results) -> Iterator[str]:
    yield """Lengths geometric, mean 256, at most 2,048. Shares are of 512 sequences of equal length in the same run,
which come in groups of eight, as the mixed ones do, or with prompts of their own, whose prefill takes longer."""
    yield table_of(results.rows["mixed"], MIXED)


def training(results: Results) -> Iterator[str]:
    yield """One packed row, every token in the loss. The fraction is the MFU: 6·N operations a token, N all parameters
(4·N under adapters, whose base has no gradient), over the measured rate. The optimizer's is of the bandwidth limit."""
    yield table_of(results.rows["train"], TRAIN)


def steps(results: Results) -> Iterator[str]:
    rows = results.rows["grpo_step"]
    yield """Through `shoal grpo`, read from the run directory: the median step of the last half. Phases may overlap.
The least time is what the limits leave for rollouts and training; the fractions are the least time, bytes alone and
operations alone, over the step."""
    yield table_of(rows, STEP)
    measured = [row for row in rows if row.get("memory")]
    if measured:
        yield """Memory at its peak, the most that the plan gave out before the first step, and how much of the peak is
neither weights, gradient, optimizer nor keys and values. A plan has room for graphs that the clock may find not worth
keeping."""
        yield table_of(measured, STEP_MEMORY)
    yield """From the command to the first step on record: cold with empty caches of kernels and of compiled Python,
warm with an earlier run's. Model files are in the page cache both times. `grpo_step_smollm2_before.json`
is of an earlier version, which compiled Python at every start. The processors of machines with the same GPU differ, so
figures of one file belong together."""
    yield table_of(results.every["grpo_step"], FIRST_STEP)
    quoted = [f"- {row['name']}: {row['quoted']}." for row in rows if row.get("quoted")]
    if quoted:
        yield "Quoted, not measured here:\n\n" + "\n".join(quoted)


def quickstart(results: Results) -> Iterator[str]:
    yield """The quickstart's three files as they are, from the command to the end, only the model named: random weights
after a few supervised steps on solved tasks, so that there is something to reward. fp8-hybrid, LoRA, noise, 8 prompts ×
16. Times are medians over all steps, each for itself; a step that meets a new size captures it. The reward is the mean
of the first and of the last ten steps, which 40 steps hardly move; k3 is how far the policy's log-probs are from
the sampler's."""
    rows = results.rows["quickstart"]
    timed = all("supervised_step_s" in row for row in rows)
    if timed:
        yield "The supervised steps before are of 64 short texts each, all weights, bf16."
    yield table_of(rows, [*QUICKSTART, SUPERVISED] if timed else QUICKSTART)


def growth(results: Results) -> Iterator[str]:
    yield "![Decode rate against sequences, context and group size](images/performance_growth.svg)"
    for axis, says in AXES.items():
        yield says
        rows = [row for row in results.rows["growth"] if row["axis"] == axis]
        yield table_of(rows, [(axis, lambda r: number(r["value"])), *GROWTH])


SECTIONS: list[tuple[str, str, Callable[[Results], Iterator[str]]]] = [
    ("rollout", "Rollouts", rollouts),
    ("mixed", "Mixed lengths", mixed),
    ("train", "Training", training),
    ("grpo_step", "Whole steps", steps),
    ("quickstart", "The quickstart", quickstart),
    ("growth", "How cost grows", growth),
    ("asynchronous", "Running ahead", asynchronous),
    ("many_rollouts", "Many rollouts at once", many_rollouts),
]
