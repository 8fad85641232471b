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

This page shows how fast Shoal is on one GPU, compares the rates with the limits of that GPU, and shows how much
running sampling ahead of training gains. `python benchmarks/performance.py` generates it from the JSON in
`benchmarks/results/`. Models have random weights of the named shape unless a file is named. Each ratio compares
figures of the same run.

These terms are used in all tables:

- The **bytes limit** is the rate that would be reached if only memory traffic took time, at the copy bandwidth
  measured in the same run. The traffic consists of the weights and of the KV cache, each read once per decode
  step.
- The **operations limit** is the rate that would be reached if only arithmetic took time, at the bf16 matrix
  rate measured in the same run. The arithmetic consists of two operations per weight and token, and of
  attention.
- The **fraction** is the measured rate divided by the lower of the two limits. Logits, activations and norms
  are not counted, so the real limit is lower."""

GOALS = """Each row compares a measurement with a goal and a more ambitious target. The result is *below* if the
goal is missed, *exceeded* if the measurement is better than the goal, and *target reached* if it also reaches
the target."""

# Negative results, written by hand, each with its measurement.
TRIED = """## What was tried and did not help

Each entry names the change in bold, then the result and the reason.

- **Compare the fused decode path with the modules over the whole model in bf16.** Rounding errors add up over
  the layers, and Qwen3's shape with random weights missed the tolerance: the difference was .040, and .03 was
  allowed. The check now compares layers one by one in fp32.
- **Multiply and sum fp32 values in Triton instead of calling `tl.dot`.** The compiler turns this into a TF32
  product, and log-probs had errors of 1e-3. `tl.dot` with `input_precision="ieee"` is exact.
- **Capture CUDA graphs over the Hugging Face modules alone.** An earlier version reached 37,395 tokens/s with
  128 sequences of the 0.5B shape, and 93,699 tokens/s with 512. A graph still runs every small kernel, so the
  kernels are now fused.
- **Draw a random number for every logit of the vocabulary.** This took 351 µs of a step of 2.8 ms with 512
  sequences. The sampler now chooses a block of the vocabulary first and draws random numbers only for the
  tokens of this block, which takes 66 µs.

The next four entries are from [profile_mixed_h200.json](../benchmarks/results/profile_mixed_h200.json):

- **Run decode attention with more than one warp per program.** With 512 sequences of equal length (0.6B shape),
  a layer takes 140 µs instead of 134 µs. With rows of different lengths, more warps are faster.
- **Split long rows into spans that separate programs compute.** With 512 rows of mixed lengths, a layer takes
  44 µs including the merge, and 43 µs with one program of four warps per row. Splitting helps with few rows:
  with eight rows the time falls from 8.6 to 6.8 µs.
- **Use Triton matrix products with fused SwiGLU for large batches.** With 512 rows of the 0.5B shape, the
  product takes 24 µs instead of the library's 20 µs. Up to 64 rows the Triton product saves one or two
  microseconds and is used.
- **Set `tensor[index] = 1` when prompts join a batch.** PyTorch copies the value from the host, and the host
  then waits 17 ms for the device each time. `index_fill_` does not wait.

### Decoding 512 sequences of the 0.5B shape

The baseline is 206,378 tokens/s ([tried_decode_h200.json](../benchmarks/results/tried_decode_h200.json)).

- **Split the rows into independent chains on parallel streams inside the graph.** The matrix products of one
  chain should overlap with the attention of another. Two chains reach 174,816 tokens/s and four chains 161,265
  tokens/s, because smaller products are less efficient and every chain reads the weights again.
- **Start our kernels early with programmatic dependent launch.** The rate is 204,484 tokens/s. Our kernels
  follow library products, which do not allow the next kernel to start early.
- **Divide a decode-attention program into lanes with separate softmaxes, so that no warp waits for another.**
  With two lanes, a layer of 256 keys takes 29.9 µs instead of 23.1 µs. The bandwidth limit is 15.8 µs. The
  difference between 23.1 µs and this limit is the same at any length: it is the start of the kernel and its
  first reads.

### Matrix products

The times include the norm that follows
([tried_products_h200.json](../benchmarks/results/tried_products_h200.json)).

