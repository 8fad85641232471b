"""Unusual devices and models: unusual head sizes, failed captures, too little memory, large batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.build import memory_probe as measuring
from shoal.build.memory_plan import MemoryRequest, decide
from shoal.engine.scheduler import bucket
from shoal.models import fused
from shoal.models.decoder import Decoder
from shoal.models.sampler_view import SamplerView
from support.engines import ask, make_engine, run
from support.models import EOS, as_decoder, lora_decoder, random_prompts, shake_adapter, small_model
from support.training import grpo, make_policy, pack, random_samples

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("whole_fp32")]
CUDA = torch.device("cuda")


def attached(model: Any) -> tuple[Decoder, str]:
    decoder = as_decoder(model.to(CUDA))
    return decoder, fused.attach(decoder, decoder.verify())


def answers(decoder: Decoder, count: int = 5, **settings: Any) -> tuple[dict[str, list[int]], str]:
    prompts = random_prompts(3, *(5 + 7 * i % 40 for i in range(count)))
    requests = [ask(str(i), prompt, temperature=0.0, max_tokens=24) for i, prompt in enumerate(prompts)]
    engine = make_engine(decoder, **settings)
    found = run(engine, requests)
    return {name: answer.token_ids for name, answer in found.items()}, engine.path


@pytest.mark.parametrize(("architecture", "size"), [("mistral", 24), ("llama", 96), ("qwen2", 80), ("gemma3", 256)])
def test_heads_of_any_size(architecture: str, size: int) -> None:
    """In fp32 the text of the CPU. In bf16 it trains and samples, on any path."""
    how = {"head_dim": size, "wild": True}
    expected, _ = answers(as_decoder(small_model(architecture, **how)))
    decoder, path = attached(small_model(architecture, **how))
    found, decoded = answers(decoder)
    assert found == expected and decoded.startswith("CUDA graphs"), (path, decoded)
    decoder, _ = attached(small_model(architecture, dtype=torch.bfloat16, head_dim=size))
    policy = make_policy(decoder)
    metrics, _ = policy.forward_backward(pack(random_samples(0, *[(20, 30)] * 8), 300).rows, grpo()).read()
    assert np.isfinite(metrics["policy/loss"][0])
    found, decoded = answers(decoder)
    assert all(len(ids) == 24 for ids in found.values()) and decoded.startswith("CUDA graphs"), decoded


def test_length_dependent_rope_is_not_captured() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    decoder, _ = attached(small_model("llama", wild=True, rope_parameters=rope, max_position_embeddings=64))
    found, path = answers(decoder)
    assert path == f"eager: {fused.TURNS_BY_LENGTH}"
    assert all(len(ids) == 24 for ids in found.values())


def test_failed_capture_continues_without_graphs() -> None:
    """A module that syncs with the device cannot be captured. Sampled tokens are kept, and the stream is the previous
    one.
    """
    decoder, _ = attached(small_model("gemma2", wild=True))
    expected, path = answers(decoder, graphs=False)
    layer: Any = decoder.body.get_submodule("layers.1")
    forward, calls = layer.forward, []

    def waits(hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            calls.append(float(hidden.sum()))
        return forward(hidden, *arguments, **options)

    layer.forward = waits
    before = torch.cuda.current_stream()
    found, path = answers(decoder)
    torch.randn(3, device=CUDA)  # random generators are no longer registered with a capture
    assert path.startswith("eager: a decode step could not be captured") and found == expected
    assert torch.cuda.current_stream() == before
    block = torch.empty(1 << 28, dtype=torch.uint8, device=CUDA)
    held = torch.cuda.memory_reserved()
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held - (1 << 28), "cached memory is still freed"


LARGE = sorted({bucket(count) for count in range(192, 4097)})


@pytest.mark.parametrize("count", sorted({*LARGE, *(size + 1 for size in LARGE if size < 4096)}))
def test_edges_of_large_batches(count: int) -> None:
    decoder, _ = attached(small_model("qwen2"))
    prompts = random_prompts(11, *(3 + i % 9 for i in range(count)))
    requests = [ask(str(i), prompt, seed=i, max_tokens=4 + i % 14) for i, prompt in enumerate(prompts)]
    slots = next(slots for slots in (512, 2048, 4096) if slots >= count)
    settings = {"slots": slots, "context_tokens": 64, "eos_token_ids": (EOS,)}
    engine = make_engine(decoder, graphs=True, **settings)
    ours = run(engine, requests)
    assert engine.path.startswith("CUDA graphs")
    eager = run(make_engine(decoder, graphs=False, **settings), requests)
    assert {name: a.token_ids for name, a in ours.items()} == {name: a.token_ids for name, a in eager.items()}
    for name, answer in ours.items():
        np.testing.assert_allclose(answer.logprobs, eager[name].logprobs, rtol=0, atol=1e-4)


def test_batches_that_grow_take_no_more_memory_than_the_largest() -> None:
    """Steps share a pool: a step reuses the memory of a larger one, but not of smaller ones."""
    decoder, _ = attached(small_model("qwen2", vocab_size=60_000))

    def reserved(*counts: int) -> int:
        engine = make_engine(decoder, slots=512, context_tokens=64, graphs=True)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for count in counts:
            run(engine, [ask(str(i), [1 + i % 9], seed=i, max_tokens=3) for i in range(count)])
        torch.cuda.empty_cache()
        assert engine.path.startswith("CUDA graphs")
        return torch.cuda.memory_reserved() - before

    reserved(512)  # memory that libraries allocate once
    assert reserved(8, 32, 64, 128, 192, 256, 320, 384, 448, 512) < 1.2 * reserved(512)


def test_more_sizes_than_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further sizes use the next larger graph. The additional rows are not read."""
    monkeypatch.setattr("shoal.engine.decode_graphs.MAX_GRAPHS", 2)
    decoder, _ = attached(small_model("qwen2"))
    prompts = random_prompts(11, *(3 + i % 9 for i in range(100)))
    requests = [ask(str(i), prompt, seed=i, max_tokens=4 + i % 34) for i, prompt in enumerate(prompts)]
    settings = {"slots": 128, "context_tokens": 64, "eos_token_ids": (EOS,)}
    engine = make_engine(decoder, graphs=True, **settings)
    ours = run(engine, requests)
    assert len(engine._graphs._graphs) == 2 and engine.path.startswith("CUDA graphs")  # type: ignore[union-attr]
    eager = run(make_engine(decoder, graphs=False, **settings), requests)
    assert {name: a.token_ids for name, a in ours.items()} == {name: a.token_ids for name, a in eager.items()}


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_graphs_on_a_copy_of_the_weights(lora: bool) -> None:
    """Sampling during training uses the last published version, in graphs that were captured before it."""
    decoder = lora_decoder(device="cuda") if lora else attached(small_model("qwen3", wild=True))[0]
    view = SamplerView(decoder, "snapshot")
    engine = make_engine(view.decoder, view)
    requests = [
        ask(str(i), prompt, temperature=0.0, max_tokens=24) for i, prompt in enumerate(random_prompts(3, 5, 30))
    ]

    def drawn() -> dict[str, list[int]]:
        return {name: answer.token_ids for name, answer in run(engine, requests).items()}

    def expected() -> dict[str, list[int]]:
        eager = make_engine(decoder, graphs=False)
        return {name: answer.token_ids for name, answer in run(eager, requests).items()}

    view.refresh(1)
    first = drawn()
    assert engine.path.startswith("CUDA graphs") and first == expected()
    shake_adapter(decoder, seed=1, std=0.3)
    assert drawn() == first, "not published yet"
    view.refresh(2)
    assert drawn() == expected() != first


