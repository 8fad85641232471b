"""Run by the lm-eval Python: `evaluate.py TASKS hf MODEL` or `evaluate.py TASKS local-completions MODEL URL`.

Prints one JSON line: for each task, the metrics and the answer of each row.
"""

# pyright: reportAttributeAccessIssue=false
# Type checkers take this folder for the package of the same name.

from __future__ import annotations

import json
import sys

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = ["shoal_choice", "shoal_generation"]


def main(tasks: str, backend: str, model: str, url: str = "") -> None:
    arguments = {"pretrained": model, "dtype": "float32", "device": "cpu"}
    if backend == "local-completions":
        arguments = {"model": model, "tokenizer": model, "base_url": url, "max_length": 256, "num_concurrent": 2}
        arguments |= {"tokenizer_backend": "huggingface", "max_retries": 1}
    results = lm_eval.simple_evaluate(
        model=backend,
        model_args=arguments,
        tasks=TASKS,
        batch_size=4,
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    found = {}
    for task in TASKS:
        metrics = {k: v for k, v in results["results"][task].items() if isinstance(v, float) and "stderr" not in k}
        rows = sorted(results["samples"][task], key=lambda row: row["doc_id"])
        found[task] = {"metrics": metrics, "rows": [row["filtered_resps"] for row in rows]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
