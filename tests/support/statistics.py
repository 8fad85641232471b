"""A chi-square test without another dependency."""

from __future__ import annotations

import numpy as np
import torch


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """P-value of `counts` under `probabilities`. Cells with an expected count below five are merged."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "an impossible id was sampled"
    rare = expected < 5
    observed, wanted = list(counts[~rare]), list(expected[~rare])
    if expected[rare].sum() > 0:
        observed.append(counts[rare].sum())
        wanted.append(expected[rare].sum())
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, wanted, strict=True))
    freedom = len(wanted) - 1
    assert freedom >= 1, "nothing to compare"
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def independence_p(first: np.ndarray, second: np.ndarray, kinds: int) -> float:
    """P-value for the independence of two sampled sequences, from their table of pairs."""
    table = np.zeros((kinds, kinds))
    np.add.at(table, (first, second), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    statistic = float(((table - expected) ** 2 / expected).sum())
    half = torch.tensor([(kinds - 1) ** 2 / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
