"""A judge over HTTP with a real local server: numbers, retries, missing and invalid answers, keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.core.errors import ConfigError
from shoal.envs import ask
from shoal.envs.datasets import DatasetSpec
from shoal.envs.registry import load_environment
from shoal.rewards.compose import NamedRewards
from shoal.rewards.http_judge import HttpJudge, JudgeError
from shoal.rewards.pool import RewardPool
from support.judge_server import Judge, Reply, chat

TASK = ask("What is {2} + 2?", answer="4")
MESSAGES = [*TASK.messages, {"role": "assistant", "content": "It is {4}."}]


@pytest.fixture
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.close()


def ask_judge(reward: HttpJudge) -> float:
    return asyncio.run(reward(TASK, MESSAGES))


def test_chat_model_is_asked_for_a_number(judge: Judge):
    judge.reply = lambda _: (200, chat("I would say: 7"))
    assert ask_judge(HttpJudge(judge.url, model="strict")) == pytest.approx(0.7)
    _, body = judge.requests[0]
    asked = body["messages"][0]["content"]
    assert body["model"] == "strict" and "What is {2} + 2?" in asked and "It is {4}." in asked and "\n4\n" in asked


def test_reward_model_gets_the_conversation(judge: Judge):
    judge.reply = lambda _: (200, {"score": -0.25})
    assert ask_judge(HttpJudge(judge.url)) == -0.25
    assert judge.requests[0][1] == {"messages": MESSAGES, "data": {"answer": "4"}}


def test_busy_judge_is_retried(judge: Judge):
    judge.reply = lambda number: (503, b"busy") if number < 3 else (200, {"score": 1})
    assert ask_judge(HttpJudge(judge.url, retries=2)) == 1
    assert len(judge.requests) == 3


@pytest.mark.parametrize(
    ("reply", "requests", "says"),
    [
        ((503, b"busy"), 3, "status 503"),
        ((401, b"who"), 1, "status 401"),
        ((200, b"<html>"), 3, "JSONDecodeError"),
        ((200, {"other": 1}), 1, "no score"),
    ],
)
def test_failing_judge_raises(judge: Judge, reply: Reply, requests: int, says: str):
    judge.reply = lambda _: reply
    with pytest.raises(JudgeError, match=says):
        ask_judge(HttpJudge(judge.url, retries=2))
    assert len(judge.requests) == requests


@pytest.mark.parametrize("text", ["great!", "11", "-3"])
def test_no_number_in_range_is_an_error(judge: Judge, text: str):
    judge.reply = lambda _: (200, chat(text))
    with pytest.raises(JudgeError, match="not a number from 0 to 10"):
        ask_judge(HttpJudge(judge.url, model="m"))


def test_silence_ends(judge: Judge):
    judge.reply = lambda _: (time.sleep(2), (200, {"score": 1}))[1]
    began = time.monotonic()
    with pytest.raises(JudgeError, match=r"within 0.2 s"):
        ask_judge(HttpJudge(judge.url, timeout_s=0.2, retries=1))
    assert time.monotonic() - began < 1.5


def test_unreachable_address():
    with pytest.raises(JudgeError, match=r"cannot be reached .*[Rr]efused"):
        ask_judge(HttpJudge("http://127.0.0.1:9/judge", retries=0))


@pytest.mark.parametrize(
    "settings", [{"url": "host:80"}, {"url": "http://x", "timeout_s": 0}, {"url": "http://x", "retries": -1}]
)
def test_wrong_settings_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match="judge: "):
        HttpJudge(**settings)


def test_judge_runs_in_the_pool_and_failures_are_counted(judge: Judge, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """From the configuration of the `dataset` environment to a score. The judge fails for the second answer."""
    monkeypatch.setenv("JUDGE_API_KEY", "the-key-12345")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a?", "answer": "1"}\n{"prompt": "b?", "answer": "1"}\n')
    settings = {"url": judge.url, "api_key_var": "JUDGE_API_KEY", "retries": 0}
    environment = load_environment(
        "dataset", {"reward": "judge", "judge": settings}, dataset=DatasetSpec(path=str(tmp_path / "rows.jsonl"))
    )
    pool = RewardPool({"dataset": environment})
    judge.reply = lambda number: (200, {"score": 0.5}) if number == 1 else (500, b"")
    pool.start()

    async def score_two():
        first = await pool.score("dataset", "train", 0, MESSAGES)
        second = await pool.score("dataset", "train", 0, MESSAGES)
        await pool.close()
        return first, second

    first, second = asyncio.run(score_two())
    assert (first.status, first.reward, first.error) == ("ok", 0.5, None)
    assert second.status == "error" and "status 500" in str(second.error) and second.reward is None
    assert second.traceback == "" and "http_judge.py" not in str(second.error), "the message is complete"
    assert judge.requests[0][0]["Authorization"] == "Bearer the-key-12345"


def test_judge_is_one_reward_part(judge: Judge):
    rewards = NamedRewards(short=lambda task, messages: 1.0, judged=(HttpJudge(judge.url), 0.5))
    assert rewards(TASK, MESSAGES) == {"short": 1.0, "judged": 1.0} and rewards.weights["judged"] == 0.5


def test_reward_and_settings_go_together(tmp_path):
    spec = DatasetSpec(path=str(tmp_path))
    for args in ({"reward": "judge"}, {"judge": {"url": "http://x"}}):
        with pytest.raises(ConfigError, match="needs `judge"):
            load_environment("dataset", args, dataset=spec)
    with pytest.raises(ConfigError, match=r"judge: .*utl"):
        load_environment("dataset", {"reward": "judge", "judge": {"utl": "http://x"}}, dataset=spec)
