"""The paired bootstrap interval of a difference of accuracies, for results on a test set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000
CHUNK = 500  # resamples at a time, to bound the memory


class Difference(NamedTuple):
    value: float
    low: float
    high: float
    problems: int


def paired_bootstrap(
    ours: Mapping[str, float], theirs: Mapping[str, float], *, level: float = LEVEL, seed: int = 0
) -> Difference:
    """Mean of ours minus theirs. Resampling draws problems, so both models keep their answers to the same problem.

    The interval is the percentile interval: it covers the choice of problems, not the seed of training.
    """
    if ours.keys() != theirs.keys():
        raise ValueError("both models must have answered the same problems")
    if len(ours) < 2:
        raise ValueError("an interval needs at least two problems")
    gaps = np.array([ours[problem] - theirs[problem] for problem in ours], dtype=np.float64)
    draw = np.random.default_rng(seed)
    means = np.concatenate(
        [gaps[draw.integers(len(gaps), size=(CHUNK, len(gaps)))].mean(axis=1) for _ in range(RESAMPLES // CHUNK)]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(gaps.mean()), float(low), float(high), len(gaps))
