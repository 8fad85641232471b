"""Policy, reference and sampler for a custom loop: log-probs, gradients of any loss, optimizer steps, completions.

A thin layer over shoal.trainer.policy and the engine. Everything runs on the device thread, packed as in training.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shoal.build.model import PolicyFiles
from shoal.core.batching import Packing, make_batches
from shoal.core.errors import ArgumentError, ConfigError
from shoal.core.protocols import RolloutEngine
from shoal.core.runner import rollout_seed
from shoal.core.types import Completion, Message, Request, Row, Sample, SamplingParams
from shoal.envs.datasets import to_messages
from shoal.recipes.datums import Datum, LossFn, SampledCompletion, align_trainer, as_trainer_logprobs, by_datum

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.trainer.policy import PendingPass, TrainedPolicy


Prompt = str | Sequence[Message] | Sequence[int]


_SAMPLERS = itertools.count()


class DeploymentSampler:
    """Samples completions from a deployment. Calls can override the sampling parameters in `defaults`."""

    def __init__(
        self, engine: RolloutEngine, chat: Any, defaults: SamplingParams, context_tokens: int, seed: int = 0
    ) -> None:
        self.engine = engine
        self._chat = chat
        self._defaults = defaults
        self._context_tokens = context_tokens
        self._seed = seed
        self._number = next(_SAMPLERS)  # several samplers may share one engine
        self._calls = itertools.count()
        self.check_synced: Callable[[], None] = lambda: None  # raises if the weights should have been synced

    @property
    def version(self) -> int:
        """The current weight version."""
        return self.engine.version

    async def sample_with_tokens(self, prompt: Prompt, n: int = 1, **sampling: Any) -> list[SampledCompletion]:
        """`n` completions of one prompt (text, messages or token ids) with their tokens and log-probs.

        `sampling` may hold temperature, max_tokens, top_p, top_k, min_p, min_tokens, stop and seed.
        """
        if n < 1:
            raise ArgumentError(f"sample_with_tokens: n: must be at least 1, not {n}")
        self.check_synced()
        prompt_ids = self._prompt_ids(prompt)
        params = self._params(sampling, len(prompt_ids))
        call = next(self._calls)
        seed = sampling.get("seed", self._seed)
        requests = [
            Request(
                f"api:{self._number}:{call}/{i}", prompt_ids, replace(params, seed=rollout_seed(seed, f"{call}/{i}", 0))
            )
            for i in range(n)
        ]
        completions = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        return [_sampled(prompt_ids, completion, params.temperature) for completion in completions]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str | Sequence):
            raise ArgumentError(
                f"sample_with_tokens: prompt: must be text, messages or token ids, not {type(prompt).__name__}"
            )
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        messages = to_messages(prompt if isinstance(prompt, str) else list(prompt))
        return self._chat.prompt_ids(messages)

    def _params(self, sampling: dict[str, Any], prompt_tokens: int) -> SamplingParams:
        known = set(SamplingParams.__dataclass_fields__) - {"stop_token_ids"}
        for name in sampling:
            if name not in known:
                raise ArgumentError(f"sample_with_tokens: {name}: unknown parameter; known: {', '.join(sorted(known))}")
        params = replace(self._defaults, **{name: value for name, value in sampling.items() if name != "seed"})
        room = self._context_tokens - prompt_tokens
        if room < 1:
            raise ArgumentError(
                f"sample_with_tokens: prompt: {prompt_tokens} tokens exceed {self._context_tokens}; raise max_seq_len"
            )
        return replace(params, max_tokens=min(params.max_tokens, room), stop=tuple(params.stop))


def _sampled(prompt_ids: list[int], completion: Completion, temperature: float) -> SampledCompletion:
    given: list[float | None] = [None, *([0.0] * (len(prompt_ids) - 1))] if prompt_ids else []
    return SampledCompletion(
        token_ids=[*prompt_ids, *completion.token_ids],
        prompt_tokens=len(prompt_ids),
        logprobs=[*given, *completion.logprobs],
        text=completion.text,
        finish_reason=completion.finish_reason,
        temperature=temperature,
        kept_ids=completion.kept_ids,
    )


@dataclass(frozen=True)
class AdamParams:
    """Hyperparameters of one optimizer step."""

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
    """The device thread, and the number of tokens per packed row."""

    executor: Executor
    token_budget: int

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.executor.submit(function, *arguments).result()


class PolicyClient:
    """The model being trained. `version` counts optimizer steps."""

    def __init__(self, policy: TrainedPolicy, device: Device, chat: Any) -> None:
        self._policy = policy
        self._device = device
        self.files = PolicyFiles(policy, chat)
        self.version = 0
        self.after_step: Callable[[int], None] = lambda _: None  # runs on the device thread

    def forward(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Log-probs under the current weights: N-1 values for the N tokens of each datum. No gradient."""
        return _forward(self._policy.logprobs, self._device, datums)

    def forward_backward_custom(self, datums: Sequence[Datum], loss_fn: LossFn) -> ForwardBackward:
        """Add the gradient of `loss_fn(datums, logprobs) -> (loss, metrics)`; `logprobs` are [N-1] tensors.

        The loss gets all datums at once: its gradient with respect to each log-prob is computed first, then
        backpropagated through the model row by row.
        """
        if not datums:
            raise ArgumentError("forward_backward_custom: datums: is empty; every group may have zero variance")
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
                "forward_backward_custom: loss_fn: must return (loss, metrics): a scalar tensor computed from "
                "logprobs, and a dictionary"
            )
        loss.backward()
        self._copy_logprobs(samples, rows, logprobs)
        return ForwardBackward(float(loss.detach()), dict(metrics))

    def _copy_logprobs(self, samples: Sequence[Sample], rows: Sequence[Row], logprobs: Sequence[Tensor]) -> None:
        slopes: dict[str, np.ndarray] = {}
        for sample, lp in zip(samples, logprobs, strict=True):
            slope = np.zeros(sample.tokens - 1) if lp.grad is None else lp.grad.double().cpu().numpy()
            slopes[sample.rollout_id] = align_trainer(sample.tokens, np.nan_to_num(slope, nan=np.inf))
        for row in rows:
            row.old_logprobs = None
            row.weights = np.zeros(row.tokens)
            for index, rollout_id in enumerate(row.rollout_ids):
                row.weights[row.sequence_ids == index] = slopes[rollout_id]
            row.loss_mask = row.weights != 0  # other tokens have no gradient
            if row.loss_mask.any():
                self._policy.forward_backward([row], _linear, "none")

    def optim_step(self, adam_params: AdamParams | None = None) -> dict[str, float]:
        """One AdamW step with the accumulated gradient. Default: the configured learning rate and settings.

        With a non-finite gradient the step is skipped, and `optim/skipped` is 1.
        """
        result = dict(self._device.do(self._policy.optim_step, _own_step(adam_params)))
        self.version += 1
        self._device.do(self.after_step, self.version)
        return result

    def export(self, folder: str | Path) -> Path:
        """Write the weights in the format of transformers (or PEFT)."""
        if Path(folder).is_file():
            raise ArgumentError(f"export: folder: {str(folder)!r} is a file; use a folder")
        self._device.do(self.files.export, Path(folder))
        return Path(folder)


