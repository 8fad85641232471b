"""The recorded runs that `shoal plan` is compared with, and why other result files are left out.

Each record has measured seconds by part, and a function that predicts them from the constants of the time model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.planning.estimate import Estimate, Workload, estimate
from shoal.planning.memory import STATE_BYTES, TrainingMemory, decode_bytes, prefill_bytes
from shoal.planning.shapes import read_shape
from shoal.planning.time_model import CONSTANTS, DEVICES, GIB, Constants, Rollouts, TimeModel

RESULTS = Path(__file__).parent / "results"
H200 = DEVICES["h200"]
PREFILL_TOKENS = 1 << 16  # of the benchmarks' engine, see workload.py
LORA_RANK = 16  # of all recorded runs with adapters

# Recorded on an H200, but not comparable.
LEFT_OUT = {
    "asynchronous_gpu.json": "records the time of the whole run with its first, cold steps, not the time of one step",
    "asynchronous_gpu_split.json": "as asynchronous_gpu.json",
    "doors_h200.json": "ten steps each, in which kernels are compiled; the longest completion is not recorded",
    "quickstart_shape_h200.json": "an earlier version, whose steps took 8 to 13 s",
    "smollm2_arithmetic_graphs_h200.json": "another program used the GPU at the same time",
    "smollm2_arithmetic_h200.json": "another run used the GPU at the same time",
    "precision_h200.json": "log-probs and bytes of weights; no times",
    "profile_h200.json": "kernel times, not times of runs",
    "profile_mixed_h200.json": "kernel times, not times of runs",
    "profile_passes_h200.json": "single passes; the host times per layer come from here",
    "profile_small_passes_h200.json": "single passes; the host times per layer come from here",
    "tried_attention_h200.json": "variants of kernels that are not in use",
    "tried_compiled_h200.json": "variants that are not in use",
    "tried_decode_h200.json": "variants of kernels that are not in use",
    "tried_mixed_h200.json": "variants that are not in use",
    "tried_products_h200.json": "variants of kernels that are not in use",
}

Use = Literal["fitted", "checked", "shown"]
Parts = dict[str, float]


@dataclass(frozen=True)
class Record:
    file: str
    shape: str
    name: str
    use: Use  # fitted: the constants come from it; checked: only compared; shown: compared, but not comparable
    total_s: float
    parts_s: Parts  # measured; empty if only the total is recorded
    predict: Callable[[Constants], Parts]
    memory_gib: float | None = None
    predicted_gib: float | None = None
    note: str = ""


def read(file: str) -> dict[str, Any]:
    return json.loads((RESULTS / file).read_text("utf-8"))


def records() -> list[Record]:
    return [*_rollouts(), *_training(), *_steps(), *_repeated(), *_shown()]


def _rollout(
    file: str, name: str, shape_name: str, rollouts: Rollouts, row: dict[str, Any], use: Use = "fitted"
) -> Record:
    """An engine alone: prefill and decode steps."""
    shape = read_shape(shape_name)
    cache = rollouts.slots * (rollouts.prompt_tokens + rollouts.longest) * shape.key_value_bytes
    prefill = prefill_bytes(shape, min(PREFILL_TOKENS, rollouts.prompts * rollouts.prompt_tokens))
    memory = 2.0 * shape.parameters + cache + prefill + decode_bytes(shape, rollouts.slots)

    def predict(constants: Constants) -> Parts:
        model = TimeModel(shape, H200, constants)
        return {"prefill": model.prefill_s(rollouts), "decode": model.decode_s(rollouts)}

    total = row.get("seconds") or rollouts.count * rollouts.new_tokens / row["tokens_per_s"]
    prefill_s = row.get("prefill_s")
    parts = {"prefill": prefill_s, "decode": total - prefill_s} if prefill_s else {}
    return Record(file, shape_name, name, use, total, parts, predict, row.get("memory_gib"), memory / GIB)


def _rollouts() -> Iterator[Record]:
    uses: tuple[tuple[str, Use], ...] = (
        ("rollout.json", "fitted"), ("rollout_7b.json", "fitted"), ("rollout_generate.json", "checked"),
        ("rollout_7b_generate.json", "checked"), ("rollout_vllm.json", "checked"),
    )  # fmt: skip
    for file, use in uses:
        for row in read(file)["rows"]:
            count, group = row["sequences"], row.get("group") or 1
            rollouts = Rollouts(count, count // group, row["prompt"], row["new"], row["new"], count)
            yield _rollout(file, f"{row['shape']}, {count} in groups of {group}", row["shape"], rollouts, row, use)
    growth = read("growth.json")
    for row in growth["rows"]:
        rollouts = Rollouts(
            row["sequences"], row["prompts"], row["prompt_tokens"], row["new"], row["new"], row["sequences"]
        )
        yield _rollout("growth.json", f"{row['axis']} {row['value']}", growth["shape"], rollouts, row)
    mixed = read("mixed.json")
    for row in mixed["rows"]:
        case = mixed["case"]
        if "longest" in row:
            count, prompts, mean = case["prompts"] * case["group"], case["prompts"], row["mean_length"]
        else:
            count, mean = row["slots"], case["mean"]
            prompts = count // case["group"] if "groups" in row["name"] else count
        rollouts = Rollouts(count, prompts, case["prompt_tokens"], mean, row.get("longest", mean), row["slots"])
        yield _rollout("mixed.json", f"{row['name']}, {row['slots']} slots", mixed["shape"], rollouts, row)


def _trained(file: str, name: str, shape_name: str, sizes: tuple[int, int], row: dict[str, Any], use: Use) -> Record:
    """One eager micro-batch and one optimizer step."""
    (sequences, length), shape = sizes, read_shape(shape_name)
    tokens, scored = sequences * length, sequences * (length - 1)
    rank, again = LORA_RANK * ("LoRA" in name), "recompute" in name
    trained = rank * shape.adapter_rank_numbers or shape.parameters

    def predict(constants: Constants) -> Parts:
        model = TimeModel(shape, H200, constants)
        passes = max(model.train_s(tokens, scored, length, rank, again), model.eager_s(bool(rank), again))
        return {"train": passes, "optimizer": model.optimizer_s(trained)}

    state = 2.0 * shape.parameters + STATE_BYTES * trained
    memory = state + TrainingMemory(shape, bool(rank)).at(tokens, again)
    if "seconds" not in row:  # only the rate of forward and backward is recorded
        alone, seconds = (lambda constants: {"train": predict(constants)["train"]}), tokens / row["tokens_per_s"]
        return Record(file, shape_name, name, use, seconds, {}, alone)
    parts = {"train": row["seconds"], "optimizer": row["optimizer_s"]}
    return Record(file, shape_name, name, use, sum(parts.values()), parts, predict, row["memory_gib"], memory / GIB)


def _training() -> Iterator[Record]:
    found = read("train.json")
    for row in found["rows"]:
        if "modules" not in row["name"]:  # the path without fused kernels, which runs do not use
            sizes = (found["sequences"], found["length"])
            yield _trained("train.json", row["name"], row["shape"], sizes, row, "fitted")


def _workload(row: dict[str, Any], longest: int, lora: bool) -> Workload:
    """Of one of the cases of grpo_step.py: 16 prompts in groups of 8, and rows that hold one group."""
    settings = dict(word.partition("=")[::2] for word in row["command"].split() if "=" in word)
    return Workload(
        rollouts=int(settings["orch.batch_size"]), group=int(settings["orch.rollouts_per_example"]),
        prompt_tokens=row["prompt_tokens"], new_tokens=row["completion_tokens"], longest=longest,
        sequence_len=int(settings["train.sequence_len"]) + 1, lora_rank=LORA_RANK if lora else 0,
    )  # fmt: skip


def _predict_step(shape_name: str, workload: Workload) -> Callable[[Constants], Parts]:
    shape = read_shape(shape_name)

    def predict(constants: Constants) -> Parts:
        found = estimate(shape, H200, workload, constants).parts_s
        return {"sampling": found["sampling"], "training": found["training"], "other": found["sync"] + found["other"]}

    return predict


def _peak_gib(shape_name: str, workload: Workload) -> float:
    found: Estimate = estimate(read_shape(shape_name), H200, workload, CONSTANTS)
    return found.memory["device"].peak / GIB


def _step(file: str, shape_name: str, longest: int, use: Use = "fitted", note: str = "") -> Record:
    (row,) = read(file)["rows"]
    workload = _workload(row, longest, "lora" in row["name"])
    split = row["split_s"]
    parts = {"sampling": split["rollout"], "training": split["train"]}
    parts["other"] = row["step_s"] - sum(parts.values())
    predict = _predict_step(shape_name, workload)
    memory, predicted = row["memory"]["allocated_gib"], _peak_gib(shape_name, workload)
    return Record(file, shape_name, f"step, {row['name']}", use, row["step_s"], parts, predict, memory, predicted, note)


def _steps() -> Iterator[Record]:
    yield _step("grpo_step.json", "qwen2.5-0.5b", 256)
    yield _step("grpo_step_7b.json", "qwen2.5-7b", 512)
    yield _step("grpo_step_smollm2.json", "smollm2-135m", 256)


def _repeated() -> Iterator[Record]:
    """Repetitions on other days, of which only rates are recorded."""
    file = "restructuring_step_h200.json"
    (row,) = read("grpo_step.json")["rows"]
    predict = _predict_step("qwen2.5-0.5b", _workload(row, 256, False))
    (repeated,) = read(file)["rows"]
    for when in ("before", "after"):
        yield Record(file, "qwen2.5-0.5b", f"step, 0.5b, {when}", "checked", 1 / repeated[when], {}, predict)
    file, found = "restructuring_h200.json", read("train.json")
    sizes = (found["sequences"], found["length"])
    for row in read(file)["rows"]:
        measured, name = {"tokens_per_s": row["after"]}, row["name"]
        if name.startswith("train "):
            yield _trained(file, name.removeprefix("train "), "qwen2.5-0.5b", sizes, measured, "checked")
        else:
            words = name.split()
            count, group = int(words[2]), int(words[-1])
            rollouts = Rollouts(count, count // group, 128, 256, 256, count)
            yield _rollout(file, name.removeprefix("rollout "), words[1].rstrip(","), rollouts, measured, "checked")


def _shown() -> Iterator[Record]:
    """Runs that the model is known not to describe; their errors are shown, and no test depends on them."""
    note = "recorded before small training passes became CUDA graphs"
    yield _step("grpo_step_smollm2_before.json", "smollm2-135m", 256, "shown", note)
    found = read("quickstart.json")
    (row,) = found["rows"]
    steps = found["steps"][len(found["steps"]) // 2 :]
    mean = sum(step["completion/length_mean"] for step in steps) / len(steps)
    computed = sum(step["tokens/computed"] for step in steps) / len(steps)
    prompt = (computed - 128 * mean) / 8
    workload = Workload(128, 16, prompt, mean, 2 * mean, 2048, lora_rank=LORA_RANK)
    other = row["step_s"] - row["rollout_s"] - row["train_s"]
    parts = {"sampling": row["rollout_s"], "training": row["train_s"], "other": other}
    note = "FP8, and graphs are captured in many of its 40 steps; the longest completion is taken as twice the mean"
    yield Record("quickstart.json", "qwen3-0.6b", "step, quickstart", "shown", row["step_s"], parts,
                 _predict_step("qwen3-0.6b", workload), note=note)  # fmt: skip
