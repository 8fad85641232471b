"""Attention sinks: values and gradients of q, k, v and the sink equal transformers' eager attention in fp64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from models.families import build
from shoal.core.errors import ModelError
from shoal.engine.kv_cache import SlotCache
from shoal.models.attention import Decode, Packed, Shape
from shoal.models.decoder import TRY_ON_GPU, Decoder, LayerShape

HEADS, KEY_HEADS, DIM = 4, 2, 8
LENGTHS = (5, 1, 11, 30)
WINDOWS = pytest.mark.parametrize("window", [None, 4])


def inputs(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, tokens, DIM), (1, KEY_HEADS, tokens, DIM), (1, KEY_HEADS, tokens, DIM), (HEADS,)]
    query, key, value, sink = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), sink.requires_grad_()


def eager(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, window: int | None) -> Tensor:
    """One sequence, [1, T, H, D]."""
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    allowed = (distance >= 0) & (distance < (window or 10_000))
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, sinks=sink, training=False)
    return eager_attention_forward(module, query, key, value, mask, scaling=0.4)[0]


def gradients(out: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    return torch.autograd.grad((out * weights).sum(), tensors)


@WINDOWS
def test_packed_segments(window: int | None) -> None:
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    tensors = inputs(int(starts[-1]))
    query, key, value, sink = tensors
    actual = Packed(starts, torch.device("cpu")).attend(0, query, key, value, Shape(0.4, window, None, sink))
    pieces = [[t[:, :, a:b] for t in (query, key, value)] for a, b in itertools.pairwise(starts)]
    expected = torch.cat([eager(q, k, v, sink, window) for q, k, v in pieces], 1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(gradients(actual, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@WINDOWS
def test_segments_that_continue_a_prefix(window: int | None) -> None:
    starts, prefixes = np.array([0, 6, 10, 13]), np.array([-1, 0, 0])
    tensors = inputs(13)
    query, key, value, sink = tensors
    packed = Packed(starts, torch.device("cpu"), prefixes=prefixes)
    actual = packed.attend(0, query, key, value, Shape(0.4, window, None, sink))
    pieces = []
    for end in (10, 13):
        at = [*range(6), *range(10 if end == 13 else 6, end)]
        pieces.append(eager(query[:, :, at], key[:, :, at], value[:, :, at], sink, window))
    expected = torch.cat([pieces[0], pieces[1][:, 6:]], 1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(gradients(actual, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@WINDOWS
@torch.no_grad()
def test_decode(window: int | None) -> None:
    cpu = torch.device("cpu")
    query, key, value, sink = inputs(20)
    cache = SlotCache({0: LayerShape(KEY_HEADS, DIM, DIM)}, 8, 32, torch.float64, cpu)
    expected = eager(query, key, value, sink, window)
    for position in range(20):
        at = slice(position, position + 1)
        step = Decode(cache, torch.tensor([position]), 32)
        actual = step.attend(0, query[:, :, at], key[:, :, at], value[:, :, at], Shape(0.4, window, None, sink))
        torch.testing.assert_close(actual, expected[:, at], rtol=0, atol=1e-12)


def test_sink_is_trained() -> None:
    decoder = Decoder(build("gpt_oss"))
    decoder.verify()
    ids = torch.arange(20)[None]
    hidden = decoder.hidden(ids, ids, decoder.pack(np.array([0, 20])))
    decoder.logits(hidden).logsumexp(-1).sum().backward()
    sinks = [p.grad for name, p in decoder.model.named_parameters() if name.endswith(".sinks")]
    assert len(sinks) == 4 and all(grad is not None and grad.abs().min() > 0 for grad in sinks)


def test_gpu_refuses_unverified_models(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(build("gpt_oss"))
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    with pytest.raises(ModelError, match=TRY_ON_GPU):
        decoder.check_device()
    monkeypatch.setenv(TRY_ON_GPU, "1")
    decoder.check_device()
    monkeypatch.delenv(TRY_ON_GPU)
    Decoder(build("qwen3")).check_device()
