"""The same parities on a CUDA device: fp32 against the CPU, bf16 within its rounding, packed attention both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.models.attention import Packed, Shape
from shoal.models.decoder import Decoder
from shoal.types import Rollout
from support.engines import ask, make_engine, run
from support.models import ARCHITECTURES, EOS, WINDOW, as_decoder, lora_decoder, random_prompts, small_model
from support.training import (
    as_rollout,
    by_rollout,
    gradients,
    grpo,
    make_policy,
    one_turn,
    pack,
    random_samples,
    rows_of,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = ((3, 40), (90, 20), (1, 70), (12, 1), (30, 64))
TF32 = 5e-3  # what fp32 log-probs may be off by where a kernel takes products in TF32
GRAPHS = pytest.mark.parametrize("graphs", (False, True), ids=("eager", "graphs"))


@pytest.fixture(autouse=True)
def whole_fp32() -> Any:
    """TF32 keeps ten bits of a product; parity in fp32 means fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_gpu(name: str, dtype: torch.dtype = torch.float32, **how: Any) -> Decoder:
    return as_decoder(small_model(name, dtype=dtype, **how).to(CUDA))


def sample(decoder: Decoder, graphs: bool | None, **sampling: Any) -> list[Rollout]:
    """Four groups of four; two prompts are longer than every sliding window."""
    prompts = random_prompts(5, 6, 20, 50, 90)
    requests = [
        ask(f"{g}/{i}", prompt, seed=10 * g + i, max_tokens=40, **sampling)
        for g, prompt in enumerate(prompts)
        for i in range(4)
    ]
    answers = run(make_engine(decoder, slots=16, context_tokens=192, eos_token_ids=(EOS,), graphs=graphs), requests)
    temperature = sampling.get("temperature", 1.0)
    return [
        as_rollout(int(name[2:]), one_turn(prompts[int(name[0])], answer, temperature), 1.0, group=int(name[0]))
        for name, answer in sorted(answers.items())
    ]


def texts(decoder: Decoder, **settings: Any) -> list[list[int]]:
    prompts = random_prompts(1, 4, WINDOW, 19, 40, 70)
    requests = [ask(str(i), prompt, temperature=0.0, max_tokens=32) for i, prompt in enumerate(prompts)]
    answers = run(make_engine(decoder, **settings), requests)
    return [answers[str(i)].token_ids for i in range(len(prompts))]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_in_fp32_is_the_cpu_s(architecture: str) -> None:
    """And the CPU's is that of `generate`: tests/parity/test_greedy.py, same models, same prompts."""
    expected = texts(as_decoder(small_model(architecture, wild=True)))
    assert texts(on_gpu(architecture, wild=True)) == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp32_logprobs_of_sampler_trainer_and_cpu(architecture: str) -> None:
    decoder = on_gpu(architecture)
    rows = rows_of(sample(decoder, None, temperature=0.8), 300)
    ours = make_policy(decoder).logprobs(rows)
    theirs = make_policy(as_decoder(small_model(architecture))).logprobs(rows)
    for row, mine, other in zip(rows, ours, theirs, strict=True):
        assert np.abs(mine - row.sampler_logprobs)[row.loss_mask].max() < 1e-5
        assert np.abs(mine - other).max() < 2e-5


@GRAPHS
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_mismatch(architecture: str, graphs: bool) -> None:
    """Identity 6: with equal weights, what separates sampler and trainer is rounding."""
    decoder = on_gpu(architecture, torch.bfloat16)
    rows = rows_of(sample(decoder, graphs))
    metrics, _ = make_policy(decoder).forward_backward(rows, grpo()).read()
    total, count = metrics["mismatch/k3"]
    assert count > 300 and 0 <= total / count < 1e-3


def test_bf16_mismatch_under_lora_and_truncation() -> None:
    decoder = Decoder(lora_decoder(dtype=torch.bfloat16).model.to(CUDA))
    rows = rows_of(sample(decoder, True, top_p=0.9, temperature=0.7))
    metrics, _ = make_policy(decoder).forward_backward(rows, grpo()).read()
    total, count = metrics["mismatch/k3"]
    assert count > 300 and 0 <= total / count < 1e-3


@pytest.mark.parametrize("window", (None, 3, WINDOW, 1000))
@pytest.mark.parametrize("kv_heads", (1, 2, 4))
def test_packed_attention_in_bf16_forward_and_backward(kv_heads: int, window: int | None) -> None:
    """The variable-length kernel against padded rectangles in fp32 on the same numbers."""
    starts = np.array([0, 5, 6, 70, 200, 213])
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(1, heads, 213, 32, generator=generator).to(CUDA, torch.bfloat16)
        for heads in (4, kv_heads, kv_heads)
    ]
    upstream = torch.randn(1, 213, 4, 32, generator=generator).to(CUDA)
    shape = Shape(32**-0.5, window, None)

    def both(dtype: torch.dtype) -> list[Tensor]:
        query, key, value = (x.detach().to(dtype).requires_grad_() for x in made)
        out = Packed(starts, CUDA).attend(0, query, key, value, shape)
        out.backward(upstream.to(dtype))
        return [out.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]

    for exact, fast in zip(both(torch.float32), both(torch.bfloat16), strict=True):
        assert exact.shape == fast.shape
        assert (exact - fast.float()).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients(architecture: str) -> None:
    """fp32 against the CPU to rounding; bf16, with its own attention, in the same direction."""
    samples = random_samples(2, *SHAPES)
    rows = pack(samples, 130).rows
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        policy = make_policy(as_decoder(small_model(architecture, dtype=dtype).to(device)))
        for row in rows:
            policy.forward_backward([row], grpo())
        found.append(torch.cat([g.flatten().float().cpu() for g in gradients(policy).values()]))
    exact, same, rounded = found
    assert (same - exact).norm() / exact.norm() < 1e-4
    assert torch.nn.functional.cosine_similarity(rounded, exact, dim=0) > 0.99


def test_packing_in_bf16() -> None:
    policy = make_policy(on_gpu("mistral", torch.bfloat16))
    samples = random_samples(3, *SHAPES)
    together, alone = pack(samples).rows, pack(samples, 111).rows
    first, second = by_rollout(together, policy.logprobs(together)), by_rollout(alone, policy.logprobs(alone))
    for name, values in first.items():
        np.testing.assert_allclose(values, second[name], rtol=0, atol=0.05)


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_graphs_see_every_optimizer_step(lora: bool) -> None:
    """A graph reads weights in place: after a step it draws from the new ones, as eager decoding does."""
    decoder = Decoder(lora_decoder().model.to(CUDA)) if lora else on_gpu("qwen3")
    engine = make_engine(decoder, slots=16, context_tokens=192, graphs=True)
    policy = make_policy(decoder)
    requests = [ask(f"{i}", prompt, seed=i, max_tokens=24) for i, prompt in enumerate(random_prompts(7, 5, 60))]
    before = run(engine, requests)
    for _ in range(2):
        policy.forward_backward(pack(random_samples(4, *SHAPES)).rows, grpo())
        policy.optim_step()
    after = run(engine, requests)
    fresh = run(make_engine(decoder, slots=16, context_tokens=192, graphs=False), requests)
    for name, answer in after.items():
        assert answer.token_ids == fresh[name].token_ids
        np.testing.assert_allclose(answer.logprobs, fresh[name].logprobs, rtol=0, atol=TF32)
        assert answer.logprobs != before[name].logprobs
