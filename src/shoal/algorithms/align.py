"""The one place where log-probs are put in line with their tokens.

For N tokens a trainer gives N-1 log-probs (entry i speaks of token i+1), a sampler N with the first undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Logprobs = Sequence[float | None] | np.ndarray


def align_logprobs(
    num_tokens: int, trainer_logprobs: Logprobs, sampler_logprobs: Logprobs
) -> tuple[np.ndarray, np.ndarray]:
    """Both as [N] float64, entry t speaking of token t, 0 at position 0, which has no context.

    Worked example, N = 3: trainer [-.1, -.2], sampler [None, -.3, -.4] → [0, -.1, -.2], [0, -.3, -.4].
    """
    return align_trainer(num_tokens, trainer_logprobs), align_sampler(num_tokens, sampler_logprobs)


def align_trainer(num_tokens: int, logprobs: Logprobs) -> np.ndarray:
    """N-1 values, the first of token 1 → [N], entry t speaking of token t."""
    _check_length("trainer", num_tokens, num_tokens - 1, len(logprobs))
    return _after_zero("trainer", logprobs)


def align_sampler(num_tokens: int, logprobs: Logprobs) -> np.ndarray:
    """N values, the first undefined → [N], entry t speaking of token t."""
    _check_length("sampler", num_tokens, num_tokens, len(logprobs))
    return _after_zero("sampler", logprobs[1:])


def as_trainer_logprobs(aligned: np.ndarray) -> np.ndarray:
    """The other way: [N] with entry t speaking of token t → the N-1 values a trainer gives."""
    return aligned[1:]


def _check_length(source: str, num_tokens: int, wanted: int, found: int) -> None:
    if num_tokens < 1:
        raise ValueError("no tokens to align log-probs with")
    if found != wanted:
        raise ValueError(f"{num_tokens} tokens need {wanted} {source} log-probs, got {found}")


def _after_zero(source: str, logprobs: Logprobs) -> np.ndarray:
    for position, value in enumerate(logprobs, start=1):
        if value is None or np.isnan(value):
            raise ValueError(f"{source} log-prob of token {position} is undefined; only that of token 0 may be")
    return np.concatenate([[0.0], np.asarray(logprobs, dtype=np.float64)])
