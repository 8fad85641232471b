"""Samples follow the requested distribution, and reported log-probs belong to this distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.engine.sampler import BLOCK, MAX_KEPT, SampledTokens, SamplingState, draw, exponential
from support.statistics import chi_square_p, independence_p

LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 2


def state(rows: int, **values: float) -> SamplingState:
    """Seeds 0, 1, 2, …: neighbouring seeds must be independent."""
    made = SamplingState.allocate(rows, torch.device("cpu"))
    made.seeds.copy_(torch.arange(rows))
    for name, value in values.items():
        getattr(made, "temperatures" if name == "temperature" else name).fill_(value)
    return made


def columns(rows: int, width: int) -> Tensor:
    return torch.arange(width).expand(rows, -1)


def draw_many(
    logits: Tensor, count: int, position: int = 0, banned: list[int] | None = None, **values: float
) -> SampledTokens:
    rows = logits[None].expand(count, -1)
    ban = None
    if banned is not None:
        ban = torch.zeros(count, len(logits), dtype=torch.bool)
        ban[:, banned] = True
    truncated = bool(values.keys() & {"top_p", "top_k", "min_p"})
    return draw(rows, state(count, **values), torch.full((count,), position), ban, truncated)


def expected_distribution(logits: Tensor, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0) -> np.ndarray:
    """In float64, by sorting and cumulative sums, one rule at a time."""
    p = torch.softmax(logits.double() / temperature, -1).numpy()
    order, kept, mass = np.argsort(-p, kind="stable"), [], 0.0
    for rank, i in enumerate(order):
        if rank > 0 and (mass >= top_p or (top_k > 0 and rank >= top_k) or p[i] < min_p * p.max()):
            break
        kept.append(i)
        mass += p[i]
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


WAYS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1, "temperature": 1.5},
    "all": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("position", (0, 1, 777))
def test_chi_square(way: str, position: int) -> None:
    drawn = draw_many(LOGITS, 20_000, position, **WAYS[way])
    counts = np.bincount(drawn.token_ids.numpy(), minlength=len(LOGITS))
    expected = expected_distribution(LOGITS, **WAYS[way])
    assert (expected > 0).sum() >= 3
    assert chi_square_p(counts, expected) > 1e-3
    reported = expected[drawn.token_ids.numpy()]
    np.testing.assert_allclose(drawn.logprobs.numpy(), np.log(reported), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ("top-k", "top-p", "min-p", "all"))
def test_kept_ids_are_the_support(way: str) -> None:
    drawn = draw_many(LOGITS, 3, **WAYS[way])
    assert drawn.kept is not None
    support = set(np.flatnonzero(expected_distribution(LOGITS, **WAYS[way])).tolist())
    for row in drawn.kept.tolist():
        assert {i for i in row if i >= 0} == support


def test_chi_square_would_notice() -> None:
    counts = np.bincount(draw_many(LOGITS, 20_000).token_ids.numpy(), minlength=len(LOGITS))
    assert chi_square_p(counts, expected_distribution(LOGITS, temperature=1.1)) < 1e-6


def test_unlikely_tokens_are_sampled_at_their_probability() -> None:
    p = torch.tensor([0.999, 5e-4, 3e-4, 1.5e-4, 5e-5])
    counts = np.bincount(draw_many(p.log(), 400_000).token_ids.numpy(), minlength=5)
    assert chi_square_p(counts, p.double().numpy() / p.double().sum().item()) > 1e-3


def test_neighbouring_seeds_positions_and_columns_are_independent() -> None:
    logits = torch.zeros(8)
    by_position = [draw_many(logits, 30_000, position).token_ids.numpy() for position in (0, 1, 2)]
    assert independence_p(by_position[0], by_position[1], 8) > 1e-3
    assert independence_p(by_position[0], by_position[2], 8) > 1e-3
    assert independence_p(by_position[0][:-1], by_position[0][1:], 8) > 1e-3
    noise = exponential(torch.arange(30_000), torch.zeros(30_000, dtype=torch.long), columns(30_000, 64)).double()
    assert abs(float(noise.mean()) - 1) < 0.003 and abs(float(noise.var()) - 1) < 0.01
    correlation = torch.corrcoef(noise.T) - torch.eye(64)
    assert float(correlation.abs().max()) < 0.03


def test_randomness_is_a_function_of_seed_position_and_column_alone() -> None:
    seeds, positions = torch.tensor([3, 1 << 62, 3]), torch.tensor([5, 0, 6])
    all_at_once = exponential(seeds, positions, columns(len(seeds), 100))
    for i in range(3):
        torch.testing.assert_close(
            exponential(seeds[i : i + 1], positions[i : i + 1], columns(1, 40))[0], all_at_once[i, :40], rtol=0, atol=0
        )
    assert not torch.equal(all_at_once[0], all_at_once[2])


def test_greedy_takes_the_most_likely_token_and_its_logprob() -> None:
    drawn = draw_many(LOGITS, 4, temperature=0.0)
    assert drawn.token_ids.tolist() == [int(LOGITS.argmax())] * 4
    np.testing.assert_allclose(drawn.logprobs, torch.log_softmax(LOGITS, -1).max(), atol=1e-6)


def test_banned_ids_are_never_sampled_and_the_rest_is_renormalised() -> None:
    banned = LOGITS.topk(3).indices.tolist()
    drawn = draw_many(LOGITS, 5000, banned=banned)
    p = expected_distribution(LOGITS)
    p[banned] = 0
    p /= p.sum()
    assert chi_square_p(np.bincount(drawn.token_ids.numpy(), minlength=len(LOGITS)), p) > 1e-3
    np.testing.assert_allclose(drawn.logprobs, np.log(p[drawn.token_ids]), rtol=0, atol=1e-5)
    assert draw_many(LOGITS, 1, banned=banned, temperature=0.0).token_ids.item() == LOGITS.topk(4).indices[3]


def test_top_p_keeps_the_crossing_id_and_at_least_one() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, kept in ((0.49, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2}), (1e-9, {0})):
        drawn = draw_many(logits, 1, top_p=top_p)
        assert drawn.kept is not None and {i for i in drawn.kept[0].tolist() if i >= 0} == kept, top_p
    assert draw_many(logits, 1, top_p=1e-9).logprobs.item() == 0


def test_full_row_beside_a_truncated_row_is_unchanged() -> None:
    mixed = state(2)
    mixed.top_k[1] = 2
    rows, positions = LOGITS[None].expand(2, -1), torch.zeros(2, dtype=torch.long)
    together = draw(rows, mixed, positions, None, truncated=True)
    alone = draw(rows[:1], mixed[:1], positions[:1], None, truncated=False)
    assert together.token_ids[0] == alone.token_ids[0] and together.logprobs[0] == alone.logprobs[0]
    assert together.kept is not None and (together.kept[0] == -1).all() and (together.kept[1] >= 0).sum() == 2


def test_kept_ids_are_limited() -> None:
    drawn = draw_many(torch.zeros(1000), 2000, top_p=0.9)
    assert drawn.kept is not None and drawn.kept.shape == (2000, MAX_KEPT)
    assert (drawn.kept >= 0).all()
    np.testing.assert_allclose(drawn.logprobs, -np.log(MAX_KEPT), atol=1e-4)
    for token, kept in zip(drawn.token_ids[:50].tolist(), drawn.kept[:50].tolist(), strict=True):
        assert token in kept


def test_sampling_state_moves_full_rows() -> None:
    made = state(3)
    made.temperatures[:] = torch.tensor([0.1, 0.2, 0.3])
    made.top_k[:] = torch.tensor([4, 5, 6])
    made.move(torch.tensor([2]), torch.tensor([0]))
    assert made.seeds.tolist() == [2, 1, 2] and made.top_k.tolist() == [6, 5, 6]
    np.testing.assert_allclose(made.temperatures, [0.3, 0.2, 0.3])


def test_sampling_reduces_vocabulary_blocks_first() -> None:
    """More ids than one block: the requested distribution, across blocks and within each."""
    width = 2 * BLOCK + 700
    logits = torch.full((width,), -20.0)
    alive = [0, 5, BLOCK - 1, BLOCK, BLOCK + 17, 2 * BLOCK + 3, width - 1]
    logits[alive] = torch.tensor([0.0, 1.0, -1.0, 0.5, 1.5, 0.2, 2.0])
    drawn = draw_many(logits, 4_000, 3)
    expected = torch.softmax(logits.double(), -1)[alive].numpy()
    counts = np.array([int((drawn.token_ids == i).sum()) for i in alive])
    assert counts.sum() >= 3_995  # all other ids together have a probability of 2e-6 per draw
    assert chi_square_p(counts, expected / expected.sum()) > 1e-3
    np.testing.assert_allclose(drawn.logprobs, torch.log_softmax(logits, -1)[drawn.token_ids], rtol=0, atol=1e-5)
    greedy = draw_many(logits, 2, temperature=0.0)
    assert greedy.token_ids.tolist() == [width - 1] * 2
