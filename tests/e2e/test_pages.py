"""The report and the live page of a real run in a real browser: curves, rollouts, filters, one prompt, themes, keys."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.browser import Watched, chromium, until

from .helpers.processes import WarmPython, environment
from .helpers.runs import SUM_ARGS, Run, base_config

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STEPS = 6
# Few prompts, so that each is drawn repeatedly, and reward parts to show.
TRAIN = {"max_steps": STEPS, "save_steps": 3}
ORCH = {
    "env": [{"id": "my_code:TwoWords", "name": "words"}, {"id": "arithmetic", "args": {**SUM_ARGS, "num_train": 4}}],
    "seq_len": 128, "batch_size": 32, "groups": {"uniform": "keep"}, "advantage": {"mean": "batch", "std": "batch"},
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def run(browser: Browser, warm: WarmPython, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run. It is made only if there is a browser."""
    config = base_config(model)
    config["train"] |= TRAIN
    config["orch"] |= ORCH
    run = Run(tmp_path_factory.mktemp("pages"), warm).write(config)
    command = run.grpo()
    assert command.wait() == 0, command.text()
    return run


@contextmanager
def opened(browser: Browser, address: str | Path, **options: Any) -> Iterator[Page]:
    watched = Watched(browser, **options)
    yield watched.open(address)
    watched.close()


@contextmanager
def watching(*arguments: str, cwd: Path) -> Iterator[str]:
    """Run `shoal watch …` in a separate process; yields its address."""
    command = [sys.executable, "-m", "shoal", "watch", *arguments, "--port", "0"]
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found is not None, line
        yield found.group()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def chart(page: Page, title: str) -> Any:
    return page.locator(f'[data-chart="{title}"]')


def hover(page: Page, title: str, share: float) -> str:
    """Move the mouse over a curve; returns the text of the tooltip."""
    box = chart(page, title).locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    page.wait_for_selector("#tip:not([hidden])")
    return page.inner_text("#tip")


def choose_everything(page: Page) -> None:
    page.click("#tab-rollouts")
    page.wait_for_selector("#groups .entry.chosen")


def test_curves_show_hover_smoothing_and_links_to_rollouts(browser: Browser, run: Run) -> None:
    rewards = {line["step"]: line["reward/mean"] for line in run.steps()}
    with opened(browser, run.path / "report.html") as page:
        titles = page.eval_on_selector_all("#charts [data-chart]", "all => all.map(one => one.dataset.chart)")
        expected = {
            "Reward", "Groups", "Reward parts", "Reward by environment", "Entropy", "Mismatch", "Completion length",
            "Truncated", "Gradient norm", "Time split", "Throughput",
        }  # fmt: skip
        assert expected <= set(titles)
        assert "smoothed" not in hover(page, "Reward", 0.5), "a short run is drawn without smoothing"
        page.fill("#smoothing", "0.6")
        told = hover(page, "Reward", 0.999)
        assert f"Step {STEPS}" in told
        shown = float(re.search(r"mean\s*([\d.]+)", told).group(1))  # type: ignore[union-attr]
        assert shown == pytest.approx(rewards[STEPS], abs=6e-3) and "smoothed" in told
        page.fill("#smoothing", "0")
        assert "smoothed" not in hover(page, "Reward", 0.5)
        box = chart(page, "Reward").locator(".u-over").bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + 1, box["y"] + 20)
        page.wait_for_selector("#groups .entry.chosen")
        assert page.is_visible("#view-rollouts") and page.input_value("#step") == "1"
        assert "#rollouts?step=1" in page.url


