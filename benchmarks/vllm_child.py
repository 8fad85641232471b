"""vLLM's side of benchmarks/rollout.py, in a separate process with its own memory and imports.

python benchmarks/vllm_child.py JOB.json OUT.json

Prefix caching is off, because the same prompts are measured several times, and Shoal computes them every time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

REPEATS = 3


def rate(llm: Any, prompts: list[list[int]], new: int, logprobs: int | None) -> float:
    """Tokens/s from the first prompt to the last token, the best of three after one warm-up run."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
    seconds = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        done = llm.generate(asked, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        drawn = sum(len(output.outputs[0].token_ids) for output in done)
        assert drawn == new * len(prompts), f"{drawn} tokens instead of {new * len(prompts)}"
    return new * len(prompts) / min(seconds[1:])


def main(job: Path, out: Path) -> None:
    import vllm

    asked = json.loads(job.read_text("utf-8"))
    prompts = list(asked["prompts"].values())
    longest = max(len(ids) for group in prompts for ids in group)
    start = time.perf_counter()
    llm = vllm.LLM(
        model=asked["model"],
        skip_tokenizer_init=True,
        max_model_len=longest + asked["new"],
        max_num_seqs=max(len(group) for group in prompts),
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        **asked.get("engine_args", {}),
    )
    start_s = time.perf_counter() - start
    found = []
    for group in prompts:
        row: dict[str, Any] = {"vllm_version": vllm.__version__, "vllm_start_s": start_s}
        row["vllm_logprobs_tokens_per_s"] = rate(llm, group, asked["new"], 0)
        row["vllm_tokens_per_s"] = rate(llm, group, asked["new"], None)
        found.append(row)
        out.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
