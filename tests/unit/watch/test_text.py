"""Console text: short numbers, text without control characters, and the step line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.watch.live_console import host_memory
from shoal.watch.text import duration, one_line, sanitise, short_number, size, sparkline, step_line, time_shares
from support.metrics import METRICS


def test_step_line_with_all_metrics() -> None:
    assert step_line(12, 200, METRICS, left_s=4320) == (
        "step 12/200  reward 0.420 ±.31 (acc .40 fmt .98)  used 96/128, 4 zero-variance groups  len 612 trunc 3%  "
        "k3 1.2e-3 ent .31 gn .80  masked 12%  stale 1  41k tok/s  gen 62% rew 3% train 28% sync 2% idle 5%  eta 1h12"
    )


def test_checkpoint_time_is_part_of_the_step() -> None:
    line = step_line(11, 30, {"time/step": 2.0, "time/rollout": 1.0, "time/save": 0.5, "time/idle": 0.5})
    assert line == "step 11/30  gen 50% save 25% idle 25%"


def test_losses_of_runs_that_do_not_sample() -> None:
    assert step_line(1, 2, {"sft/loss": 2.5}) == "step 1/2  loss 2.500"
    preferences = {"dpo/loss": 0.5, "dpo/accuracy": 0.75, "dpo/margin": 1.25, "optim/grad_norm": 2.0}
    assert step_line(1, 2, preferences) == "step 1/2  loss 0.500  acc .75 margin 1.25  gn 2"


def test_singular() -> None:
    assert step_line(1, 2, {"batch/used": 16, "batch/rollouts": 32, "group/flat": 1}).endswith(
        "used 16/32, 1 zero-variance group"
    )


def test_metrics_that_were_not_measured_are_left_out() -> None:
    assert step_line(1, 2, {}) == "step 1/2"
    assert step_line(2, 2, {"eval/a/mean": 0.5}, left_s=3) == "step 2/2  eval a 0.500"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.31, ".31"),
        (-0.5, "-.50"),
        (1.234, "1.23"),
        (612.4, "612"),
        (9999.0, "9999"),
        (41_000, "41k"),
        (1.2e6, "1.2M"),
        (1.2e-3, "1.2e-3"),
        (3e-12, "3.0e-12"),
        (float("nan"), "nan"),
        (2.5e9, "2.5G"),
    ],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (185, "3m05"), (4320, "1h12"), (183_600, "2d03h"), (float("inf"), "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline_and_size() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, float("nan"), 1]) == "▁ ▁"
    assert sparkline([]) == ""
    assert sparkline(range(100), width=3) == "▁▅█" or len(sparkline(range(100), width=3)) == 3
    assert (size(512), size(3 * 1024**2), size(1.5 * 1024**3)) == ("512 B", "3 MiB", "1.5 GiB")
    assert host_memory().endswith(" host")


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("a\x07b\x00c\rd", "a\ufffdb\ufffdc\ufffdd"),
        ("right\u202eleft", "right\ufffdleft"),
        ("\x9b31m", "\ufffd31m"),
        ("lone \ud800", "lone \ufffd"),
        ("keeps\nlines\tand né 🐟", "keeps\nlines\tand né 🐟"),
    ],
)
def test_sanitise(raw: str, safe: str) -> None:
    assert sanitise(raw) == safe


@given(st.text())
def test_sanitised_text_has_no_control_characters(text: str) -> None:
    safe = sanitise(text + "\x1b" + text)
    assert not [c for c in safe if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160]
    assert sanitise(safe) == safe


def test_one_line_is_short() -> None:
    assert one_line("a\n b\t c") == "a b c"
    assert len(one_line("x" * 500)) == 200


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ({"rollout": 2.0, "train": 1.9}, {"gen": 0.51, "train": 0.49}),  # overlapping: parts of their sum
        ({"rollout": 1.0, "train": 1.0, "idle": 0.0}, {"gen": 0.5, "train": 0.5}),
        ({"rollout": 1.092, "reward": 0.034, "train": 0.592, "idle": 0.292}, None),  # 55 + 2 + 30 + 15 if each rounds
        ({"rollout": 0.666, "train": 0.666, "idle": 0.666}, {"gen": 0.34, "train": 0.33, "idle": 0.33}),
    ],
)
def test_time_shares_add_up_to_at_most_100_percent(seconds: dict[str, float], shown: dict[str, float] | None):
    shares = time_shares({"time/step": 2.0, **{f"time/{name}": value for name, value in seconds.items()}})
    assert sum(round(100 * share) for _, share in shares) <= 100
    if shown is not None:
        assert dict(shares) == shown
