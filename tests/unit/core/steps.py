"""Steps to pack: rollouts as lists of samples, drawn by hypothesis or from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from shoal.core.types import Sample

VOCABULARY = 7


def make_sample(
    rollout_id: str, group_id: str, mask: list[bool], rng: np.random.Generator, prompt: Sequence[int] = ()
) -> Sample:
    """Random tokens after those of `prompt`, of which as many as fit are at the start."""
    size = len(mask)
    trained = np.array([False, *mask[1:]])
    return Sample(
        rollout_id=rollout_id,
        group_id=group_id,
        token_ids=np.concatenate([prompt[:size], rng.integers(0, VOCABULARY, size)])[:size].astype(np.int64),
        loss_mask=trained,
        sampler_logprobs=np.where(trained, -rng.exponential(1.0, size), 0).astype(np.float32),
        temperatures=np.ones(size, dtype=np.float32),
        advantages=np.full(size, rng.normal(), dtype=np.float32),
    )


@st.composite
def steps(draw: st.DrawFn, longest: int = 8) -> list[list[Sample]]:
    """Groups of rollouts with one to three samples each. Some have no trained tokens, and most share a prefix."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    masks = st.lists(st.booleans(), min_size=1, max_size=longest)
    rollouts = []
    for group in range(draw(st.integers(1, 4))):
        prompt = rng.integers(0, VOCABULARY, draw(st.integers(0, longest))).tolist()
        untrained = draw(st.integers(0, longest))
        for index in range(draw(st.integers(1, 4))):
            shapes = [[*[False] * untrained, *mask][:longest] for mask in draw(st.lists(masks, min_size=1, max_size=3))]
            rollouts.append([make_sample(f"g{group}/{index}", f"g{group}", mask, rng, prompt) for mask in shapes])
    return rollouts


def random_step(seed: int, groups: int = 4, size: int = 3) -> list[list[Sample]]:
    rng = np.random.default_rng(seed)
    rollouts = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, group).tolist()  # the first group shares no prefix
        for index in range(size):
            pieces = 1 + int(rng.random() < 0.3)
            shapes = [
                [*[False] * group, *(rng.random(rng.integers(3, 12 - group)) < 0.7).tolist()] for _ in range(pieces)
            ]
            rollouts.append([make_sample(f"g{group}/{index}", f"g{group}", shape, rng, prompt) for shape in shapes])
    return rollouts
