"""Metrics of a step as a run logs them, for tests that display them."""

from __future__ import annotations

METRICS = {
    "reward/mean": 0.42,
    "reward/std": 0.31,
    "reward/part/acc": 0.4,
    "reward/part/fmt": 0.98,
    "batch/rollouts": 128,
    "batch/used": 96,
    "group/flat": 4,
    "group/mixed_frac": 0.75,
    "group/all_good_frac": 0.2,
    "completion/length_mean": 612.4,
    "completion/truncated_frac": 0.03,
    "mismatch/k3": 1.2e-3,
    "policy/entropy": 0.31,
    "optim/grad_norm": 0.8,
    "optim/lr": 1e-5,
    "masked": 0.12,
    "staleness/mean": 0.5,
    "staleness/max": 1,
    "throughput/rollout_tok_s": 41_000,
    "throughput/train_tok_s": 52_000,
    "time/step": 100.0,
    "time/rollout": 62.0,
    "time/reward": 3.0,
    "time/train": 28.0,
    "time/sync": 2.0,
    "time/idle": 5.0,
}
