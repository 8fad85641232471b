"""The sections of the performance page, one per benchmark: an explanation, then tables defined by their columns."""

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
    ("sequences per prompt", lambda r: number(r["group"])),
    ("prompt + new tokens", lambda r: f"{r['prompt']} + {r['new']}"),
    TOTAL,
    ("bytes limit, tok/s", lambda r: number(r["limit_bytes"])),
    ("operations limit, tok/s", lambda r: number(r["limit_operations"])),
    FRACTION,
    DECODE,
    ("decode fraction", lambda r: percent(r["decode"]["fraction"])),
    ("prefill time", lambda r: seconds(r["prefill_s"])),
    ("prefill fraction", lambda r: percent(r["prefill"]["fraction"])),
    MEMORY,
]
PARITY: list[Column] = [
    ("shape", lambda r: r["shape"]),
    ("tokens until the first difference", lambda r: f"{r['mean_tokens_until_different']:.0f} of {r['new_tokens']}"),
    ("mean log-prob difference before it", lambda r: f"{r['mean_logprob_gap']:.1e}"),
]
RIVAL: list[Column] = [
    ("shape", lambda r: r["shape"]),
    ("sequences", lambda r: number(r["sequences"])),
    ("system", lambda r: r["other"]),
    ("system tok/s", lambda r: number(r["rate"])),
    ("Shoal tok/s", lambda r: number(r["tokens_per_s"])),
    ("ratio", lambda r: f"{r['ratio']:.1f}×"),
]
MIXED: list[Column] = [
    ("work", lambda r: r["name"]),
    ("slots", lambda r: number(r["slots"])),
    TOTAL,
    ("total relative to equal lengths in groups", lambda r: percent(r.get("ratio"))),
    ("total relative to equal lengths with distinct prompts", lambda r: percent(r.get("distinct_ratio"))),
    DECODE,
    ("decode rate relative to equal lengths", lambda r: percent(r.get("decode_ratio"))),
    FRACTION,
    MEMORY,
]
TRAIN: list[Column] = [
    ("trained", lambda r: r["name"]),
    ("shape", lambda r: r["shape"]),
    ("tokens in the row", lambda r: number(r["tokens"])),
    ("tok/s", lambda r: number(r["tokens_per_s"])),
    ("limit, tok/s", lambda r: number(min(r["limit_bytes"], r["limit_operations"]))),
    FRACTION,
    ("optimizer time", lambda r: seconds(r["optimizer_s"])),
    ("optimizer fraction", lambda r: percent(r["optimizer_fraction"])),
    ("tok/s with optimizer", lambda r: number(r["tokens_per_s_with_optimizer"])),
    MEMORY,
]
STEP: list[Column] = [
    ("run", lambda r: r["name"]),
    ("prompt + new tokens", lambda r: f"{r['prompt_tokens']:.0f} + {r['completion_tokens']:.0f}"),
    ("step time", lambda r: seconds(r["step_s"])),
    *((f"{phase} time", lambda r, phase=phase: seconds(r["split_s"][phase])) for phase in PHASES),
    ("lower bound of the step", lambda r: seconds(sum(r["least_s"].values()))),
    FRACTION,
    ("fraction from bytes", lambda r: percent(r["fraction_bytes"])),
    ("fraction from operations", lambda r: percent(r["fraction_operations"])),
]
STEP_MEMORY: list[Column] = [
    ("run", lambda r: r["name"]),
    ("peak memory", lambda r: gib(r["memory"]["allocated_gib"])),
    ("reserved", lambda r: gib(r["memory"]["reserved_gib"])),
    ("planned", lambda r: gib(r["memory"].get("planned_gib"))),
    ("weights and optimizer", lambda r: gib(r["memory"]["weights_and_optimizer_gib"])),
    ("KV cache", lambda r: gib(r["memory"]["cache_gib"])),
    ("other memory", lambda r: gib(r["memory"]["beyond_gib"])),
]
FIRST_STEP: list[Column] = [
    ("run", lambda r: r["name"]),
    ("file", lambda r: f"`{r['file']}`"),
    ("cold", lambda r: seconds(r["first_step_s"]["cold"])),
    ("warm", lambda r: seconds(r["first_step_s"]["warm"])),
]
QUICKSTART: list[Column] = [
    ("shape", lambda r: r["shape"]),
    ("steps", lambda r: number(r["steps"])),
    ("whole run", lambda r: seconds(r["seconds"])),
    ("step time", lambda r: seconds(r["step_s"])),
    ("rollout time", lambda r: seconds(r["rollout_s"])),
    ("train time", lambda r: seconds(r["train_s"])),
    ("mean reward, first → last ten steps", lambda r: f"{r['reward_first']:.3f} → {r['reward_last']:.3f}"),
    ("mismatch (k3)", lambda r: f"{r['k3']:.1e}"),
]
SUPERVISED: Column = ("supervised step time", lambda r: seconds(r["supervised_step_s"]))
GROWTH: list[Column] = [
    DECODE,
    ("limit, tok/s", lambda r: number(min(r["limit_bytes"], r["limit_operations"]))),
    FRACTION,
    ("decode step time", lambda r: seconds(r["decode_step_ms"] / 1e3)),
    TOTAL,
    ("prefill time", lambda r: seconds(r["prefill_s"])),
    MEMORY,
]
AXES = {
    "sequences": "This table shows how the rates of the 0.5B shape grow with the number of concurrent sequences.",
    "context": "This table shows how the rates depend on the context length, with 128 sequences of one prompt.",
    "group": "This table shows how the rates depend on the group size, with 512 sequences in total. Larger groups have "
    "fewer prompts to prefill.",
}


AXIS_UNITS = {"sequences": "sequences", "context": "tokens", "group": "rollouts per group"}