- **Write our own Triton product, split along its depth (split-K).** These are the times of the last product of
  a layer with 128 rows:

  | product | 0.5B shape | 1.5B shape |
  | --- | --- | --- |
  | our Triton product | 9.1 µs | 19.1 µs |
  | library, batched over four parts of the depth | 8.4 µs | 14.2 µs |
  | library, plain | 10.7 µs | 15.3 µs |

  The batched library product replaced ours. With 256 rows it takes 9.3 µs instead of 12.2 µs for the plain
  product, and with 512 rows 12.0 µs instead of 13.1 µs.
- **Choose between the two matrix libraries of torch.** The times differ by less than .5 µs with 512 rows.

### torch.compile

This table compares variants of packed training in one run
([tried_compiled_h200.json](../benchmarks/results/tried_compiled_h200.json)):

| variant | tokens/s | memory |
| --- | --- | --- |
| our kernels, not compiled | 124,411 | 31.4 GiB |
| our kernels, each layer compiled | 121,693 | 44.3 GiB |
| the Hugging Face modules, compiled (the first pass takes 51 s) | 128,578 | 37.9 GiB |

Without compilation, passes take between .181 and .201 s, so the differences between the variants are within the
noise. Compilation needs more memory and delays the start. Shoal therefore compiles nothing.

### Decode attention

The times are per layer, with 512 sequences of the 0.5B shape and 256 keys unless the entry names another case
([tried_attention_h200.json](../benchmarks/results/tried_attention_h200.json)).

- **Read the first keys before the queries are ready.** The time falls from 22.5 to 22.2 µs. With 128 sequences,
  it rises from 8.7 to 10.0 µs.
- **Capture all eight steps of a window as one graph.** A step takes 2,016 µs with and without this change.

Two changes helped and are used:

| change | 0.5B shape, 512 sequences | 0.6B shape, 128 sequences | 0.6B shape, 512 sequences |
| --- | --- | --- | --- |
| start with the new token instead of ending with it | 23.2 to 22.5 µs | 45.5 to 41.9 µs | – |
| blocks of 16 keys instead of 32 | 22.8 to 22.0 µs | 42.4 to 38.8 µs | 135.4 to 135.8 µs |

### 4,096 sequences of mixed lengths

These entries are from [tried_mixed_h200.json](../benchmarks/results/tried_mixed_h200.json).

- **Run more sequences at the same time.** In these runs, Python's garbage collector still made the device wait,
  and the same run differed by 6 % from one time to the next:

  | batch sizes | 1,024 slots | 1,536 slots | 2,048 slots | 4,096 slots |
  | --- | --- | --- | --- | --- |
  | in eighths | 172,358 tokens/s | | 184,391 tokens/s | 191,622 tokens/s |
  | in quarters | 183,321 tokens/s | 177,236 tokens/s | 184,245 tokens/s | |

- **Start the longest rows first, with the heads of a row side by side.** A layer of 1,024 rows takes 57 µs
  instead of 67 µs (the bandwidth limit is 48 µs), but the whole run takes equally long. A second comparison of
  whole runs gave 5.61 s with the longest rows first, and 5.59 s unsorted.
- **Use matrix products with fused SwiGLU, in the largest tiles that the device supports.**

  | product | 1,024 rows | 2,048 rows | 4,096 rows |
  | --- | --- | --- | --- |
  | with fused SwiGLU | 38.1 µs | 70.1 µs | 145.1 µs |
  | without | 35.4 µs | 70.9 µs | 138.8 µs |

- **Start kernels early (programmatic dependent launch) and let them prefetch their weights into the cache while
  they wait.** Our own products, for up to 64 rows, replace the library kernels between them. The times are per
  step:

  | variant | 8 rows | 64 rows |
  | --- | --- | --- |
  | the version in use | .79 ms | .94 ms |
  | early start, our own products | 1.19 ms | 1.11 ms |
  | our own products, started one after the other | .84 ms | 1.01 ms |
  | library products between kernels that start early | .82 ms | .97 ms |

Three changes helped:

| change | time of the whole run |
| --- | --- |
| the results of a window are one list on the host ([log.md](log.md#decoding-on-a-gpu)) | – |
| batches above 512 rows come in sixteenths instead of eighths | 5.61 to 5.51 s |
| windows have four steps instead of eight from 512 rows on | 5.66 to 5.61 s |

The last two changes were measured separately. With 512 sequences of equal length, runs with windows of four
steps take .505 to .521 s, and runs with windows of eight steps .505 to .512 s. Windows of four steps therefore
start at 1,024 rows."""


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
    parts = [INTRO, "## Goals", GOALS, goals_table(results)]
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