def test_plan_contains_the_memory_of_a_micro_batch() -> None:
    """Measured with one and two rows. A planned micro-batch stays within its line of the plan."""
    decoder, _ = attached(small_model("qwen3", dtype=torch.bfloat16))
    policy = make_policy(decoder)
    demand = MemoryRequest(256, 4096, None, None, slots=64, context_tokens=256, utilization=None, prefill_tokens=4096)
    layers = decoder.verify()
    measured = measuring.measure(
        decoder, layers, demand, policy.optimizer.moment_bytes, lambda rows: policy.dry_run(256, rows)
    )
    plan = decide(measured, demand)
    assert measured.sampling.prefill > 0 and measured.sampling.decode.per_token > 0 and measured.elsewhere > 0
    assert list(measured.costs) == [False], "activation checkpointing is not measured if it is not needed"
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    policy.dry_run(256, plan.micro_batch_tokens // 256)
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * measured.costs[False].at(plan.micro_batch_tokens)


def test_memory_is_freed_after_an_out_of_memory_pass() -> None:
    decoder, _ = attached(small_model("qwen3", dtype=torch.bfloat16))
    policy = make_policy(decoder)
    rows = pack(random_samples(0, *[(20, 30)] * 16), 300).rows
    policy.forward_backward(rows, grpo()).read()
    policy.discard_gradient()
    held = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            policy.dry_run(4096, 64)
        policy.discard_gradient()
        assert torch.cuda.memory_allocated() <= held
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    policy.forward_backward(rows, grpo()).read()


def test_supervised_steps_use_the_memory_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from shoal.cli.entry import main

    assert main(["make-model", "tiny", str(tmp_path / "model")]) == 0
    rows = [{"prompt": "a" * (3 + i % 50), "completion": "b" * (3 + i % 40)} for i in range(256)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    words = [f"train.model={tmp_path / 'model'}", f"train.output_dir={out}", f"dataset.path={tmp_path / 'rows.jsonl'}"]
    assert main(["sft", *words, "train.max_steps=8", "batch_size=64", "train.recipe=bf16"]) == 0
    said = capfd.readouterr().out
    assert "memory  micro-batch of" in said and "cache of" not in said and "training: fused kernels" in said
    losses = [json.loads(line)["sft/loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


def test_evaluation_prints_sampling_and_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from shoal.cli.entry import main

    assert main(["make-model", "tiny", str(tmp_path / "model")]) == 0
    words = ["--env", "reverse-text", "--num-examples", "4", "--max-tokens", "16", "--device", "cuda"]
    assert main(["eval", str(tmp_path / "model"), *words]) == 0
    said = capfd.readouterr().err
    assert (
        "rollouts: CUDA graphs" in said
        and "memory  KV cache of" in said
        and "memory  prefills and decode steps" in said
    )