def test_every_rollout_of_a_group_side_by_side_with_parts_and_tints(browser: Browser, run: Run) -> None:
    with opened(browser, run.path / "report.html") as page:
        choose_everything(page)
        page.select_option("#env", "words")
        until(page, "document.querySelector('#group .parts') !== null")
        group = page.inner_text("#group .prompt-head b")
        mine = [r for r in run.rollouts() if r["prompt_id"] == group and r["step"] == STEPS]
        assert page.locator("#group .rollout").count() == len(mine) == 4
        first = page.inner_text("#group .rollout >> nth=0")
        assert "first" in first and "second" in first and "adv" in first
        tokens = page.locator("#group .rollout >> nth=0 >> .token")
        roles = [message["role"] for message in mine[0]["messages"]]
        assert page.locator("#group .rollout >> nth=0 >> .role").all_inner_texts() == roles and "user" in roles
        assert tokens.count() == sum(mine[0]["turn_tokens"]), "the turns of the policy"
        page.click('[data-view="tokens"]')
        assert tokens.count() == len(mine[0]["token_ids"])
        colored = "all => all.filter(one => one.style.background).length"
        seen = {}
        for name in ("logprob", "ratio", "advantage", "none"):
            page.click(f'[data-tint="{name}"]')
            assert page.get_attribute(f'[data-tint="{name}"]', "aria-pressed") == "true"
            seen[name] = page.eval_on_selector_all("#group .token:not(.unmasked)", colored)
        sampled = sum(sum(r["loss_mask"]) for r in mine)
        assert seen["none"] == seen["ratio"] == 0, "sampler and trainer agree, so no ratio is highlighted"
        assert 0 < seen["logprob"] <= sampled
        largest = max(abs(r["advantage"]) for r in mine)
        assert seen["advantage"] == sum(sum(r["loss_mask"]) for r in mine if abs(r["advantage"]) >= 0.02 * largest > 0)
        tokens.first.hover()
        assert "sampler log-prob" in page.inner_text("#tip")


def test_filters_find_what_the_files_hold(browser: Browser, run: Run) -> None:
    rollouts = run.rollouts()
    groups: dict[str, list[dict[str, Any]]] = {}
    for rollout in rollouts:
        groups.setdefault(f"{rollout['step']} {rollout['group']}", []).append(rollout)

    def wanted(test: Callable[[dict[str, Any]], bool]) -> int:
        return sum(any(test(r) for r in group) for group in groups.values())

    word = "kelp"
    with opened(browser, run.path / "report.html") as page:
        choose_everything(page)
        page.check("#everywhere")
        counted(page, len(groups))
        page.select_option("#env", "arithmetic")
        counted(page, wanted(lambda r: r["env"] == "arithmetic"))
        page.select_option("#env", "")
        page.fill("#least", "0.5")
        page.press("#least", "Enter")
        counted(page, wanted(lambda r: r["reward"] is not None and r["reward"] >= 0.5))
        page.fill("#least", "")
        page.fill("#text", word)
        counted(page, wanted(lambda r: word in r["prompt"].lower() or word in r["completion"].lower()))
        page.fill("#text", "no such text anywhere")
        counted(page, 0)
        assert "No group matches" in page.inner_text("#group")


def counted(page: Page, groups: int) -> None:
    until(page, f"document.querySelector('#count').textContent.startsWith('{groups} group')")


def test_one_prompt_is_followed_over_the_steps(browser: Browser, run: Run) -> None:
    steps: dict[str, set[int]] = {}
    for rollout in run.rollouts():
        steps.setdefault(rollout["prompt_id"], set()).add(rollout["step"])
    prompt = max(steps, key=lambda name: len(steps[name]))
    assert len(steps[prompt]) > 1
    with opened(browser, run.path / "report.html") as page:
        follow(page, prompt, steps[prompt])


def follow(page: Page, prompt: str, steps: set[int]) -> None:
    choose_everything(page)
    page.check("#everywhere")
    page.locator("#groups .entry", has_text=prompt).first.click()
    until(page, f"document.querySelector('#group .prompt-head b')?.textContent === {json.dumps(prompt)}")
    page.keyboard.press("f")
    page.wait_for_selector(".timeline .chips button")
    assert {int(text) for text in page.locator(".timeline .chips button").all_inner_texts()} == steps
    page.locator(".timeline .chips button").first.click()
    until(page, f"document.querySelector('#group .prompt-head')?.textContent.includes('step {min(steps)} ')")


def test_theme_keys_and_tabs(browser: Browser, run: Run) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    with opened(browser, run.path / "report.html") as page:
        light = page.evaluate(background)
        page.click("#theme")
        dark = page.evaluate(background)
        assert light != dark and page.get_attribute("html", "data-theme") == "dark"
        assert page.evaluate("localStorage.getItem('shoal-theme')") == "dark"
        page.click("#theme")
        assert page.evaluate(background) == light
        page.context.add_init_script("localStorage.setItem('shoal-theme', 'dark')")
        page.reload()
        page.wait_for_selector("#charts .plot canvas")
        assert page.evaluate(background) == dark, "the choice is remembered"
        for key, view in (("2", "rollouts"), ("3", "events"), ("4", "config"), ("5", "glossary"), ("1", "curves")):
            page.keyboard.press(key)
            assert page.is_visible(f"#view-{view}")
        page.focus("#tab-curves")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#groups .entry.chosen")
        assert page.is_visible("#view-rollouts")
        before = page.inner_text("#group .prompt-head b")
        page.keyboard.press("j")
        until(page, f"document.querySelector('#group .prompt-head b').textContent !== {json.dumps(before)}")
        page.keyboard.press("h")
        until(page, f"document.querySelector('#step').value === '{STEPS - 1}'")
        page.keyboard.press("?")
        assert page.is_visible("#keys")
    with opened(browser, run.path / "report.html", dark=True) as page:
        assert page.evaluate(background) == dark, "so is the preference of the system"


