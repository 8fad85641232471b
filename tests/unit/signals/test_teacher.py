"""The teacher's term in every loss against its float64 reference, and which tokens each teacher scores."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.core.batching import Packing, make_batches, rollout_samples
from shoal.core.collect import StopRequested
from shoal.core.learn import StepRows
from shoal.core.losses import LOSSES
from shoal.core.metrics import Tally
from shoal.core.objective import Objective, TeacherWeights
from shoal.core.ranks import SingleProcess, deal
from shoal.core.types import Row
from shoal.signals.teacher import BASELINE, TEACHER, LocalTeacher, RemoteTeacher, SelfTeacher
from unit.core.groups import make_group, make_prompt, make_turn
from unit.core.reference import REFERENCE, masked_with_teacher, teacher_baselines, with_teacher
from unit.core.rows import gradient, random_row, to_inputs, with_garbage


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drift", [0.7, 15.0])  # 15 nats reaches the ±20 clamp
def test_every_loss_with_a_teacher(name: str, seed: int, drift: float) -> None:
    row, tau, reward_weight = random_row(seed, drift=drift), 0.7, 0.4
    teacher = np.minimum(row.inf + drift * np.random.default_rng(seed + 9).normal(size=len(row.m)), -1e-3)
    baseline = np.random.default_rng(seed + 7).normal(size=row.num_sequences)[row.seq]
    leaf, inputs = to_inputs(with_garbage(row, seed + 100))
    given = {"teacher_logprobs": teacher, "teacher_baseline": baseline}
    inputs = replace(inputs, **{name: torch.tensor(np.where(row.m, values, np.nan)) for name, values in given.items()})
    params = {"adv_tau": 0.5, "kl_tau": 0.3} if name == "masked" else {}
    objective = Objective(LOSSES[name].model_validate(params), TeacherWeights(tau, reward_weight))
    total, metrics = objective(inputs, torch.ones(len(row.m), dtype=torch.float64))
    if name == "masked":
        loss, grad = masked_with_teacher(row, teacher, baseline, tau, reward_weight, 0.5, 0.3)
    else:
        loss, grad = REFERENCE[name](with_teacher(row, teacher, baseline, tau, reward_weight), np.ones(len(row.m)))
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


class Pair(SingleProcess):
    """One of two ranks in one event loop."""

    def __init__(self, rank: int, rounds: list[dict[int, bytes]]) -> None:
        self._number, self._rounds, self._count = rank, rounds, 0

    async def exchange(self, mine: bytes) -> list[bytes]:
        while len(self._rounds) <= self._count:
            self._rounds.append({})
        found, self._count = self._rounds[self._count], self._count + 1
        found[self._number] = mine
        while len(found) < 2:
            await asyncio.sleep(0.001)
        return [found[0], found[1]]


@pytest.mark.parametrize("signalled", [0, 1])
@pytest.mark.parametrize("delay_s", [0.2, 600.0])
def test_signal_to_one_rank_ends_the_wait_of_both(
    signalled: int, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has its answers, rank 1 waits for a server. A server that answers soon is waited for."""
    monkeypatch.setattr("shoal.signals.teacher.TICK_S", 0.02)
    monkeypatch.setattr("shoal.signals.teacher.STOP_GRACE_S", 0.5)

    async def both() -> list[object]:
        rounds: list[dict[int, bytes]] = []
        stops = [asyncio.Event(), asyncio.Event()]
        stops[signalled].set()

        async def run(rank: int) -> list[list[float]]:
            async def ask(_: list[list[int]]) -> list[list[float]]:
                await asyncio.sleep(delay_s * rank)
                return [[-1.0]]

            return await RemoteTeacher(ask, Pair(rank, rounds))._answers([[1]], stops[rank])

        async with asyncio.timeout(20):
            return list(await asyncio.gather(run(0), run(1), return_exceptions=True))

    found = asyncio.run(both())
    if delay_s < 1:
        assert found == [[[-1.0]], [[-1.0]]]
    else:
        assert [type(error) for error in found] == [StopRequested, StopRequested]


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
        assert not row.signals[BASELINE].any(), "no other rollout has a signal"


def rollouts_with(logprobs: list[list[float]]):
    group = make_group(make_prompt(0), [0.0] * len(logprobs))
    for rollout, values in zip(group.rollouts, logprobs, strict=True):
        rollout.turns = [make_turn(range(10, 10 + len(values)), logprobs=values)]
        rollout.advantage = 0.0
    return group.rollouts


