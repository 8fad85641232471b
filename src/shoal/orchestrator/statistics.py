"""How sure a score is: avg@k and pass@k with confidence intervals, and two models compared prompt by prompt.

Prompts are the unit: rollouts of one prompt are alike, and counting them one by one would promise too much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

SOLVED = 1.0
LEVEL = 0.95
FEWEST = 4  # values of a spread one has to estimate; from fewer, it is wider than any range of rewards


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and the bounds of its confidence interval; the bounds are nan where prompts are too few."""

    value: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.4g} (too few for an interval)"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def average(scores: Mapping[int, Sequence[float]], level: float = LEVEL) -> Estimate:
    """avg@k: the mean reward of a rollout, prompts weighing the same."""
    return interval([fmean(rewards) for rewards in scores.values() if rewards], level)


def pass_at(scores: Mapping[int, Sequence[float]], k: int, level: float = LEVEL) -> Estimate:
    """pass@k without bias from n >= k rollouts a prompt: 1 - C(n - c, k) / C(n, k), c of them solved."""
    values = []
    for rewards in scores.values():
        n, solved = len(rewards), sum(reward >= SOLVED for reward in rewards)
        if n >= k:
            values.append(1 - math.comb(n - solved, k) / math.comb(n, k))
    return interval(values, level)


def difference(
    ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]], level: float = LEVEL
) -> Estimate:
    """Mean of ours minus theirs over the prompts both answered; paired, so what is hard for both cancels out."""
    shared = [index for index in ours if ours[index] and theirs.get(index)]
    return interval([fmean(ours[index]) - fmean(theirs[index]) for index in shared], level, paired=True)


def interval(values: Sequence[float], level: float = LEVEL, *, paired: bool = False) -> Estimate:
    """Student's interval of a mean; Wilson's where every value is 0 or 1, which is right at the ends too."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = fmean(values)
    if not paired and all(value in (0, 1) for value in values):
        return _wilson(mean, n, level)
    if n < FEWEST:
        return Estimate(mean, math.nan, math.nan, n)
    half = student_quantile(0.5 + level / 2, n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def _wilson(mean: float, n: int, level: float) -> Estimate:
    z = NormalDist().inv_cdf(0.5 + level / 2)
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), n)


def student_quantile(probability: float, freedom: int) -> float:
    """Exact for one and two degrees of freedom, else Hill's expansion around the normal quantile (error below 1e-2)."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
