"""Reward functions in the forms people write them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shoal.envs.items import ItemEnvironment
from shoal.errors import ArgumentError, DataError
from shoal.rewards.functions import RewardFunctions, Scored
from shoal.rewards.outcome import RewardValueError, read_outcome

ROW = {"prompt": "2 + 3?", "answer": "5", "level": 1}


def scored(completion: str, prompt: object = "2 + 3?") -> Scored:
    return Scored(ROW, ROW, prompt, completion)


def correct(completion, answer):
    return float(completion == answer)


def lengths(prompts, completions, **columns):
    assert columns["answer"] == ["5"] and columns["level"] == [1]
    return [float(len(completion)) for completion in completions]


async def slow(completion):
    return 0.25


def test_a_plain_function_gets_columns_by_name():
    assert RewardFunctions([correct])(scored("5")) == 1.0
    assert RewardFunctions([correct])(scored("6")) == 0.0
    assert RewardFunctions([lambda text, prompt, row: len(prompt) + row["level"]])(scored("x")) == 7
    assert RewardFunctions([lambda text, bonus=2.0: bonus])(scored("x")) == 2.0
    assert RewardFunctions([slow])(scored("x")) == 0.25


def test_trls_form_gets_lists_of_one():
    assert RewardFunctions([lengths])(scored("abc")) == 3.0
    only = RewardFunctions([lambda completions, answer: [completions[0] + answer[0] == "55"]])
    assert only(scored("5")) is True


def test_messages_in_messages_out():
    messages = [{"role": "user", "content": "2 + 3?"}]
    seen = []

    def judge(prompts, completions):
        seen.append((prompts, completions))
        return [1.0]

    RewardFunctions([judge])(scored("5", messages))
    assert seen == [([messages], [[{"role": "assistant", "content": "5"}]])]


def test_several_functions_are_parts_with_weights():
    rewards = RewardFunctions([correct, lengths], [1.0, 0.1])
    value = rewards(scored("5"))
    assert value == {"correct": 1.0, "lengths": 1.0}
    assert read_outcome(value, rewards.weights)[0] == pytest.approx(1.1)
    same = RewardFunctions([correct, correct])
    assert same(scored("5")) == {"correct": 1.0, "correct_2": 1.0}


def test_none_excludes_or_does_not_apply():
    def none(completion):
        return None

    def does_not_apply(prompts, completions, **_):
        return [None]

    assert RewardFunctions([none])(scored("5")) is None
    assert RewardFunctions([correct, none])(scored("5")) is None
    assert RewardFunctions([correct, does_not_apply])(scored("5")) == {"correct": 1.0}
    assert RewardFunctions([does_not_apply])(scored("5")) is None


def test_the_prompt_may_come_first():
    def matches(prompt, completion, answer):
        return float((prompt, completion, answer) == (ROW["prompt"], "7", ROW["answer"]))

    rewards = RewardFunctions([matches])
    rewards.check(list(ROW))
    assert rewards(scored("7")) == 1.0 and rewards(scored("8")) == 0.0


def test_wrong_functions_are_named():
    with pytest.raises(ArgumentError, match=r"half takes prompts but no completions; write half\(prompts, c"):

        def half(prompts, answer):
            return [1.0]

        RewardFunctions([half])
    with pytest.raises(ArgumentError, match=r"there are prompt, row, gold$"):
        RewardFunctions([correct]).check(["prompt", "gold"])
    with pytest.raises(ArgumentError, match=r"reward_weights: 1 weights for 2"):
        RewardFunctions([correct, slow], [1.0])
    with pytest.raises(ArgumentError, match=r"reward_funcs: 3 is not a function"):
        RewardFunctions([3])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r"reward_funcs: correct asks for 'answer', which is no column"):
        RewardFunctions([correct]).check(["prompt", "gold"])
    with pytest.raises(RewardValueError, match=r"two returned 2 rewards for 1 completion"):

        def two(completions):
            return [1, 2]

        RewardFunctions([two])(scored("5"))
    with pytest.raises(RewardValueError, match=r"returned float, not a list"):
        RewardFunctions([lambda completions: 1.0])(scored("5"))


@dataclass
class Item:
    prompt: object
    wanted: str

    def get_reward(self, completion: str) -> float | None:
        return None if completion == "?" else float(completion == self.wanted)


class Deaf:
    prompt = "a?"

    def get_reward(self) -> float:
        return 1.0


def answered(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]


def test_items_judge_themselves_and_rows_are_judged():
    items = ItemEnvironment([Item("a?", "a"), Item([{"role": "user", "content": "b?"}], "b")])
    first, second = items.tasks("train")
    assert first.messages == [{"role": "user", "content": "a?"}] and second.messages[0]["content"] == "b?"
    assert [items.reward(second, answered(text)) for text in ("b", "a", "?")] == [1.0, 0.0, None]
    rows = ItemEnvironment([ROW], [ROW], rewards=RewardFunctions([correct]))
    assert rows.reward(rows.tasks("eval")[0], answered("5")) == 1.0


def test_bad_items_are_named_with_their_number():
    with pytest.raises(DataError, match=r"items: train item 1: the prompt is empty"):
        ItemEnvironment([Item("a", "a"), Item(" ", "b")])
    with pytest.raises(DataError, match=r"items: train item 0: dict has no method get_reward"):
        ItemEnvironment([ROW])
    with pytest.raises(DataError, match=r"items: eval item 0: dict has no prompt; it has question$"):
        ItemEnvironment([ROW], [{"question": "q"}], rewards=RewardFunctions([lengths]))
    with pytest.raises(DataError, match=r"train item 0: get_reward\(\) cannot be called as get_reward\(completion\)"):
        ItemEnvironment([Deaf()])
    with pytest.raises(DataError, match=r"items: train is empty; give it at least one item"):
        ItemEnvironment([])


def test_other_answers_are_other_data():
    one = ItemEnvironment([ROW], rewards=RewardFunctions([correct])).tasks("train")[0].data
    two = ItemEnvironment([{**ROW, "answer": "6"}], rewards=RewardFunctions([correct])).tasks("train")[0].data
    assert one != two and one == ItemEnvironment([dict(ROW)], rewards=RewardFunctions([correct])).tasks("train")[0].data
