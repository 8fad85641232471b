"""Writes docs/performance.md and its plots from the JSON in benchmarks/results/. Needs neither GPU nor torch.

    python benchmarks/performance.py [--results DIR] [--out docs/performance.md] [--no-plots]

For each benchmark NAME, NAME.json is read first and then NAME_*.json. If two rows have the same key, the first is used.
The page lists missing results. A test compares the page with the output of this script.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from performance_goals import goals_table
from performance_sections import SECTIONS
from performance_tables import table

ROOT = Path(__file__).parents[1]
# The fields that identify a row of each benchmark.
KEYS = {
    "rollout": ("shape", "sequences", "group"),
    "mixed": ("name", "slots"),
    "train": ("name", "shape"),
    "grpo_step": ("name",),
    "quickstart": ("shape",),
    "growth": ("axis", "value"),
    "asynchronous": ("layout", "name", "level"),
    "many_rollouts": ("tokens",),
}
DEFAULTS = {"rollout": {"group": 1}}  # for rows recorded before the field existed
ON_CPU = ("asynchronous", "many_rollouts")
WITHOUT_RATES = ("quickstart", *ON_CPU)  # they are not compared with a limit
MISSING = "Not measured yet: `python benchmarks/{name}.py benchmarks/results/{name}.json`{where}."

INTRO = """# Performance

This page shows how fast Shoal is on one GPU, compared with the limits of that GPU, and how much its scheduling gains on
a CPU. It is generated from the JSON in `benchmarks/results/`: `python benchmarks/performance.py`. Models have random
weights of the named shape unless a file is named. Ratios are between figures of one run.

A **limit** is the rate if only memory traffic (bytes) or only arithmetic (operations) took time, at the copy bandwidth
and the bf16 matrix rate measured in the same run. Bytes are the weights, read once per decode step, and the KV cache,
read once. Operations are two per weight and token, plus attention. Logits, activations and norms are not counted, so
the real limit is lower. A **fraction** is the measured rate divided by the lower of the two limits."""

# Negative results, written by hand, each with its measurement.
TRIED = """## What was tried and did not help

- Comparing the fused decode path with the modules over a whole model in bf16. Rounding adds up over the layers, and
  Qwen3's shape with random weights missed the tolerance (.040 instead of .03). Layers are compared one by one, in fp32,
  instead.
- Multiply and sum of fp32 values in Triton instead of `tl.dot`. The compiler turns it into a TF32 product, and
  log-probs had errors of 1e-3. `input_precision="ieee"` is exact.
- CUDA graphs over the Hugging Face modules alone, in an earlier version: 37,395 and 93,699 tokens/s for 128 and 512
  sequences of the 0.5B shape. A graph still pays for every small kernel, so kernels are fused.
- A random number for every logit of the vocabulary: 351 µs of a 2.8 ms step at 512 sequences. Now the vocabulary is
  sampled by blocks first, and only the tokens of the selected block need random numbers: 66 µs.
- More than one warp per decode-attention program, with many programs and rows of equal length: 140 µs instead of 134
  (512 sequences of the 0.6B shape). With rows of different lengths more warps are faster.
- Splitting long rows into spans, with many programs: at 512 rows of mixed lengths 44 µs per layer including the merge,
  compared with 43 µs for one program of four warps per row. It helps with few rows: 8.6 to 6.8 µs for eight.
- Triton matrix products with fused SwiGLU for large batches: 24 µs instead of the library's 20 (0.5B shape, 512 rows).
  Up to 64 rows they save one or two microseconds and are used.
- `tensor[index] = 1` when prompts join a batch. The value is copied from the host, which then waits for the device,
  17 ms each time. `index_fill_` does not wait.

The last four are from [profile_mixed_h200.json](../benchmarks/results/profile_mixed_h200.json).

**512 sequences of the 0.5B shape**, baseline 206,378 tokens/s
([tried_decode_h200.json](../benchmarks/results/tried_decode_h200.json)):

