"""Writes docs/performance.md and its plots from the JSON in benchmarks/results/; needs no GPU and no torch.

    python benchmarks/performance.py [--results DIR] [--out docs/performance.md] [--no-plots]

NAME.json and NAME_*.json of the benchmarks are read, NAME.json first; of two rows about the same thing the first
counts. What is missing is said to be missing. A test compares the page with what this writes.
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
# What a row of each benchmark is about.
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
DEFAULTS = {"rollout": {"group": 1}}  # of rows from before it was noted
ON_CPU = ("asynchronous", "many_rollouts")
WITHOUT_RATES = ("quickstart", *ON_CPU)  # nothing in them is set beside a limit
MISSING = "Not measured yet: `python benchmarks/{name}.py benchmarks/results/{name}.json`{where}."

INTRO = """# Performance

How fast Shoal is on one GPU, beside what that GPU could do; and, on a CPU, what its scheduling gains. This page is
generated from the JSON in `benchmarks/results/`: `python benchmarks/performance.py`. Models have random weights of the
named shape unless a file is named; ratios are between figures of one run.

A **limit** is the rate if only bytes or only operations cost time, at the copy bandwidth and the bf16 matrix rate
measured in the same run. Bytes are weights once a decode step, and keys and values once; operations are two a weight
and token, and attention. Logits, activations and norms are not counted, so no limit is too low. A **fraction** is the
measured rate over the tighter limit."""

# What did not help, kept by hand; each with what was seen.
TRIED = """## What was tried and did not help

- Comparing the fused decode path with the modules over a whole model in bf16: rounding adds up over the layers, and
  Qwen3's shape with random weights missed the tolerance (.040 where .03 was asked). Layers are compared one by one, in
  fp32, instead.
- Multiplying and summing fp32 numbers in Triton instead of `tl.dot`: the compiler makes a TF32 product of it, and
  log-probs were off by 1e-3. `input_precision="ieee"` is exact.
- Graphs over the Hugging Face modules alone: 37,395 and 93,699 tokens/s for 128 and 512 sequences of the 0.5B shape, in
  an earlier version. A graph still pays for every small kernel, so kernels are fused.
- A random number for every logit of the vocabulary: 351 µs of a 2.8 ms step at 512 sequences. Blocks race first, and
  only the winner's tokens need random numbers: 66 µs.
- More than one warp for a decode-attention program where programs abound and rows are equal: 140 µs against 134 (512
  sequences of the 0.6B shape). Where their lengths differ it is the other way round.
- Cutting long rows into spans where programs abound: with 512 rows of mixed lengths, 44 µs a layer with the join
  against 43 for one program a row with four warps. Few rows gain by it: 8.6 to 6.8 µs for eight.
- Triton products with SwiGLU inside for large batches: 24 µs against 20 of the library's (0.5B shape, 512 rows). Up to
  64 rows they gain a microsecond or two, and are used there.
- `tensor[index] = 1` while prompts join a batch: the number travels from the host, which then waits for the device,
  17 ms each time. `index_fill_` does not.

The last four are from [profile_mixed_h200.json](../benchmarks/results/profile_mixed_h200.json). With 512 sequences of
the 0.5B shape, 206,378 tokens/s as it is, in [tried_decode_h200.json](../benchmarks/results/tried_decode_h200.json):

- Rows as two or four independent chains on parallel streams inside the graph, so that the products of one meet the
  attention of another: 174,816 and 161,265 tokens/s. Smaller products are worse, and weights are read as often again.
- Programmatic dependent launch of our kernels: 204,484 tokens/s. They follow products of the library, which do not let
  the next one begin early.
- A decode-attention program of several lanes, each with a softmax of its own until the end, so that no warp waits for
  another: 29.9 µs a layer of 256 keys with two lanes against 23.1. What stands between 23.1 and the 15.8 of the
  bandwidth is the same at any length: a kernel's start and its first reads.

From [tried_products_h200.json](../benchmarks/results/tried_products_h200.json), with the norm that follows:

- A Triton product of our own, split along its depth: 9.1 µs for the 0.5B shape's last product of a layer at 128 rows
  and 19.1 for the 1.5B shape's, where the library's batched product over four parts of the depth takes 8.4 and 14.2,
  and its plain one 10.7 and 15.3. It was replaced by the batched product, which gains at 256 and 512 rows too (12.2 to
  9.3 and 13.1 to 12.0).
