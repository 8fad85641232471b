"""Two sections of the performance page: what running ahead of training gains, and what many rollouts at once cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from performance_tables import Column, gib, number, percent, seconds, table_of

if TYPE_CHECKING:
    from performance import Results

LAYOUT: list[Column] = [
    ("layout", lambda r: r["layout"]),
    ("work", lambda r: r["name"]),
    ("level", lambda r: str(r["level"])),
    ("rollouts/s", lambda r: f"{r['rollouts_per_s']:.1f}"),
    ("beside level 0", lambda r: f"{r['gain']:.2f}×"),
    ("sampler idle", lambda r: percent(r.get("sampler_idle"))),
    ("trainer idle", lambda r: percent(r.get("trainer_idle"))),
    ("handing over", lambda r: seconds(r.get("sync_s"))),
]
EXPECTED: list[Column] = [
    ("level", lambda r: str(r["level"])),
    ("expected rollouts/s", lambda r: f"{r['predicted_rollouts_per_s']:.1f}"),
    ("measured", lambda r: f"{r['rollouts_per_s']:.1f}"),
    ("of expected", lambda r: percent(r["of_predicted"])),
]
LAYOUTS = {
    "simulated": "the real loop on an engine and a policy with set delays: 0.4 s for a step's rollouts and 0.4 s to "
    "train them; or half of the time for most answers and four times that for the longest.",
    "engine process": "the embedded engine of a tiny model in a process of its own on a CPU, one thread for it and one "
    "for training, so that the two overlap; the fastest of three runs.",
    "co-located": "`shoal grpo` with all threads: sampling and training take turns on one device, and waiting "
    "for one's turn is not idle; the fastest of three runs on the CPU, one on the GPU.",
    "split": "`shoal grpo --layout split`, runs as before. On the one GPU both processes compute, and every step hands "
    "a gigabyte of weights over as files: one GPU is what co-located is for.",
}
MANY: list[Column] = [
    ("rollouts at once", lambda r: number(r["most_at_once"])),
    ("tokens each", lambda r: number(r["tokens"])),
    ("own time each", lambda r: f"{r['own_ms_a_rollout']:.2f} ms"),
    ("peak memory", lambda r: gib(r["peak_gib"])),
]


def asynchronous(results: Results) -> Iterator[str]:
    rows = results.rows["asynchronous"]
    yield """Rollouts a second over a whole run, from the first dispatch to the last record, at `max_async_level` 0, 1
and 4."""
    layouts = {row["layout"] for row in rows}
    yield "\n".join(f"- *{name}*: {says}" for name, says in LAYOUTS.items() if name in layouts)
    missing = ", ".join(name for name in LAYOUTS if name not in layouts)
    if missing:
        yield f"Not measured yet: {missing}; `python benchmarks/asynchronous.py` measures them where nothing else runs."
    yield table_of(rows, LAYOUT)
    yield "![Rollouts a second and idle time by level](images/performance_asynchronous.svg)"
    expected = [row for row in rows if "predicted_rollouts_per_s" in row]
    if expected:
        base = expected[0]
        delays = f"{base['generate_s']:.2f} s of generation and {base['train_s']:.2f} s of training a step"
        yield f"""The engine process beside the simulation with the delays measured at level 0: {delays},
on a virtual clock."""
        yield table_of(expected, EXPECTED)


def many_rollouts(results: Results) -> Iterator[str]:
    yield """All open at once on a simulated engine, in groups of eight, the process kept to two cores. Own time is CPU
time of the orchestrator: playing, asking for rewards, judging, packing, writing every rollout. At most 1 ms and 2 GiB
are asked for."""
    yield table_of(results.rows["many_rollouts"], MANY)