- Rows as two or four independent chains on parallel streams inside the graph, so that the matrix products of one
  overlap with the attention of another: 174,816 and 161,265 tokens/s. Smaller products are less efficient, and weights
  are read once per chain.
- Programmatic dependent launch of our kernels: 204,484 tokens/s. They follow library products, which do not allow the
  next kernel to start early.
- A decode-attention program with several lanes, each with its own softmax until the end, so that no warp waits for
  another: 29.9 µs per layer of 256 keys with two lanes, compared with 23.1. The bandwidth limit is 15.8 µs. The
  remaining time is the same at any length: the start of a kernel and its first reads.

**Matrix products**, with the norm that follows
([tried_products_h200.json](../benchmarks/results/tried_products_h200.json)):

- Our own Triton product, split along its depth (split-K). Times for the last product of a layer at 128 rows:

  | product | 0.5B shape | 1.5B shape |
  | --- | --- | --- |
  | our Triton product | 9.1 µs | 19.1 µs |
  | library, batched over four parts of the depth | 8.4 µs | 14.2 µs |
  | library, plain | 10.7 µs | 15.3 µs |

  The batched product replaced ours. It is also faster than the plain one at 256 and 512 rows (12.2 to 9.3 µs and 13.1
  to 12.0 µs).
- Choosing between the two matrix libraries of torch: the difference is below .5 µs at 512 rows.

**`torch.compile`** of packed training, one run
([tried_compiled_h200.json](../benchmarks/results/tried_compiled_h200.json)):

| variant | tokens/s | memory |
| --- | --- | --- |
| our kernels, not compiled | 124,411 | 31.4 GiB |
| our kernels, each layer compiled | 121,693 | 44.3 GiB |
| the model's own modules, compiled (first pass 51 s) | 128,578 | 37.9 GiB |

Passes of one variant differ by as much (.181 to .201 s without compilation). So compilation brings no speed beyond the
noise, needs more memory and delays the start. Nothing is compiled.

**Decode attention** at 512 sequences of the 0.5B shape and 256 keys
([tried_attention_h200.json](../benchmarks/results/tried_attention_h200.json)):

- Reading the first keys before the queries are ready: 22.2 µs per layer instead of 22.5, but 10.0 instead of 8.7 at 128
  sequences.
- All eight steps of a window as one graph: 2,016 µs per step either way.
- Two changes helped there. Starting with the new token instead of ending with it: 23.2 to 22.5 µs, and 45.5 to 41.9 µs
  for 128 sequences of the 0.6B shape. Then blocks of 16 keys instead of 32: 22.8 to 22.0 µs and 42.4 to 38.8 µs (no
  gain with 512 sequences of the 0.6B shape, 135.4 to 135.8 µs).

**4,096 sequences of mixed lengths** ([tried_mixed_h200.json](../benchmarks/results/tried_mixed_h200.json)):

- More concurrent sequences, while Python's garbage collector still made the device wait:

  | batch sizes | 1,024 slots | 1,536 slots | 2,048 slots | 4,096 slots |
  | --- | --- | --- | --- | --- |
  | in eighths | 172,358 tokens/s | | 184,391 tokens/s | 191,622 tokens/s |
  | in quarters | 183,321 tokens/s | 177,236 tokens/s | 184,245 tokens/s | |

  The same run differed by 6 % from one time to the next.
- Longest rows first, with the heads of a row side by side: a layer of 1,024 rows takes 57 µs instead of 67 (bandwidth
  limit 48), but the whole run took equally long. In another whole run longest first took 5.61 s, and unsorted 5.59 s.
- Matrix products with fused SwiGLU, in the largest tiles that the device supports: 38.1 µs instead of 35.4 at 1,024
  rows, 70.1 instead of 70.9 at 2,048, 145.1 instead of 138.8 at 4,096.
