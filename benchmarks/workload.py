"""Shared by the benchmarks: a model of a known shape, requests, and a timed engine.

With `--smoke` everything is the tiny model on the CPU in fp32 and takes seconds. This shows that a script runs; its
numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from limits import ModelShape, Rates, measure_rates
from transformers import AutoModelForCausalLM

from shoal.core.types import Completion, Request, SamplingParams
from shoal.engine.engine import EmbeddedEngine, EngineSettings
from shoal.models import fused, lora
from shoal.models.attention import ROW_MULTIPLE, round_up
from shoal.models.decoder import Decoder, LayerShape
from shoal.models.random_models import character_tokenizer, shape_config, tiny_config
from shoal.models.sampler_view import SamplerView

TINY = "tiny"
PREFILL_TOKENS = 1 << 16  # all prompts of a benchmark in one prefill if they fit


@dataclass
class Loaded:
    decoder: Decoder
    layers: dict[int, LayerShape]
    shape: ModelShape
    path: str  # the computation path of prefill and training, as text


@dataclass(frozen=True)
class Timing:
    """The best of several runs. `prefill_s`: the same requests with one token each, which need no decode step."""

    seconds: float
    prefill_s: float
    all_seconds: list[float]
    tokens: int
    sequences: int
    memory_gib: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.tokens - self.sequences) / max(1e-9, self.seconds - self.prefill_s)

    def row(self) -> dict[str, Any]:
        return {
            "tokens_per_s": self.tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "prefill_s": self.prefill_s,
            "seconds": self.seconds,
            "all_seconds": self.all_seconds,
            "memory_gib": self.memory_gib,
        }


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path, help="JSON file to write, again after every row")
    made.add_argument("--smoke", action="store_true", help="tiny model on the CPU, seconds: does the script run?")
    return made


def begin(smoke: bool) -> tuple[Rates, dict[str, Any]]:
    """The rates of the device, and the header of a result."""
    if not smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke runs it on the CPU with a tiny model")
    rates = measure_rates(smoke)
    free()
    return rates, {"smoke": smoke, "rates": asdict(rates), "rows": []}


def config_of(shape: str) -> Any:
    return tiny_config(len(character_tokenizer())) if shape == TINY else shape_config(shape)


def load(shape: str, adapters: lora.LoraSettings | None = None) -> Loaded:
    """Random weights of the shape, created on the device and loaded like the model of a run: verified, with adapters,
    fused.
    """
    torch.manual_seed(0)
    device, dtype = ("cpu", torch.float32) if shape == TINY else ("cuda", torch.bfloat16)
    config = config_of(shape)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layers = Decoder(model.eval()).verify()
    if adapters is not None:
        model = lora.attach(model, adapters)
    decoder = Decoder(model)
    path = fused.attach(decoder, layers)
    return Loaded(decoder, layers, ModelShape.of(config, dtype.itemsize), path)


def make_engine(loaded: Loaded, slots: int, context_tokens: int, graphs: bool = True) -> EmbeddedEngine:
    prefill = max(PREFILL_TOKENS, context_tokens)
    settings = EngineSettings(round_up(slots, ROW_MULTIPLE), context_tokens, prefill, graphs=graphs)
    return EmbeddedEngine(SamplerView(loaded.decoder), loaded.layers, settings, lambda ids: "")


def requests(vocabulary: int, prompts: int, prompt_tokens: int, new: Sequence[int]) -> list[Request]:
    """One request per entry of `new`, evenly over random prompts; requests of a prompt are adjacent."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (prompts, prompt_tokens), generator=generator).tolist()
    group = len(new) // prompts
    return [Request(str(i), ids[i // group], SamplingParams(max_tokens=n, seed=i)) for i, n in enumerate(new)]


def generate(engine: EmbeddedEngine, work: Sequence[Request]) -> tuple[float, dict[str, Completion]]:
    wait()
    start = time.perf_counter()
    for request in work:
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.busy:
        done |= {completion.request_id: completion for completion in engine.step()}
    wait()
    return time.perf_counter() - start, done


def time_engine(engine: EmbeddedEngine, work: Sequence[Request], repeats: int = 3) -> Timing:
    """After two runs, because graphs are captured at the second use. Every token is sampled with its log-prob."""
    first = [replace(request, sampling=replace(request.sampling, max_tokens=1)) for request in work]
    for _ in range(2):
        _, done = generate(engine, work)
    tokens = sum(len(completion.token_ids) for completion in done.values())
    assert tokens == sum(request.sampling.max_tokens for request in work), "a sequence ended early"
    reset_peak()
    seconds = [generate(engine, work)[0] for _ in range(repeats)]
    generate(engine, first)
    prefill_s = min(generate(engine, first)[0] for _ in range(repeats))
    return Timing(min(seconds), prefill_s, seconds, tokens, len(work), peak_gib())


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def free() -> None:
    """Free memory that nothing uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
