"""Pages of unusual runs in a real browser: empty, one step, crashed, large, full of markup."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shoal.runs.run_dir import RunDir, rollouts_path
from shoal.watch.console import PlainConsole
from shoal.watch.report.page import write_report
from support.browser import Watched, chromium, until

from .synthetic_run import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>bold</b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@contextmanager
def watching(*folders: Path) -> Iterator[tuple[str, int]]:
    """`shoal watch` in a separate process; yields its address and process id. It must end without an error."""
    command = [sys.executable, "-m", "shoal", "watch", *map(str, folders), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found is not None
        yield found.group(), process.pid
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@contextmanager
def opened(browser: Browser, address: str | Path, **options: Any) -> Iterator[Page]:
    watched = Watched(browser, **options)
    yield watched.open(address)
    watched.close()


def visit_everything(page: Page) -> None:
    for key in "12345":
        page.keyboard.press(key)
        page.wait_for_timeout(60)


def test_empty(browser: Browser, tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", "", {}) as run_dir, opened(browser, write_report(run_dir.path)) as page:
        assert page.inner_text("#state") == "running" and "No step has been recorded yet" in page.inner_text("#charts")
        visit_everything(page)
        page.keyboard.press("2")
        assert "no rollouts yet" in page.inner_text("#group")


def test_one_step(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, groups=1, size=2)
    with opened(browser, write_report(run)) as page:
        visit_everything(page)
        assert page.locator("#charts canvas").count() > 5
        page.keyboard.press("2")
        page.wait_for_selector("#group .rollout")
        assert page.locator("#group .rollout").count() == 2


def test_header_mismatch_noise_and_time_split(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record, (rollout_s, train_s) in zip(records, [(9.0, 1.0)] * 3 + [(0.0, 10.0)], strict=True):
        phases = dict.fromkeys((name for name in record if name.startswith("time/")), 0.0)
        record |= {**phases, "time/step": 10.0, "time/rollout": rollout_s, "time/train": train_s}
        record |= {"mismatch/k3": 1e-13 if record["step"] < 4 else -2e-14}
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    machine = {"device": "NVIDIA H200", "torch": "2.13.0"}
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"step": 0, "kind": "ready", "message": "", "data": {"machine": machine}}) + "\n")
    with opened(browser, write_report(run)) as page:
        header = page.inner_text("#about")
        for text in ("tiny-qwen3", "reverse-text", "grpo", "1e-05", "NVIDIA H200", "torch 2.13.0", "Start"):
            assert text in header, text
        charts = "[...document.querySelectorAll('figure')].map((each) => each.getAttribute('aria-label'))"
        labels = {label.split(":")[0]: label for label in page.evaluate(charts)}
        assert labels["Mismatch"] == "Mismatch: k3 0"
        drawn = (
            "shoal.prepareChart(shoal.CHARTS.find((one) => one.title === 'Mismatch'), shoal.page.runs).lines[0].values"
        )
        assert page.evaluate(drawn) == [0, 0, 0, 0]
        assert "rollout 68%" in labels["Time split"] and "train 33%" in labels["Time split"], "27 s and 13 s of 40 s"


@pytest.mark.parametrize("width", [360, 800, 1375])
def test_no_caption_is_cut_off(browser: Browser, tmp_path: Path, width: int) -> None:
    captions = "[...document.querySelectorAll('.tile *, figcaption *')]"
    cut = f"{captions}.filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map((e) => e.textContent)"
    with opened(browser, write_report(make_run(tmp_path / "run", steps=4)), width=width) as page:
        page.wait_for_selector("figure canvas")
        assert page.locator(".tile").count() > 4
        assert page.evaluate(cut) == []


def test_evaluation_prompts_are_counted_apart_from_groups(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, groups=2, size=4)
    lines = rollouts_path(run, 2).read_text().splitlines()[:3]
    held_out = [{**json.loads(line), "group": f"eval:reverse-text/{i}/0/0"} for i, line in enumerate(lines)]
    (run / "rollouts" / "eval_000002.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
    with opened(browser, write_report(run)) as page:
        page.keyboard.press("2")
        until(
            page,
            "document.querySelector('#count').textContent === '2 groups, 8 rollouts; 3 evaluation prompts, 3 rollouts'",
        )


def test_live_page_shows_what_a_run_does_before_and_after_its_first_step(browser: Browser, tmp_path: Path) -> None:
    console = PlainConsole(io.StringIO())
    shown = "document.querySelector('#progress').innerText"
    with RunDir.create(tmp_path / "run", "", {}) as run_dir, watching(run_dir.path) as (address, _):
        with console.progress("loading the model", quiet=True):
            run_dir.write_progress(console.describe_progress())
            with opened(browser, address) as page:
                assert "Loading the model" in page.inner_text("#progress")
        console.begin("training", 40)
        with opened(browser, address) as page, console.progress("rollouts of step 1", 16, quiet=True) as bar:
            bar.advance(4)
            time.sleep(0.6)  # a quarter took 0.6 s: two more seconds
            console.waiting("rollouts of step 1: waiting for 12 more useful groups; 60% of groups have equal rewards")
            run_dir.write_progress(console.describe_progress())
            until(page, f"{shown}.includes('waiting for 12 more useful groups')")
            text = page.inner_text("#progress")
            assert "4 of 16" in text and "about 2 s left" in text and "step 0 of 40" in text
            assert "loading the model" in page.inner_text("#progress .done")
            console.step(1, {"reward/mean": 0.5})
            run_dir.append_metrics(1, {"reward/mean": 0.5})
            run_dir.write_progress(console.describe_progress())
            until(page, f"{shown}.includes('step 1 of 40')")
            assert page.locator("#progress .done").count() == 0 and page.inner_text("#progress").count("left") == 2
            run_dir.write_status("finished", step=1, reason="", resumable=False)
            until(page, "document.querySelector('#progress').hidden")
        run_dir.write_status("running", step=1, reason="", resumable=False)
        with opened(browser, write_report(run_dir.path)) as page:
            assert page.is_hidden("#progress"), "a file does not change"
    console.close()


def test_healthy_range_is_drawn(browser: Browser, tmp_path: Path) -> None:
    """Mismatch up to 0.02: the background is tinted below the limit of the glossary, 0.01, and white above."""
    run = make_run(tmp_path / "run", steps=4)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = "".join(json.dumps({**record, "mismatch/k3": 0.02}) + "\n" for record in records)
    (run / "metrics.jsonl").write_text(metrics)
    opacity = """() => {
        const canvas = document.querySelector('[data-chart="Mismatch"] canvas'), { width, height } = canvas;
        const column = canvas.getContext("2d").getImageData(width / 2 + 3, 0, 1, height).data;
        return [0.28, 0.72].map((share) => column[4 * Math.round(share * height) + 3]);
    }"""
    with opened(browser, write_report(run)) as page:
        page.wait_for_selector('[data-chart="Mismatch"] canvas')
        healthy = "(name) => shoal.healthyRange(name, shoal.page.runs)"
        assert page.evaluate(healthy, "mismatch/k3")["high"] == 0.01
        assert page.evaluate(healthy, "policy/ratio_mean") is None, "a range in words"
        assert page.evaluate(healthy, "policy/entropy") is None, "relative to the first five steps"
        assert "healthy below 0.01" in page.inner_text("figure:has([data-chart='Mismatch'])")
        above, below = page.evaluate(opacity)
        assert above == 0 and below > 0, "at about 0.015 and 0.005"
    with opened(browser, write_report(make_run(tmp_path / "longer", steps=6))) as page:
        first = page.evaluate("shoal.page.runs[0].series['policy/entropy'].slice(0, 5)")
        assert page.evaluate(healthy, "policy/entropy")["low"] == pytest.approx(0.1 * sum(first) / 5)


def test_groups_are_sorted_by_reward_and_spread(browser: Browser, tmp_path: Path) -> None:
    rewards = {"a": [0.0, 0.2], "b": [0.9, 1.0], "c": [None, None], "d": [0.0, 1.0]}
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        run_dir.append_metrics(1, {"reward/mean": 0.5})
        run_dir.write_rollouts(
            1, [{"group": name, "prompt_id": name, "reward": value} for name, all_ in rewards.items() for value in all_]
        )
    shown = (
        "[...document.querySelectorAll('#groups .entry-head span:first-child')].map((each) => each.innerText).join('')"
    )
    with opened(browser, write_report(run_dir.path)) as page:
        page.keyboard.press("2")
        for order, expected in (("", "abcd"), ("reward", "bdac"), ("spread", "dabc"), ("", "abcd")):
            page.select_option("#sort", order)
            until(page, f"{shown} === '{expected}'")


def make_conversations(path: Path, text: str = "") -> Path:
    """Two steps in which one prompt is answered with a tool call. `text` is used everywhere text is possible."""
    system, user = {"role": "system", "content": f"Use add.{text}"}, {"role": "user", "content": f"1 + 2?{text}"}
    call = {"name": f"add{text}", "arguments": f'{{"a": 1, "b": 2}}{text}'}
    with RunDir.create(path, "", {}) as run_dir:
        for step, answer in ((1, "I do not know."), (2, "It is 3.")):
            run_dir.append_metrics(step, {"reward/mean": 0.5 * step})
            messages = [
                {"role": "assistant", "content": "call", "tool_calls": [call], "reasoning": f"first the sum{text}"},
                {"role": f"tool{text}", "name": f"add{text}", "content": f"3{text}"},
                {"role": "assistant", "content": answer},
            ]
            pieces = [
                "first the",
                " sum",
                "call",
                " add",
                "<end>",
                "<tool>",
                "3",
                "</tool>",
                *re.findall(" ?[^ ]+", answer),
            ]
            line = {
                "rollout_id": "a", "group": f"sums/0/{step}/0", "prompt_id": "sums/0", "env": "sums", "status": "ok",
                "prompt": "1 + 2?", "completion": "all", "prompt_messages": [system, user], "messages": messages,
                "turn_rewards": [0.25, 0.75], "token_advantages": [[-1.0], [0.5] * (len(pieces) - 8)],
                "advantage": 0.1, "turn_tokens": [5, len(pieces) - 8],
                "token_texts": pieces, "parts": {f"sum{text}": 1.0},
                "loss_mask": [1, 1, 1, 1, 1, 0, 0, 0] + [1] * (len(pieces) - 8),
                "sampler_logprobs": [-1.0] * len(pieces),
            }  # fmt: skip
            plain = {key: value for key, value in line.items() if "messages" not in key and "turn_" not in key}
            run_dir.write_rollouts(step, [{**line, "reward": 0.5 * step}, {**plain, "reward": 0.0}])
    return path


def test_conversation_is_shown_as_turns_with_tool_calls(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, write_report(make_conversations(tmp_path / "run"))) as page:
        page.keyboard.press("2")
        page.wait_for_selector("#group .rollout")
        assert [turn.split("\n")[0] for turn in page.locator("#group .prompt .turn").all_inner_texts()] == [
            "system",
            "user",
        ]
        turns = page.locator("#group .rollout >> nth=0 >> .turn")
        roles = page.locator("#group .rollout >> nth=0 >> .role").all_inner_texts()
        assert roles == ["assistantreward 0.25", "tool · add", "assistantreward 0.75"], "with the rewards of the turns"
        tokens = [turns.nth(i).locator(".token").all_text_contents() for i in range(3)]
        first = ["first the", " sum", "call", " add", "<end>"]
        assert tokens == [first, [], ["It", " is", " 3."]], "without those of the chat template"
        assert '{"a": 1, "b": 2}' in turns.nth(0).locator(".call").inner_text()
        assert "first the sum" not in turns.nth(0).inner_text() and "3" in turns.nth(1).inner_text()
        turns.nth(0).locator("details.reasoning summary").click()
        assert turns.nth(0).locator("details.reasoning").inner_text().endswith("first the sum"), "its tokens"
        assert page.locator("#group .rollout >> nth=1 >> .turn").count() == 0
        page.click('[data-tint="advantage"]')
        for turn, token, advantage in ((0, 2, "-1"), (2, 8, "+0.5")):
            turns.nth(turn).locator(f"[data-i='{token}']").hover()
            assert page.inner_text("#tip").replace("\n", " ").endswith(f"advantage {advantage}"), "its own"
        page.click('[data-view="tokens"]')
        assert page.locator("#group .rollout >> nth=0 >> .token").count() == 11
        assert page.locator("#group .rollout .turn").count() == 0


def test_first_and_last_answer_to_a_prompt_are_compared(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, write_report(make_conversations(tmp_path / "run"))) as page:
        page.keyboard.press("2")
        page.wait_for_selector("#group .rollout")
        page.keyboard.press("x")
        page.wait_for_selector("#group .columns")
        columns = page.locator("#group .column")
        first, last = columns.nth(0).inner_text(), columns.nth(1).inner_text()
        assert "step 1" in first and "I do not know." in first and "step 2" in last and "It is 3." in last
        assert columns.nth(1).locator(".reward").all_inner_texts() == ["1", "0"], "the best first"
        page.keyboard.press("x")
        assert page.locator("#group .columns").count() == 0 and page.locator("#group .timeline").count() == 1
    run = make_run(tmp_path / "once", steps=1)
    with opened(browser, write_report(run)) as page:
        page.keyboard.press("2")
        page.wait_for_selector("#group .rollout")
        page.click("#compare")
        page.wait_for_selector("#group .notice")


def test_list_of_runs_links_to_their_pages(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "first", steps=2)
    make_run(tmp_path / "second", steps=3)
    with RunDir.create(tmp_path / "third", "", {}) as run_dir, watching(tmp_path) as (address, _):
        run_dir.write_status("failed", step=1, reason=MARKUP, resumable=False)
        watched = Watched(browser)
        page = watched.page
        page.goto(address)
        page.wait_for_selector("#list .run >> nth=2")
        assert MARKUP in page.inner_text("#list") and page.is_disabled("#compare") and "owned" not in page.title()
        page.click("#list a:text-is('a/first')")
        page.wait_for_selector("#charts canvas")
        page.keyboard.press("2")
        page.wait_for_selector("#group .rollout")
        page.click("#all-runs")
        for name in ("a/first", "second"):
            page.check(f"#list input[aria-label='Select {name}']")
        page.click("#compare")
        page.wait_for_selector("#charts canvas")
        assert page.inner_text("#state") == "2 runs"
        page.keyboard.press("2")
        page.select_option("#run", "1")
        until(page, "document.querySelector('#step').value === '3'")
        watched.close()


def test_crashed(browser: Browser, tmp_path: Path) -> None:
    """A run that was killed while it wrote: partial lines, no configuration, no lock."""
    run = make_run(tmp_path / "run", steps=3)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "running"}))
    for name in ("metrics.jsonl", "events.jsonl", "journal.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 4, "rew')
    with rollouts_path(run, 3).open("a") as file:
        file.write('{"group": "torn')
    (run / "config.yaml").unlink()
    with opened(browser, write_report(run)) as page:
        visit_everything(page)
        assert page.inner_text("#state") == "killed" and "killed" in page.inner_text("#findings")
        assert page.evaluate("shoal.page.runs[0].steps") == [1, 2, 3]


def test_markup_is_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", f"# {MARKUP}\n", {}) as run_dir:
        run_dir.append_metrics(1, {"reward/mean": 0.5})
        run_dir.append_event({"step": 1, "kind": MARKUP, "message": MARKUP, "time": 0.0, "level": "warning"})
        texts = ("group", "prompt_id", "env", "prompt", "completion", "status", "error")
        row = {"rollout_id": "a", **dict.fromkeys(texts, MARKUP), "reward": 1.0, "parts": {MARKUP: 1.0}}
        run_dir.write_rollouts(1, [row, {**row, "token_texts": [MARKUP, " end"], "loss_mask": [1, 1]}])
        run_dir.write_status("failed", step=1, reason=MARKUP, resumable=False)
    with opened(browser, write_report(run_dir.path)) as page:
        visit_everything(page)
        page.keyboard.press("2")
        page.wait_for_selector("#group .rollout")
        for place in (
            "#group .prompt pre",
            "#group .rollout >> nth=0 >> .completion",
            "#group .rollout >> nth=1 >> .completion",
        ):
            assert MARKUP in page.inner_text(place)
        assert "owned" not in page.title() and page.locator("img, #group b b, main script").count() == 0
    with opened(browser, write_report(make_conversations(tmp_path / "turns", MARKUP))) as page:
        page.keyboard.press("2")
        page.wait_for_selector("#group .turn")
        page.eval_on_selector_all("details.reasoning", "all => all.forEach(each => (each.open = true))")
        # two prompts, two parts, reasoning, call, arguments, role, name and result
        assert page.inner_text("#group").count(MARKUP) == 10
        page.keyboard.press("x")
        page.wait_for_selector("#group .columns")
        assert "owned" not in page.title() and page.locator("img, #group b b, main script").count() == 0


def test_ten_thousand_rollouts(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=40, groups=32, size=8)
    path = write_report(run)
    assert path.stat().st_size <= 20_000_000
    with opened(browser, path) as page:
        assert page.evaluate("shoal.page.runs[0].left_out.groups") == 1280
        page.keyboard.press("2")
        page.wait_for_selector("#group .rollout")
        page.check("#everywhere")
        until(page, "document.querySelector('#count').textContent.startsWith('1280 groups, 10240 rollouts')")
        page.select_option("#status", "dropped")
        until(page, "document.querySelector('#count').textContent.startsWith('13 groups')")
        page.fill("#text", "otter")
        until(page, "!document.querySelector('#count').textContent.startsWith('13 groups')")


def make_large_run(path: Path, steps: int = 500, groups: int = 32, size: int = 16) -> Path:
    """The documented number of steps and rollouts. The files of five steps are linked for all steps."""
    make_run(path, steps=5, groups=groups, size=size)
    metrics = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    with (path / "metrics.jsonl").open("a") as file:
        for step in range(6, steps + 1):
            os.link(rollouts_path(path, step % 5 + 1), rollouts_path(path, step))
            file.write(json.dumps({**metrics, "step": step}) + "\n")
    return path


def test_large_run_opens_fast_with_little_memory(browser: Browser, tmp_path: Path) -> None:
    """500 steps with 512 rollouts: first chart within a second, server memory below 300 MiB."""
    run = make_large_run(tmp_path / "run")
    with watching(run) as (address, pid):
        first_paint_s = []
        for _ in range(5):  # best of five: the machine may be busy
            started = time.monotonic()
            with opened(browser, address) as page:
                page.wait_for_selector("#charts canvas")
                first_paint_s.append(time.monotonic() - started)
        assert min(first_paint_s) < 1.0, first_paint_s
        with opened(browser, address) as page:
            page.keyboard.press("2")
            page.wait_for_selector("#group .rollout")
            assert page.locator("#groups .entry").count() == 32 and page.locator("#group .rollout").count() == 16
            page.check("#everywhere")
            page.fill("#text", "heron")
            page.wait_for_selector("#go-on:not([hidden])")
            page.click("#go-on")
            page.keyboard.press("Escape")
            for _ in range(5):
                page.click("#previous")
                page.wait_for_timeout(100)
        status = Path(f"/proc/{pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert peak is not None and int(peak.group(1)) < 300 * 1024
