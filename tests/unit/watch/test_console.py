"""Both consoles, also on streams that cannot be written to."""

from __future__ import annotations

import io
import time

import pytest

from shoal.watch.console import Pace, PlainConsole, make_console
from shoal.watch.live_console import LiveConsole
from support.metrics import METRICS


def test_plain_console_prints_one_line_per_step() -> None:
    stream = io.StringIO()
    console = make_console(stream, every=2)
    assert isinstance(console, PlainConsole)
    console.begin("tiny on reverse-text", 5)
    for step in range(1, 6):
        console.step(step, METRICS)
    console.warn("odd \x1b[2J text")
    console.closing(["reward .3 → .8"])
    console.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == ["step 1/5", "step 2/5", "step 4/5", "step 5/5"]
    assert lines[5:] == ["warning: odd  text", "reward .3 → .8"]


def test_heartbeat_shows_the_current_operation() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream, heartbeat_s=0.05)
    console.begin("x", 10)
    console.step(3, {})
    console.waiting("the reward of 4 rollouts")
    deadline = time.monotonic() + 5
    while "now: the reward" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    console.close()
    assert "… step 3/10 done; now: the reward of 4 rollouts" in stream.getvalue()


class Closed(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole])
def test_closed_stream_only_disables_the_console(kind: type) -> None:
    console = kind(Closed())
    console.begin("x", 2)
    console.step(1, METRICS)
    console.warn("still here")
    with console.progress("loading", 10) as bar:
        bar.advance(10)
    console.closing(["done"])
    console.close()


def test_ascii_stream_replaces_characters() -> None:
    raw = io.BytesIO()
    console = PlainConsole(io.TextIOWrapper(raw, encoding="ascii"))
    console.step(1, METRICS)
    console.close()
    assert b"reward 0.420 ?.31" in raw.getvalue()


def test_progress_lines() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    with console.progress("loading weights", 4) as bar:
        for _ in range(4):
            bar.advance()
    console.close()
    assert stream.getvalue().splitlines() == ["loading weights", "loading weights: done in 0s"]


def test_live_block_shows_the_metrics() -> None:
    stream = io.StringIO()
    console = LiveConsole(stream)
    console.begin("tiny [bold]on[/bold] reverse-text", 200)
    for step, reward in enumerate([0.1, 0.2, 0.42], start=1):
        console.step(step, {**METRICS, "reward/mean": reward, "eval/reverse-text/mean": reward})
    console.waiting("rollouts")
    console.note("a note [red]as it is[/red] \x1b[31m")
    console._rich.width = 100
    console._rich.print(console.block())
    console.closing(["all done"])
    console.close()
    text = stream.getvalue()
    for words in (
        "3/200",
        "▁▃█",
        "mixed 75%",
        "zero-variance",
        "k3 1.2e-3",
        "lr 1.0e-5",
        "rollout 41k tok/s",
        "training 52k tok/s",
        "masked 12.0%",
        "staleness mean .50, max 1",
        "████████████",
        "gen 62%",
        "0.100 → 0.420",
        "host",
    ):
        assert words in text, words
    assert "a note [red]as it is[/red]" in text
    assert "[bold]on[/bold]" in text
    assert text.rstrip().endswith("all done")


def test_pace_estimates_time_left() -> None:
    clock = iter([0.0, 0.0, 10.0, 20.0])
    pace = Pace(lambda: next(clock))
    pace.start(5)
    assert pace.left(10) is None
    pace.step(6)
    assert pace.left(10) == 40.0
    pace.step(7)
    assert pace.left(10) == 30.0


def test_quiet_bar_appears_only_in_the_heartbeat() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream, heartbeat_s=0.05)
    console.activity = lambda: "3 to prefill, 13 decoding"
    with console.progress("rollouts of step 4", 16, quiet=True) as bar:
        bar.advance(5)
        deadline = time.monotonic() + 5
        while "now: rollouts" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    console.close()
    lines = set(stream.getvalue().splitlines())
    assert lines == {"… working; now: rollouts of step 4 (5/16, 3 to prefill, 13 decoding)"}


def test_live_block_shows_the_bar_of_the_current_operation() -> None:
    stream = io.StringIO()
    console = LiveConsole(stream)
    console._rich.width = 110
    console.begin("tiny", 10)
    console.activity = lambda: "0 to prefill, 6 decoding"
    with console.progress("evaluation after step 5", 8, quiet=True) as bar:
        bar.advance(6)
        console._rich.print(console.block())
    console._rich.print(console.block())
    console.close()
    text = stream.getvalue()
    assert "━" * 24 + " 6/8  evaluation after step 5 (0 to prefill, 6 decoding" in text
    assert console._bar is None


def test_final_block_has_no_current_operation() -> None:
    stream = io.StringIO()
    console = LiveConsole(stream)
    console.begin("tiny", 2)
    console.step(2, METRICS)
    console.waiting("writing the report")
    assert "now" in dict(console._lines({}))
    console.closing(["finished after step 2"])
    assert "now" not in dict(console._lines({}))
    console.close()
    assert stream.getvalue().rstrip().endswith("finished after step 2")


def test_previous_operation_is_restored() -> None:
    console = PlainConsole(io.StringIO())
    assert console._describe_operation() == "starting"
    with console.progress("loading tiny"):
        assert console._describe_operation() == "loading tiny"
    assert console._describe_operation() == "starting"
    console.close()


def test_block_shows_the_time_of_the_current_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the time since the last step: two seconds of training after a minute of rollouts show as two seconds."""
    console = LiveConsole(io.StringIO())
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    console.waiting("training of step 1")
    monkeypatch.setattr(time, "monotonic", lambda: now + 62)
    assert console._now().plain == "training of step 1 (2s)"
    console.close()


def test_error_removes_the_bar() -> None:
    console = PlainConsole(io.StringIO())
    with pytest.raises(RuntimeError), console.progress("rollouts", 4, quiet=True):
        raise RuntimeError
    assert console._bar is None
    console.close()