def rollouts(results: Results) -> Iterator[str]:
    rows = results.rows["rollout"]
    yield """Every token is returned with its log-prob. The total rate covers the time from the first prompt to the
last token, and the best of three runs is shown. The decode rate excludes the prefill, which is timed separately. In
rows with one sequence per prompt, all prompts are distinct. In rows with eight, the prompt of a group is computed
once, as in GRPO. The goals above were derived from the decode steps of a prototype."""
    yield table_of(rows, ROLLOUT)
    yield "![Roofline plot of decode, prefill and training](images/performance_roofline.svg)"
    yield """This table compares CUDA graphs with eager decoding of the same requests."""
    yield table_of([{**row, **row["parity_graphs_eager"]} for row in rows if "parity_graphs_eager" in row], PARITY)
    others: list[Row] = [
        {**row, "other": name, "rate": row[f"{key}_tokens_per_s"], "ratio": row[f"{key}_ratio"]}
        for row in results.every["rollout"]
        for key, name in RIVALS.items()
        if f"{key}_ratio" in row
    ]
    if not others:
        yield "Comparison with other systems: not measured yet (`--generate`, `--vllm`)."
        return
    yield """This table compares Shoal with other systems in the same run, with the same weights and prompts. The
rates include the prefill. `generate` of transformers reports no log-probs. If fewer steps of `generate` were timed,
its rate is extrapolated with the same time per step. `generate` launches one kernel at a time, so its rate depends
on the CPU of the machine: two runs differ by a factor of three."""
    yield table_of(others, RIVAL)


def mixed(results: Results) -> Iterator[str]:
    yield """Completion lengths have a geometric distribution with mean 256 and maximum 2,048. Rates are compared
with those of 512 sequences of equal length in the same run. There are two baselines: sequences in groups of eight,
like the mixed sequences, and sequences with distinct prompts, whose prefill takes longer."""
    yield table_of(results.rows["mixed"], MIXED)


def training(results: Results) -> Iterator[str]:
    yield """Each measurement trains one packed row with every token in the loss. The fraction is the model FLOPs
utilization (MFU): 6·N operations per token for N parameters (4·N with LoRA, because the base has no gradient),
divided by the measured matrix rate. The optimizer fraction is relative to the bandwidth limit. *recompute* means
activation checkpointing, and *its own modules* means the Hugging Face modules instead of the fused path."""
    yield table_of(results.rows["train"], TRAIN)


def steps(results: Results) -> Iterator[str]:
    rows = results.rows["grpo_step"]
    yield """The times are medians over the second half of the steps of `shoal grpo`, read from the run directory.
Phases may overlap. The lower bound is the time of rollouts and training at their limits. The fraction is the lower
bound divided by the step time. The last two columns divide only the part of the lower bound that comes from bytes or
from operations."""
    yield table_of(rows, STEP)
    measured = [row for row in rows if row.get("memory")]
    if measured:
        yield """This table compares the peak memory with the maximum that the memory plan allowed before the first
step (*planned*). *Reserved* is the peak memory that PyTorch's allocator held. *Other memory* is the part of the peak
that is neither weights, gradient, optimizer state nor KV cache. A plan includes room for CUDA graphs that are
dropped if timing shows no gain."""
        yield table_of(measured, STEP_MEMORY)
    yield """This table shows the time from the command to the first recorded step. In a *cold* start, the caches of
Triton kernels and of compiled Python are empty. In a *warm* start, an earlier run has filled these caches. Model
files are in the page cache in both cases. `grpo_step_smollm2_before.json` is from an earlier version, which compiled
Python at every start. Machines with the same GPU have different CPUs, so compare only figures of one file."""
    yield table_of(results.every["grpo_step"], FIRST_STEP)
    quoted = [f"- {row['name']}: {row['quoted']}." for row in rows if row.get("quoted")]
    if quoted:
        yield "These figures are quoted and were not measured here:\n\n" + "\n".join(quoted)


def quickstart(results: Results) -> Iterator[str]:
    yield """This run uses the three files of the quickstart, unchanged except for the model. The model has random
weights and was trained for a few supervised steps on solved tasks, so that some rollouts get a reward. The run uses
`recipe: fp8-hybrid`, LoRA, QeRL noise and 8 prompts × 16 rollouts. The time of the whole run starts with the
command. All other times are medians over all steps, including steps that capture a CUDA graph for a new size. The
mean reward changes little in 40 steps. k3 is the mismatch between the log-probs of policy and sampler."""
    rows = results.rows["quickstart"]
    timed = all("supervised_step_s" in row for row in rows)
    if timed:
        yield "Each supervised step before the run trains all weights on 64 short texts, in bf16."
    yield table_of(rows, [*QUICKSTART, SUPERVISED] if timed else QUICKSTART)


def growth(results: Results) -> Iterator[str]:
    yield "![Decode rate by number of sequences, context length and group size](images/performance_growth.svg)"
    for axis, text in AXES.items():
        yield text
        rows = [row for row in results.rows["growth"] if row["axis"] == axis]
        yield table_of(rows, [(axis, lambda r, unit=AXIS_UNITS[axis]: f"{number(r['value'])} {unit}"), *GROWTH])


SECTIONS: list[tuple[str, str, Callable[[Results], Iterator[str]]]] = [
    ("rollout", "Rollouts", rollouts),
    ("mixed", "Mixed lengths", mixed),
    ("train", "Training", training),
    ("grpo_step", "Whole steps", steps),
    ("quickstart", "The quickstart", quickstart),
    ("growth", "Scaling", growth),
    ("asynchronous", "Running ahead", asynchronous),
    ("many_rollouts", "Many concurrent rollouts", many_rollouts),
]
