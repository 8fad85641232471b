"""Rollouts become samples: one while the history grows, a further one where it diverges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.batching import rollout_samples
from shoal.core.types import Completion, Prompt, Rollout, Span, Turn


def turn(prompt: list[int], ids: list[int], temperature: float = 1.0, kept: list[list[int]] | None = None) -> Turn:
    logprobs = [-0.1 * (i + 1) for i in range(len(ids))]
    return Turn(prompt, Completion("r", ids, logprobs, [Span(0, len(ids), 0)], "stop", kept_ids=kept), temperature)


def rollout(*turns: Turn, advantage: float | None = 0.5) -> Rollout:
    return Rollout(Prompt("env", 3, []), 1, list(turns), advantage=advantage)


def test_one_turn() -> None:
    (sample,) = rollout_samples(rollout(turn([5, 6], [7, 2], temperature=0.5)))
    assert sample.token_ids.tolist() == [5, 6, 7, 2]
    assert sample.loss_mask.tolist() == [False, False, True, True]  # the end of sequence, 2, is trained
    assert sample.sampler_logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2])
    assert sample.temperatures.tolist() == [1, 1, 0.5, 0.5]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5]
    assert (sample.rollout_id, sample.group_id, sample.kept_ids) == ("env/3/0/0/1", "env/3/0/0", None)
    assert sample.token_ids.dtype == np.int64 and sample.sampler_logprobs.dtype == np.float32


def test_turns_merge_while_history_grows() -> None:
    (sample,) = rollout_samples(rollout(turn([5], [7, 2]), turn([5, 7, 2, 8, 9], [6], kept=[[6, 7]])))
    assert sample.token_ids.tolist() == [5, 7, 2, 8, 9, 6]
    assert sample.loss_mask.tolist() == [False, True, True, False, False, True]
    assert sample.kept_ids == [None, None, None, None, None, [6, 7]]


def test_divergent_history_starts_a_new_sample() -> None:
    first, second = rollout_samples(rollout(turn([5], [7, 2]), turn([5, 7, 8], [6]), turn([5, 7, 8, 6, 1], [3])))
    assert first.token_ids.tolist() == [5, 7, 2]
    assert second.token_ids.tolist() == [5, 7, 8, 6, 1, 3]
    assert second.loss_mask.tolist() == [False, False, False, True, False, True]
    assert first.rollout_id == second.rollout_id


def test_shorter_prompt_is_not_an_extension() -> None:
    samples = rollout_samples(rollout(turn([5, 6], [7]), turn([5, 6], [8])))
    assert [sample.token_ids.tolist() for sample in samples] == [[5, 6, 7], [5, 6, 8]]


def test_not_trained_rollouts_and_empty_ones() -> None:
    (sample,) = rollout_samples(rollout(turn([5], [7, 2]), advantage=None), train=False)
    assert not sample.loss_mask.any() and not sample.sampler_logprobs.any()
    (sample,) = rollout_samples(rollout(turn([5, 6], [])))
    assert sample.token_ids.tolist() == [5, 6] and not sample.loss_mask.any()
    assert rollout_samples(rollout()) == [] and rollout_samples(rollout(turn([], []))) == []


def test_first_token_has_no_context() -> None:
    (sample,) = rollout_samples(rollout(turn([], [7, 2], temperature=0.5)))
    assert sample.loss_mask.tolist() == [False, True]
    assert sample.sampler_logprobs.tolist() == pytest.approx([0, -0.2]) and sample.temperatures.tolist() == [1, 0.5]


def test_advantage_is_needed_to_train() -> None:
    with pytest.raises(ValueError, match="no advantage"):
        rollout_samples(rollout(turn([5], [7]), advantage=None))
    (sample,) = rollout_samples(rollout(turn([5], [7]), advantage=None), advantage=0.0)
    assert sample.loss_mask.any() and not sample.advantages.any()


ids = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), ids, ids), min_size=1, max_size=5))
def test_every_sampled_token_is_trained_exactly_once(script: list[tuple[bool, list[int], list[int]]]) -> None:
    turns: list[Turn] = []
    history: list[int] = []
    for number, (grows, context, answer) in enumerate(script):
        # A unique first id, so that a prompt meant to diverge cannot extend the history by chance.
        prompt = history + context if grows else [10 + number, *context]
        turns.append(turn(prompt, answer))
        history = prompt + answer
    samples = rollout_samples(rollout(*turns))
    trained = [token for sample in samples for token in sample.token_ids[sample.loss_mask].tolist()]
    assert trained == [token for t in turns for token in t.completion.token_ids]
    logprobs = [value for sample in samples for value in sample.sampler_logprobs[sample.loss_mask].tolist()]
    assert logprobs == pytest.approx([value for t in turns for value in t.completion.logprobs])
    assert len(samples) == 1 + sum(not grows for grows, _, _ in script[1:])
