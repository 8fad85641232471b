"""N-1 trainer log-probs and N sampler log-probs refer to the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.recipes.datums import align_logprobs, align_sampler, align_trainer, as_trainer_logprobs


def test_rewards_and_advantages_align_with_their_tokens() -> None:
    trainer, sampler = align_logprobs(3, [-0.1, -0.2], [None, -0.3, -0.4])
    assert trainer.tolist() == [0.0, -0.1, -0.2] and sampler.tolist() == [0.0, -0.3, -0.4]
    trainer, sampler = align_logprobs(2, np.array([-0.1]), np.array([np.nan, -0.3]))
    assert trainer.tolist() == [0.0, -0.1] and sampler.tolist() == [0.0, -0.3]
    trainer, sampler = align_logprobs(1, [], [None])
    assert trainer.tolist() == sampler.tolist() == [0.0]


@pytest.mark.parametrize(
    ("num_tokens", "trainer", "sampler", "said"),
    [
        (3, [-0.1, -0.2, -0.3], [None, -0.3, -0.4], "need 2 trainer log-probs, got 3"),
        (3, [-0.1, -0.2], [-0.3, -0.4], "need 3 sampler log-probs, got 2"),
        (3, [-0.1, None], [None, -0.3, -0.4], "trainer log-prob of token 2"),
        (3, [-0.1, -0.2], [None, None, -0.4], "sampler log-prob of token 1"),
        (0, [], [], "no tokens"),
    ],
)
def test_wrong_lengths_and_gaps_are_refused(num_tokens: int, trainer: list, sampler: list, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        align_logprobs(num_tokens, trainer, sampler)


def test_each_side_alone_and_back_again():
    trainer = align_trainer(3, [-0.1, -0.2])
    assert trainer.tolist() == [0.0, -0.1, -0.2]
    assert as_trainer_logprobs(trainer).tolist() == [-0.1, -0.2]
    assert align_sampler(3, [None, -0.3, -0.4]).tolist() == [0.0, -0.3, -0.4]
    with pytest.raises(ValueError, match="3 tokens need 2 trainer log-probs, got 3"):
        align_trainer(3, [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="sampler log-prob of token 2 is undefined"):
        align_sampler(3, [None, -0.3, None])
