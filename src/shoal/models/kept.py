"""What tokens could be drawn from, where the sampler narrowed its choice: the logits of all other ids are taken away.

Ids are listed, never laid out over the vocabulary: a tile of logits is narrowed at the places that are named.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.models.upload import upload

NOTHING = float("-inf")


class Kept:
    """`of` numbers the tokens; each has the ids it could be drawn from, or `~id` of all it could not, or None."""

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
        """Logits [T, V] of the tokens from `start` on; in place where no gradient asks what they were."""
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
