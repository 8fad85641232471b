"""The teacher's term in every loss against its float64 reference, and which tokens each teacher scores."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.core.batching import Packing, make_batches, rollout_samples
from shoal.core.learn import StepRows
from shoal.core.losses import LOSSES
from shoal.core.metrics import Tally
from shoal.core.objective import Objective, TeacherWeights
from shoal.core.ranks import SingleProcess
from shoal.signals.teacher import TEACHER, RemoteTeacher, SelfTeacher
from unit.core.groups import make_group, make_prompt, make_turn
from unit.core.reference import REFERENCE, masked_with_teacher, with_teacher
from unit.core.rows import gradient, random_row, to_inputs, with_garbage


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drift", [0.7, 15.0])  # 15 nats reaches the ±20 clamp
def test_every_loss_with_a_teacher(name: str, seed: int, drift: float) -> None:
    row, tau, reward_weight = random_row(seed, drift=drift), 0.7, 0.4
    teacher = np.minimum(row.inf + drift * np.random.default_rng(seed + 9).normal(size=len(row.m)), -1e-3)
    leaf, inputs = to_inputs(with_garbage(row, seed + 100))
    inputs = replace(inputs, teacher_logprobs=torch.tensor(np.where(row.m, teacher, np.nan)))
    params = {"adv_tau": 0.5, "kl_tau": 0.3} if name == "masked" else {}
    objective = Objective(LOSSES[name].model_validate(params), TeacherWeights(tau, reward_weight))
    total, metrics = objective(inputs, torch.ones(len(row.m), dtype=torch.float64))
    if name == "masked":
        loss, grad = masked_with_teacher(row, teacher, tau, reward_weight, 0.5, 0.3)
    else:
        loss, grad = REFERENCE[name](with_teacher(row, teacher, tau, reward_weight), np.ones(len(row.m)))
    scale = max(1.0, float(np.abs(loss).max()))
    assert total.item() == pytest.approx(loss.sum(), rel=1e-9, abs=1e-8 * scale)
    np.testing.assert_allclose(gradient(total, leaf), grad, rtol=1e-9, atol=1e-10 * scale)
    value, count = metrics["teacher/kl"]
    assert float(value) / int(count) == pytest.approx((row.lp - teacher)[row.m].mean())


def test_row_without_a_teacher_is_an_error() -> None:
    _, inputs = to_inputs(random_row(0))
    with pytest.raises(ValueError, match="teacher_logprobs"):
        Objective(LOSSES["grpo"](), TeacherWeights(1.0))(inputs, torch.ones(48))


def step_of(samples, score=None, groups=()) -> StepRows:
    def pack(of):
        return make_batches(of, Packing(64, "token-mean", 8))

    return StepRows(list(groups), pack(samples), pack, score)  # type: ignore[arg-type]


def test_server_scores_whole_sequences() -> None:
    """Also of a shared prompt, which a row stores once. The test answer is the position of a token in its sequence."""
    group = make_group(make_prompt(0), [0.0, 1.0, 2.0], turn=None)
    for rollout, ids in zip(group.rollouts, [[3, 4], [5], [6, 7, 1]], strict=True):
        rollout.turns, rollout.advantage = [make_turn(ids)], 0.0
    asked: list[list[int]] = []

    async def ask(sequences: list[list[int]]) -> list[list[float]]:
        asked.extend(sequences)
        return [[-float(t) for t in range(len(ids))] for ids in sequences]

    step = step_of([rollout_samples(rollout) for rollout in group.rollouts])
    asyncio.run(RemoteTeacher(ask, SingleProcess()).annotate(step))
    assert sorted(asked) == [[1, 2, 3, 4], [1, 2, 5], [1, 2, 6, 7, 1]]
    (row,) = step.batches[0].rows
    assert -1 not in row.segment_prefix[1:], "the prompt is shared"
    np.testing.assert_array_equal(row.signals[TEACHER][row.loss_mask], -row.position_ids[row.loss_mask])


def test_policy_as_teacher_sees_the_hint() -> None:
    """A rollout without a hint, or with one that does not fit, has no signal."""
    group = make_group(make_prompt(0), [0.0, 1.0, 2.0])
    for rollout, hint in zip(group.rollouts, [[9, 9, 1, 2], None, [9] * 70], strict=True):
        first, then = make_turn([3, 4], prompt_ids=[1, 2]), make_turn([5], prompt_ids=[1, 2, 3, 4, 8])
        rollout.turns, rollout.advantage, rollout.hint_ids = [first, then], 0.0, hint
    seen = []

    async def score(function, batches):
        rows = [row for batch in batches for row in batch.rows]
        seen.extend(rows)
        return [(row, np.where(row.loss_mask, -row.position_ids, 0).astype(np.float32)) for row in rows]

    class Policy:
        logprobs = teacher_logprobs = None

    step = step_of([rollout_samples(rollout) for rollout in group.rollouts], score, [group])
    teacher, tally = SelfTeacher(Policy(), SingleProcess(), token_budget=64), Tally()  # type: ignore[arg-type]
    asyncio.run(teacher.annotate(step))
    teacher.observe(tally)
    assert [row.token_ids.tolist() for row in seen] == [[9, 9, 1, 2, 3, 4, 8, 5]]
    assert tally.reduce()["teacher/missing_frac"] == pytest.approx(2 / 3)
    for row in step.batches[0].rows:
        for index, name in enumerate(row.rollout_ids):
            at = row.loss_mask & (row.sequence_ids == index)
            expected = [-4, -5, -7] if name.endswith("/0") else row.sampler_logprobs[at]
            np.testing.assert_array_equal(row.signals[TEACHER][at], expected)