- Kernels that start early (programmatic dependent launch), prefetch their weights into the cache and wait there, with
  our own products for up to 64 rows so that no library kernel is in between. Time per step:

  | variant | 8 rows | 64 rows |
  | --- | --- | --- |
  | as it is | .79 ms | .94 ms |
  | early start, our own products | 1.19 ms | 1.11 ms |
  | our own products, started one after the other | .84 ms | 1.01 ms |
  | library products between kernels that start early | .82 ms | .97 ms |

Three changes helped. The host's lists were replaced (see [log.md](log.md)). Batches above 512 rows come in sixteenths
instead of eighths: 5.61 to 5.51 s. Windows of four steps from 512 rows on: 5.66 to 5.61 s. With 512 sequences of equal
length such windows take .505 to .521 s, and windows of eight .505 to .512 s, so short windows start at 1,024 rows. The
last two were measured separately, each within that variant."""


@dataclass
class Results:
    """Rows by benchmark, one per key, and the files that they come from, in the order read."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in KEYS})
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    # All rows, including later ones with the same key: comparisons and cold starts are in files of their own.
    every: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in KEYS})

    def add(self, benchmark: str, row: dict[str, Any]) -> None:
        if self.find(benchmark, **{key: row[key] for key in KEYS[benchmark]}) is None:
            self.rows[benchmark].append(row)
        self.every[benchmark].append(row)

    def find(self, benchmark: str, **wanted: Any) -> dict[str, Any] | None:
        return next((row for row in self.rows[benchmark] if all(row[key] == wanted[key] for key in wanted)), None)


def read_results(folder: Path) -> Results:
    """Skips runs with --smoke, which are not measurements, and files written before rows had limits."""
    results = Results()
    for name in KEYS:
        for path in [folder / f"{name}.json", *sorted(folder.glob(f"{name}_*.json"))]:
            found = json.loads(path.read_text("utf-8")) if path.exists() else {}
            if "rows" not in found or ("rates" not in found and name not in WITHOUT_RATES) or found.get("smoke"):
                continue
            results.files[path.name] = found
            for row in found["rows"]:
                results.add(name, {**DEFAULTS.get(name, {}), **row, "file": path.name})
    return results


def page(results: Results) -> str:
    parts = [INTRO, "## Goals", goals_table(results)]
    for name, title, write in SECTIONS:
        missing = MISSING.format(name=name, where="" if name in ON_CPU else " on a GPU")
        parts += [f"## {title}", *(write(results) if results.rows[name] else [missing])]
    parts += [TRIED, "## Machines and commands", *_sources(results)]
    return "\n\n".join(parts) + "\n"


def _sources(results: Results) -> Iterator[str]:
    if not results.files:
        yield "There are no results yet."
        return
    rates = {name: found["rates"] for name, found in results.files.items() if "rates" in found}
    yield table(
        ["run", "copy bandwidth", "bf16 matrix product"],
        [
            [f"`{name}`", f"{r['bytes_per_s'] / 1e12:.2f} TB/s", f"{r['operations_per_s'] / 1e12:.0f} TFLOP/s"]
            for name, r in rates.items()
        ],
    )
    for name, found in results.files.items():
        m = found["machine"]
        versions = [f"{key} {m[key]}" for key in ("python", "torch", "triton", "transformers") if key in m]
        where = ", ".join([m.get("gpu", "no GPU"), f"{m['cores']} CPU cores", *versions, m["date"]])
        commands = "\n".join([found["command"], *(row["command"] for row in found["rows"] if "command" in row)])
        yield f"[`{name}`](../benchmarks/results/{name}): {where}.\n\n```text\n{commands}\n```"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    made.add_argument("--out", type=Path, default=ROOT / "docs" / "performance.md")
    made.add_argument("--no-plots", action="store_true")
    asked = made.parse_args()
    results = read_results(asked.results)
    asked.out.write_text(page(results), "utf-8")
    if not asked.no_plots:
        import performance_plots

        performance_plots.write(results, asked.out.parent / "images")
    print(f"{asked.out} from {', '.join(results.files) or 'no results'}")


if __name__ == "__main__":
    main()
