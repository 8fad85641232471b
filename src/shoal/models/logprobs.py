"""Token log-probs and entropy from hidden states, in tiles, so that no [T, V] fp32 tensor exists at once.

Called by the trainer with gradients and by parity tests without; the sampler has its own single-position path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.models import kernels
from shoal.models.kept import Kept


@dataclass(frozen=True)
class Head:
    """[T, hidden] → logits [T, V] in the model's dtype; `weight` [V, hidden] where that is all it is, a product."""

    logits: Callable[[Tensor], Tensor]
    weight: Tensor | None = None


# One tile of fp32 logits may hold this many numbers; a row that fits in one tile is not recomputed in the backward.
TILE_NUMBERS = {"cpu": 1 << 25, "cuda": 1 << 27}
KERNEL_TILE_NUMBERS = 1 << 29  # in 16 bits, and there is never more than one tile


@dataclass(frozen=True)
class Scored:
    logprobs: Tensor  # [T] fp32 (fp64 for fp64 models), with gradient
    entropy: Tensor  # [T], without gradient


def token_logprobs(
    head: Head,
    hidden: Tensor,  # [T, hidden], the state that predicts each target
    targets: Tensor,  # [T]
    temperatures: Tensor,  # [T]
    vocab_size: int,
    kept: Kept | None = None,
) -> Scored:
    """Log-prob of each target at its own temperature, over the kept ids where the sampler truncated."""
    if head.weight is not None and kernels.available(hidden.is_cuda) and hidden.dtype != torch.float64:
        weight = head.weight.to(hidden.dtype)
        return Scored(*_Tiles.apply(hidden, weight, targets, temperatures.float(), kept))  # type: ignore[misc]
    rows = max(1, TILE_NUMBERS.get(hidden.device.type, 1 << 25) // vocab_size)
    if hidden.shape[0] <= rows:
        return Scored(*_tile(head.logits, hidden, targets, temperatures, _narrow(kept, 0)))
    logprobs, entropies = [], []
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        arguments = (head.logits, hidden[part], targets[part], temperatures[part], _narrow(kept, start))
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_tile, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            logprob, entropy = _tile(*arguments)
        logprobs.append(logprob)
        entropies.append(entropy)
    return Scored(torch.cat(logprobs), torch.cat(entropies))


class _Tiles(torch.autograd.Function):
    """The same from a plain product, tile by tile: one tile of logits lives at a time; the backward makes them anew.

    The weight's gradient is summed over tiles in fp32.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, kept: Kept | None
    ) -> tuple[Tensor, Tensor]:
        from shoal.models.kernels.logprobs import score

        tiles = [
            score(_narrow(kept, part.start)(hidden[part] @ weight.T), targets[part], temperatures[part])
            for part in _parts(len(hidden), weight.shape[0])
        ]
        logprobs, entropies, totals = (torch.cat(x) for x in zip(*tiles, strict=True))
        ctx.save_for_backward(hidden, weight, targets, temperatures, totals)
        ctx.kept = kept
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        from shoal.models.kernels.logprobs import differentiate_

        hidden, weight, targets, temperatures, totals = ctx.saved_tensors
        d_logprobs = upstream[0].float().contiguous()
        d_hidden = torch.empty_like(hidden)
        d_weight: Tensor | None = None
        for part in _parts(len(hidden), weight.shape[0]):
            logits = _narrow(ctx.kept, part.start)(hidden[part] @ weight.T)
            gradient = differentiate_(logits, targets[part], temperatures[part], totals[part], d_logprobs[part])
            torch.mm(gradient, weight, out=d_hidden[part])
            if ctx.needs_input_grad[1]:
                d_weight = _add_product(d_weight, gradient.T, hidden[part])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def _parts(rows: int, width: int) -> list[slice]:
    """Tiles of nearly equal size."""
    count = -(-rows * width // KERNEL_TILE_NUMBERS) or 1
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right in fp32 (the first product alone if there is no total yet)."""
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32)
    product = (left @ right).float()
    return product if total is None else total.add_(product)


def _tile(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    narrow: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    logits = logits_of(hidden)
    logits = narrow((logits if logits.dtype == torch.float64 else logits.float()) / temperatures[:, None])
    logprobs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        # A dropped id has probability 0 and log-prob -inf; its share of the entropy is 0.
        entropy = -(logprobs.exp() * logprobs.masked_fill(torch.isneginf(logprobs), 0)).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def _narrow(kept: Kept | None, start: int) -> Callable[[Tensor], Tensor]:
    return partial(kept.narrow, start) if kept is not None else _all_of


def _all_of(logits: Tensor) -> Tensor:
    return logits
