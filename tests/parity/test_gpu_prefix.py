"""Shared prompts on a CUDA device: the variable-length kernel with fewer queries than keys, and rows that use it.

The kernel must align queries and keys at their ends, in the causal mask and in the window. These tests check it for
the installed torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.models import fused
from shoal.models.attention import Packed, Shape
from shoal.models.decoder import Decoder
from shoal.models.lora import as_reference
from shoal.trainer.policy import Reference
from support.models import ARCHITECTURES, WINDOW, as_decoder, lora_decoder, small_model
from support.training import by_rollout, gradients, grouped_samples, grpo, make_policy, pack

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("whole_fp32")]

CUDA = torch.device("cuda")
# Queries of 1 to 200, without a prefix and after prefixes of 1 to 200. Blocks of the kernel have a length of 64 or 128.
LENGTHS = (1, 1, 200, 64, 200, 1, 63, 129, 5, 7, 200, 128, 130, 2)
PREFIXES = (-1, 0, 0, -1, 3, 3, 3, -1, 7, 7, -1, 10, -1, 10)
GROUPS = ((3, (40, 1, 90)), (90, (20, 30, 5, 64)), (WINDOW, (12, 12)))


def starts_of(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def attend(starts: np.ndarray, prefixes: np.ndarray | None, made: list[Tensor], shape: Shape) -> list[Tensor]:
    """The output and the gradients of query, key and value, for a fixed gradient of the output."""
    query, key, value = (x.detach().requires_grad_() for x in made)
    out = Packed(starts, CUDA, prefixes=prefixes).attend(0, query, key, value, shape)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), upstream)]


def random_qkv(kv_heads: int, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, sum(LENGTHS), dim) for heads in (4, kv_heads, kv_heads))
    return [torch.randn(shape, generator=generator).to(CUDA, dtype) for shape in shapes]


def segment_errors(exact: Tensor, fast: Tensor) -> list[float]:
    """The relative error of each segment separately, so that long segments do not hide a wrong mask of a short one.

    A query with one key has no gradient. Its error is absolute.
    """
    return [
        float((exact[start:end] - fast[start:end].float()).norm() / exact[start:end].norm().clamp_min(1.0))
        for start, end in pairwise(starts_of(LENGTHS).tolist())
    ]


@pytest.mark.parametrize("window", (None, 1, 3, WINDOW, 65, 1000))
@pytest.mark.parametrize("kv_heads", (1, 2, 4))
def test_bf16_kernel_against_fp32_rectangles(kv_heads: int, window: int | None) -> None:
    """Forward and backward with the same numbers. The rectangles are tested in float64 on the CPU."""
    shape, prefixes = Shape(64**-0.5, window, None), np.array(PREFIXES)
    made = random_qkv(kv_heads)
    exact = attend(starts_of(LENGTHS), prefixes, [x.float() for x in made], shape)
    fast = attend(starts_of(LENGTHS), prefixes, made, shape)
    for name, one, other in zip(("out", "dq", "dk", "dv"), exact, fast, strict=True):
        assert one.shape == other.shape
        one, other = (x[0] if name == "out" else x[0].transpose(0, 1) for x in (one, other))  # tokens first
        errors = segment_errors(one, other)
        assert max(errors) < 3e-2, (name, errors)


@pytest.mark.parametrize("dim", (32, 128, 256))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_head_sizes_and_fp16(dim: int, dtype: torch.dtype) -> None:
    shape, prefixes = Shape(dim**-0.5, None, None), np.array(PREFIXES)
    made = random_qkv(2, dim, dtype)
    exact = attend(starts_of(LENGTHS), prefixes, [x.float() for x in made], shape)
    for one, other in zip(exact, attend(starts_of(LENGTHS), prefixes, made, shape), strict=True):
        assert (one - other.float()).norm() / one.norm() < 1e-2


@pytest.mark.parametrize("softcap", (None, 4.0))
def test_fp32_on_the_gpu_is_the_cpu_s(softcap: float | None) -> None:
    shape, prefixes = Shape(0.125, 65, softcap), np.array(PREFIXES)
    made = random_qkv(2, dtype=torch.float32)
    here = attend(starts_of(LENGTHS), prefixes, made, shape)
    query, key, value = (x.cpu().requires_grad_() for x in made)
    out = Packed(starts_of(LENGTHS), torch.device("cpu"), prefixes=prefixes).attend(0, query, key, value, shape)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    there = [out.detach(), *torch.autograd.grad(out, (query, key, value), upstream)]
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_with_and_without_sharing(architecture: str) -> None:
    """bf16: a shared prompt is as close to fp32 as a copied one, in log-probs and in the gradient."""
    samples = grouped_samples(1, *GROUPS)
    found = {}
    for dtype, share in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        policy = make_policy(as_decoder(small_model(architecture, dtype=dtype).to(CUDA)))
        rows = pack(samples, 250, share_prefixes=share).rows
        logprobs = []
        for row in rows:
            _, values = policy.forward_backward([row], grpo()).read()
            logprobs += values
        gradient = torch.cat([g.flatten().float() for g in gradients(policy).values()])
        scored = by_rollout(rows, logprobs)
        found[dtype, share] = gradient, np.concatenate([scored[name] for name in sorted(scored)])
    exact, alone, shared = found.values()
    for one in (alone, shared):
        assert torch.nn.functional.cosine_similarity(one[0], exact[0], dim=0) > 0.99
        assert np.abs(one[1] - exact[1]).mean() < 0.02
    assert (shared[0] - exact[0]).norm() < 1.5 * (alone[0] - exact[0]).norm()


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_no_device_sync_within_a_step(lora: bool) -> None:
    """Old and reference log-probs, gradient, clipping, optimizer: CUDA reports any sync. Syncs are allowed in the
    first step, which selects kernels and allocates memory.
    """
    model = lora_decoder(dtype=torch.bfloat16).model if lora else small_model("qwen3", dtype=torch.bfloat16)
    decoder = Decoder(model.to(CUDA))
    fused.attach(decoder, decoder.verify())  # as in a run; the Hugging Face body reads positions on the host
    reference = Reference(decoder, partial(as_reference, decoder.model) if lora else nullcontext)  # type: ignore[arg-type]
    policy = make_policy(decoder, reference=reference)
    rows = pack(grouped_samples(2, *GROUPS), 250).rows
    assert len(rows) > 1
    for row in rows:
        row.old_logprobs = row.reference_logprobs = row.sampler_logprobs

    def step() -> list[Any]:
        scored = [score([row]) for score in (policy.logprobs, policy.reference_logprobs) for row in rows]
        trained = [policy.forward_backward([row], grpo()) for row in rows]
        policy.optimizer.step(1e-3, None, policy.optimizer.clip(1.0))
        policy.optimizer.zero_grad()
        return scored + trained

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(np.isfinite(values).all() for result in pending for values in result.read()[1])
