"""The same rollouts by other systems, for ratios within one run: transformers' generate, and vLLM in a separate
process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm_environment import VLLM_ENVIRONMENT
from workload import requests, wait

from shoal.core.types import Request
from shoal.models.decoder import Decoder
from shoal.models.random_models import character_tokenizer

GENERATE_WARM = 8  # tokens before the measurement starts
VLLM_LIMIT_S = 420


def transformers_generate(decoder: Decoder, count: int, prompt: int, new: int) -> dict[str, Any]:
    """The rate for the same prompts and the same number of tokens, from the first prompt to the last token."""
    work = requests(decoder.vocab_size, count, prompt, [new] * count)
    ids = torch.tensor([request.prompt_ids for request in work], device=decoder.device)
    model: Any = decoder.inner
    model.set_attn_implementation("sdpa")
    try:
        _generate(model, ids, min(GENERATE_WARM, new))
        seconds = _generate(model, ids, new)
    finally:
        model.set_attn_implementation("shoal")
    return {"generate_tokens_per_s": count * new / seconds, "generate_timed_tokens": new}


def _generate(model: Any, ids: torch.Tensor, new: int) -> float:
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "pad_token_id": 0, "top_k": 0}
    wait()
    start = time.perf_counter()
    model.generate(ids, **options)
    wait()
    return time.perf_counter() - start


@contextmanager
def saved(decoder: Decoder) -> Iterator[Path]:
    """The weights as a folder that other systems can load."""
    with tempfile.TemporaryDirectory() as name:
        model: Any = decoder.inner
        model.save_pretrained(name)
        character_tokenizer(decoder.vocab_size).save_pretrained(name)
        yield Path(name)


def vllm(
    folder: Path, prompts: Mapping[int, Sequence[Request]], new: int, packages: str | None
) -> list[dict[str, Any]]:
    """vLLM on the same token ids, with and without log-probs of sampled tokens; one entry per count, in order.

    `packages` is a folder that only vLLM's process imports from. A failed or slow run is recorded and does not end the
    benchmark.
    """
    job, out = folder / "job.json", folder / "vllm.json"
    ids = {count: [request.prompt_ids for request in work] for count, work in prompts.items()}
    job.write_text(json.dumps({"model": str(folder), "new": new, "prompts": ids}), "utf-8")
    script = Path(__file__).with_name("vllm_child.py")
    log = folder / "vllm.log"
    environment = {**os.environ, **VLLM_ENVIRONMENT}
    if packages is not None:
        environment["PYTHONPATH"] = os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as stream:
        try:
            code = subprocess.run(
                [sys.executable, str(script), str(job), str(out)],
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=VLLM_LIMIT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    found = json.loads(out.read_text("utf-8")) if out.exists() else []
    if code or len(found) < len(ids):
        tail = log.read_text("utf-8", "replace")[-3000:]
        print(f"vLLM ended with {code} after {len(found)} of {len(ids)} counts:\n{tail}", file=sys.stderr, flush=True)
        found += [{"vllm_problem": f"ended with {code}"}] * (len(ids) - len(found))
    return found