class ForwardOnlyError(ConfigError, RuntimeError):
    """Raised if the reference is trained."""


class ReferenceClient:
    """The frozen reference: forward only. `score` computes the log-probs, here or in another process."""

    def __init__(self, score: Callable[[Sequence[Datum]], list[np.ndarray]]) -> None:
        self._score = score

    def forward(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Log-probs under the reference: N-1 values for the N tokens of each datum."""
        return self._score(datums)

    def forward_backward_custom(self, *_: Any) -> NoReturn:
        raise ForwardOnlyError("the reference is forward-only; train the policy")

    def optim_step(self, *_: Any) -> NoReturn:
        raise ForwardOnlyError("the reference is forward-only; call optim_step on the policy")


def local_reference(policy: TrainedPolicy, device: Device, datums: Sequence[Datum]) -> list[np.ndarray]:
    """The log-probs of the reference that the policy contains."""
    return _forward(policy.reference_logprobs, device, datums)


def _forward(score: Callable[..., PendingPass], device: Device, datums: Sequence[Datum]) -> list[np.ndarray]:
    samples, rows = _rows(datums, device.token_budget)
    device.do(_score, rows, [device.do(score, [row]) for row in rows])
    return [as_trainer_logprobs(array) for array in by_datum(samples, rows, "old_logprobs")]


def _score(rows: Sequence[Row], pending: Sequence[PendingPass]) -> None:
    """Fill in old_logprobs of each row. All passes are launched before the first result is read."""
    for row, result in zip(rows, pending, strict=True):
        _, (row.old_logprobs,) = result.read()


def _rows(datums: Sequence[Datum], token_budget: int) -> tuple[list[Sample], list[Row]]:
    """Rows in which every token except the first of each sequence is scored, so that N tokens give N-1 log-probs."""
    samples = []
    for number, datum in enumerate(datums):
        scored = np.arange(datum.num_tokens) > 0
        samples.append(replace(datum.sample, rollout_id=str(number), loss_mask=scored))
    budget = max(token_budget, *(sample.tokens for sample in samples)) if samples else token_budget
    # Prompts are scored in every sequence, so they are not shared.
    batches = make_batches([[s] for s in samples], Packing(budget, "token-sum", 1, share_prefixes=False))
    return samples, [row for batch in batches for row in batch.rows]


def _linear(inputs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    return (weights.to(inputs.dtype) * inputs.policy_logprobs).sum(), {}


def _own_step(params: AdamParams | None) -> Any:
    from shoal.trainer.optimizer import AdamSettings
    from shoal.trainer.policy import OptimizerSettings

    if params is None:
        return None
    if not isinstance(params, AdamParams):
        raise ArgumentError(f"optim_step: adam_params: must be AdamParams(learning_rate=…), not {params!r:.80}")
    adam = AdamSettings(params.beta1, params.beta2, params.eps, params.weight_decay)
    return OptimizerSettings(params.learning_rate, params.max_grad_norm, adam)
