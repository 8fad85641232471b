"""Makes datums (token sequences to train on) from completions and rewards, and loss functions from configurations.

For N tokens, a trainer returns N-1 log-probs (entry i is for token i+1), a sampler N with the first undefined. The
functions here align both with the tokens.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.advantages import is_uniform
from shoal.core.batching import Packing, make_batches
from shoal.core.errors import ArgumentError
from shoal.core.types import Sample
from shoal.recipes.config import Config, check_config, translate

if TYPE_CHECKING:
    from torch import Tensor


Logprobs = Sequence[float | None] | np.ndarray


def align_logprobs(
    num_tokens: int, trainer_logprobs: Logprobs, sampler_logprobs: Logprobs
) -> tuple[np.ndarray, np.ndarray]:
    """Both as [N] float64. Entry t is for token t; position 0 has no context and is 0.

    Worked example, N = 3: trainer [-.1, -.2], sampler [None, -.3, -.4] → [0, -.1, -.2], [0, -.3, -.4].
    """
    return align_trainer(num_tokens, trainer_logprobs), align_sampler(num_tokens, sampler_logprobs)


def align_trainer(num_tokens: int, logprobs: Logprobs) -> np.ndarray:
    """N-1 values, the first for token 1 → [N], entry t for token t."""
    _check_length("trainer", num_tokens, num_tokens - 1, len(logprobs))
    return _after_zero("trainer", logprobs)


def align_sampler(num_tokens: int, logprobs: Logprobs) -> np.ndarray:
    """N values, the first undefined → [N], entry t for token t."""
    _check_length("sampler", num_tokens, num_tokens, len(logprobs))
    return _after_zero("sampler", logprobs[1:])


def as_trainer_logprobs(aligned: np.ndarray) -> np.ndarray:
    """[N] with entry t for token t → the N-1 values of a trainer."""
    return aligned[1:]


def _check_length(source: str, num_tokens: int, wanted: int, found: int) -> None:
    if num_tokens < 1:
        raise ValueError("there are no tokens")
    if found != wanted:
        raise ValueError(f"{num_tokens} tokens need {wanted} {source} log-probs, got {found}")


def _after_zero(source: str, logprobs: Logprobs) -> np.ndarray:
    for position, value in enumerate(logprobs, start=1):
        if value is None or np.isnan(value):
            raise ValueError(f"{source} log-prob of token {position} is undefined; only the log-prob of token 0 may be")
    return np.concatenate([[0.0], np.asarray(logprobs, dtype=np.float64)])


_GROUPS = itertools.count()  # unique group numbers across calls
LossFn = Callable[[list["Datum"], list["Tensor"]], tuple["Tensor", dict[str, float]]]


@dataclass(frozen=True)
class SampledCompletion:
    """A prompt and one completion. Prompt tokens were not sampled, so their log-prob is 0."""

    token_ids: list[int]  # prompt and completion, N in all
    prompt_tokens: int
    logprobs: list[float | None]  # N, the first None
    text: str  # of the completion
    finish_reason: str
    temperature: float = 1.0
    kept_ids: list[list[int]] | None = None  # of the completion tokens, if sampling was truncated

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.prompt_tokens :]


@dataclass(frozen=True)
class PromptGroup:
    """The completions of one prompt and their rewards. A reward of None excludes the completion."""

    completions: Sequence[SampledCompletion]
    rewards: Sequence[float | None]

    def __post_init__(self) -> None:
        if inspect.isawaitable(self.completions):
            if inspect.iscoroutine(self.completions):
                self.completions.close()
            raise ArgumentError(
                "PromptGroup: completions: is a coroutine; await sample_with_tokens(…), or use asyncio.run(…)"
            )
        if any(reward is not None and not hasattr(reward, "__float__") for reward in self.rewards):
            raise ArgumentError("PromptGroup: rewards: must be numbers, or None to exclude a completion")
        if len(self.completions) != len(self.rewards):
            raise ArgumentError(
                f"PromptGroup: rewards: {len(self.rewards)} rewards for {len(self.completions)} completions"
            )


@dataclass(frozen=True)
class Datum:
    """One sequence to train on. `sampler_logprobs` has N values, the first None, as inference servers return."""

    sample: Sample = field(repr=False)
    sampler_logprobs: list[float | None] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        return self.sample.tokens

    @property
    def loss_mask(self) -> np.ndarray:
        """[N-1] bool, aligned with the log-probs of a trainer: true for sampled tokens."""
        return self.sample.loss_mask[1:]

    @property
    def advantage(self) -> float:
        return float(self.sample.advantages[0])


def build_grpo_datums(groups: Sequence[PromptGroup], config: Config | None = None) -> list[Datum]:
    """Advantages within each group, then one datum per scored completion. Zero-variance groups are skipped.

    Without a configuration: the group mean and unbiased standard deviation.
    """
    from shoal.build.parts import make_advantages  # imports torch
    from shoal.signals.advantages import AdvantageNormalizer

    if config is not None:
        check_config("build_grpo_datums", config)
    for index, group in enumerate(_checked_list("build_grpo_datums: groups", groups)):
        if not isinstance(group, PromptGroup):
            raise ArgumentError(
                f"build_grpo_datums: groups[{index}]: must be PromptGroup(completions, rewards), "
                f"not {type(group).__name__}"
            )
    normaliser = AdvantageNormalizer() if config is None else make_advantages(translate(config, in_memory=True)[0].orch)
    if not hasattr(normaliser, "estimate"):
        raise ArgumentError(
            "build_grpo_datums: config: orch.advantage.per_part and credit need rollouts with parts and turns"
        )
    datums: list[Datum] = []
    for group in groups:
        number = next(_GROUPS)
        scored = [(c, float(r)) for c, r in zip(group.completions, group.rewards, strict=True) if r is not None]
        if len(scored) < 2 or is_uniform([reward for _, reward in scored]):
            continue
        (advantages,) = normaliser.estimate([[reward for _, reward in scored]])
        datums += [
            _datum(completion, advantage, f"{number}/{index}", str(number))
            for index, ((completion, _), advantage) in enumerate(zip(scored, advantages, strict=True))
        ]
    return datums


def _checked_list(name: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ArgumentError(f"{name}: must be a list, not {type(given).__name__}")
    return given


def _datum(completion: SampledCompletion, advantage: float, rollout_id: str, group_id: str) -> Datum:
    size = len(completion.token_ids)
    mask = np.arange(size) >= max(1, completion.prompt_tokens)
    aligned = align_sampler(size, completion.logprobs)
    kept = completion.kept_ids
    sample = Sample(
        rollout_id=rollout_id,
        group_id=group_id,
        token_ids=np.array(completion.token_ids, dtype=np.int64),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, aligned, 0).astype(np.float32),
        temperatures=np.where(mask, completion.temperature, 1).astype(np.float32),
        advantages=np.full(size, advantage, dtype=np.float32),
        kept_ids=[*([None] * completion.prompt_tokens), *kept] if kept is not None else None,
    )
    return Datum(sample, list(completion.logprobs))


@dataclass
class GRPOLossFn:
    """A built-in loss for `forward_backward_custom`, for one batch of datums.

    If the loss needs old_logprobs (gspo, a correction) and none were passed, the log-probs of the first call are used.
    """

    objective: Any
    aggregation: str
    max_tokens: int
    reference_logprobs: Sequence[Any] | None = None
    old_logprobs: Sequence[Any] | None = None

    def __call__(self, datums: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        import torch

        from shoal.core.loss_inputs import LossInputs

        for name in ("reference_logprobs", "old_logprobs"):
            given = getattr(self, name)
            if given is not None and [len(np.asarray(v)) for v in given] != [d.num_tokens - 1 for d in datums]:
                raise ArgumentError(
                    f"make_grpo_loss_fn: {name}: must be one array per datum, with a value for each token but the "
                    "first, as policy.forward(datums) returns"
                )
        masks = [torch.as_tensor(datum.loss_mask) for datum in datums]
        policy = torch.cat([lp[mask.to(lp.device)] for lp, mask in zip(logprobs, masks, strict=True)])
        if self.old_logprobs is None and self.objective.needs_old:
            self.old_logprobs = [lp.detach().cpu().numpy() for lp in logprobs]

        def tensor(arrays: Sequence[np.ndarray]) -> Tensor:
            masked = [array[datum.sample.loss_mask] for datum, array in zip(datums, arrays, strict=True)]
            return torch.as_tensor(np.concatenate(masked), dtype=policy.dtype, device=policy.device)

        def trainer(values: Sequence[Any]) -> Tensor:
            return tensor([align_trainer(d.num_tokens, np.asarray(v)) for d, v in zip(datums, values, strict=True)])

        sampler = tensor([align_sampler(datum.num_tokens, datum.sampler_logprobs) for datum in datums])
        inputs = LossInputs(
            policy_logprobs=policy,
            old_logprobs=trainer(self.old_logprobs) if self.old_logprobs is not None else sampler,
            sampler_logprobs=sampler,
            loss_mask=torch.ones(len(policy), dtype=torch.bool, device=policy.device),
            advantages=tensor([datum.sample.advantages for datum in datums]),
            sequence_ids=torch.repeat_interleave(torch.tensor([int(m.sum()) for m in masks])).to(policy.device),
            num_sequences=len(datums),
            reference_logprobs=trainer(self.reference_logprobs) if self.reference_logprobs is not None else None,
        )
        loss, metrics = self.objective(inputs, tensor(self._weights(datums)))
        return loss, {name: float(total) / float(count or 1) for name, (total, count) in metrics.items()}

    def _weights(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        """The weight of every token, by the aggregation, as in training."""
        samples = [datum.sample for datum in datums]
        budget = max(1, sum(sample.tokens for sample in samples))
        packing = Packing(budget, self.aggregation, self.max_tokens, share_prefixes=False)
        batches = make_batches([[sample] for sample in samples], packing)
        return by_datum(samples, [row for batch in batches for row in batch.rows], "weights")


def by_datum(samples: Sequence[Sample], rows: Sequence[Any], name: str) -> list[np.ndarray]:
    """A per-token array of packed rows, in the order of the samples; zeros for samples that were not packed."""
    found: dict[str, np.ndarray] = {}
    for row in rows:
        for index, rollout_id in enumerate(row.rollout_ids):
            found[rollout_id] = getattr(row, name)[row.sequence_ids == index]
    return [found.get(sample.rollout_id, np.zeros(sample.tokens)) for sample in samples]


def make_grpo_loss_fn(
    config: Config, reference_logprobs: Sequence[Any] | None = None, old_logprobs: Sequence[Any] | None = None
) -> LossFn:
    """The loss of `config`, for `forward_backward_custom`. Log-probs have the format of `forward`."""
    from shoal.build.model import make_objective  # imports torch

    check_config("make_grpo_loss_fn", config)
    for name, given in (("reference_logprobs", reference_logprobs), ("old_logprobs", old_logprobs)):
        if given is not None:
            _checked_list(f"make_grpo_loss_fn: {name}", given)
    run, _ = translate(config, in_memory=True)
    objective = make_objective(run.train)
    loss = objective.loss
    if objective.teacher or loss.entropy.on or loss.entropy.top_fraction < 1 or loss.context_cross_entropy > 0:
        raise ArgumentError(
            "make_grpo_loss_fn: config: train.teacher, train.loss.entropy and train.loss.context_cross_entropy need "
            "more than log-probs; use rl_loop.main, or add these terms to a loss of your own"
        )
    if objective.needs_reference and reference_logprobs is None:
        raise ArgumentError(
            "make_grpo_loss_fn: reference_logprobs: the loss has a KL term; pass infra.reference.forward(datums), "
            "or set kl_beta=0"
        )
    assert run.train.loss.aggregation is not None and run.orch.sampling.max_tokens is not None
    return GRPOLossFn(
        objective, run.train.loss.aggregation, run.orch.sampling.max_tokens, reference_logprobs, old_logprobs
    )
