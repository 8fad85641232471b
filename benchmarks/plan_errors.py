"""Compares `shoal plan` with every comparable recorded run, and writes the tables of docs/planning.md.

    python benchmarks/plan_errors.py [--fit] [--out benchmarks/results/plan_errors.json] [--page docs/planning.md]

--fit also fits the constants again, once with all records and once without each file (leave one out), and prints them;
shoal/planning/time_model.py declares them. Without --fit the recorded fits are kept. A test compares the page and the
predictions with what this writes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from performance_tables import table
from plan_records import LEFT_OUT, Record, records

from shoal.cli.entry import main as shoal
from shoal.planning.time_model import CONSTANTS, Constants

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "plan_errors.json"
PAGE = ROOT / "docs" / "planning.md"
# Set beforehand, not fitted: the product rate that long prefills of the 7b shape reach, and host times of eager passes
# from profile_passes_h200.json and profile_small_passes_h200.json.
SET = {"products": 0.85, "eager_layer_s": 5e-3, "eager_adapter_layer_s": 9e-3}
# Where every fit starts: round guesses, towards which a constant is pulled that no record decides.
START = Constants(
    attention=0.5, bandwidth=0.9, decode_layer_s=20e-6, adapter_layer_s=20e-6, prefill_layer_s=100e-6, activations=1.0,
    backward_activations=3.0, adapter_activations=2.0, optimizer_s=5e-3, rollout_s=0.5e-3, packing_s=0.2e-3,
    other_s=0.2e-3, **SET,
)  # fmt: skip
FITTED = [field.name for field in fields(Constants) if field.name not in SET]
PULL = 0.03  # weight of the distance to START in the fit, in logarithms
ITERATIONS = 40


def fit(found: Sequence[Record]) -> Constants:
    """Least squares of the logarithms of predicted over measured seconds, part by part (Levenberg-Marquardt).

    The parts of one file have together the weight of one record, so that no file decides by its number of rows.
    """
    measured = [(record, part, seconds) for record in found for part, seconds in record.parts_s.items()]
    counts = Counter((record.file, part) for record, part, _ in measured)
    weights = np.array([counts[record.file, part] ** -0.5 for record, part, _ in measured])
    start = np.log([getattr(START, name) for name in FITTED])

    def residuals(logs: np.ndarray) -> np.ndarray:
        predicted = {id(record): record.predict(_constants(logs)) for record in found}
        errors = [math.log(predicted[id(record)][part] / seconds) for record, part, seconds in measured]
        return np.concatenate([weights * errors, PULL * (logs - start)])

    logs, damping = start, 1e-2
    now = residuals(logs)
    for _ in range(ITERATIONS):
        moves = 1e-4 * np.eye(len(logs))
        slopes = np.stack([(residuals(logs + move) - now) / 1e-4 for move in moves], axis=1)
        change = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(logs)), -slopes.T @ now)
        then = residuals(logs + change)
        if then @ then < now @ now:
            logs, now, damping = logs + change, then, damping / 3
        else:
            damping *= 4
    return _constants(logs)


def _constants(logs: np.ndarray) -> Constants:
    return replace(START, **{name: float(value) for name, value in zip(FITTED, np.exp(logs), strict=True)})


def rounded(constants: Constants) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in asdict(constants).items()}


def predictions(found: Sequence[Record], constants: Constants = CONSTANTS) -> list[dict[str, Any]]:
    rows = []
    for record in found:
        parts = record.predict(constants)
        row: dict[str, Any] = {
            "file": record.file, "shape": record.shape, "name": record.name, "use": record.use,
            "measured_s": record.total_s,
            "predicted_s": sum(parts.values()), "error": sum(parts.values()) / record.total_s - 1,
            "parts": {part: [seconds, parts[part]] for part, seconds in record.parts_s.items()}, "note": record.note,
        }  # fmt: skip
        if record.memory_gib and record.predicted_gib:
            row |= {"memory_gib": record.memory_gib, "predicted_gib": record.predicted_gib}
            row["memory_error"] = record.predicted_gib / record.memory_gib - 1
        rows.append({key: _short(value) for key, value in row.items()})
    return rows


def _short(value: Any) -> Any:
    """Six digits, so that another machine's arithmetic writes the same file."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list) else value


