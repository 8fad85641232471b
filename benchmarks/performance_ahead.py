"""Two sections of the performance page: the gain of running ahead, and the cost of many concurrent rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from performance_tables import Column, gib, number, percent, seconds, table_of

if TYPE_CHECKING:
    from performance import Results

LAYOUT: list[Column] = [
    ("layout", lambda r: r["layout"]),
    ("work", lambda r: r["name"]),
    ("`max_async_level`", lambda r: str(r["level"])),
    ("rollouts/s", lambda r: f"{r['rollouts_per_s']:.1f}"),
    ("relative to level 0", lambda r: f"{r['gain']:.2f}×"),
    ("sampler idle, share of time", lambda r: percent(r.get("sampler_idle"))),
    ("trainer idle, share of time", lambda r: percent(r.get("trainer_idle"))),
    ("weight transfer time", lambda r: seconds(r.get("sync_s"))),
]
EXPECTED: list[Column] = [
    ("`max_async_level`", lambda r: str(r["level"])),
    ("expected rollouts/s", lambda r: f"{r['predicted_rollouts_per_s']:.1f}"),
    ("measured rollouts/s", lambda r: f"{r['rollouts_per_s']:.1f}"),
    ("measured / expected", lambda r: percent(r["of_predicted"])),
]
LAYOUTS = {
    "simulated": "The real loop runs with a simulated engine and policy that have fixed delays: 0.4 s for the rollouts "
    "of a step and 0.4 s for training. In the rows with few long answers, most completions take half as long and the "
    "longest take four times as long.",
    "engine process": "The embedded engine runs a tiny model in a separate process on a CPU, with one thread for the "
    "engine and one for training, so that both overlap. The fastest of three runs is shown.",
    "co-located": "`shoal grpo` runs with all threads. Sampling and training alternate on one device, and waiting "
    "for the device does not count as idle. The fastest of three runs is shown for the CPU, and one run for the GPU.",
    "split": "`shoal grpo --layout split` runs as often as the co-located layout. Both processes share one GPU, and "
    "every step transfers a gigabyte of weights as files. With one GPU use the co-located layout.",
}
MANY: list[Column] = [
    ("concurrent rollouts", lambda r: number(r["most_at_once"])),
    ("tokens per rollout", lambda r: number(r["tokens"])),
    ("CPU time per rollout", lambda r: f"{r['own_ms_a_rollout']:.2f} ms"),
    ("peak memory", lambda r: gib(r["peak_gib"])),
]


def asynchronous(results: Results) -> Iterator[str]:
    rows = results.rows["asynchronous"]
    yield """This section shows how many rollouts per second a run finishes if sampling runs ahead of training
(`orch.max_async_level` 0, 1 and 4). The rate covers the whole run, from the first dispatch to the last record."""
    layouts = {row["layout"] for row in rows}
    yield "\n".join(f"- *{name}*: {text}" for name, text in LAYOUTS.items() if name in layouts)
    missing = ", ".join(name for name in LAYOUTS if name not in layouts)
    if missing:
        yield f"Not measured yet: {missing}; run `python benchmarks/asynchronous.py` on an otherwise idle machine."
    yield table_of(rows, LAYOUT)
    yield "![Rollouts per second and idle time by level](images/performance_asynchronous.svg)"
    expected = [row for row in rows if "predicted_rollouts_per_s" in row]
    if expected:
        base = expected[0]
        delays = f"{base['generate_s']:.2f} s of generation and {base['train_s']:.2f} s of training per step"
        yield f"""This table compares the engine process with a simulation on a virtual clock. The simulation uses
the delays measured at level 0: {delays}."""
        yield table_of(expected, EXPECTED)


def many_rollouts(results: Results) -> Iterator[str]:
    yield """All rollouts are in flight at once on a simulated engine, in groups of eight, on two cores. The table
shows the CPU time of the orchestrator, which runs environments, requests rewards, checks groups, and packs and
writes every rollout. The goal is at most 1 ms per rollout and 2 GiB."""
    yield table_of(results.rows["many_rollouts"], MANY)
