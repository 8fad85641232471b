"""From sampled completions and their rewards to what a policy trains on, and from a loss's name to a loss function.

A datum is one token sequence. Log-probs of N tokens come as N-1 values from a trainer and as N, the first undefined,
from a sampler; shoal.algorithms.align puts both in line.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import build
from shoal.algorithms.advantages import judge_group
from shoal.algorithms.align import align_sampler, align_trainer
from shoal.batching.pack import Packing, make_batches
from shoal.errors import ArgumentError
from shoal.recipes.config import Config
from shoal.recipes.translate import check_config, translate
from shoal.types import Sample

if TYPE_CHECKING:
    from torch import Tensor

_GROUPS = itertools.count()  # every group has a number of its own, whichever call made it
LossFn = Callable[[list["Datum"], list["Tensor"]], tuple["Tensor", dict[str, float]]]


@dataclass(frozen=True)
class SampledCompletion:
    """A prompt and one answer to it. Tokens of the prompt were not sampled: their log-prob is 0."""

    token_ids: list[int]  # prompt and completion, N in all
    prompt_tokens: int
    logprobs: list[float | None]  # N, the first None
    text: str  # of the completion
    finish_reason: str
    temperature: float = 1.0
    kept_ids: list[list[int]] | None = None  # of the completion's tokens, where sampling was truncated

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.prompt_tokens :]


@dataclass(frozen=True)
class PromptGroup:
    """The completions of one prompt and their rewards; None leaves a completion out."""

    completions: Sequence[SampledCompletion]
    rewards: Sequence[float | None]

    def __post_init__(self) -> None:
        if inspect.isawaitable(self.completions):
            if inspect.iscoroutine(self.completions):
                self.completions.close()
            raise ArgumentError(
                "PromptGroup: completions: is a coroutine; await sample_with_tokens, or asyncio.run(…) it in a script"
            )
        if any(reward is not None and not hasattr(reward, "__float__") for reward in self.rewards):
            raise ArgumentError("PromptGroup: rewards: must be numbers, or None to leave a completion out")
        if len(self.completions) != len(self.rewards):
            raise ArgumentError(
                f"PromptGroup: rewards: {len(self.rewards)} rewards for {len(self.completions)} completions"
            )


@dataclass(frozen=True)
class Datum:
    """One sequence to train on. `sampler_logprobs` are N with the first None, as an inference server gives them."""

    sample: Sample = field(repr=False)
    sampler_logprobs: list[float | None] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        return self.sample.tokens

    @property
    def loss_mask(self) -> np.ndarray:
        """[N-1] bool, in line with a trainer's log-probs: true on tokens the policy sampled."""
        return self.sample.loss_mask[1:]

    @property
    def advantage(self) -> float:
        return float(self.sample.advantages[0])


def build_grpo_datums(groups: Sequence[PromptGroup], config: Config | None = None) -> list[Datum]:
    """Advantages within each group, then one datum a scored completion. Groups of uniform rewards are skipped.

    Without a configuration: the group's mean and unbiased standard deviation.
    """
    from shoal.algorithms.advantages import Normaliser

    normaliser = Normaliser() if config is None else build.make_advantages(translate(config, in_memory=True)[0].orch)
    datums: list[Datum] = []
    for group in groups:
        number = next(_GROUPS)
        scored = [(c, float(r)) for c, r in zip(group.completions, group.rewards, strict=True) if r is not None]
        if judge_group([reward for _, reward in scored]) != "mixed":
            continue
        (advantages,) = normaliser.estimate([[reward for _, reward in scored]])
        datums += [
            _datum(completion, advantage, f"{number}/{index}", str(number))
            for index, ((completion, _), advantage) in enumerate(zip(scored, advantages, strict=True))
        ]
    return datums


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
    """A built-in loss as `forward_backward_custom` takes it. Made for one batch of datums.

    Where the loss compares with the policy at the start of the batch (gspo, a correction) and `old_logprobs` were not
    given, those of the first call are taken.
    """

    objective: Any
    aggregation: str
    max_tokens: int
    reference_logprobs: Sequence[Any] | None = None
    old_logprobs: Sequence[Any] | None = None

    def __call__(self, datums: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        import torch

        from shoal.algorithms.inputs import LossInputs

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
        """What every token weighs, by the aggregation: as the loop packs it."""
        samples = [datum.sample for datum in datums]
        budget = max(1, sum(sample.tokens for sample in samples))
        packing = Packing(budget, self.aggregation, self.max_tokens, share_prefixes=False)
        batches = make_batches([[sample] for sample in samples], packing)
        return by_datum(samples, [row for batch in batches for row in batch.rows], "weights")


def by_datum(samples: Sequence[Sample], rows: Sequence[Any], name: str) -> list[np.ndarray]:
    """A per-token array of packed rows, back in the order of the samples; zeros where a sample was not packed."""
    found: dict[str, np.ndarray] = {}
    for row in rows:
        for index, rollout_id in enumerate(row.rollout_ids):
            found[rollout_id] = getattr(row, name)[row.sequence_ids == index]
    return [found.get(sample.rollout_id, np.zeros(sample.tokens)) for sample in samples]


def make_grpo_loss_fn(
    config: Config, reference_logprobs: Sequence[Any] | None = None, old_logprobs: Sequence[Any] | None = None
) -> LossFn:
    """The loss that `config` names, for `forward_backward_custom`. Log-probs are as `forward` gives them."""
    check_config("make_grpo_loss_fn", config)
    run, _ = translate(config, in_memory=True)
    objective = build.make_objective(run.train)
    if objective.needs_reference and reference_logprobs is None:
        raise ArgumentError(
            "make_grpo_loss_fn: reference_logprobs: the loss has a KL term; pass infra.reference.forward(datums), "
            "or set kl_beta=0"
        )
    assert run.train.loss.aggregation is not None and run.orch.sampling.max_tokens is not None
    return GRPOLossFn(
        objective, run.train.loss.aggregation, run.orch.sampling.max_tokens, reference_logprobs, old_logprobs
    )