async def baselines_of(rollouts, teacher: Callable[[Row], np.ndarray], budget: int, world: int = 1) -> dict[str, float]:
    """By rollout, of a teacher on `world` ranks. The ranks meet after each has packed the rows for itself."""
    meeting, arrived, shared = asyncio.Event(), [], {}

    class Rank(SingleProcess):
        def __init__(self, rank: int) -> None:
            self.rank, self.world = rank, world

        async def exchange(self, mine: bytes) -> list[bytes]:
            shared[self.rank] = mine
            arrived.append(self.rank)
            if len(arrived) == world:
                meeting.set()
            await meeting.wait()
            return [shared[rank] for rank in range(world)]

    class Policy:
        logprobs = teacher_logprobs = None

    async def one_rank(rank: int) -> dict[str, float]:
        ranks = Rank(rank)
        packing = Packing(budget, "token-mean", 8, minibatches=2)
        batches = make_batches([rollout_samples(rollout) for rollout in rollouts], packing)
        mine = [row for batch in batches for row in deal(batch.rows, ranks)]

        async def score(function, batches):
            return [(row, teacher(row)) for row in mine]

        step = StepRows([], batches, None, score)  # type: ignore[arg-type]
        await LocalTeacher(Policy(), ranks).annotate(step)  # type: ignore[arg-type]
        found = {}
        for row in mine:
            for index, name in enumerate(row.rollout_ids):
                (found[name],) = set(row.signals[BASELINE][row.loss_mask & (row.sequence_ids == index)].tolist())
        return found

    parts = await asyncio.gather(*map(one_rank, range(world)))
    return {name: value for part in parts for name, value in part.items()}


def test_baseline_leaves_out_the_own_rollout() -> None:
    """The same for any packing and number of ranks."""
    rng = np.random.default_rng(0)
    old = [(-rng.exponential(1.0, size)).tolist() for size in (1, 4, 2, 6, 3)]
    rollouts = rollouts_with(old)

    def teacher(row: Row) -> np.ndarray:  # 30 nats below for every third id: clamped
        return np.where(row.token_ids % 3 == 0, row.sampler_logprobs - 30, -row.token_ids / 8).astype(np.float32)

    scores = [[o - 30 if (10 + t) % 3 == 0 else -(10 + t) / 8 for t, o in enumerate(values)] for values in old]
    expected = dict(zip([r.rollout_id for r in rollouts], teacher_baselines(old, scores), strict=True))
    found = asyncio.run(baselines_of(rollouts, teacher, 64))
    assert found == pytest.approx(expected, rel=1e-5)
    assert (
        found == asyncio.run(baselines_of(rollouts, teacher, 8)) == asyncio.run(baselines_of(rollouts, teacher, 8, 2))
    )
    alone = asyncio.run(baselines_of(rollouts[:1], teacher, 64))
    assert set(alone.values()) == {0.0}


def test_baseline_keeps_the_expected_gradient_and_reduces_its_variance() -> None:
    """Enumerates five rollouts of one token, drawn from a softmax over 4 ids, in float64. The teacher is certain."""
    p, q = np.array([0.3, 0.3, 0.2, 0.2]), np.array([0.94, 0.03, 0.02, 0.01])
    old, theirs = np.log(p), np.log(q)
    slopes = np.eye(4) - p  # d log p(a) / d logits
    plain, centred, chances = [], [], []
    for drawn in itertools.product(range(4), repeat=5):
        baselines = teacher_baselines([[old[a]] for a in drawn], [[theirs[a]] for a in drawn])
        plain.append(sum((theirs[a] - old[a]) * slopes[a] for a in drawn))
        centred.append(sum((theirs[a] - old[a] - b) * slopes[a] for a, b in zip(drawn, baselines, strict=True)))
        chances.append(math.prod(p[a] for a in drawn))
    means = [np.average(values, axis=0, weights=chances) for values in (plain, centred)]
    np.testing.assert_allclose(means[0], means[1], atol=1e-12)
    spread = [
        np.average(np.square(values - mean).sum(1), weights=chances)
        for values, mean in zip((plain, centred), means, strict=True)
    ]
    assert spread[1] < 0.8 * spread[0], spread
