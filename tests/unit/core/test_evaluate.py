"""Held-out evaluation: the same prompts and rollouts every time, compared with manual sums."""

from __future__ import annotations

import asyncio

import pytest

from shoal.core.errors import DataError, DeadlineError
from shoal.core.evaluate import EvalSettings, Evaluator, summarise
from shoal.core.types import Prompt, RolloutGroup, SamplingParams

from .groups import Letters, fits, make_group, make_prompt, make_turn

GREEDY = SamplingParams(temperature=0.0, max_tokens=7)


def settings(**changes) -> EvalSettings:
    return EvalSettings(**{"num_examples": 3, "rollouts_per_example": 2, "sampling": GREEDY, **changes})


def test_first_prompts_that_fit_of_each_environment():
    asked: list[tuple[Prompt, int, SamplingParams]] = []

    async def run_group(prompt: Prompt, size: int, sampling: SamplingParams) -> RolloutGroup:
        asked.append((prompt, size, sampling))
        return make_group(prompt, [float(prompt.index)] * size)

    environments = {"a": Letters(1, "a", long=[1], size_eval=10), "b": Letters(1, "b", size_eval=2)}
    evaluator = Evaluator(run_group, environments, fits, settings())
    metrics, groups = asyncio.run(evaluator.evaluate())
    assert [(p.env, p.index, p.split) for p, _, _ in asked] == [
        ("a", 0, "eval"), ("a", 2, "eval"), ("a", 3, "eval"), ("b", 0, "eval"), ("b", 1, "eval"),
    ]  # fmt: skip
    assert {(size, sampling) for _, size, sampling in asked} == {(2, GREEDY)}
    assert metrics["eval/a/mean"] == pytest.approx(5 / 3) and metrics["eval/b/mean"] == 0.5
    assert len(groups) == 5
    again, _ = asyncio.run(evaluator.evaluate())
    assert again == metrics and asked[:5] == asked[5:]


def test_summary_by_hand():
    solved = make_group(make_prompt(0), [0.0, 1.0, None], turn=make_turn([3, 4]))
    failed = make_group(make_prompt(1), [0.5, 0.0, 0.25], turn=make_turn([3] * 5, finish="length"))
    for rollout in solved.rollouts:
        rollout.reward = None if rollout.reward is None else rollout.reward * 10  # shaping is for training only
    assert summarise([solved, failed]) == pytest.approx(
        {
            "mean": (0 + 1 + 0.5 + 0 + 0.25) / 5,
            "std": 0.4183300132670378,
            "error_frac": 1 / 6,
            "pass_at_k": 0.5,
            "length_mean": 3.5,
            "truncated_frac": 0.5,
        }
    )


def test_pass_at_k_goes_by_the_raw_reward():
    """A reward scaled for training does not show which prompts were solved."""
    group = make_group(make_prompt(0), [1.0, 0.0])
    for rollout in group.rollouts:
        assert rollout.reward is not None
        rollout.reward = rollout.reward * 0.1
    assert summarise([group])["pass_at_k"] == 1.0


def test_all_failed_has_no_mean():
    metrics = summarise([make_group(make_prompt(0), [None, None])])
    assert metrics["error_frac"] == 1 and "mean" not in metrics and "std" not in metrics


def test_pass_at_k_needs_several_rollouts():
    assert "pass_at_k" not in summarise([make_group(make_prompt(0), [1.0])])


def test_without_held_out_prompts_it_is_refused():
    with pytest.raises(DataError, match="a has no held-out prompt that fits"):
        Evaluator(lambda *_: asyncio.sleep(0), {"a": Letters(5, "a")}, fits, settings())  # type: ignore[arg-type]


def test_evaluation_past_its_deadline_names_the_environment():
    async def never(prompt: Prompt, size: int, sampling: SamplingParams) -> RolloutGroup:
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    evaluator = Evaluator(never, {"a": Letters(1, "a", size_eval=1)}, fits, settings(deadline_s=0.05))
    with pytest.raises(DeadlineError, match="evaluation of a"):
        asyncio.run(evaluator.evaluate())


def test_slow_evaluation_with_progress_meets_its_deadline():
    """Ten groups, one after another, each within the deadline and all together far beyond it."""
    turn = asyncio.Semaphore(1)

    async def slowly(prompt: Prompt, size: int, sampling: SamplingParams) -> RolloutGroup:
        async with turn:
            await asyncio.sleep(0.05)
        return make_group(prompt, [float(prompt.index)] * size)

    evaluator = Evaluator(
        slowly, {"a": Letters(1, "a", size_eval=10)}, fits, settings(num_examples=10, deadline_s=0.25)
    )
    metrics, groups = asyncio.run(evaluator.evaluate())
    assert [group.prompt.index for group in groups] == list(range(10)) and metrics["eval/a/mean"] == 4.5
