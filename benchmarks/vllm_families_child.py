"""vLLM's side of benchmarks/vllm_families.py: greedy completions of several models, in the Python of vLLM.

    python benchmarks/vllm_families_child.py JOBS.json OUT.jsonl

Imports vLLM once. Each model gets a process forked from this one, so that a crash ends only that model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LIMIT_S = 240  # for one model
# Of a chain of errors, vLLM often reports the last one, which names no cause.
GENERIC = ("Engine core initialization failed", "See root cause")


def complete(job: dict[str, Any]) -> dict[str, Any]:
    """The greedy tokens of each prompt and their log-probs."""
    import vllm

    llm = vllm.LLM(model=job["folder"], **job["engine_args"])
    asked: Any = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    found = [output.outputs[0] for output in llm.generate(asked, sampling, use_tqdm=False)]
    rows = [
        {
            "token_ids": list(answer.token_ids),
            "logprobs": [
                entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs or [], strict=True)
            ],
        }
        for answer in found
    ]
    return {"completions": rows}


def in_own_process(job: dict[str, Any], log: Path) -> dict[str, Any]:
    answer = log.with_suffix(".json")
    pid = os.fork()
    if pid == 0:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                result = complete(job)
            except BaseException as error:
                traceback.print_exc()
                result = {"error": cause(error)}
            answer.write_text(json.dumps(result), "utf-8")
            sys.stdout.flush()
            os._exit(0)
    end = time.monotonic() + LIMIT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"error": f"no result after {LIMIT_S} s"}
        time.sleep(0.2)
    if answer.exists():
        return json.loads(answer.read_text("utf-8"))
    return {"error": f"the process of vLLM ended with {signal.Signals(os.WTERMSIG(status)).name}"}


def cause(error: BaseException) -> str:
    """The last line of the first error of the chain that is not generic."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    named = next((e for e in chain if not any(part in str(e) for part in GENERIC)), error)
    lines = [line.strip() for line in str(named).splitlines() if line.strip()]
    return f"{type(named).__name__}: {' '.join(lines[:3])}"[:400]


def main(jobs: Path, out: Path) -> None:
    import vllm.v1.engine.llm_engine  # noqa: F401  before the forks
    from vllm.model_executor.models import registry
    from vllm.v1.engine.core import EngineCore  # noqa: F401
    from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: F401

    # vLLM inspects a class in another Python, to keep CUDA out of this one. That takes longer than the rest of a job.
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(  # type: ignore[method-assign]
        self.load_model_cls()
    )

    for number, job in enumerate(json.loads(jobs.read_text("utf-8"))):
        start = time.monotonic()
        result = in_own_process(job, out.with_name(f"vllm_{number:03d}.log"))
        row = {"job": job["name"], "seconds": round(time.monotonic() - start, 1), **result}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
