"""Pages of runs out of the ordinary, in a real browser: empty, one step, crashed, going on, huge, full of markup."""

from __future__ import annotations

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

from shoal.observability.run_dir import RunDir, rollouts_path
from shoal.report import write_report
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
        assert "No rollouts are stored here yet" in page.inner_text("#group")


def test_one_step(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, groups=1, size=2)
    with opened(browser, write_report(run)) as page:
        visit_everything(page)
        assert page.locator("#charts canvas").count() > 5
        page.keyboard.press("2")
        page.wait_for_selector("#group .rollout")
        assert page.locator("#group .rollout").count() == 2


def test_crashed(browser: Browser, tmp_path: Path) -> None:
    """Killed while it wrote: torn lines everywhere, no configuration, nobody holding the lock."""
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
    """As many steps and rollouts as the page promises to handle; the files of five steps stand for all."""
    make_run(path, steps=5, groups=groups, size=size)
    metrics = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    with (path / "metrics.jsonl").open("a") as file:
        for step in range(6, steps + 1):
            os.link(rollouts_path(path, step % 5 + 1), rollouts_path(path, step))
            file.write(json.dumps({**metrics, "step": step}) + "\n")
    return path


def test_a_large_run_is_shown_at_once_in_little_memory(browser: Browser, tmp_path: Path) -> None:
    """500 steps of 512 rollouts: the first curve within a second, the server below 300 MiB after some use."""
    run = make_large_run(tmp_path / "run")
    command = [sys.executable, "-m", "shoal", "watch", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found is not None
        first_paint_s = []
        for _ in range(5):  # the best of five: this machine may be busy with other things
            started = time.monotonic()
            with opened(browser, found.group()) as page:
                page.wait_for_selector("#charts canvas")
                first_paint_s.append(time.monotonic() - started)
        assert min(first_paint_s) < 1.0, first_paint_s
        with opened(browser, found.group()) as page:
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
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert peak is not None and int(peak.group(1)) < 300 * 1024
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
