"""Reward functions in all accepted forms."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shoal.core.errors import ArgumentError, DataError
from shoal.core.types import Task
from shoal.envs.items import ItemEnvironment
from shoal.rewards.compose import NamedRewards
from shoal.rewards.functions import FunctionReward, RewardFunctions, RewardInput, input_of
from shoal.rewards.outcome import RewardValueError, read_outcome

ROW = {"prompt": "2 + 3?", "answer": "5", "level": 1}


def scored(completion: str, prompt: object = "2 + 3?") -> RewardInput:
    return RewardInput(ROW, ROW, prompt, completion)


def correct(completion, answer):
    return float(completion == answer)


def lengths(prompts, completions, **columns):
    assert columns["answer"] == ["5"] * len(completions) and columns["level"] == [1] * len(completions)
    return [float(len(completion)) for completion in completions]


async def slow(completion):
    return 0.25


def test_plain_function_gets_columns_by_name():
    assert RewardFunctions([correct])(scored("5")) == 1.0
    assert RewardFunctions([correct])(scored("6")) == 0.0
    assert RewardFunctions([lambda text, prompt, row: len(prompt) + row["level"]])(scored("x")) == 7
    assert RewardFunctions([lambda text, bonus=2.0: bonus])(scored("x")) == 2.0
    assert RewardFunctions([slow])(scored("x")) == 0.25


def rank(prompts, completions, **columns):
    """Compares the completions of a group. With lists of length one it is constant 0."""
    order = sorted(range(len(completions)), key=lambda index: len(completions[index]))
    return [order.index(index) / max(1, len(order) - 1) for index in range(len(order))]


def test_trl_reward_functions_receive_the_group():
    assert RewardFunctions([lengths]).takes_groups and not RewardFunctions([correct]).takes_groups
    group = [scored("bb"), scored("a"), scored("cccc"), scored("ddd")]
    assert RewardFunctions([rank]).score_group(group) == [1 / 3, 0.0, 1.0, 2 / 3]
    only = RewardFunctions([lambda completions, answer: [c + a == "55" for c, a in zip(completions, answer)]])  # noqa: B905
    assert only.score_group([scored("5"), scored("6")]) == [True, False]


def test_forms_mix_within_a_group():
    mixed = RewardFunctions([correct, rank], [1.0, 0.5])
    assert mixed.score_group([scored("5"), scored("66")]) == [
        {"correct": 1.0, "rank": 0.0},
        {"correct": 0.0, "rank": 1.0},
    ]

    def abstains(completions):
        return [None if completion == "?" else 1.0 for completion in completions]

    assert RewardFunctions([correct, abstains]).score_group([scored("5"), scored("?")]) == [
        {"correct": 1.0, "abstains": 1.0},
        {"correct": 0.0},
    ]


def test_environment_argument_formats():
    """The names of the parameters decide, equally in scripts, configurations and datasets."""
    task = Task([{"role": "user", "content": "2 + 3?"}], {"answer": "5"})
    messages = [*task.messages, {"role": "assistant", "content": "5"}]

    def named(messages, task):
        return float(messages[-1]["content"] == task.data["answer"])

    def first(text, answer):
        return float(text == answer)

    def plain(completion, answer, prompt):
        return float((completion, answer, prompt) == ("5", "5", "2 + 3?"))

    assert RewardFunctions([named])(input_of(task, messages)) == 1.0
    for function in (named, first, plain, NamedRewards(right=first), NamedRewards(right=named)):
        reward = FunctionReward(RewardFunctions([function]))
        assert reward.reward(task, messages) in (1.0, {"right": 1.0}) and reward.reward_group is None
    grouped = FunctionReward(RewardFunctions([rank]))
    shorter = [*task.messages, {"role": "assistant", "content": ""}]
    assert grouped.reward_group is not None and grouped.reward_group(task, [messages, shorter]) == [1.0, 0.0]
    for wrong in (lambda task, text: 1.0, lambda messages: 1.0, lambda: 1.0, lambda prompts: 1.0):
        with pytest.raises(ArgumentError, match=r"^orch: .*f\(completion.*f\(task, messages\).*completions"):
            RewardFunctions([wrong], label="orch")


def test_messages_round_trip():
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


def test_prompt_may_come_first():
    def matches(prompt, completion, answer):
        return float((prompt, completion, answer) == (ROW["prompt"], "7", ROW["answer"]))

    rewards = RewardFunctions([matches])
    rewards.check(list(ROW))
    assert rewards(scored("7")) == 1.0 and rewards(scored("8")) == 0.0


def test_wrong_functions_are_named():
    with pytest.raises(ArgumentError, match=r"half.* takes no completion; .*f\(prompts, completions"):

        def half(prompts, answer):
            return [1.0]

        RewardFunctions([half])
    with pytest.raises(ArgumentError, match=r"columns are prompt, row, gold; write f\(completion"):
        RewardFunctions([correct]).check(["prompt", "gold"])
    with pytest.raises(ArgumentError, match=r"reward_weights: 1 weights for 2"):
        RewardFunctions([correct, slow], [1.0])
    with pytest.raises(ArgumentError, match=r"reward_funcs: 3 is not a function"):
        RewardFunctions([3])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r"reward_funcs: correct .*'answer', which is not"):
        RewardFunctions([correct]).check(["prompt", "gold"])

    def in_lists(completions, gold, answer, environments=None, environment=3):
        return [1.0]

    with pytest.raises(ArgumentError, match=r"in_lists has a parameter 'answer', which is not a column"):
        RewardFunctions([in_lists]).check(["prompt", "gold"])
    with pytest.raises(RewardValueError, match=r"two returned 2 rewards for 1 "):

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


def test_items_score_themselves_and_rows_use_reward_functions():
    items = ItemEnvironment([Item("a?", "a"), Item([{"role": "user", "content": "b?"}], "b")])
    first, second = items.tasks("train")
    assert first.messages == [{"role": "user", "content": "a?"}] and second.messages[0]["content"] == "b?"
    assert [items.reward(second, answered(text)) for text in ("b", "a", "?")] == [1.0, 0.0, None]
    rows = ItemEnvironment([ROW], [ROW], rewards=RewardFunctions([correct]))
    assert rows.reward(rows.tasks("eval")[0], answered("5")) == 1.0 and rows.reward_group is None
    ranked = ItemEnvironment([ROW], rewards=RewardFunctions([rank]))
    assert ranked.reward_group is not None
    assert ranked.reward_group(ranked.tasks("train")[0], [answered("aa"), answered("a")]) == [1.0, 0.0]


def test_bad_items_are_named_with_their_number():
    with pytest.raises(DataError, match=r"items: train item 1: the prompt is empty"):
        ItemEnvironment([Item("a", "a"), Item(" ", "b")])
    with pytest.raises(DataError, match=r"items: train item 0: dict has no method get_reward"):
        ItemEnvironment([ROW])
    with pytest.raises(DataError, match=r"items: eval item 0: dict has no prompt; it has question$"):
        ItemEnvironment([ROW], [{"question": "q"}], rewards=RewardFunctions([lengths]))
    with pytest.raises(DataError, match=r"train item 0: get_reward\(\) cannot be called as get_reward\(completion\)"):
        ItemEnvironment([Deaf()])
    with pytest.raises(DataError, match=r"items: train is empty"):
        ItemEnvironment([])


def test_other_answers_are_other_data():
    one = ItemEnvironment([ROW], rewards=RewardFunctions([correct])).tasks("train")[0].data
    two = ItemEnvironment([{**ROW, "answer": "6"}], rewards=RewardFunctions([correct])).tasks("train")[0].data
    assert one != two and one == ItemEnvironment([dict(ROW)], rewards=RewardFunctions([correct])).tasks("train")[0].data


def test_reasoning_and_the_whole_text_are_parameters():
    answer = {"role": "assistant", "content": "5", "reasoning_content": "2 and 3", "text": "<think>2 and 3</think>5"}
    task = Task([{"role": "user", "content": "2 + 3?"}], {"answer": "5"})
    seen = []

    def plain(completion, reasoning, full_text, answer):
        seen.append((completion, reasoning, full_text, answer))
        return 1.0

    functions = RewardFunctions([plain])
    functions.check(["answer"])
    assert functions(input_of(task, [*task.messages, answer])) == 1.0
    assert seen == [("5", "2 and 3", "<think>2 and 3</think>5", "5")]
    without = {"role": "assistant", "content": "<answer>5</answer>"}
    functions(input_of(task, [*task.messages, without]))
    assert seen[1] == ("<answer>5</answer>", "", "<answer>5</answer>", "5")

    def named(completion, reasoning):
        seen.append(reasoning)
        return 1.0

    RewardFunctions([named])(RewardInput({}, {"reasoning": "a column"}, "?", "5", task, [answer]))
    assert seen[2] == "a column", "columns have priority"
