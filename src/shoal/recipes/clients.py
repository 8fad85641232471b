"""The policy and its frozen reference as one's own loop uses them: log-probs, gradients of any loss, optimizer steps.

Thin over shoal.trainer.policy: everything runs on the device's thread, packed as the loop packs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shoal import build
from shoal.algorithms.align import align_trainer, as_trainer_logprobs
from shoal.batching.pack import Packing, make_batches
from shoal.errors import ArgumentError, ConfigError
from shoal.recipes.datums import Datum, LossFn, by_datum
from shoal.types import Row, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.trainer.policy import RowResults, TrainedPolicy


@dataclass(frozen=True)
class AdamParams:
    """The numbers of one optimizer step."""

    learning_rate: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
                raise ArgumentError(f"AdamParams: {name}: must be a number of at least 0, not {value!r}")


@dataclass(frozen=True)
class ForwardBackward:
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """The one thread that computes, and how many tokens a packed row holds."""

    executor: Executor
    token_budget: int

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.executor.submit(function, *arguments).result()


class PolicyClient:
    """The model being trained. `version` counts optimizer steps."""

    def __init__(self, policy: TrainedPolicy, device: Device, chat: Any) -> None:
        self._policy = policy
        self._device = device
        self._files = build.PolicyFiles(policy, chat)
        self.version = 0

    def forward(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Log-probs under the current weights: N-1 values for the N tokens of each datum. No gradient."""
        return _forward(self._policy.logprobs, self._device, datums)

    def forward_backward_custom(self, datums: Sequence[Datum], loss_fn: LossFn) -> ForwardBackward:
        """Add the gradient of `loss_fn(datums, logprobs) -> (loss, metrics)`; `logprobs` are [N-1] tensors.

        The loss sees all datums at once, whatever fits into memory: its derivative by each log-prob is taken first, and
        then carried back through the model row by row.
        """
        if not datums:
            raise ArgumentError("forward_backward_custom: datums: there are none; every group may have been uniform")
        return self._device.do(self._forward_backward, list(datums), loss_fn)

    def _forward_backward(self, datums: list[Datum], loss_fn: LossFn) -> ForwardBackward:
        import torch

        samples, rows = _rows(datums, self._device.token_budget)
        _score(rows, [self._policy.logprobs([row]) for row in rows])
        values = [as_trainer_logprobs(array) for array in by_datum(samples, rows, "old_logprobs")]
        where = self._policy.decoder.device
        logprobs = [torch.tensor(value, dtype=torch.float32, device=where, requires_grad=True) for value in values]
        returned = loss_fn(datums, logprobs)
        loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        good = isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad
        if not good or not isinstance(metrics, Mapping):
            raise ArgumentError(
                "forward_backward_custom: loss_fn: must return (loss, metrics), a number made of logprobs and a "
                "dictionary"
            )
        loss.backward()
        self._carry_back(samples, rows, logprobs)
        return ForwardBackward(float(loss.detach()), dict(metrics))

    def _carry_back(self, samples: Sequence[Sample], rows: Sequence[Row], logprobs: Sequence[Tensor]) -> None:
        slopes: dict[str, np.ndarray] = {}
        for sample, lp in zip(samples, logprobs, strict=True):
            slope = np.zeros(sample.tokens - 1) if lp.grad is None else lp.grad.double().cpu().numpy()
            slopes[sample.rollout_id] = align_trainer(sample.tokens, np.nan_to_num(slope, nan=np.inf))
        for row in rows:
            row.old_logprobs = None
            row.weights = np.zeros(row.tokens)
            for index, rollout_id in enumerate(row.rollout_ids):
                row.weights[row.sequence_ids == index] = slopes[rollout_id]
            row.loss_mask = row.weights != 0  # the rest has no gradient and need not be computed
            if row.loss_mask.any():
                self._policy.forward_backward([row], _linear, "none")

    def optim_step(self, adam_params: AdamParams | None = None) -> dict[str, float]:
        """One AdamW step with the gradient collected since the last; unset: the configured rate and settings.

        A gradient that is not finite moves nothing, and `optim/skipped` is 1.
        """
        result = dict(self._device.do(self._policy.optim_step, _own_step(adam_params)))
        self.version += 1
        return result

    def export(self, folder: str | Path) -> Path:
        """Weights as transformers (or PEFT) load them."""
        if Path(folder).is_file():
            raise ArgumentError(f"export: folder: {str(folder)!r} is a file; name a folder")
        self._device.do(self._files.export, Path(folder))
        return Path(folder)


class ForwardOnlyError(ConfigError, RuntimeError):
    """The reference was asked to train."""


class ReferenceClient:
    """The frozen reference: forward only."""

    def __init__(self, policy: TrainedPolicy, device: Device) -> None:
        self._policy = policy
        self._device = device

    def forward(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Log-probs under the reference: N-1 values for the N tokens of each datum."""
        return _forward(self._policy.reference_logprobs, self._device, datums)

    def forward_backward_custom(self, *_: Any) -> NoReturn:
        raise ForwardOnlyError("the reference is forward-only; train the policy")

    def optim_step(self, *_: Any) -> NoReturn:
        raise ForwardOnlyError("the reference is forward-only; call optim_step on the policy")


def _forward(score: Callable[..., RowResults], device: Device, datums: Sequence[Datum]) -> list[np.ndarray]:
    samples, rows = _rows(datums, device.token_budget)
    device.do(_score, rows, [device.do(score, [row]) for row in rows])
    return [as_trainer_logprobs(array) for array in by_datum(samples, rows, "old_logprobs")]


def _score(rows: Sequence[Row], pending: Sequence[RowResults]) -> None:
    """Of each row, read when all are under way."""
    for row, result in zip(rows, pending, strict=True):
        _, (row.old_logprobs,) = result.read()


def _rows(datums: Sequence[Datum], token_budget: int) -> tuple[list[Sample], list[Row]]:
    """Every token but the first of each sequence is scored, sampled or not: a trainer gives N-1 log-probs."""
    samples = []
    for number, datum in enumerate(datums):
        scored = np.arange(datum.num_tokens) > 0
        samples.append(replace(datum.sample, rollout_id=str(number), loss_mask=scored))
    budget = max(token_budget, *(sample.tokens for sample in samples)) if samples else token_budget
    # Prompts are scored in every sequence, so none of them is shared.
    batches = make_batches([[s] for s in samples], Packing(budget, "token-sum", 1, share_prefixes=False))
    return samples, [row for batch in batches for row in batch.rows]


def _linear(inputs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    return (weights.to(inputs.dtype) * inputs.policy_logprobs).sum(), {}


def _own_step(params: AdamParams | None) -> Any:
    from shoal.trainer.optimizer import AdamSettings
    from shoal.trainer.policy import OwnStep

    if params is None:
        return None
    if not isinstance(params, AdamParams):
        raise ArgumentError(f"optim_step: adam_params: must be AdamParams(learning_rate=…), not {params!r:.80}")
    adam = AdamSettings(params.beta1, params.beta2, params.eps, params.weight_decay)
    return OwnStep(params.learning_rate, params.max_grad_norm, adam)
