"""Turns a rollout into token sequences to train on. Nothing is tokenised here: ids are used as they were sampled.

A conversation is one sample for as long as every prompt extends what came before it, id for id. Where history diverges
(a template that strips an earlier thought, say) a new sample starts; every sampled token is trained in one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shoal.types import Rollout, Sample, Turn


@dataclass(slots=True)
class _Draft:
    """A sample being written: one entry a token, and one piece for each run of tokens that are alike."""

    token_ids: list[int] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    kept_ids: list[list[int] | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of the pieces
    sampled: list[bool] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    narrowed: bool = False  # some token was not drawn from the whole vocabulary

    def extends_to(self, prompt_ids: list[int]) -> bool:
        return prompt_ids[: len(self.token_ids)] == self.token_ids

    def append(self, turn: Turn) -> None:
        context = turn.prompt_ids[len(self.token_ids) :]
        self._extend(context, False, [0.0] * len(context), 1.0, None)
        completion = turn.completion
        self._extend(completion.token_ids, True, completion.logprobs, turn.temperature, completion.kept_ids)

    def _extend(
        self, ids: list[int], sampled: bool, logprobs: list[float], temperature: float, kept_ids: list[list[int]] | None
    ) -> None:
        self.token_ids.extend(ids)
        self.sampler_logprobs.extend(logprobs)
        self.kept_ids.extend([None] * len(ids) if kept_ids is None else kept_ids)
        self.lengths.append(len(ids))
        self.sampled.append(sampled)
        self.temperatures.append(temperature)
        self.narrowed |= bool(kept_ids)


def rollout_samples(rollout: Rollout, *, train: bool = True, advantage: float | None = None) -> list[Sample]:
    """The samples of one rollout, in order. With train false (a truncated rollout set aside) nothing is in the loss.

    `advantage` replaces the rollout's own, for rows that are built before advantages are known.
    """
    value = rollout.advantage if advantage is None else advantage
    if value is None and train:
        raise ValueError(f"{rollout.rollout_id} has no advantage yet")
    drafts: list[_Draft] = []
    for turn in rollout.turns:
        if not drafts or not drafts[-1].extends_to(turn.prompt_ids):
            drafts.append(_Draft())
        drafts[-1].append(turn)
    return [_finish(rollout, draft, 0.0 if value is None else value, train) for draft in drafts if draft.token_ids]


def _finish(rollout: Rollout, draft: _Draft, advantage: float, train: bool) -> Sample:
    mask = np.repeat(np.array(draft.sampled, dtype=bool), draft.lengths) & train
    temperatures = np.repeat(np.array(draft.temperatures, dtype=np.float32), draft.lengths)
    mask[0] = False  # a completion of an empty prompt: its first token has no context to be predicted from
    return Sample(
        rollout_id=rollout.rollout_id,
        group_id=rollout.prompt.group_id,
        token_ids=np.array(draft.token_ids, dtype=np.int64),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, np.array(draft.sampler_logprobs, dtype=np.float32), np.float32(0)),
        temperatures=np.where(mask, temperatures, np.float32(1)),
        advantages=np.full(len(mask), advantage, dtype=np.float32),
        kept_ids=draft.kept_ids if draft.narrowed else None,
    )
