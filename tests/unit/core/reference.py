"""Each loss and its gradient, token by token in float64 without torch, written from the formulas alone.

Every function takes a row of plain numbers and returns (loss [T], d loss / d lp [T]). The loss of a token has no
gradient with respect to the log-prob of another token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass
class PlainRow:
    lp: np.ndarray
    old: np.ndarray
    inf: np.ndarray
    ref: np.ndarray
    m: np.ndarray
    a: np.ndarray
    seq: np.ndarray
    num_sequences: int

    def tokens_of(self, sequence: int) -> list[int]:
        return [t for t in range(len(self.m)) if self.m[t] and self.seq[t] == sequence]

    def mean_over(self, values: Callable[[int], float], sequence: int) -> float:
        tokens = self.tokens_of(sequence)
        return sum(values(t) for t in tokens) / len(tokens)


Pair = tuple[float, float]  # value, derivative with respect to lp
Result = tuple[np.ndarray, np.ndarray]


def each_token(row: PlainRow, token: Callable[[int], Pair]) -> Result:
    loss, grad = np.zeros(len(row.m)), np.zeros(len(row.m))
    for t in range(len(row.m)):
        if row.m[t]:
            loss[t], grad[t] = token(t)
    return loss, grad


def ratio(x: float) -> Pair:
    """exp(clamp(x, ±20)) and its derivative."""
    value = math.exp(min(max(x, -20.0), 20.0))
    return value, value if -20 <= x <= 20 else 0.0


def surrogate(u: Pair, a: float, low: float, high: float, dual: float | None = None) -> Pair:
    value, slope = u
    bounded = min(max(value, 1 - low), 1 + high)
    loss, grad = -value * a, -slope * a
    if -bounded * a > loss:
        loss, grad = -bounded * a, 0.0
    if dual is not None and a < 0 and -dual * a < loss:
        loss, grad = -dual * a, 0.0
    return loss, grad


def scaled(weight: float, pair: Pair) -> Pair:
    return weight * pair[0], weight * pair[1]


def grpo(
    row: PlainRow,
    w: np.ndarray,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Result:
    return dapo(row, w, clip_low, clip_low if clip_high is None else clip_high, dual_clip)


def dapo(
    row: PlainRow, w: np.ndarray, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None
) -> Result:
    return each_token(
        row,
        lambda t: scaled(w[t], surrogate(ratio(row.lp[t] - row.old[t]), row.a[t], clip_low, clip_high, dual_clip)),
    )


def importance_sampling(
    row: PlainRow, w: np.ndarray, ratio_low: float | None = None, ratio_high: float | None = None
) -> Result:
    low = -math.inf if ratio_low is None else ratio_low
    high = math.inf if ratio_high is None else ratio_high

    def token(t: int) -> Pair:
        value, slope = ratio(row.lp[t] - row.old[t])
        inside = low <= value <= high
        return -w[t] * min(max(value, low), high) * row.a[t], -w[t] * slope * row.a[t] if inside else 0.0

    return each_token(row, token)


def reinforce(row: PlainRow, w: np.ndarray, ratio: str = "on") -> Result:
    def token(t: int) -> Pair:
        gap = min(max(row.lp[t] - row.inf[t], -20.0), 20.0)
        factor = math.exp(gap) if ratio == "on" else 1.0
        return -row.a[t] * factor * row.lp[t], -row.a[t] * factor

    return each_token(row, token)


def dro(row: PlainRow, w: np.ndarray, quad_beta: float = 0.05) -> Result:
    def token(t: int) -> Pair:
        gap = row.lp[t] - row.old[t]
        return -(w[t] * row.lp[t] * row.a[t] - 0.5 * quad_beta * gap**2), -w[t] * row.a[t] + quad_beta * gap

    return each_token(row, token)


def gspo(row: PlainRow, w: np.ndarray, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Result:
    def token(t: int) -> Pair:
        s = math.exp(row.mean_over(lambda i: row.lp[i] - row.old[i], row.seq[t]))
        return scaled(w[t], surrogate((s, s), row.a[t], clip_low, clip_high))

    return each_token(row, token)


def cispo(row: PlainRow, w: np.ndarray, ratio_low: float = 0.0, ratio_high: float = 4.0) -> Result:
    def token(t: int) -> Pair:
        bounded = min(max(ratio(row.lp[t] - row.old[t])[0], ratio_low), ratio_high)
        return -w[t] * bounded * row.lp[t] * row.a[t], -w[t] * bounded * row.a[t]

    return each_token(row, token)


def decoupled(
    row: PlainRow,
    w: np.ndarray,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    cap: float = 5.0,
    dual_clip: float | None = None,
) -> Result:
    def token(t: int) -> Pair:
        v = ratio(row.old[t] - row.inf[t])[0]
        u = ratio(row.lp[t] - row.old[t])
        return scaled(0.0 if v > cap else v, surrogate(u, row.a[t], clip_low, clip_high, dual_clip))

    return each_token(row, token)


def dropped_by_masked(row: PlainRow, **given: float | str) -> tuple[np.ndarray, np.ndarray]:
    """Which trained tokens `masked` drops individually, and which with their rollout."""
    bounds = {
        "token_mask_low": 0.125, "token_mask_high": 8.0, "geo_mask_low": 0.1, "geo_mask_high": 10.0,
        "sequence_mask_low": 0.0, "sequence_mask_high": 100.0, **given,
    }  # fmt: skip
    alone, together = np.zeros(len(row.m), dtype=bool), np.zeros(len(row.m), dtype=bool)
    for sequence in range(row.num_sequences):
        tokens = row.tokens_of(sequence)
        if not tokens:
            continue
        ratios = [math.exp(row.lp[t] - row.inf[t]) for t in tokens]
        g = math.exp(row.mean_over(lambda t: row.lp[t] - row.inf[t], sequence))
        whole = g < bounds["geo_mask_low"] or g > bounds["geo_mask_high"]
        whole = whole or min(ratios) < bounds["sequence_mask_low"] or max(ratios) > bounds["sequence_mask_high"]
        for t, r in zip(tokens, ratios, strict=True):
            together[t] = whole
            alone[t] = r < bounds["token_mask_low"] or r > bounds["token_mask_high"]
    return alone, together


def masked(row: PlainRow, w: np.ndarray, **given: float | str) -> Result:
    values = {"ratio_type": "token", "adv_tau": 1.0, "kl_tau": 0.0, "sequence_clip_high": 10.0, **given}
    bounds = {name: value for name, value in given.items() if "_mask_" in name}
    alone, together = dropped_by_masked(row, **bounds)

    def token(t: int) -> Pair:
        if alone[t] or together[t]:
            return 0.0, 0.0
        gap = row.lp[t] - row.inf[t]
        weight = math.exp(gap)
        if values["ratio_type"] == "sequence":
            total = sum(row.lp[i] - row.inf[i] for i in row.tokens_of(row.seq[t]))
            weight = min(math.exp(min(total, 10.0)), float(values["sequence_clip_high"]))
        coefficient = weight * (float(values["adv_tau"]) * row.a[t] - float(values["kl_tau"]) * gap)
        return -coefficient * row.lp[t], -coefficient

    return each_token(row, token)


def dppo(row: PlainRow, w: np.ndarray, mask_low: float = 0.2, mask_high: float = 0.2, kl_tau: float = 1e-3) -> Result:
    def token(t: int) -> Pair:
        gap = row.lp[t] - row.inf[t]
        moved = math.exp(row.lp[t]) - math.exp(row.inf[t])
        drop = moved > mask_high if row.a[t] > 0 else moved < -mask_low
        value, slope = (0.0, 0.0) if drop else ratio(gap)
        return -row.a[t] * value + kl_tau * gap**2, -row.a[t] * slope + 2 * kl_tau * gap

    return each_token(row, token)


def sapo(row: PlainRow, w: np.ndarray, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Result:
    def token(t: int) -> Pair:
        tau = tau_pos if row.a[t] > 0 else tau_neg
        value, slope = ratio(row.lp[t] - row.old[t])
        gate = 1 / (1 + math.exp(-tau * (value - 1))) if tau * (value - 1) > -700 else 0.0
        return -w[t] * 4 / tau * gate * row.a[t], -w[t] * 4 * gate * (1 - gate) * slope * row.a[t]

    return each_token(row, token)


def vespo(
    row: PlainRow, w: np.ndarray, k_pos: float = 2.0, rate_pos: float = 3.0, k_neg: float = 3.0, rate_neg: float = 2.0
) -> Result:
    def token(t: int) -> Pair:
        tokens = row.tokens_of(row.seq[t])
        product = sum(min(max(row.lp[i] - row.old[i], -20.0), 20.0) + math.log(max(w[i], 1e-8)) for i in tokens)
        ratio_of_all = math.exp(min(max(product, math.log(1e-8)), 20.0))
        k, rate = (k_pos, rate_pos) if row.a[t] >= 0 else (k_neg, rate_neg)
        gate = ratio_of_all**k * math.exp(rate * (1 - ratio_of_all))
        return -gate * row.a[t] * row.lp[t], -gate * row.a[t]

    return each_token(row, token)


REFERENCE: dict[str, Callable[..., Result]] = {
    "grpo": grpo, "ppo": grpo, "importance_sampling": importance_sampling, "reinforce": reinforce, "dapo": dapo,
    "dro": dro, "gspo": gspo, "cispo": cispo, "decoupled": decoupled, "masked": masked, "dppo": dppo, "sapo": sapo,
    "vespo": vespo,
}  # fmt: skip


def kl(row: PlainRow, estimator: str) -> Result:
    def token(t: int) -> Pair:
        raw = row.lp[t] - row.ref[t]
        d, slope = min(max(raw, -20.0), 20.0), float(-20 <= raw <= 20)
        if estimator == "k1":
            return d, slope
        if estimator == "k2":
            return d * d / 2, d * slope
        k3, k3_slope = math.exp(-d) + d - 1, (1 - math.exp(-d)) * slope
        if estimator == "k3":
            return k3, k3_slope
        rho, rho_slope = ratio(row.lp[t] - row.old[t])
        return rho * k3, rho * k3_slope + rho_slope * k3

    return each_token(row, token)


def correction(row: PlainRow, kind: str, cap: float = 5.0, level: str = "token", floor: float = 0.5) -> Result:
    """w before and after clipping."""
    raw, weight = np.ones(len(row.m)), np.ones(len(row.m))
    for t in range(len(row.m)):
        if not row.m[t]:
            continue
        raw[t] = ratio(row.old[t] - row.inf[t])[0]
        if level == "sequence":
            raw[t] = math.exp(row.mean_over(lambda i: row.old[i] - row.inf[i], row.seq[t]))
        weight[t] = min(raw[t], cap) if kind == "tis" else (raw[t] if floor <= raw[t] <= cap else 0.0)
    return raw, weight


def entropy_of(logits: np.ndarray) -> tuple[float, np.ndarray]:
    """Entropy of softmax(logits), and its derivative with respect to the logits: -p · (log p + H). Excluded ids are
    -inf.
    """
    finite = [x for x in logits.tolist() if x > -math.inf]
    log_total = max(finite) + math.log(sum(math.exp(x - max(finite)) for x in finite))
    entropy = -sum(math.exp(x - log_total) * (x - log_total) for x in finite)
    slope = [-math.exp(x - log_total) * (x - log_total + entropy) if x > -math.inf else 0.0 for x in logits.tolist()]
    return entropy, np.array(slope)


def adapted(coef: float, entropy: float, target: float, delta: float, low: float, high: float) -> float:
    """The coefficient after a step with this mean entropy."""
    return min(max(coef + (delta if entropy <= target else -delta), low), high)


def controlled(coef: float, gain: float, last: list[float], target: float, high: float) -> float:
    """The weight of the entropy bonus with `gain`, from the entropies of the steps so far."""
    trend = last[-1] - last[-2] if len(last) > 1 else 0.0
    return min(max(coef + gain * (target - last[-1] - trend), 0.0), high)


def maxrl(rewards: list[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    if mean <= 0:
        return [0.0] * len(rewards)
    bound = len(rewards) - 1
    return [min(max((r - mean) / mean, -bound), bound) for r in rewards]


def standardised(values: list[float], eps: float = 1e-6) -> list[float]:
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / (std + eps) for v in values]


def gdpo(groups: list[list[dict[str, float]]], weights: dict[str, float], rescale: bool) -> list[list[float]]:
    """Each rollout is a list of its parts."""
    sums = []
    for group in groups:
        columns = {name: standardised([rollout[name] for rollout in group]) for name in group[0]}
        sums.append([sum(weights.get(n, 1.0) * column[i] for n, column in columns.items()) for i in range(len(group))])
    if not rescale:
        return sums
    flat = iter(standardised([value for group in sums for value in group]))
    return [[next(flat) for _ in group] for group in sums]


def per_turn(group: list[list[float]], discount: float | None) -> list[list[float]]:
    """Rewards per turn of each rollout → advantages per turn. With a discount: of the returns from each turn on."""
    if discount is not None:
        group = [[sum(discount ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))] for r in group]
    result = [[0.0] * len(rollout) for rollout in group]
    for k in range(max(map(len, group))):
        there = [i for i, rollout in enumerate(group) if len(rollout) > k]
        for i, value in zip(there, standardised([group[i][k] for i in there]), strict=True):
            result[i][k] = value
    return result


def teacher_baselines(old: list[list[float]], teacher: list[list[float]], silent: tuple[int, ...] = ()) -> list[float]:
    """For each rollout: the mean of clamp(teacher - old, ±20) over the tokens of the others, weighted by 1 - exp(old).
    `silent` rollouts have no signal of the teacher."""

    def of_others(mine: int) -> float:
        if mine in silent:
            return 0.0
        others = [i for i in range(len(old)) if i != mine and i not in silent]
        weighted = [
            (1 - math.exp(o), min(max(t - o, -20.0), 20.0))
            for i in others
            for o, t in zip(old[i], teacher[i], strict=True)
        ]
        total = math.fsum(weight for weight, _ in weighted)
        return math.fsum(weight * gap for weight, gap in weighted) / total if total > 0 else 0.0

    return [of_others(mine) for mine in range(len(old))]


def with_teacher(
    row: PlainRow, teacher: np.ndarray, baseline: np.ndarray, tau: float, reward_weight: float
) -> PlainRow:
    """The row with the advantages that include the teacher, for losses without a teacher term."""
    clamped = [min(max(float(teacher[t] - row.old[t]), -20.0), 20.0) if row.m[t] else 0.0 for t in range(len(row.m))]
    gaps = [gap - b for gap, b in zip(clamped, baseline, strict=True)]
    return replace(row, a=np.array([reward_weight * a + tau * gap for a, gap in zip(row.a, gaps, strict=True)]))


def masked_with_teacher(
    row: PlainRow,
    teacher: np.ndarray,
    baseline: np.ndarray,
    tau: float,
    reward_weight: float,
    adv_tau: float,
    kl_tau: float,
) -> Result:
    alone, together = dropped_by_masked(row)

    def token(t: int) -> Pair:
        if alone[t] or together[t]:
            return 0.0, 0.0
        gap, teacher_gap = row.lp[t] - row.inf[t], min(max(float(teacher[t] - row.lp[t]), -20.0), 20.0)
        reward = adv_tau * reward_weight * row.a[t]
        coefficient = math.exp(gap) * (reward + tau * (teacher_gap - baseline[t]) - kl_tau * gap)
        return -coefficient * row.lp[t], -coefficient

    return each_token(row, token)
