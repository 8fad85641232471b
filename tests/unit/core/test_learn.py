"""One training step from groups to optimizer, followed with a policy of eight logits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shoal.core.collect import StopRequested
from shoal.core.errors import MemoryStop
from shoal.core.learn import Learner, LearnSettings, StepResult, StepRows
from shoal.core.metrics import Tally
from shoal.core.types import Rollout, RolloutGroup, Row, Turn
from shoal.signals.advantages import AdvantageNormalizer

from .groups import make_group, make_prompt, make_turn
from .unigram import VOCABULARY, Results, UnigramPolicy, make_learner, on_device, reinforce

MEAN_ONLY = AdvantageNormalizer(std="none")


def group_of(index: int, rewards: list[float | None], turns: list[Turn] | None = None) -> RolloutGroup:
    group = make_group(make_prompt(index), rewards)
    for rollout, turn in zip(group.rollouts, turns or [], strict=False):
        rollout.turns = [turn]
    return group


def learn(learner: Learner, groups: list[RolloutGroup]) -> tuple[StepResult, dict[str, float]]:
    tally = Tally()
    learned = asyncio.run(learner.learn(groups, tally))
    return learned, tally.reduce()


def test_advantages_are_assigned_to_scored_rollouts():
    groups = [group_of(0, [0.0, 1.0, None, 1.0, 0.0]), group_of(1, [3.0, 1.0])]
    learn(make_learner(UnigramPolicy(), MEAN_ONLY), groups)
    assert [r.advantage for r in groups[0].rollouts] == [-0.5, 0.5, None, 0.5, -0.5]
    assert [r.advantage for r in groups[1].rollouts] == [1.0, -1.0]


def test_stop_while_a_signal_waits_leaves_groups_and_weights_unchanged():
    """The next checkpoint may contain the groups, and the resumed run trains them again."""

    class Waiting:
        async def annotate(self, step: StepRows) -> None:
            await step.stop.wait()
            raise StopRequested

        def observe(self, tally: Tally) -> None: ...

    async def stopped(groups: list[RolloutGroup]) -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, stop.set)
        with pytest.raises(StopRequested):
            await learner.learn(groups, Tally(), stop)

    policy = UnigramPolicy(reference=np.arange(VOCABULARY) / 4)
    settings = LearnSettings(token_budget=8, aggregation="token-mean", max_tokens=4, reward_kl_beta=0.1)
    learner = Learner(policy, MEAN_ONLY, reinforce, settings, on_device, signals=[Waiting()])
    groups = [group_of(0, [0.0, 1.0], [make_turn([3]), make_turn([5])])]
    asyncio.run(stopped(groups))
    assert [(r.reward, r.advantage, r.token_advantages) for r in groups[0].rollouts] == [
        (0.0, None, None),
        (1.0, None, None),
    ]
    assert not policy.theta.any() and policy.optim_steps == 0


def test_rewarded_token_gains_probability_and_unscored_rollout_has_no_effect():
    turns = [make_turn([3]), make_turn([5]), make_turn([6])]
    policy, alone = UnigramPolicy(), UnigramPolicy()
    learned, metrics = learn(make_learner(policy, MEAN_ONLY), [group_of(0, [1.0, 0.0, None], turns)])
    learn(make_learner(alone, MEAN_ONLY), [group_of(0, [1.0, 0.0], turns)])
    # Token-mean over two tokens, advantages ±.5, softmax gradient cancels: theta moves by ±.25.
    expected = np.zeros(VOCABULARY)
    expected[3], expected[5] = 0.25, -0.25
    np.testing.assert_allclose(policy.theta, expected, atol=1e-7)
    np.testing.assert_array_equal(policy.theta, alone.theta)
    assert sorted(learned.trained_rollouts) == ["letters/0/0/0/0", "letters/0/0/0/1"]
    # Two samples of three tokens. The prompt of two tokens is computed once.
    assert learned.trained_tokens == 2 and learned.sample_tokens == 6 and metrics["tokens/computed"] == 4


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    # Completions of 1 and 3 tokens: per token, each rollout.
    [
        ("token-mean", (1 / 4, 1 / 4)),
        ("token-sum", (1.0, 1.0)),
        ("seq-mean-token-mean", (1 / 2, 1 / 6)),
        ("seq-mean-token-sum-norm", (1 / 8, 1 / 8)),
        ("prompt-mean", (1 / 4, 1 / 4)),
    ],
)
def test_denominators_are_of_the_whole_step(aggregation: str, weights: tuple[float, float]):
    policy = UnigramPolicy()
    turns = [make_turn([3]), make_turn([4, 5, 6])]
    learn(make_learner(policy, MEAN_ONLY, aggregation=aggregation), [group_of(0, [1.0, 0.0], turns)])
    found = {}
    for call in policy.calls:
        for row in call.rows:
            for index, rollout_id in enumerate(row.rollout_ids):
                mine = row.loss_mask & (row.sequence_ids == index)
                found[rollout_id] = set(row.weights[mine].tolist())
    assert found == {"letters/0/0/0/0": {weights[0]}, "letters/0/0/0/1": {weights[1]}}


@pytest.mark.parametrize("shares", [True, False])
def test_prompts_are_shared_where_the_policy_allows_it(shares: bool):
    """Two answers of two tokens to a prompt of two: 2 + 4 tokens to compute, or 8, with the same result."""
    policy = UnigramPolicy(shares_prefixes=shares)
    learned, metrics = learn(make_learner(policy, MEAN_ONLY), [group_of(0, [0.0, 1.0])])
    (row,) = policy.calls[0].rows
    assert row.tokens == metrics["tokens/computed"] == (6 if shares else 8)
    assert row.segment_prefix.tolist() == ([-1, 0, 0] if shares else [-1, -1])
    assert learned.sample_tokens == 8 and learned.trained_tokens == 4 and row.weights.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("rows_per_micro_batch", [1, 2, 100])
def test_micro_batches_do_not_change_the_step(rows_per_micro_batch: int):
    whole, split = UnigramPolicy(), UnigramPolicy()
    turns = [make_turn([3, 4, 5]), make_turn([6, 7]), make_turn([1]), make_turn([2, 2])]
    learn(make_learner(whole, MEAN_ONLY, token_budget=1000), [group_of(0, [1.0, 0.0, 0.5, 0.25], turns)])
    learner = make_learner(split, MEAN_ONLY, token_budget=5, rows_per_micro_batch=rows_per_micro_batch)
    learned, _ = learn(learner, [group_of(0, [1.0, 0.0, 0.5, 0.25], turns)])
    # After the prompt of two, a row has space for three: one answer of 3, those of 2 and 1, and the other one of 2.
    assert len(whole.calls) == 1 and len(split.calls) == math.ceil(3 / rows_per_micro_batch)
    assert split.optim_steps == 1
    assert sum(call.weight for call in split.calls) == pytest.approx(1.0)
    np.testing.assert_allclose(split.theta, whole.theta, atol=1e-12)
    assert len(learned.trained_rollouts) == 4


def five_rows() -> list[RolloutGroup]:
    """Of four tokens each, if a row has at most four."""
    return [group_of(i, [1.0, 0.0], [make_turn([3]), make_turn([5])]) for i in range(5)]


@pytest.mark.parametrize("rows_per_micro_batch", [None, 5])
def test_out_of_memory_halves_the_micro_batch(rows_per_micro_batch: int | None):
    """The step starts again, and the next one uses the size that fits."""
    whole, tight = UnigramPolicy(), UnigramPolicy(most_tokens=8)
    options = {"token_budget": 4, "rows_per_micro_batch": rows_per_micro_batch}
    learn(make_learner(whole, MEAN_ONLY, **options), five_rows())
    learner = make_learner(tight, MEAN_ONLY, **options)
    learned, _ = learn(learner, five_rows())
    assert len(whole.calls) == 1 and len(learned.trained_rollouts) == 10 and tight.optim_steps == 1
    np.testing.assert_allclose(tight.theta, whole.theta, atol=1e-12)
    begun = len(tight.calls)
    assert [len(call.rows) for call in tight.calls][-3:] == [2, 2, 1]
    learn(learner, five_rows())
    assert [len(call.rows) for call in tight.calls[begun:]] == [2, 2, 1]


@pytest.mark.parametrize("settings", ({"recompute_old": True, "needs_reference": True}, {"reward_kl_beta": 0.1}))
def test_logprobs_that_do_not_fit_in_memory_are_split(settings: dict[str, Any]):
    whole, tight = UnigramPolicy(), UnigramPolicy(most_tokens=8)
    for policy in (whole, tight):
        learner = make_learner(policy, MEAN_ONLY, token_budget=4, rows_per_micro_batch=None, **settings)
        learn(learner, five_rows())
    np.testing.assert_allclose(tight.theta, whole.theta, atol=1e-12)
    assert [len(call.rows) for call in tight.calls] == [2, 2, 1], "the gradient knows already"


def test_row_that_does_not_fit_in_memory_ends_the_run():
    for policy in (UnigramPolicy(most_tokens=3), UnigramPolicy(most_tokens=8, passes_together=True)):
        with pytest.raises(MemoryStop):
            learn(make_learner(policy, MEAN_ONLY, token_budget=4, rows_per_micro_batch=None), five_rows())
        assert policy.optim_steps == 0


@pytest.mark.parametrize(
    ("tokens", "keys", "calls"),
    [
        (1000, 1, [5]),  # each row has 6 tokens and gathers 10 keys: the prompt's and each answer's
        (79, 1, [3, 2]),  # not 4 and 1
        (80, 1, [5]),
        (44, 4, [3, 2]),
        (45, 4, [5]),
        (30, 100, [3, 2]),
        (35, 100, [5]),
        (5, 100, [1] * 5),  # none fits, so each row is a micro-batch
    ],
)
def test_micro_batches_are_few_and_of_equal_size(tokens: int, keys: int, calls: list[int]):
    """Within the plan, which counts computed tokens and the memory of gathered keys."""
    policy = UnigramPolicy()
    plan: Any = {"rows_per_micro_batch": None, "micro_batch_tokens": tokens, "keys_for_token": keys}
    learn(make_learner(policy, MEAN_ONLY, token_budget=6, **plan), [group_of(i, [0.0, 1.0]) for i in range(5)])
    assert [len(call.rows) for call in policy.calls] == calls


def test_minibatches_times_epochs_optimizer_steps():
    policy = UnigramPolicy()
    learner = make_learner(policy, MEAN_ONLY, minibatches=2, ppo_epochs=3, token_budget=100)
    learned, metrics = learn(learner, [group_of(i, [0.0, 1.0]) for i in range(4)])
    assert policy.optim_steps == 6
    assert [call.optim_steps_before for call in policy.calls] == list(range(6))
    assert [call.weight for call in policy.calls] == pytest.approx([1.0] * 6), "each optimizer step is a separate mean"
    assert policy.calls[0].rollout_ids == policy.calls[2].rollout_ids != policy.calls[1].rollout_ids
    assert len(learned.trained_rollouts) == len(set(learned.trained_rollouts)) == 8, (
        "listed once for any number of epochs"
    )
    assert metrics["optim/skipped"] == 0


def test_mismatch_is_measured_before_the_weights_move():
    plain, recomputing = UnigramPolicy(), UnigramPolicy()
    groups = [group_of(i, [0.0, 1.0]) for i in range(2)]
    learn(make_learner(plain, MEAN_ONLY, minibatches=2, ppo_epochs=2), groups)
    learn(make_learner(recomputing, MEAN_ONLY, minibatches=2, ppo_epochs=2, recompute_old=True), groups)
    assert [call.source for call in plain.calls] == ["old", "none", "none", "none"]
    assert [call.source for call in recomputing.calls] == ["old", "old", "none", "none"]
    assert all(row.old_logprobs is None for call in plain.calls for row in call.rows)


def test_old_logprobs_are_of_the_weights_before_the_first_optimizer_step():
    policy = UnigramPolicy(theta=np.arange(VOCABULARY) / 4)
    start = policy.theta.copy()
    learner = make_learner(policy, MEAN_ONLY, minibatches=2, ppo_epochs=2, recompute_old=True)
    learn(learner, [group_of(i, [0.0, 1.0], [make_turn([3, 4]), make_turn([5, 6])]) for i in range(2)])
    assert not np.allclose(policy.theta, start)
    before = UnigramPolicy(theta=start)
    for call in policy.calls:
        for row in call.rows:
            assert row.old_logprobs is not None
            np.testing.assert_array_equal(row.old_logprobs, before.logprobs([row]).read()[1][0])


def test_reference_logprobs_are_taken_where_the_loss_needs_them():
    reference = np.linspace(-1, 1, VOCABULARY)
    policy = UnigramPolicy(reference=reference)
    learn(make_learner(policy, MEAN_ONLY, needs_reference=True), [group_of(0, [0.0, 1.0])])
    for row in policy.calls[0].rows:
        assert row.reference_logprobs is not None
        np.testing.assert_array_equal(
            row.reference_logprobs, UnigramPolicy(theta=reference).logprobs([row]).read()[1][0]
        )


@pytest.mark.parametrize(
    ("settings", "passes"), (({"recompute_old": True, "needs_reference": True}, 10), ({"reward_kl_beta": 0.1}, 5))
)
def test_results_are_read_after_the_last_pass_is_launched(settings: dict[str, Any], passes: int):
    """A read in between would leave the device idle until the next pass."""
    made: list[str] = []

    @dataclass
    class Late(Results):
        def read(self) -> Any:
            made.append("read")
            return super().read()

    class Noted(UnigramPolicy):
        def logprobs(self, rows: Sequence[Row]) -> Results:
            made.append("pass")
            return Late({}, super().logprobs(rows).logprobs)

        def reference_logprobs(self, rows: Sequence[Row]) -> Results:
            made.append("pass")
            return Late({}, super().reference_logprobs(rows).logprobs)

    learner = make_learner(Noted(), MEAN_ONLY, token_budget=6, **settings)
    learn(learner, [group_of(i, [0.0, 1.0]) for i in range(5)])
    assert made[: 2 * passes] == ["pass"] * passes + ["read"] * passes, "the gradient comes later"


def test_kl_folded_into_the_reward():
    """r -= beta · Σ (sampler − reference). The advantages then use the lower reward."""
    policy = UnigramPolicy()
    uniform = -math.log(VOCABULARY)
    turns = [make_turn([3, 4], logprobs=[-0.5, -0.25]), make_turn([5], logprobs=[-1.0])]
    group = group_of(0, [1.0, 1.0], turns)
    learn(make_learner(policy, MEAN_ONLY, reward_kl_beta=0.1), [group])
    expected = [1 - 0.1 * ((-0.5 - uniform) + (-0.25 - uniform)), 1 - 0.1 * (-1.0 - uniform)]
    assert [r.reward for r in group.rollouts] == pytest.approx(expected, abs=1e-6)
    assert [r.raw_reward for r in group.rollouts] == [1.0, 1.0]
    gap = (expected[0] - expected[1]) / 2
    assert [r.advantage for r in group.rollouts] == pytest.approx([gap, -gap], abs=1e-6)


def test_reward_kl_is_per_row():
    """Several rows are computed together. Each is compared with its own reference."""
    groups = [group_of(i, [1.0, 1.0], [make_turn([3 + i]), make_turn([5 + i, 6])]) for i in range(3)]
    alone = [group_of(i, [1.0, 1.0], [make_turn([3 + i]), make_turn([5 + i, 6])]) for i in range(3)]
    reference = np.linspace(-1, 1, VOCABULARY)
    plan: Any = {"rows_per_micro_batch": None, "micro_batch_tokens": 100, "token_budget": 6, "reward_kl_beta": 0.1}
    learn(make_learner(UnigramPolicy(reference=reference), MEAN_ONLY, **plan), groups)
    one: Any = {**plan, "rows_per_micro_batch": 1}
    learn(make_learner(UnigramPolicy(reference=reference), MEAN_ONLY, **one), alone)
    found, expected = ([r.reward for group in of for r in group.rollouts] for of in (groups, alone))
    assert found == expected and len(set(found)) > 3


def test_masked_rollouts_count_for_the_advantage_but_not_for_the_loss():
    policy = UnigramPolicy()
    turns = [make_turn([3]), make_turn([4, 4, 4, 4], finish="length"), make_turn([5])]
    group = group_of(0, [1.0, 0.0, 0.5], turns)

    def whole(rollout: Rollout) -> bool:
        return not rollout.truncated

    learned, _ = learn(make_learner(policy, MEAN_ONLY, trains=whole), [group])
    assert [r.advantage for r in group.rollouts] == pytest.approx([0.5, -0.5, 0.0])
    assert sorted(learned.trained_rollouts) == ["letters/0/0/0/0", "letters/0/0/0/2"]
    assert learned.trained_tokens == 2
    assert policy.calls[0].weight == pytest.approx(1.0), "denominators count trained tokens"
    assert policy.theta[4] == pytest.approx(policy.theta[0]), "the truncated answer changed nothing"


@pytest.mark.parametrize("groups", [[], [group_of(0, [0.0, 1.0], [make_turn([3], finish="length")] * 2)]])
def test_nothing_to_train_takes_no_optimizer_step(groups: list[RolloutGroup]):
    policy = UnigramPolicy()
    learned, metrics = learn(make_learner(policy, MEAN_ONLY, trains=lambda r: not r.truncated), groups)
    assert learned == StepResult() and metrics == {}
    assert policy.optim_steps == 0 and not policy.calls


def test_nonfinite_gradient_is_skipped_and_reported():
    policy = UnigramPolicy()

    def broken(logprobs, row):
        slope = reinforce(logprobs, row)
        if "letters/1/0/0/0" in row.rollout_ids:
            slope = slope * np.nan
        return slope

    learner = make_learner(policy, MEAN_ONLY, broken, minibatches=2)
    learned, metrics = learn(
        learner, [group_of(0, [0.0, 1.0], [make_turn([3]), make_turn([4])]), group_of(1, [0.0, 1.0])]
    )
    assert learned.skipped and metrics["optim/skipped"] == 1
    assert np.isfinite(policy.theta).all() and policy.theta[4] > 0, "the finite minibatch was trained"


def test_policy_logprobs_are_noted_for_the_rollout_files():
    policy = UnigramPolicy(theta=np.arange(VOCABULARY) / 2)
    start = UnigramPolicy(theta=policy.theta.copy())
    group = group_of(0, [0.0, 1.0], [make_turn([3, 4, 5]), make_turn([6])])
    learned, _ = learn(make_learner(policy, MEAN_ONLY, ppo_epochs=2), [group])
    row = policy.calls[0].rows[0]
    expected = start.logprobs([row]).read()[1][0][row.loss_mask & (row.sequence_ids == 0)]
    np.testing.assert_array_equal(learned.policy_logprobs[row.rollout_ids[0]], expected)
    assert {key: len(value) for key, value in learned.policy_logprobs.items()} == {
        "letters/0/0/0/0": 3,
        "letters/0/0/0/1": 1,
    }


def test_largest_ratios_are_of_single_tokens():
    """A uniform policy over eight tokens has 1/8. The sampler had 1/2, 1/4 and 1/16 for three of them."""
    turns = [
        make_turn([3, 4], logprobs=[math.log(1 / 2), math.log(1 / 4)]),
        make_turn([5], logprobs=[math.log(1 / 16)]),
    ]
    _, metrics = learn(make_learner(UnigramPolicy(), MEAN_ONLY), [group_of(0, [1.0, 0.0], turns)])
    assert metrics["mismatch/ratio_max"] == pytest.approx(2.0, rel=1e-5)
    assert metrics["policy/ratio_max"] == pytest.approx(2.0, rel=1e-5), "the sampler replaces the old policy"
