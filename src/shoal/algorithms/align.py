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
    if num_tokens < 1:
        raise ValueError("no tokens to align log-probs with")
    if len(trainer_logprobs) != num_tokens - 1:
        raise ValueError(f"{num_tokens} tokens need {num_tokens - 1} trainer log-probs, got {len(trainer_logprobs)}")
    if len(sampler_logprobs) != num_tokens:
        raise ValueError(f"{num_tokens} tokens need {num_tokens} sampler log-probs, got {len(sampler_logprobs)}")
    return _after_zero("trainer", trainer_logprobs), _after_zero("sampler", sampler_logprobs[1:])


def _after_zero(source: str, logprobs: Logprobs) -> np.ndarray:
    for position, value in enumerate(logprobs, start=1):
        if value is None or np.isnan(value):
            raise ValueError(f"{source} log-prob of token {position} is undefined; only that of token 0 may be")
    return np.concatenate([[0.0], np.asarray(logprobs, dtype=np.float64)])
