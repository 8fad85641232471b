"""Rewards over a whole group: one job in one worker, one timeout, and an error of the call is that of all rollouts."""

import asyncio
import os
import time

import pytest

from shoal.envs import SingleTurn, answer_of, ask
from shoal.rewards.functions import FunctionReward, RewardFunctions
from shoal.rewards.pool import RewardPool


class Ranked(SingleTurn):
    """Longer answers rank higher. The first answer may order the call to misbehave."""

    weights = {"rank": 2.0}

    def tasks(self, split):
        return [ask("write")]

    def reward_group(self, task, conversations):
        answers = [answer_of(messages) for messages in conversations]
        if answers[0] == "raise":
            raise ValueError("no ranking")
        if answers[0] == "hang":
            time.sleep(60)
        if answers[0] == "exit":
            os._exit(3)
        if answers[0] == "short":
            return [1.0]
        if answers[0] == "no list":
            return 1.0
        order = sorted(answers, key=len)
        return [None if a == "?" else {"rank": float(order.index(a)), "bad": "x"} if a == "part" else
                {"rank": float(order.index(a))} for a in answers]  # fmt: skip


def rank(prompts, completions, **columns):
    order = sorted(completions, key=len)
    return [float(order.index(completion)) for completion in completions]


class Function(SingleTurn):
    def __init__(self):
        scorer = FunctionReward(RewardFunctions([rank]))
        self.reward, self.reward_group = scorer.reward, scorer.reward_group  # type: ignore[method-assign]

    def tasks(self, split):
        return [ask("write")]


@pytest.fixture(scope="module")
def pool():
    made = RewardPool({"ranked": Ranked(), "function": Function()}, workers=1, timeout_s=0.5)
    made.start()
    yield made
    asyncio.run(made.close())


def score(pool, *answers, env="ranked"):
    conversations = [[{"role": "assistant", "content": answer}] for answer in answers]
    return asyncio.run(pool.score_group(env, "train", 0, conversations))


def test_ranking_compares_the_rollouts_of_a_group(pool):
    scores = score(pool, "aa", "a", "aaaa", "?")
    assert [s.reward for s in scores] == [4.0, 0.0, 6.0, None]
    assert [s.status for s in scores] == ["ok"] * 4 and scores[0].parts == {"rank": 2.0}
    assert [s.reward for s in score(pool, "aa", "a", "aaa", env="function")] == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    "order, status, word",
    [
        ("raise", "error", "ValueError: no ranking"),
        ("exit", "error", "exit code 3"),
        ("short", "error", "1 rewards for 3"),
        ("no list", "error", "TypeError"),
        ("part", "error", "part 'bad'"),
        ("hang", "timeout", "0.5 s"),
    ],
)
def test_error_excludes_the_whole_group(pool, order, status, word):
    scores = score(pool, order, "a", "b")
    assert [(s.status, s.reward) for s in scores] == [(status, None)] * 3
    assert all(word in (s.error or "") for s in scores)
    assert [s.reward for s in score(pool, "aa", "a")] == [2.0, 0.0], "the next group is scored"
