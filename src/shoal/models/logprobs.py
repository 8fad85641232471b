"""Token log-probs and entropy from hidden states, in tiles, so that no [T, V] fp32 tensor exists at once.

Called by the trainer with gradients and by parity tests without; the sampler has its own path for single positions.
`AllowedTokens` replays truncated sampling (top-k, top-p, min-p): logits of excluded ids are masked, tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.models import kernels
from shoal.models.attention import upload

NOTHING = float("-inf")


class AllowedTokens:
    """`of[t]`: the ids that token t could be drawn from, or `~id` of each excluded id, or None for all ids."""

    def __init__(self, of: Sequence[Sequence[int] | None], device: torch.device) -> None:
        only = [(token, ids) for token, ids in enumerate(of) if ids and ids[0] >= 0]
        banned = [(token, [~i for i in ids]) for token, ids in enumerate(of) if ids and ids[0] < 0]
        self._host = {"rows": np.array([token for token, _ in only], dtype=np.int64)}
        arrays = dict(self._host)
        for name, lists in (("only", only), ("banned", banned)):
            tokens = np.array([token for token, _ in lists], dtype=np.int64)
            self._host[name] = arrays[name] = np.repeat(tokens, [len(ids) for _, ids in lists])
            arrays[f"{name}_ids"] = np.concatenate([np.zeros(0, dtype=np.int64), *(ids for _, ids in lists)])
        self._there = upload({name: array.astype(np.int64) for name, array in arrays.items()}, device)

    def narrow(self, start: int, logits: Tensor) -> Tensor:
        """Mask logits [T, V] of the tokens from `start` on; in place if they need no gradient."""
        if logits.requires_grad:
            return logits + self._narrow_(start, torch.zeros_like(logits))
        return self._narrow_(start, logits)

    def _narrow_(self, start: int, numbers: Tensor) -> Tensor:
        flat = numbers.view(-1)
        only, banned = (self._places(name, start, numbers) for name in ("only", "banned"))
        if len(only):
            kept = flat.index_select(0, only)
            numbers.index_fill_(0, self._part("rows", "rows", start, len(numbers)) - start, NOTHING)
            flat.index_copy_(0, only, kept)
        if len(banned):
            flat.index_fill_(0, banned, NOTHING)
        return numbers

    def _places(self, name: str, start: int, numbers: Tensor) -> Tensor:
        tokens, ids = (self._part(name, values, start, len(numbers)) for values in (name, f"{name}_ids"))
        return (tokens - start) * numbers.shape[1] + ids

    def _part(self, name: str, values: str, start: int, count: int) -> Tensor:
        first, last = np.searchsorted(self._host[name], (start, start + count)).tolist()
        return self._there[values][first:last]


@dataclass(frozen=True)
class Head:
    """[T, hidden] → logits [T, V] in the model's dtype; `weight` [V, hidden] is set if the head is a plain product."""

    logits: Callable[[Tensor], Tensor]
    weight: Tensor | None = None


# Elements of one tile of fp32 logits. A row that fits in one tile is not recomputed in the backward.
TILE_NUMBERS = {"cpu": 1 << 25, "cuda": 1 << 27}
KERNEL_TILE_NUMBERS = 1 << 29  # elements in a 16-bit dtype; only one tile exists at a time


@dataclass(frozen=True)
class TokenScores:
    logprobs: Tensor  # [T] fp32 (fp64 for fp64 models), with gradient
    entropy: Tensor  # [T], with gradient only if requested


def token_logprobs(
    head: Head,
    hidden: Tensor,  # [T, hidden], the state that predicts each target
    targets: Tensor,  # [T]
    temperatures: Tensor,  # [T]
    vocab_size: int,
    kept: AllowedTokens | None = None,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Log-prob of each target at its own temperature, over the kept ids where the sampler truncated.

    The kernels have no gradient of the entropy: with `entropy_gradient`, plain tiles are used on every device.
    """
    if (
        not entropy_gradient
        and head.weight is not None
        and kernels.available(hidden.is_cuda)
        and hidden.dtype != torch.float64
    ):
        weight = head.weight.to(hidden.dtype)
        return TokenScores(*_Tiles.apply(hidden, weight, targets, temperatures.float(), kept))  # type: ignore[misc]
    rows = max(1, TILE_NUMBERS.get(hidden.device.type, 1 << 25) // vocab_size)
    if hidden.shape[0] <= rows:
        return TokenScores(*_tile(head.logits, hidden, targets, temperatures, _narrow(kept, 0), entropy_gradient))
    logprobs, entropies = [], []
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        arguments = (head.logits, hidden[part], targets[part], temperatures[part], _narrow(kept, start))
        arguments = (*arguments, entropy_gradient)
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_tile, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            logprob, entropy = _tile(*arguments)
        logprobs.append(logprob)
        entropies.append(entropy)
    return TokenScores(torch.cat(logprobs), torch.cat(entropies))


class _Tiles(torch.autograd.Function):
    """The same for a plain product: one tile of logits exists at a time, and the backward recomputes it.

    The weight's gradient is summed over tiles in fp32.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, kept: AllowedTokens | None
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
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    logits = logits_of(hidden)
    logits = narrow((logits if logits.dtype == torch.float64 else logits.float()) / temperatures[:, None])
    logprobs = torch.log_softmax(logits, -1)
    with nullcontext() if entropy_gradient else torch.no_grad():
        # An excluded id has probability 0 and log-prob -inf; it adds 0 to the entropy.
        entropy = -(logprobs.exp() * logprobs.masked_fill(torch.isneginf(logprobs), 0)).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def _narrow(kept: AllowedTokens | None, start: int) -> Callable[[Tensor], Tensor]:
    return partial(kept.narrow, start) if kept is not None else _all_of


def _all_of(logits: Tensor) -> Tensor:
    return logits
