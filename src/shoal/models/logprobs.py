"""Token log-probs and entropy from hidden states, in tiles, so that no [T, V] fp32 tensor exists at once.

Called by the trainer with gradients and by parity tests without; the sampler has its own single-position path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]  # [T, hidden] → logits [T, V] in the model's dtype

# One tile of fp32 logits may hold this many numbers; a row that fits in one tile is not recomputed in the backward.
TILE_NUMBERS = {"cpu": 1 << 25, "cuda": 1 << 27}


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
    kept_ids: Sequence[Sequence[int] | None] | None = None,
) -> Scored:
    """Log-prob of each target at its own temperature, over the kept ids where the sampler truncated."""
    rows = max(1, TILE_NUMBERS.get(hidden.device.type, 1 << 25) // vocab_size)
    if hidden.shape[0] <= rows:
        return Scored(*_tile(head, hidden, targets, temperatures, _kept_mask(kept_ids, vocab_size, hidden.device)))
    logprobs, entropies = [], []
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        kept = _kept_mask(kept_ids[part] if kept_ids is not None else None, vocab_size, hidden.device)
        arguments = (head, hidden[part], targets[part], temperatures[part], kept)
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_tile, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            logprob, entropy = _tile(*arguments)
        logprobs.append(logprob)
        entropies.append(entropy)
    return Scored(torch.cat(logprobs), torch.cat(entropies))


def _tile(
    head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperatures[:, None]
    if kept is not None:
        logits = logits.masked_fill(~kept, float("-inf"))
    logprobs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        # A dropped id has probability 0 and log-prob -inf; its share of the entropy is 0.
        entropy = -(logprobs.exp() * logprobs.masked_fill(torch.isneginf(logprobs), 0)).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def _kept_mask(kept_ids: Sequence[Sequence[int] | None] | None, vocab_size: int, device: torch.device) -> Tensor | None:
    """What each token could be drawn from: kept ids, or all but banned ones (~id), or everything."""
    if kept_ids is None or not any(kept_ids):
        return None
    mask = torch.zeros(len(kept_ids), vocab_size, dtype=torch.bool)
    for row, ids in enumerate(kept_ids):
        if not ids or ids[0] < 0:
            mask[row] = True
            mask[row, [~i for i in ids or ()]] = False
        else:
            mask[row, list(ids)] = True
    return mask.to(device)