def left_out_fits(found: Sequence[Record]) -> list[dict[str, Any]]:
    """Per fitted file and per shape: errors of its records with constants that were fitted without it."""
    fitted = [record for record in found if record.use == "fitted"]
    rows = []
    for kind in ("file", "shape"):
        for name in sorted({getattr(record, kind) for record in fitted}):
            left_out = [record for record in fitted if getattr(record, kind) == name]
            errors = [row["error"] for row in predictions(left_out, fit([r for r in fitted if r not in left_out]))]
            rows.append({
                "kind": kind, "name": name, "records": len(errors), "mean": _mean(errors), "largest": _largest(errors)
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def _mean(errors: Sequence[float]) -> float:
    return _short(sum(map(abs, errors)) / len(errors))


def _largest(errors: Sequence[float]) -> float:
    return _short(max(errors, key=abs))


def make_result(again: bool, before: dict[str, Any]) -> dict[str, Any]:
    found = records()
    result = {"constants": rounded(CONSTANTS), "fitted_constants": len(FITTED), "rows": predictions(found)}
    if again:
        result["fit"] = rounded(fit([record for record in found if record.use == "fitted"]))
        result["leave_one_out"] = left_out_fits(found)
    else:
        result |= {key: before[key] for key in ("fit", "leave_one_out") if key in before}
    return result | {"left_out": LEFT_OUT}


def percent(error: float) -> str:
    return f"{100 * error:+.0f} %"


def summary_table(result: dict[str, Any]) -> str:
    rows = []
    for file in dict.fromkeys(row["file"] for row in result["rows"] if row["use"] != "shown"):
        of_file = [row for row in result["rows"] if row["file"] == file]
        errors = [row["error"] for row in of_file]
        memory = [row["memory_error"] for row in of_file if "memory_error" in row]
        rows.append([
            f"`{file}`", of_file[0]["use"], str(len(of_file)), f"{100 * _mean(errors):.0f} %",
            percent(_largest(errors)), f"{percent(min(memory))} to {percent(max(memory))}" if memory else "–",
        ])  # fmt: skip
    heads = ["file", "use", "runs", "mean time error", "largest time error", "memory error"]
    return table(heads, rows)


def step_table(result: dict[str, Any]) -> str:
    """Whole GRPO steps, part by part."""
    rows = []
    for row in result["rows"]:
        if not row["name"].startswith("step"):
            continue
        cells = [f"{pair[1]:.3g} / {pair[0]:.3g} s" if (pair := row["parts"].get(part)) else "–"
                 for part in ("sampling", "training", "other")]  # fmt: skip
        memory = f"{row['predicted_gib']:.1f} / {row['memory_gib']:.1f} GiB" if "memory_gib" in row else "–"
        name = f"{row['name'].removeprefix('step, ')} ({row['use']})"
        rows.append(
            [name, *cells, f"{row['predicted_s']:.3g} / {row['measured_s']:.3g} s", percent(row["error"]), memory]
        )
    return table(["step", "sampling", "training", "other", "step time", "error", "memory"], rows)


def left_out_table(result: dict[str, Any]) -> str:
    rows = [
        [f"`{row['name']}`", str(row["records"]), f"{100 * row['mean']:.0f} %", percent(row["largest"])]
        for row in result["leave_one_out"]
    ]
    return table(["file or shape left out of the fit", "runs", "mean time error", "largest time error"], rows)


def reasons_table(result: dict[str, Any]) -> str:
    rows = [[f"`{file}`", reason] for file, reason in result["left_out"].items()]
    rows += [[f"`{row['file']}`", f"{row['note']} (error {percent(row['error'])})"]
             for row in result["rows"] if row["use"] == "shown"]  # fmt: skip
    return table(["file", "reason"], sorted(rows))


def example(words: str) -> str:
    """A command and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = shoal(words.split()[1:])
    if code:
        raise SystemExit(f"{words}: exit code {code}")
    return f"```bash\n{words}\n```\n\n```text\n{printed.getvalue().rstrip()}\n```"


EXAMPLES = {
    "first example": "shoal plan qwen2.5-7b --lora --prompt-tokens 256 --new-tokens 512 --sequence-len 4352 "
    "--steps 200 --price-per-hour 3",
    "colocated 70b": "shoal plan llama-3-70b --gpus 64 --rollouts 1024 --prompt-tokens 256 --new-tokens 1024",
    "split 70b": "shoal plan llama-3-70b --gpus 64 --sampler-gpus 32 --tp 4 --rollouts 1024 --prompt-tokens 256 "
    "--new-tokens 1024 --recompute --steps 200",
}


def parts_of_page(result: dict[str, Any]) -> dict[str, str]:
    checked = [row for row in result["rows"] if row["use"] != "shown"]
    fitted = sum(row["use"] == "fitted" for row in checked)
    errors = [row["error"] for row in checked]
    counts = (
        f"{result['fitted_constants']} constants are fitted to {fitted} recorded runs. "
        f"{len(checked) - fitted} more runs are only compared. The mean error of a predicted time is "
        f"{100 * _mean(errors):.0f} %, and the largest error is {percent(_largest(errors))}."
    )
    return {
        "errors": f"{counts}\n\n{summary_table(result)}",
        "steps": step_table(result),
        "leave one out": left_out_table(result),
        "left out": reasons_table(result),
        **{name: example(words) for name, words in EXAMPLES.items()},
    }


def write_page(page: str, parts: dict[str, str]) -> str:
    for name, text in parts.items():
        between = re.compile(rf"(<!-- {name}: begin[^>]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        page, count = between.subn(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)
        if count != 1:
            raise SystemExit(f"the page needs one part {name!r}, and has {count}")
    return page


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--fit", action="store_true")
    made.add_argument("--out", type=Path, default=OUT)
    made.add_argument("--page", type=Path, default=PAGE)
    asked = made.parse_args()
    before = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {}
    result = make_result(asked.fit, before)
    asked.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for row in result["rows"]:
        memory = percent(row["memory_error"]) if "memory_error" in row else ""
        seconds = f"{row['measured_s']:8.3f} {row['predicted_s']:8.3f} s"
        print(f"{row['file']:<32} {row['use']:<8} {row['name']:<44} {seconds} {percent(row['error']):>7} {memory:>7}")
    print(json.dumps(result.get("fit"), indent=1))
    if PAGE.exists():
        asked.page.write_text(write_page(PAGE.read_text("utf-8"), parts_of_page(result)), "utf-8")


if __name__ == "__main__":
    main()