def test_words_and_tables(browser: Browser, run: Run) -> None:
    with opened(browser, run.path / ["report.html", "config"][0]) as page:
        page.keyboard.press("4")
        rows = page.locator("#view-config tbody tr").all_inner_texts()
        assert any("train.learning_rate" in row and "0.0002" in row and "0.000005" in row for row in rows)
        page.keyboard.press("5")
        assert "Mean entropy of the policy" in page.inner_text("#view-glossary")


@pytest.mark.parametrize("width", [390, 1024, 1920])
def test_page_fits_the_window_width(browser: Browser, run: Run, width: int) -> None:
    with opened(browser, run.path / "report.html", width=width) as page:
        for key in "12345":
            page.keyboard.press(key)
            page.wait_for_timeout(150)
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_live_page_shows_the_same_and_reads_on_demand(browser: Browser, run: Run) -> None:
    steps: dict[str, set[int]] = {}
    for rollout in run.rollouts():
        steps.setdefault(rollout["prompt_id"], set()).add(rollout["step"])
    prompt = max(steps, key=lambda name: len(steps[name]))
    with watching(str(run.path), cwd=run.folder) as address, opened(browser, address) as page:
        assert f"Step {STEPS}" in hover(page, "Reward", 0.999)
        follow(page, prompt, steps[prompt])
        page.click("#tab-curves")
        page.click("#theme")
        assert page.get_attribute("html", "data-theme") == "dark"


def test_running_run_is_followed(browser: Browser, run: Run, new_run: Callable[..., Run]) -> None:
    slow = {"function": "my_code:slow_reward", "workers": 1}
    growing = new_run(train={"max_steps": 400, "save_steps": 1000}, orch={"reward": slow})
    command = growing.start()
    try:
        deadline = time.monotonic() + 60
        while not (growing.path / "metrics.jsonl").is_file() or not growing.steps():
            assert time.monotonic() < deadline and command.running(), command.text()
            time.sleep(0.05)
        with watching(str(growing.path), cwd=growing.folder) as address, opened(browser, address) as page:
            assert page.inner_text("#state") == "running"
            first = int(page.evaluate("shoal.page.runs[0].steps.at(-1)"))
            box = chart(page, "Reward").locator(".u-over").bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + 20, box["y"] + 50)
            page.mouse.down()
            page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 50, steps=5)
            page.mouse.up()
            page.mouse.move(5, 5)
            zoomed = page.evaluate("shoal.zooms.get('Reward')")
            until(page, f"shoal.page.runs[0].steps.at(-1) > {first + 2}")
            page.wait_for_timeout(300)
            assert page.evaluate("shoal.zooms.get('Reward')") == zoomed is not None, "a zoom survives an update"
            assert page.locator("#charts .plot canvas").count() > 5
            command.send(signal.SIGINT)
            assert command.wait() == 130
            until(page, "document.querySelector('#state').textContent === 'interrupted'")
    finally:
        command.kill()
    assert (growing.path / "report.html").is_file(), "an interrupted run has a report too"
    with opened(browser, growing.path / "report.html") as page:
        assert page.inner_text("#state") == "interrupted" and "--resume" in page.inner_text("#reason")


def test_two_runs_are_overlaid(browser: Browser, run: Run, new_run: Callable[..., Run]) -> None:
    other = new_run(train={"learning_rate": 1e-3})
    command = other.grpo()
    assert command.wait() == 0, command.text()
    both = other.folder / "both.html"
    done = other.warm.run(["report", str(run.path), str(other.path), "--out", str(both)], other.folder)
    assert done.wait() == 0, done.text()
    with opened(browser, both) as page:
        told = hover(page, "Reward", 0.5)
        assert len(re.findall(r"/out", told)) == 2, told
        page.keyboard.press("4")
        rows = page.locator("#view-config tbody tr").all_inner_texts()
        assert any("train.learning_rate" in row and "0.0002" in row and "0.001" in row for row in rows)
        choose_everything(page)
        page.select_option("#run", "1")
        until(page, "document.querySelector('#step').options.length === 4")
