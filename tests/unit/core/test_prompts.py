"""Prompts in seeded epochs: equal in every process, resumable at any point, mixed by weight, with counted omissions."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import DataError
from shoal.core.prompts import Buffer, PromptStream
from shoal.core.types import Prompt
from shoal.envs.base import TaskList

from .groups import Letters, fits, make_group, make_stream


def draw(stream: PromptStream, count: int) -> list[Prompt]:
    return [stream.next() for _ in range(count)]


def test_epoch_draws_every_prompt_once_in_its_own_order():
    stream = make_stream(size=20)
    assert len(stream) == 20
    epochs = [draw(stream, 20) for _ in range(3)]
    for number, prompts in enumerate(epochs):
        assert sorted(p.index for p in prompts) == list(range(20))
        assert {p.epoch for p in prompts} == {number}
    orders = {tuple(p.index for p in prompts) for prompts in epochs}
    assert len(orders) == 3
    assert len({p.group_id for prompts in epochs for p in prompts}) == 60


def test_seed_decides_the_order():
    assert draw(make_stream(seed=1), 50) == draw(make_stream(seed=1), 50)
    assert draw(make_stream(seed=1), 50) != draw(make_stream(seed=2), 50)


def test_prompts_carry_the_task():
    prompt = make_stream(size=1).next()
    assert prompt == Prompt("letters", 0, [{"role": "user", "content": "train 0"}], "train", 0)
    assert prompt.group_id == "letters/0/0/0"


@pytest.mark.parametrize(
    ("weights", "first", "counts"),
    [
        ({"a": 1.0, "b": 1.0}, "abab", {"a": 500, "b": 500}),
        ({"a": 3.0, "b": 1.0}, "aaab", {"a": 750, "b": 250}),
        ({"a": 0.2, "b": 0.5, "c": 0.3}, "bcb", {"a": 200, "b": 500, "c": 300}),
    ],
)
def test_environments_are_mixed_by_weight(weights: dict[str, float], first: str, counts: dict[str, int]):
    environments = {name: Letters(7, name) for name in weights}
    stream = PromptStream(environments, weights, 0, fits)
    names = [prompt.env for prompt in draw(stream, 1000)]
    assert "".join(names[: len(first)]) == first
    assert Counter(names) == counts


def test_draws_follow_the_constant_weights():
    weights = {"a": 0.61, "b": 0.29, "c": 0.1}
    stream = PromptStream({name: Letters(11, name) for name in weights}, weights, 0, fits)
    seen: Counter[str] = Counter()
    for total in range(1, 400):
        seen[stream.next().env] += 1
        assert all(abs(seen[name] - total * weight) < 2 for name, weight in weights.items())


def linear(step: int, start: float, end: float, steps: int = 20) -> float:
    return start + (end - start) * min(1.0, step / steps)


def changing(sizes: dict[str, int], *slopes: tuple[float, float]) -> PromptStream:
    """The weight of each environment changes from the first to the second number within 20 steps."""
    weights = {name: partial(linear, start=a, end=b) for name, (a, b) in zip(sizes, slopes, strict=True)}
    return PromptStream({name: Letters(size, name) for name, size in sizes.items()}, weights, 0, fits)


def test_weights_change_with_the_steps():
    """From all of a to all of b: 8 prompts per step, computed manually."""
    stream = changing({"a": 5, "b": 5}, (1, 0), (0, 1))
    steps = [Counter(stream.next(step).env for _ in range(8)) for step in range(25)]
    assert [steps[step]["b"] for step in (0, 5, 10, 15, 20, 24)] == [0, 2, 4, 6, 8, 8]
    assert all(counts == {"b": 8} for counts in steps[20:])
    assert abs(sum(counts["a"] for counts in steps) - sum(8 * (1 - min(1, step / 20)) for step in range(25))) < 1


@settings(max_examples=60, deadline=None)
@given(
    slopes=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=2, max_size=4),
    counts=st.lists(st.integers(0, 12), min_size=25, max_size=25),
)
def test_draws_follow_the_changing_weights(slopes: list[tuple[float, float]], counts: list[int]):
    """After each draw, every environment has its share of all draws so far, up to the number of environments."""
    names = [f"e{i}" for i in range(len(slopes))]
    slopes = [(a + 0.01, b + 0.01) if i == 0 else (a, b) for i, (a, b) in enumerate(slopes)]
    stream, due, seen = changing(dict.fromkeys(names, 7), *slopes), Counter[str](), Counter[str]()
    for step, count in enumerate(counts):
        now = {name: linear(step, *slope) for name, slope in zip(names, slopes, strict=True)}
        for _ in range(count):
            due.update({name: weight / sum(now.values()) for name, weight in now.items()})  # type: ignore[arg-type]
            chosen = stream.next(step).env
            seen[chosen] += 1
            assert now[chosen] > 0, "an environment with weight 0 is not drawn"
            assert all(abs(seen[name] - due[name]) < len(names) for name in names)


@settings(max_examples=60, deadline=None)
@given(before=st.integers(0, 80), back=st.integers(0, 10), slope=st.tuples(st.floats(0, 3), st.floats(0.1, 3)))
def test_changing_env_weights_resume_at_any_point(before: int, back: int, slope: tuple[float, float]):
    """After a resume, and after surplus prompts were returned, the draws equal those of an undisturbed stream."""

    def fresh() -> PromptStream:
        return changing({"a": 3, "b": 4, "c": 5}, (1, 1), slope, (2, 0))

    whole = fresh()
    wanted = [whole.next(number // 4) for number in range(before + 30)]
    stream = fresh()
    assert [stream.next(number // 4) for number in range(before)] == wanted[:before]
    place = stream.position()
    for number in range(before, before + back):
        stream.next(number // 4)
    stream.rewind(place)
    resumed = fresh()
    resumed.load_state(json.loads(json.dumps(stream.state())))
    assert [resumed.next(number // 4) for number in range(before, before + 30)] == wanted[before:]


@settings(max_examples=60, deadline=None)
@given(
    before=st.integers(0, 60),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    active=st.booleans(),
)
def test_cursor_continues_at_any_point(before: int, sizes: list[int], seed: int, active: bool):
    """State through JSON into a new stream: the next prompts are the same."""

    def fresh() -> PromptStream:
        environments = {f"e{i}": Letters(size + 1, f"e{i}", long=[0]) for i, size in enumerate(sizes)}
        weights = {f"e{i}": 1.0 + i for i in range(len(sizes))}
        buffer = Buffer(easy_threshold=0.5, easy_fraction=0.3) if active else None
        return PromptStream(environments, weights, seed, fits, buffer)

    def play(stream: PromptStream, count: int) -> list[Prompt]:
        prompts = []
        for _ in range(count):
            prompts.append(stream.next())
            stream.observe(make_group(prompts[-1], [1.0, float(prompts[-1].index % 2)]))
        return prompts

    whole = play(fresh(), before + 30)
    first = fresh()
    assert play(first, before) == whole[:before]
    second = fresh()
    second.load_state(json.loads(json.dumps(first.state())))
    assert play(second, 30) == whole[before:]


def test_prompts_that_do_not_fit_are_skipped_and_counted():
    stream = make_stream(size=10, long=[2, 5, 7])
    assert sorted(p.index for p in draw(stream, 7)) == [0, 1, 3, 4, 6, 8, 9]
    draw(stream, 7)
    assert stream.cursor.set_aside >= 3
    assert stream.cursor.positions["letters"] - stream.cursor.set_aside == 14


def test_unavailable_prompt_raises():
    """A run that ends with this error meets it again after a resume."""
    stream = make_stream(size=10)
    tasks = stream._environments["letters"].tasks("train")
    failing = TaskList(10, lambda index: tasks[index if len(made) < 3 else 99])
    made: list[Prompt] = []
    stream._environments["letters"].tasks = lambda split: failing  # type: ignore[method-assign]
    for _ in range(3):
        made.append(stream.next())
    for _ in range(2):
        with pytest.raises(IndexError):
            stream.next()
    assert stream.cursor.positions["letters"] == 3


def test_no_fitting_prompt_is_a_data_error():
    with pytest.raises(DataError, match=r"no prompt of letters fits.*orch\.seq_len"):
        make_stream(size=5, long=range(5)).next()


def test_one_fitting_prompt_is_enough():
    stream = make_stream(size=5, long=[0, 1, 2, 4])
    prompts = draw(stream, 40)
    assert {p.index for p in prompts} == {3}
    assert [p.epoch for p in prompts] == list(range(40))


def test_environment_without_prompts_is_refused():
    with pytest.raises(DataError, match="letters has no training prompts"):
        make_stream(size=0)


def test_resuming_with_other_environments_is_refused():
    state = make_stream().state()
    other = PromptStream({"b": Letters(3, "b")}, {"b": 1.0}, 0, fits)
    with pytest.raises(DataError, match="environments are"):
        other.load_state(state)


def test_buffer_draws_easy_and_hard_prompts_less_often():
    """Prompts 0–9 are solved, 10–19 hopeless, 20–29 in between. Each kind has its own share."""

    def mean(prompt: Prompt) -> float:
        return [1.0, 0.0, 0.5][prompt.index // 10]

    stream = make_stream(size=30, buffer=Buffer(0.9, 0.1, easy_fraction=0.2, hard_fraction=0.5))
    for prompt in draw(stream, 30):
        stream.observe(make_group(prompt, [mean(prompt)] * 2))
    assert stream.cursor.passed_over == 0, "nothing is known in the first epoch"
    drawn = Counter(prompt.index // 10 for prompt in draw(stream, 3400))
    assert drawn[2] == pytest.approx(3400 / 1.7, rel=0.05)
    assert drawn[0] / drawn[2] == pytest.approx(0.2, abs=0.03)
    assert drawn[1] / drawn[2] == pytest.approx(0.5, abs=0.03)
    assert stream.cursor.passed_over == pytest.approx(3400 * 1.3 / 1.7, rel=0.05)


def test_thresholds_are_strict():
    buffer = Buffer(easy_threshold=0.8, hard_threshold=0.2, easy_fraction=0.0, hard_fraction=0.25)
    assert [buffer.share(mean) for mean in (1.0, 0.8, 0.5, 0.2, 0.1)] == [0.0, 1.0, 1.0, 1.0, 0.25]
    assert not Buffer().active


def test_prompt_is_drawn_even_if_all_are_hopeless():
    """All solved and easy_fraction 0: training uses these prompts instead of searching forever."""
    stream = make_stream(size=6, buffer=Buffer(easy_threshold=0.5, easy_fraction=0.0))
    for prompt in draw(stream, 6):
        stream.observe(make_group(prompt, [1.0, 1.0]))
    assert len(draw(stream, 3)) == 3


def test_prompt_history_uses_the_last_group_and_ignores_failed_rewards():
    stream = make_stream(size=1, buffer=Buffer(easy_threshold=0.5))
    prompt = stream.next()
    for rewards in ([1.0, 1.0], [0.0, 1.0, None], [None, None]):
        stream.observe(make_group(prompt, rewards))
    assert stream.cursor.means == {"letters/0": 0.5}
    plain = make_stream(size=1)
    plain.observe(make_group(plain.next(), [1.0]))
    assert plain.cursor.means == {}, "without a buffer nothing is stored"


def test_prompts_with_equal_rewards_are_drawn_less_often_each_time():
    """Half as often after one such group, a sixteenth after four and more. A useful group restores the prompt."""
    stream = make_stream(size=200, buffer=Buffer(zero_variance_fraction=0.5))
    hopeless = {prompt.index for prompt in draw(stream, 200) if prompt.index % 2}
    counts = []
    for _ in range(6):
        for index in range(200):
            rewards = [0.0, 0.0] if index in hopeless else [0.0, 1.0]
            stream.observe(make_group(Prompt("letters", index, []), rewards))
        epoch = stream.cursor.positions["letters"] // 200
        counts.append(0)
        while stream.cursor.positions["letters"] // 200 == epoch:
            counts[-1] += stream.next().index in hopeless
    expected = [50, 25, 12.5, 6.25, 6.25, 6.25]
    assert all(abs(count - mean) < 3 * mean**0.5 + 2 for count, mean in zip(counts, expected, strict=True)), counts
    assert stream.passed_over == stream.cursor.passed_over > 0 and make_stream().passed_over is None
    for index in hopeless:
        stream.observe(make_group(Prompt("letters", index, []), [0.0, 1.0]))
    assert stream.cursor.zero_variance == {}


def test_history_of_prompts_survives_a_resume_and_older_checkpoints():
    buffer = Buffer(zero_variance_fraction=0.3)
    stream, other = make_stream(20, buffer=buffer), make_stream(20, buffer=buffer)
    for prompt in draw(stream, 30):
        stream.observe(make_group(prompt, [1.0, 1.0]))
    state = json.loads(json.dumps(stream.state()))
    other.load_state(state)
    assert draw(other, 40) == draw(stream, 40) and other.passed_over == stream.passed_over
    del state["zero_variance"]
    other.load_state(state)
    assert other.cursor.zero_variance == {}
