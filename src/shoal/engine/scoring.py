"""Log-probs of given texts, and the most likely tokens at each position, from the model's own packed forward pass.

Called by `rollout/embedded.py` between decode windows. The KV cache and the CUDA graphs are not involved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.core.types import ScoredTokens, ScoreRequest
from shoal.models.attention import ROW_MULTIPLE, round_up, upload
from shoal.models.logprobs import AllowedTokens
from shoal.models.sampler_view import SamplerView

TILE_NUMBERS = 1 << 25  # elements of one tile of fp32 logits


def take_batch(lengths: Sequence[int], limit: int) -> int:
    """How many texts, from the first on, have at most `limit` tokens together; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(lengths), limit, side="right")))


@torch.no_grad()
def score(view: SamplerView, requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
    """The scores of all requests, in one forward pass under the served weights. Each has a token to score."""
    inputs = [request.token_ids[:-1] for request in requests]  # the last token predicts nothing that is scored
    lengths = [len(ids) for ids in inputs]
    padding = round_up(sum(lengths), ROW_MULTIPLE) - sum(lengths)
    if padding:  # an extra segment of token 0, whose result is unused
        inputs.append([0] * padding)
        lengths = [*lengths, padding]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    wanted = [np.arange(starts[i] + r.start - 1, starts[i + 1]) for i, r in enumerate(requests)]
    counts = [len(rows) for rows in wanted]
    arrays = {
        "ids": np.concatenate([np.asarray(ids, dtype=np.int64) for ids in inputs]),
        "positions": np.arange(starts[-1]) - np.repeat(starts[:-1], lengths),
        "rows": np.concatenate(wanted),
        "targets": np.concatenate([np.asarray(r.token_ids[r.start :], dtype=np.int64) for r in requests]),
        "temperatures": np.repeat([r.temperature or 1.0 for r in requests], counts).astype(np.float32),
    }
    decoder = view.decoder
    there = upload(arrays, decoder.device)
    with view.active():
        hidden = decoder.hidden(there["ids"][None], there["positions"][None], decoder.pack(starts))[0]
        found = _tiles(view, hidden[there["rows"]], there, requests)
    logprobs, values, ids = (torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True))
    edges = np.cumsum(counts)[:-1]
    per_request = zip(requests, *(np.split(array, edges) for array in (logprobs, values, ids)), strict=True)
    return [_scored(request, *arrays) for request, *arrays in per_request]


def _tiles(
    view: SamplerView, hidden: Tensor, there: dict[str, Tensor], requests: Sequence[ScoreRequest]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Log-probs of the targets, and the values and ids of the most likely tokens, tile by tile."""
    decoder = view.decoder
    most = min(max(r.top for r in requests), decoder.vocab_size)
    allowed = AllowedTokens([ids for r in requests for ids in _kept(r)], decoder.device)
    found, rows = [], max(1, TILE_NUMBERS // decoder.vocab_size)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        logits = decoder.logits(hidden[part]).float() / there["temperatures"][part, None]
        logprobs = torch.log_softmax(allowed.narrow(start, logits), -1)
        chosen = logprobs.gather(-1, there["targets"][part, None]).squeeze(-1)
        found.append((chosen, *logprobs.topk(most, dim=-1)))
    return found


def _kept(request: ScoreRequest) -> list[list[int] | None]:
    """Per scored token: the ids that it could be sampled from; None for all ids."""
    kept = request.kept_ids or []
    return [*[None] * (len(request.token_ids) - request.start - len(kept)), *kept]


def _scored(request: ScoreRequest, logprobs: np.ndarray, values: np.ndarray, ids: np.ndarray) -> ScoredTokens:
    possible = np.isfinite(values[:, : request.top])
    rows = zip(ids.tolist(), values.tolist(), possible.sum(-1).tolist(), strict=True)
    top = [list(zip(i[:count], v[:count], strict=True)) for i, v, count in rows]
    return ScoredTokens(logprobs.tolist(), top)
