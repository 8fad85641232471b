"""The embedded engine against transformers' `generate` on the CPU: the demo's model, 64 sequences, 64 new tokens, as
eight groups of eight and as 64 different prompts.

python benchmarks/cpu_engine.py OUT.json

Both sample from the full vocabulary. The engine also reports log-probs. Runs alternate, and medians are recorded.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import write_result
from transformers import AutoModelForCausalLM

from shoal.core.types import Request, SamplingParams
from shoal.engine.engine import EmbeddedEngine, EngineSettings
from shoal.models.chat import Chat
from shoal.models.decoder import Decoder
from shoal.models.random_models import character_tokenizer, tiny_config
from shoal.models.sampler_view import SamplerView

SEQUENCES, NEW, REPEATS = 64, 64, 11


def main(out: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    chat = Chat(character_tokenizer())
    model: Any = AutoModelForCausalLM.from_config(tiny_config(len(chat.tokenizer))).eval()
    decoder = Decoder(model)
    engine = EmbeddedEngine(SamplerView(decoder), decoder.verify(), EngineSettings(SEQUENCES, 128), chat.text)
    rows = {}
    for name, group in (("groups of 8", 8), ("64 prompts", 1)):
        asked = [chat.prompt_ids([{"role": "user", "content": f"shoal {i // group:02d}"}]) for i in range(SEQUENCES)]
        rows[name] = compare(engine, model, asked)
        print(f"{name}: {rows[name]['ratio']:.2f} times as fast as generate")
    write_result(out, {"sequences": SEQUENCES, "new_tokens": NEW, "threads": 1, "load": os.getloadavg()[0], **rows})


def compare(engine: EmbeddedEngine, model: Any, prompts: list[list[int]]) -> dict[str, Any]:
    requests = [Request(str(i), ids, SamplingParams(max_tokens=NEW, seed=i)) for i, ids in enumerate(prompts)]
    batch = torch.tensor(prompts)
    times: dict[str, list[float]] = {"shoal": [], "transformers": []}
    for _ in range(REPEATS + 1):
        times["shoal"].append(_shoal(engine, requests))
        model.set_attn_implementation("sdpa")
        times["transformers"].append(_generate(model, batch))
        model.set_attn_implementation("shoal")
    seconds = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {"median_seconds": seconds, "ratio": seconds["transformers"] / seconds["shoal"], "all": times}


def _shoal(engine: EmbeddedEngine, requests: list[Request]) -> float:
    start = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return time.perf_counter() - start


def _generate(model: Any, batch: torch.Tensor) -> float:
    start = time.perf_counter()
    model.generate(batch, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, top_k=0, pad_token_id=0)
    return time.perf_counter() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]))
