"""Rollout speed of the embedded engine on one GPU: random weights of a known shape, log-probs included.

    python benchmarks/rollout.py OUT.json [--shapes qwen2.5-0.5b qwen3-0.6b] [--sequences 128 512] [--generate]

Each row states tokens per second and the bandwidth limit: every decode step reads all weights and the cache once.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from machine import write_result
from transformers import AutoModelForCausalLM

from shoal.engine.engine import EmbeddedEngine, EngineSettings
from shoal.models.decoder import Decoder
from shoal.models.sampler_view import SamplerView
from shoal.models.shapes import shape_config
from shoal.types import Completion, Request, SamplingParams

PROMPT, NEW = 128, 256


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read plus written."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").fill_(1)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 10 * 2 * source.numel() * 4 / (time.perf_counter() - start)


def load(shape: str) -> Decoder:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(shape_config(shape), dtype=torch.bfloat16)
    return Decoder(model.eval())


def requests(count: int, vocabulary: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, vocabulary, (count, PROMPT), generator=generator).tolist()
    return [Request(str(i), prompt, SamplingParams(max_tokens=NEW, seed=i)) for i, prompt in enumerate(prompts)]


def run(engine: EmbeddedEngine, work: list[Request]) -> tuple[float, dict[str, Completion]]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for request in work:
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.busy:
        done |= {completion.request_id: completion for completion in engine.step()}
    torch.cuda.synchronize()
    return time.perf_counter() - start, done


def measure(decoder: Decoder, layers: Any, count: int, bandwidth: float, graphs: bool) -> dict[str, Any]:
    settings = EngineSettings(count, PROMPT + NEW, prefill_tokens=1 << 16, graphs=graphs)
    engine = EmbeddedEngine(SamplerView(decoder), layers, settings, lambda ids: "")
    work = requests(count, decoder.vocab_size)
    run(engine, work)  # captures the graphs
    seconds = min(run(engine, work)[0] for _ in range(3 if graphs else 1))
    weights = sum(p.numel() * p.element_size() for p in decoder.model.parameters())
    per_token = engine.cache.bytes_per_token(layers, decoder.dtype)
    step_bytes = weights + count * per_token * (PROMPT + NEW / 2)
    return {
        "sequences": count,
        "graphs": graphs,
        "seconds": seconds,
        "tokens_per_s": count * NEW / seconds,
        "limit_tokens_per_s": count / (step_bytes / bandwidth),
    }


def hf_generate(decoder: Decoder, count: int) -> dict[str, Any]:
    model: Any = decoder.inner
    ids = torch.tensor([request.prompt_ids for request in requests(count, decoder.vocab_size)], device="cuda")
    model.set_attn_implementation("sdpa")
    options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": True, "pad_token_id": 0, "top_k": 0}
    model.generate(ids, **options)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(ids, **options)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    model.set_attn_implementation("shoal")
    return {"sequences": count, "transformers_generate_tokens_per_s": count * 32 / seconds}


def parity(decoder: Decoder, layers: Any) -> dict[str, float]:
    """The same requests in graphs and eagerly: how long the tokens agree, and how far log-probs differ."""
    work = requests(16, decoder.vocab_size)
    results = []
    for graphs in (True, False):
        settings = EngineSettings(16, PROMPT + NEW, graphs=graphs)
        results.append(run(EmbeddedEngine(SamplerView(decoder), layers, settings, lambda ids: ""), work)[1])
    same, gaps = [], []
    for name, ours in results[0].items():
        theirs = results[1][name]
        agree = next((i for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)) if a != b), NEW)
        same.append(agree)
        gaps += [abs(a - b) for a, b in zip(ours.logprobs[:agree], theirs.logprobs[:agree], strict=True)]
    return {"mean_tokens_until_different": sum(same) / len(same), "mean_logprob_gap": sum(gaps) / max(1, len(gaps))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5-0.5b", "qwen3-0.6b"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--generate", action="store_true", help="also time transformers' generate")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    result: dict[str, Any] = {"copy_bandwidth_tb_s": bandwidth / 1e12, "prompt": PROMPT, "new": NEW, "shapes": {}}
    for shape in arguments.shapes:
        decoder = load(shape)
        layers = decoder.verify()
        rows = [measure(decoder, layers, count, bandwidth, graphs=True) for count in arguments.sequences]
        rows.append(measure(decoder, layers, arguments.sequences[0], bandwidth, graphs=False))
        if arguments.generate:
            rows.append(hf_generate(decoder, arguments.sequences[0]))
        result["shapes"][shape] = {"parity": parity(decoder, layers), "rows": rows}
        print(shape, result["shapes"][shape], flush=True)
        write_result(arguments.out, result)
        del decoder
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
