"""Graders with answers that are easy to check."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.types import Reward
from shoal.rewards.math_parser import extract_answer, process_results
from shoal.rewards.numeric import last_number, parse_number, same_number
from shoal.rewards.outcome import RewardValueError, read_outcome, read_score


@pytest.mark.parametrize(
    "completion, gold",
    [
        ("so \\boxed{18}", "x\n#### 18"),
        ("the answer is $1,234.", "#### 1,234"),
        ("#### 1234", "1,234"),
        ("#### $12", "12"),
        ("The answer is 3 + 5 = 8.", "8"),
        ("The answer is 18 dollars per day.", "18"),
        ("The answer is 10.5.", "10.5"),
        ("**Answer: 42**", "42"),
        ("the answer is \\$18.00", "18"),
        ("The final answer is: $\\frac{3}{4}$", "0.75"),
        ("The answer is blue.", "blue"),
        ("\\boxed{25\\%}", "25"),
        ("\\boxed{25%}", "0.25"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("\\boxed{\\dfrac12}", "1/2"),
        ("\\boxed{3 1/2}", "3.5"),
        ("\\boxed{18 \\text{ dollars}}", "18"),
        ("\\boxed{5cm}", "5"),
        ("\\boxed{5 km/h}", "5"),
        ("\\boxed{1{,}000}", "1000"),
        ("\\boxed{5 million}", "5000000"),
        ("\\boxed{− 5}", "-5"),
        ("\\boxed{x=5}", "5"),
        ("\\boxed{2x+1}", "1+2x"),
        ("\\boxed{(1,2)}", "(1,2)"),
        ("first \\boxed{3}, no: \\boxed{4}", "4"),
        ("The answer is 5. \\boxed{6}", "6"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("3 + 4 = 7\n18", "18"),  # the last line is only a number
        ("18", "18"),
        ("so <answer>18 dollars</answer>", "18"),
        ("<answer>3</answer> no <answer>\n4\n</answer>", "4"),
        ("<answer>\\boxed{5}</answer>", "5"),
        ("\\boxed{3\\frac{1}{2}}", "3.5"),
        ("the answer is 3 1/2", "7/2"),
        ("The answer is 25%.", "25"),
        ("The answer is 10:30 AM.", "10:30 am"),
        ("\\boxed{2:05 pm}", "14:05"),
        ("\\boxed{10:30}", "10:30"),
        ("\\boxed{1 234 567}", "1,234,567"),
        ("\\boxed{1\\,234}", "1234"),
        ("\\boxed{18}", 18),
        ("\\boxed{18}", 18.0),
        ("\\boxed{0.5}", 0.5),
    ],
)
def test_right_answers(completion, gold):
    assert process_results(completion, gold)[0] is True


@pytest.mark.parametrize(
    "completion, gold",
    [
        ("", "18"),
        ("There are 18", "18"),  # no final answer is given
        ("18\nI am not sure.", "18"),
        ("The answer is 10:30.", "10"),
        ("\\boxed{10:30}", "10:31"),
        ("\\boxed{10:30 am}", "10:30 pm"),
        ("\\boxed{1.234}", "1234"),  # a dot is a decimal point
        ("\\boxed{1/2}", 0.25),
        ("\\boxed{7", "7"),
        ("\\boxed{5x}", "5"),
        ("\\boxed{2\\pi}", "2"),
        ("\\boxed{5 3}", "5"),
        ("\\boxed{-5}", "5"),
        ("\\boxed{1/0}", "1"),
        ("\\boxed{1e999999999}", "1"),
        ("\\boxed{" + "9" * 5000 + "}", "9"),
        ("\\boxed{(1,2)}", "(2,1)"),
        ("first \\boxed{4}, no: \\boxed{3}", "4"),
        ("\\boxed{18.0001}", "18"),
    ],
)
def test_wrong_answers(completion, gold):
    assert process_results(completion, gold)[0] is False


def test_gold_answer_is_text_or_a_number():
    for gold in (None, True):
        with pytest.raises(RewardValueError, match="gold answer"):
            process_results("\\boxed{1}", gold)


def test_both_answers_come_back():
    assert process_results("I say \\boxed{1,300}", "work\n#### 1,200") == (False, ("1,300", "1,200"))
    assert process_results("no idea", "#### 7") == (False, (None, "7"))


@given(st.text(max_size=300), st.text(max_size=20))
def test_any_text_can_be_searched(completion, gold):
    answer = extract_answer(completion)
    assert answer is None or answer
    last_number(completion)
    same_number(completion, gold)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "${:,}", "{} apples", "{}%", "{}.0", "{}."]))
def test_number_is_parsed_in_every_notation(number, style):
    assert parse_number(style.format(number)) == number
    assert same_number(last_number(f"so it is {style.format(number)}") or "", str(number))


@given(st.fractions(max_denominator=999))
def test_fractions_are_exact(value):
    assert parse_number(f"{value.numerator}/{value.denominator}") == value
    if value >= 0:
        assert parse_number(f"\\frac{{{value.numerator}}}{{{value.denominator}}}") == value


@pytest.mark.parametrize(
    "text, number",
    [
        ("3 + 5 = 8.", "8"),
        ("...8", "8"),
        ("8 - 3", "3"),
        ("= -7", "-7"),
        ("**8**", "8"),
        ("costs $5,000.50!", "$5,000.50"),
        ("3/4", "3/4"),
        ("x2", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_fractions_differ_from_rounded_decimals():
    assert parse_number("1/3") == Fraction(1, 3)
    assert not same_number("0.3333", "1/3")


def test_rewards_are_numbers_parts_or_none():
    assert read_outcome(2, {}) == (2.0, {})
    assert read_outcome({"a": 1, "b": True}, {"a": 3.0}) == (4.0, {"a": 1.0, "b": 1.0})
    assert read_outcome(None, {}) == (None, {})
    for bad in ({}, {1: 1.0}, {"a": None}, object(), b"1", {"a": 9e5, "b": 9e5}, {f"p{n}": 1 for n in range(65)}):
        with pytest.raises(RewardValueError):
            read_outcome(bad, {})


def test_reward_may_have_turns_tokens_and_kinds() -> None:
    """The total is the given one, else the weighted parts, else the sum over turns or tokens."""
    turns = read_score(Reward(turns=[0.25, 1.0], kinds=["policy", "ignore"]), {})
    assert (turns["reward"], turns["turns"], turns["kinds"]) == (1.25, [0.25, 1.0], ["policy", "ignore"])
    assert read_score(Reward(tokens=[[1.0, 2.0], []]), {})["reward"] == 3.0
    assert read_score(Reward(parts={"a": 2.0}, turns=[9.0]), {"a": 0.5})["reward"] == 1.0
    assert read_score(Reward(total=7.0, turns=[1.0]), {})["reward"] == 7.0
    assert read_score(Reward(), {})["reward"] is None
    for wrong in (Reward(turns="ab"), Reward(turns=[float("nan")]), Reward(kinds=["other"]), Reward(tokens=[1.0])):  # type: ignore[arg-type,list-item]
        with pytest.raises(RewardValueError):
            read_score(wrong, {})


def test_words_are_not_numbers_and_are_fast():
    """An untrained model writes many words. math-verify parses each as a product of symbols, which takes 20 ms."""
    words = ["".join("abcdefghij"[int(digit)] for digit in f"{number:05d}") for number in range(11111, 11411)]
    began = time.process_time()
    assert not any(process_results(f"\\boxed{{about {word} apples}}", "72")[0] for word in words)
    assert time.process_time() - began < 1.0
    assert process_results("\\boxed{72 apples}", "72")[0] and process_results("\\boxed{x}", "x")[0]
