"""Token log-probs and entropy against float64 NumPy. Tiles change nothing, and no full [T, V] tensor is made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.models import logprobs
from shoal.models.logprobs import AllowedTokens, Head, token_logprobs

VOCABULARY, WIDTH, TOKENS = 50, 8, 23
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(VOCABULARY, WIDTH, generator=GENERATOR, dtype=torch.float64)
HIDDEN = torch.randn(TOKENS, WIDTH, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randint(0, VOCABULARY, (TOKENS,), generator=GENERATOR)
TEMPERATURES = torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float32)
KEPT: list[list[int] | None] = [
    None if t % 3 == 0 else [int(TARGETS[t]), 1, 7] if t % 3 == 1 else [~int((TARGETS[t] + 1) % VOCABULARY)]
    for t in range(TOKENS)
]


def in_numpy(kept: list[list[int] | None] | None = None) -> tuple[np.ndarray, np.ndarray]:
    chosen, entropies = [], []
    for t in range(TOKENS):
        logits = (HIDDEN[t] @ WEIGHT.T).numpy() / float(TEMPERATURES[t])
        ids = kept[t] if kept is not None else None
        if ids:
            allowed = np.isin(np.arange(VOCABULARY), ids if ids[0] >= 0 else [~i for i in ids]) ^ (ids[0] < 0)
            logits = np.where(allowed, logits, -np.inf)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        chosen.append(np.log(p[int(TARGETS[t])]))
        entropies.append(-sum(x * np.log(x) for x in p if x > 0))
    return np.array(chosen), np.array(entropies)


def listed(kept: list[list[int] | None] | None) -> AllowedTokens | None:
    return None if kept is None else AllowedTokens(kept, torch.device("cpu"))


head = Head(lambda hidden: hidden @ WEIGHT.T.to(hidden.dtype))


def tile(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setitem(logprobs.TILE_NUMBERS, "cpu", rows * VOCABULARY)


@pytest.mark.parametrize("rows", (1, 2, 7, 22, 23, 1000))
@pytest.mark.parametrize("kept", (None, KEPT), ids=("whole", "kept"))
def test_against_numpy(rows: int, kept: list[list[int] | None] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tile(monkeypatch, rows)
    scored = token_logprobs(head, HIDDEN, TARGETS, TEMPERATURES, VOCABULARY, listed(kept))
    chosen, entropies = in_numpy(kept)
    assert scored.logprobs.dtype == torch.float64
    np.testing.assert_allclose(scored.logprobs, chosen, rtol=0, atol=1e-12)
    np.testing.assert_allclose(scored.entropy, entropies, rtol=0, atol=1e-12)


def test_fp32_and_bf16_heads_are_scored_in_fp32() -> None:
    chosen, entropies = in_numpy()
    for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
        scored = token_logprobs(head, HIDDEN.to(dtype), TARGETS, TEMPERATURES, VOCABULARY)
        assert scored.logprobs.dtype == scored.entropy.dtype == torch.float32
        np.testing.assert_allclose(scored.logprobs, chosen, rtol=0, atol=atol)
        np.testing.assert_allclose(scored.entropy, entropies, rtol=0, atol=atol)


@pytest.mark.parametrize("kept", (None, KEPT), ids=("whole", "kept"))
def test_tiles_give_the_same_gradient(kept: list[list[int] | None] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (1000, 5):
        tile(monkeypatch, rows)
        hidden = HIDDEN.clone().requires_grad_()
        weight = WEIGHT.clone().requires_grad_()
        scored = token_logprobs(
            Head(lambda h, w=weight: h @ w.T), hidden, TARGETS, TEMPERATURES, VOCABULARY, listed(kept)
        )
        assert scored.logprobs.requires_grad and not scored.entropy.requires_grad
        (scored.logprobs * torch.arange(TOKENS)).sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        found.append((hidden.grad, weight.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
    assert found[0][1].abs().max() > 1


@pytest.mark.parametrize("grad", (False, True))
def test_logits_never_exceed_a_tile(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every intermediate result is inspected: the largest is a tile of logits, also in the backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return result

    tile(monkeypatch, 4)
    hidden = HIDDEN.float().requires_grad_(grad)
    with Watch(), torch.set_grad_enabled(grad):
        scored = token_logprobs(head, hidden, TARGETS, TEMPERATURES, VOCABULARY)
        if grad:
            scored.logprobs.sum().backward()
    assert 4 * VOCABULARY <= largest < TOKENS * VOCABULARY
    assert largest <= max(4 * VOCABULARY, WEIGHT.numel())


def test_logit_tile_is_freed_before_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are saved for the backward, not logits."""
    tile(monkeypatch, 4)
    saved: list[int] = []
    hidden = HIDDEN.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        token_logprobs(head, hidden, TARGETS, TEMPERATURES, VOCABULARY)
    assert max(saved, default=0) < 4 * VOCABULARY


def test_certain_token_has_zero_entropy() -> None:
    scored = token_logprobs(head, HIDDEN[:1], TARGETS[:1], TEMPERATURES[:1], VOCABULARY, listed([[int(TARGETS[0])]]))
    assert scored.logprobs.item() == 0 and scored.entropy.item() == 0
