"""A judge that compares the rollouts of a group, with a real local server: order, ids, ranges, failures, the pool."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shoal.core.errors import ConfigError
from shoal.core.types import Message, Score
from shoal.envs import ask
from shoal.envs.datasets import DatasetSpec
from shoal.envs.registry import load_environment
from shoal.rewards.compose import NamedRewards
from shoal.rewards.functions import RewardFunctions, input_of
from shoal.rewards.http_judge import JudgeError, RelativeJudge
from shoal.rewards.outcome import RewardValueError
from shoal.rewards.pool import RewardPool
from support.judge_server import Judge, Reply, chat

TASK = ask("Write {count} words.", system="Be brief.", answer="two words")


def conversation(*answers: str) -> list[Message]:
    """Answers of the policy with a reply of the user between them."""
    turns: list[Message] = []
    for number, answer in enumerate(answers):
        turns += [{"role": "user", "content": "go on"}] if number else []
        turns.append({"role": "assistant", "content": answer})
    return [*TASK.messages, *turns]


GROUP = [conversation(text) for text in ("a", "bbb", "cc", "dddd")]


def attempts_of(body: Any) -> dict[str, str]:
    """The last text of each attempt of a request, by id, in the order of the request."""
    lines = body["messages"][0]["content"].splitlines()
    found = [json.loads(line) for line in lines if line.startswith('{"id"')]
    return {attempt["id"]: attempt["messages"][-1]["content"] for attempt in found}


def by_length(body: Any) -> str:
    """The reply of a judge that prefers long answers."""
    scores = [{"id": name, "score": len(text)} for name, text in attempts_of(body).items()]
    return json.dumps({"scores": scores})


@pytest.fixture
def judge() -> Iterator[Judge]:
    made = Judge()
    made.reply = lambda number: (200, chat(by_length(made.requests[number - 1][1])))
    yield made
    made.close()


def compare(reward: RelativeJudge, group: Sequence[Sequence[Message]] = GROUP) -> list[float]:
    return asyncio.run(reward(TASK, group))


def test_each_rollout_gets_its_own_score_in_one_request(judge: Judge):
    assert compare(RelativeJudge(judge.url, "strict")) == pytest.approx([0.1, 0.3, 0.2, 0.4])
    ((_, body),) = judge.requests
    text = body["messages"][0]["content"]
    assert body["model"] == "strict" and body["temperature"] == 0 and list(attempts_of(body)) == ["1", "2", "3", "4"]
    assert "two words" in text and "from 0 (worst) to 10 (best)" in text and "4 attempts" in text
    assert text.count("Write {count} words.") == 1 and text.count("Be brief.") == 1, "the shared start is sent once"


def test_reasoning_is_sent_once(judge: Judge):
    """`text` of an answer repeats its parts."""
    answers = [{"content": text, "reasoning_content": "hm", "text": f"<think>hm</think>{text}"} for text in "ab"]
    compare(RelativeJudge(judge.url, "m"), [[*TASK.messages, {"role": "assistant", **answer}] for answer in answers])
    text = judge.requests[0][1]["messages"][0]["content"]
    assert text.count("hm") == 2 and "<think>" not in text


def test_settings_of_the_request(judge: Judge):
    reward = RelativeJudge(
        judge.url, "m", rubric="Prefer {best} rhymes.", best=4, request={"max_tokens": 7, "temperature": 0.5}
    )
    assert compare(reward) == pytest.approx([0.25, 0.75, 0.5, 1.0])
    _, body = judge.requests[0]
    assert "Prefer {best} rhymes." in body["messages"][0]["content"]
    assert (body["max_tokens"], body["temperature"]) == (7, 0.5)


def test_only_the_common_start_is_shared(judge: Judge):
    group = [conversation("plan", "x"), conversation("plan", "yy", "end"), conversation("plan", "yy")]
    assert compare(RelativeJudge(judge.url, "m"), group) == pytest.approx([0.1, 0.3, 0.2])
    text = judge.requests[0][1]["messages"][0]["content"]
    assert text.count('"plan"') == 1 and text.count('"yy"') == 2
    same = [conversation("same"), conversation("same")]
    assert compare(RelativeJudge(judge.url, "m"), same) == pytest.approx([0.4, 0.4]), "equal rollouts are compared too"
    assert compare(RelativeJudge(judge.url, "m"), [conversation("abc")]) == pytest.approx([0.3])


def test_replay_position_is_seeded_random():
    """Over many groups, a rollout has each place about as often as any other, whatever its index."""
    judge, places = RelativeJudge("http://x", "m"), Counter[tuple[int, int]]()
    for number in range(2000):
        order = judge._order([conversation(f"{number}/{index}") for index in range(4)])
        assert sorted(order) == [0, 1, 2, 3]
        places.update(enumerate(order))
    assert len(places) == 16
    assert max(places.values()) < 600 and min(places.values()) > 400  # 500 expected, standard deviation 19
    orders = [RelativeJudge("http://x", "m", seed=seed)._order(GROUP) for seed in range(20)]
    assert judge._order(GROUP) == judge._order(GROUP) == orders[0]
    assert len({tuple(order) for order in orders}) > 5, "another seed, another order"


def entries(*pairs: tuple[Any, Any]) -> str:
    return json.dumps({"scores": [{"id": name, "score": score} for name, score in pairs]})


ALL = (("1", 1), ("2", 2), ("3", 3), ("4", 4))


@pytest.mark.parametrize(
    "text",
    [
        entries(*ALL),
        entries(*reversed(ALL)),
        entries(*((int(name), float(score)) for name, score in ALL)),
        f"<think>{{maybe}} {entries(*((name, 0) for name, _ in ALL))}</think>\n```json\n{entries(*ALL)}\n```",
        json.dumps({"notes": {"a": 1}, "scores": json.loads(entries(*ALL))["scores"], "done": True}),
        json.dumps({"result": json.loads(entries(*ALL))}),
    ],
)
def test_valid_reply_formats(judge: Judge, text: str):
    judge.reply = lambda _: (200, chat(text))
    order = RelativeJudge(judge.url, "m")._order(GROUP)
    assert compare(RelativeJudge(judge.url, "m")) == pytest.approx([(order.index(i) + 1) / 10 for i in range(4)])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all are fine", "without a JSON list"),
        ('{"scores": [{"id": "1", "score": 1}', "without a JSON list"),
        ("{" * 5000, "without a JSON list"),
        ('{"scores": {"1": 1}}', "without a JSON list"),
        ('{"scores": [1, 2, 3, 4]}', "an id and a score"),
        ('{"scores": []}', "scored the attempts none"),
        (entries(*ALL[:3]), "not each of 1 to 4 once"),
        (entries(*ALL, ("4", 4)), "not each of 1 to 4 once"),
        (entries(*ALL[:3], ("3", 3)), "not each of 1 to 4 once"),
        (entries(*ALL[:3], ("5", 3)), "not each of 1 to 4 once"),
        (entries(*ALL[:3], ("4", 10.5)), "attempt 4 the score 10.5"),
        (entries(*ALL[:3], ("4", -1)), "attempt 4 the score -1"),
        (entries(*ALL[:3], ("4", "9")), "attempt 4 the score 9"),
        (entries(*ALL[:3], ("4", True)), "attempt 4 the score True"),
        (entries(*ALL[:3], ("4", None)), "attempt 4 the score None"),
        (entries(*ALL[:3], ("4", float("nan"))), "attempt 4 the score nan"),
    ],
)
def test_reply_must_score_each_rollout_once(judge: Judge, text: str, says: str):
    judge.reply = lambda _: (200, chat(text))
    with pytest.raises(JudgeError, match=says):
        compare(RelativeJudge(judge.url, "m"))
    assert len(judge.requests) == 1


@pytest.mark.parametrize(
    ("reply", "requests", "says"),
    [
        ((500, b"broken"), 3, "status 500"),
        ((400, b"no"), 1, "status 400"),
        ((200, b"<html>"), 3, "JSONDecodeError"),
        ((200, {"choices": []}), 1, "no score"),
    ],
)
def test_broken_server_raises(judge: Judge, reply: Reply, requests: int, says: str):
    judge.reply = lambda _: reply
    with pytest.raises(JudgeError, match=says):
        compare(RelativeJudge(judge.url, "m", retries=2))
    assert len(judge.requests) == requests


def test_slow_server_times_out(judge: Judge):
    judge.reply = lambda _: (time.sleep(1.5), (200, {}))[1]
    began = time.monotonic()
    with pytest.raises(JudgeError, match=r"within 0.2 s"):
        compare(RelativeJudge(judge.url, "m", timeout_s=0.2, retries=1))
    assert time.monotonic() - began < 1.2


def score_groups(environment: Any, count: int, **settings: Any) -> list[list[Score]]:
    pool = RewardPool({"dataset": environment}, **settings)
    pool.start()

    async def score() -> list[list[Score]]:
        try:
            return [await pool.score_group("dataset", "train", 0, GROUP) for _ in range(count)]
        finally:
            await pool.close()

    return asyncio.run(score())


def test_from_the_configuration_to_scores(judge: Judge, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """The second group's judge breaks and the third's is too slow: their rollouts have no reward."""
    monkeypatch.setenv("JUDGE_API_KEY", "the-key-12345")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a?"}\n{"prompt": "b?"}\n')
    settings = {"url": judge.url, "model": "m", "api_key_var": "JUDGE_API_KEY", "retries": 0}
    environment = load_environment(
        "dataset",
        {"reward": "relative-judge", "judge": settings},
        dataset=DatasetSpec(path=str(tmp_path / "rows.jsonl")),
    )

    def reply(number: int) -> Reply:
        if number == 3:
            time.sleep(1.5)
        return (500, b"") if number == 2 else (200, chat(by_length(judge.requests[number - 1][1])))

    judge.reply = reply
    first, second, third = score_groups(environment, 3, timeout_s=0.5)
    assert [score.reward for score in first] == pytest.approx([0.1, 0.3, 0.2, 0.4])
    assert judge.requests[0][0]["Authorization"] == "Bearer the-key-12345"
    assert {score.status for score in second} == {"error"} and "status 500" in str(second[0].error)
    assert {score.status for score in third} == {"timeout"}
    assert all(score.reward is None for score in [*second, *third])


def test_wrong_settings_are_refused(tmp_path: Any):
    spec = DatasetSpec(path=str(tmp_path))
    for args, word in [
        ({"reward": "relative-judge"}, "needs `judge"),
        ({"reward": "relative-judge", "judge": {"url": "http://x"}}, "model"),
        ({"reward": "relative-judge", "judge": {"url": "host", "model": "m"}}, "not a URL"),
        ({"reward": "judge", "judge": {"url": "http://x", "rubric": "r"}}, "rubric"),
    ]:
        with pytest.raises(ConfigError, match=word):
            load_environment("dataset", args, dataset=spec)


def test_functions_over_conversations():
    """`f(task, conversations)` is a form of reward functions, next to others; the key of a judge is kept."""

    def rank(conversations: Any, task: Any) -> list[float]:
        assert task.data["answer"] == "two words"
        return [float(len(messages)) for messages in conversations]

    judge = RelativeJudge("http://x", "m", api_key_var="JUDGE_API_KEY")
    assert RewardFunctions([judge]).takes_groups and RewardFunctions([judge, rank]).keep_env == ["JUDGE_API_KEY"]
    both = RewardFunctions([rank, lambda completion: float(len(completion))], [1.0, 2.0])
    group = [input_of(TASK, conversation("a")), input_of(TASK, conversation("a", "bb"))]
    assert both.score_group(group) == [{"rank": 3.0, "lambda": 1.0}, {"rank": 5.0, "lambda": 2.0}]


def test_reward_part_that_compares_rollouts(judge: Judge):
    """Named parts of which one is a judge over the group: the environment sets `reward_group`."""

    def short(completion: str) -> float | None:
        return None if completion == "cc" else float(len(completion) < 3)

    rewards = NamedRewards(short=short, judged=(RelativeJudge(judge.url, "m"), 0.5))
    assert rewards.group(TASK, GROUP) == [
        {"short": 1.0, "judged": pytest.approx(0.1)}, {"short": 0.0, "judged": pytest.approx(0.3)}, None,
        {"short": 0.0, "judged": pytest.approx(0.4)},
    ]  # fmt: skip
    assert rewards.weights["judged"] == 0.5 and len(judge.requests) == 1
    with pytest.raises(RewardValueError, match="'judged' compares the rollouts"):
        rewards(TASK, GROUP[0])
