"""A policy that can be computed manually: one logit per token, no context, plain gradient descent, NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.errors import MemoryStop
from shoal.core.learn import Learner, LearnSettings
from shoal.core.types import Row

VOCABULARY = 8


@dataclass
class Results:
    metrics: dict[str, tuple[float, float]]
    logprobs: list[np.ndarray]

    def read(self) -> tuple[Mapping[str, tuple[float, float]], list[np.ndarray]]:
        return self.metrics, self.logprobs


@dataclass
class Backward:
    """One call of forward_backward."""

    rows: list[Row]
    source: str
    optim_steps_before: int

    @property
    def rollout_ids(self) -> list[str]:
        return [rollout_id for row in self.rows for rollout_id in row.rollout_ids]

    @property
    def weight(self) -> float:
        return float(sum(row.weights.sum() for row in self.rows))


def reinforce(logprobs: np.ndarray, row: Row) -> np.ndarray:
    """d loss / d log-prob of each token: minus weight times advantage."""
    return -row.weights * row.advantages


@dataclass
class UnigramPolicy:
    """Implements protocols.Policy. The objective is a function (log-probs [T], row) → d loss / d log-prob [T]."""

    rate: float = 1.0
    theta: np.ndarray = field(default_factory=lambda: np.zeros(VOCABULARY))
    calls: list[Backward] = field(default_factory=list)
    optim_steps: int = 0
    reference: np.ndarray = field(default_factory=lambda: np.zeros(VOCABULARY))
    shares_prefixes: bool = True
    passes_together: bool = False
    most_tokens: int | None = None  # the micro-batch size that fits into memory

    def __post_init__(self) -> None:
        self._gradient = np.zeros(VOCABULARY)

    def logprobs(self, rows: Sequence[Row]) -> Results:
        return self._scored(rows, self.theta)

    def reference_logprobs(self, rows: Sequence[Row]) -> Results:
        return self._scored(rows, self.reference)

    def _scored(self, rows: Sequence[Row], theta: np.ndarray) -> Results:
        if self.most_tokens is not None and sum(row.tokens for row in rows) > self.most_tokens:
            raise MemoryStop("no memory")
        return Results({}, [_token_logprobs(theta, row) for row in rows])

    def forward_backward(self, rows: Sequence[Row], objective: Any, mismatch_from: Any = "old") -> Results:
        self.calls.append(Backward(list(rows), mismatch_from, self.optim_steps))
        loss = 0.0
        for row in rows:
            if self.most_tokens is not None and sum(row.tokens for row in rows) > self.most_tokens:
                self._gradient += 1000.0  # gradients added before memory ran out
                raise MemoryStop("no memory")
            logprobs = _token_logprobs(self.theta, row)
            slope = objective(logprobs, row)
            loss += float((slope * logprobs).sum())
            for t in np.flatnonzero(row.loss_mask):
                self._gradient -= slope[t] * np.exp(_log_softmax(self.theta))
                self._gradient[row.token_ids[t]] += slope[t]
        return Results({"policy/loss": (loss, 0.0)}, self.logprobs(rows).logprobs)

    def discard_gradient(self) -> None:
        self._gradient = np.zeros(VOCABULARY)

    def optim_step(self) -> Mapping[str, float]:
        norm = float(np.linalg.norm(self._gradient))
        skipped = not np.isfinite(norm)
        if not skipped:
            self.theta = self.theta - self.rate * self._gradient
        self._gradient = np.zeros(VOCABULARY)
        self.optim_steps += 1
        outcome = {"optim/lr": self.rate, "optim/skipped": float(skipped)}
        return outcome if skipped else {**outcome, "optim/grad_norm": norm}


async def on_device(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def make_learner(policy: UnigramPolicy, advantages: Any, objective: Any = reinforce, **settings: Any) -> Learner:
    chosen = LearnSettings(**{"token_budget": 8, "aggregation": "token-mean", "max_tokens": 4, **settings})
    return Learner(policy, advantages, objective, chosen, on_device)


def _log_softmax(theta: np.ndarray) -> np.ndarray:
    return theta - theta.max() - np.log(np.exp(theta - theta.max()).sum())


def _token_logprobs(theta: np.ndarray, row: Row) -> np.ndarray:
    return np.where(row.loss_mask, _log_softmax(theta)[row.token_ids], 0.0).astype(np.float32)
