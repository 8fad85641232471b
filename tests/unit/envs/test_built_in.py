"""The built-in environments, with manually computed answers."""

import random
import re
from collections import Counter
from difflib import SequenceMatcher
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.envs import SingleTurn, Task
from shoal.envs.arithmetic import Arithmetic, evaluate
from shoal.envs.base import held_out
from shoal.envs.countdown import Countdown, ExpressionError, calculate
from shoal.envs.reverse_text import ReverseText, draw_phrase


def reward(environment: SingleTurn, task: Task, answer: str):
    return environment.reward(task, [*task.messages, {"role": "assistant", "content": answer}])


def test_reverse_text_is_the_published_definition():
    environment = ReverseText()
    task = environment.tasks("train")[0]
    system, user = task.messages
    assert system["role"] == "system" and "character by character" in system["content"]
    assert "<reversed_text>" in system["content"]
    text, answer = user["content"], user["content"][::-1]
    assert task.data["answer"] == answer
    assert reward(environment, task, f"<reversed_text> {answer}\n</reversed_text>") == 1.0
    first_tag_counts = f"<reversed_text>{text}</reversed_text><reversed_text>{answer}</reversed_text>"
    assert reward(environment, task, first_tag_counts) == SequenceMatcher(None, text, answer).ratio() < 1
    assert reward(environment, task, answer) == 0.0


def test_reverse_text_by_hand():
    environment = ReverseText()
    task = Task([{"role": "user", "content": "abcd"}], {"answer": "dcba"})
    # "dcab" and "dcba" share "dc" and one of "a", "b": 2 * 3 / 8.
    assert reward(environment, task, "<reversed_text>dcab</reversed_text>") == 0.75


@given(st.integers(2, 60), st.integers(0, 40), st.integers())
def test_phrases_keep_their_length_and_alphabet(shortest, more, seed):
    text = draw_phrase(random.Random(seed), shortest, shortest + more)
    assert shortest <= len(text) <= shortest + more
    assert re.fullmatch(r"[a-z]+( [a-z]+)*", text)


def test_phrases_vary():
    texts = [draw_phrase(random.Random(n), 8, 40) for n in range(2000)]
    assert len(set(texts)) > 1900
    lengths = Counter(len(text) // 10 for text in texts)
    assert all(lengths[decade] > 200 for decade in (1, 2, 3))


@pytest.mark.parametrize(
    "operands, operators, value",
    [([3, 5], "+", 8), ([3, 5], "-", -2), ([2, 3, 4], "+*", 14), ([2, 3, 4], "*-", 2), ([9, 2, 3, 4], "-*+", 7)],
)
def test_arithmetic_precedence(operands, operators, value):
    assert evaluate(operands, operators) == value


def test_arithmetic_level_one_asks_one_digit_sums():
    environment = Arithmetic()
    for task in environment.tasks("train")[:200]:
        found = re.search(r"(\d) \+ (\d)", task.messages[-1]["content"])
        assert found and task.data["answer"] == int(found[1]) + int(found[2])


@pytest.mark.parametrize(
    "answer, score",
    [("8", 1), ("3 + 5 = 8.", 1), ("It is **8**", 1), ("8.0", 1), ("8 or 9", 0), ("eight", 0), ("-8", 0), ("18", 0)],
)
def test_arithmetic_compares_the_last_number(answer, score):
    assert reward(Arithmetic(), Task([{"role": "user", "content": "3 + 5"}], {"answer": 8}), answer) == score


def test_sums_and_their_mirror_images_share_a_split():
    environment = Arithmetic(num_train=2000, num_eval=500)
    pairs = {}
    for split in ("train", "eval"):
        texts = [task.messages[-1]["content"] for task in environment.tasks(split)]
        pairs[split] = {tuple(sorted(map(int, re.findall(r"\d+", text)))) for text in texts}
    assert not pairs["train"] & pairs["eval"]
    assert len(pairs["train"] | pairs["eval"]) == 55, "all one-digit sums appear"
    assert len(pairs["eval"]) >= 8


def test_eval_tasks_of_one_seed_are_never_train_tasks_of_another():
    asked = lambda split, seed: {  # noqa: E731
        task.messages[-1]["content"] for task in Countdown(seed=seed, num_train=500, num_eval=500).tasks(split)
    }
    assert not asked("eval", 1) & asked("train", 2)
    assert asked("train", 1) != asked("train", 2)
    assert 0.15 < sum(held_out(str(n)) for n in range(10_000)) / 10_000 < 0.25


@pytest.mark.parametrize(
    "answer, score",
    [
        ("<answer>(3 + 5) * 2</answer>", 1.0),
        ("<answer>2 × (5 + 3) = 16</answer>", 1.0),
        ("<answer>1</answer> no <answer>2*(3+5)</answer>", 1.0),
        ("<answer>3 + 5</answer>", 0.1),
        ("<answer>3 + 3 + 5 + 5</answer>", 0.0),
        ("<answer>8 * 2</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>3 / (5 - 5)</answer>", 0.0),
        ("(3 + 5) * 2", 0.0),
    ],
)
def test_countdown_by_hand(answer, score):
    task = Task([{"role": "user", "content": ""}], {"numbers": [3, 5, 2], "target": 16})
    assert reward(Countdown(), task, answer) == score


@pytest.mark.parametrize(
    "text, value", [("1+2*3", 7), ("-(2-5)/2", Fraction(3, 2)), ("8/4/2", 1), ("[1 + 2] − 3", 0), ("2--3", 5)]
)
def test_calculator(text, value):
    assert calculate(text)[0] == value


@pytest.mark.parametrize(
    "text", ["", "1+", "(1", "1)", "1 2", "2**3", "1.5", "a", "(" * 100, "1/0", "9" * 500, "1" * 10]
)
def test_calculator_refuses(text):
    with pytest.raises(ExpressionError):
        calculate(text)


@given(st.text(alphabet="0123456789+-*/() ", max_size=60))
def test_calculator_gives_a_value_or_refuses(text):
    try:
        value, _ = calculate(text)
    except ExpressionError:
        return
    assert isinstance(value, Fraction)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ReverseText(min_len=9, max_len=8),
        lambda: Countdown(min_numbers=5),
        lambda: Countdown(max_number=7),
        lambda: Arithmetic().tasks("test"),
    ],
)
def test_bad_arguments_are_config_errors(make):
    with pytest.raises(ConfigError):
        make()