- Choosing between the two libraries of products that torch has: within .5 µs of each other at 512 rows.

In one run of packed training ([tried_compiled_h200.json](../benchmarks/results/tried_compiled_h200.json)):

- `torch.compile`: 124,411 tokens/s and 31.4 GiB as it is, 121,693 and 44.3 GiB with each layer compiled on top of our
  kernels, 128,578 and 37.9 GiB with the model's own modules compiled, whose first pass takes 51 s. Passes of one kind
  differ by as much (.181 to .201 s as it is): no faster beyond that, more memory, and a start that waits. So nothing
  is compiled.

At 512 sequences of the 0.5B shape and 256 keys
([tried_attention_h200.json](../benchmarks/results/tried_attention_h200.json)):

- The first keys read before the queries are made ready: 22.2 µs a layer against 22.5, but 10.0 against 8.7 at 128
  sequences. What did help there was to begin with the new token instead of ending with it (23.2 to 22.5; 45.5 to 41.9
  for 128 sequences of the 0.6B shape), and then blocks of 16 keys instead of 32 (22.8 to 22.0; 42.4 to 38.8; with 512
  sequences of the 0.6B shape nothing, 135.4 to 135.8).
- All eight steps of a window as one graph: 2,016 µs a step either way.

For 4,096 sequences of mixed lengths ([tried_mixed_h200.json](../benchmarks/results/tried_mixed_h200.json)):

- More sequences at once, while Python's collector still had the device wait: 172,358 tokens/s with 1,024 slots,
  184,391 with 2,048 and 191,622 with all 4,096 and batches in eighths; in quarters 183,321 with 1,024, 177,236 with
  1,536 and 184,245 with 2,048. The same run differed by 6 % from one time to the next.
- Rows computed longest first, the heads of a row side by side: a layer of 1,024 rows takes 57 µs instead of 67, of 48
  that the bandwidth asks for, but the whole run took as long.
- Products with SwiGLU inside, in tiles as large as the device takes: 38.1 µs against 35.4 at 1,024 rows, 70.1 against
  70.9 at 2,048, 145.1 against 138.8 at 4,096.
- Kernels that start early (programmatic dependent launch), fetch their weights into the cache and wait there, with
  products of our own for up to 64 rows, so that nothing of the library stands between: a step of 8 rows takes 1.19 ms
  where it took .79, of 64 rows 1.11 instead of .94. Such products started one after the other: .84 and 1.01; the
  library's between kernels that start early: .82 and .97.
- Rows longest first once more, in a whole run: 5.61 s, and 5.59 as they lie.

What helped there: the host's lists (see [log.md](log.md)); and, each measured within that candidate, batches above 512
rows in sixteenths instead of eighths, 5.61 to 5.51 s, and windows of four steps from 512 rows on, 5.66 to 5.61. With
512 sequences of equal lengths such windows take .505 to .521 s where windows of eight take .505 to .512, so they begin
at 1,024 rows."""


@dataclass
class Results:
    """Rows by benchmark, one about each thing; the files they are from, in the order read."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in KEYS})
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    # And those that others stand before: a rival's run, or a cold start's, has rows of its own to compare with.
    every: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in KEYS})

    def add(self, benchmark: str, row: dict[str, Any]) -> None:
        if self.find(benchmark, **{key: row[key] for key in KEYS[benchmark]}) is None:
            self.rows[benchmark].append(row)
        self.every[benchmark].append(row)

    def find(self, benchmark: str, **wanted: Any) -> dict[str, Any] | None:
        return next((row for row in self.rows[benchmark] if all(row[key] == wanted[key] for key in wanted)), None)


def read_results(folder: Path) -> Results:
    """Runs with --smoke are no measurements and are left out; so is what was written before rows had limits."""
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
    parts = [INTRO, "## What is to be reached", goals_table(results)]
    for name, title, write in SECTIONS:
        missing = MISSING.format(name=name, where="" if name in ON_CPU else " on a GPU")
        parts += [f"## {title}", *(write(results) if results.rows[name] else [missing])]
    parts += [TRIED, "## Machines and commands", *_sources(results)]
    return "\n\n".join(parts) + "\n"


def _sources(results: Results) -> Iterator[str]:
    if not results.files:
        yield "No result is in yet."
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
