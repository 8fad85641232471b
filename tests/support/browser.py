"""A real headless Chromium for tests of pages, without network access. Every error of a page is recorded."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PLACES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-quic",
]  # fmt: skip


def find_chromium() -> str | None:
    return next((path for name in PLACES if (path := shutil.which(name)) is not None), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium through playwright. Skips with a reason if one of them is missing."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install 'shoal[dev]')"
    )
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def until(page: Page, expression: str, limit_s: float = 30.0) -> None:
    """Wait until an expression is true. It is evaluated from outside, because the page's policy forbids eval."""
    deadline = time.monotonic() + limit_s
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {expression}"
        page.wait_for_timeout(25)


class Watched:
    """A page with its recorded problems: errors, console messages, requests to other machines."""

    def __init__(self, browser: Browser, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        self.page: Page = context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _note_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def open(self, address: str | Path) -> Page:
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        self.page.goto(url)
        until(self.page, "document.querySelector('#charts').children.length > 0")
        return self.page

    def close(self) -> None:
        """Close the page. It must have had no errors and requests only to itself and its server."""
        self.page.context.close()
        assert self.problems == []
        assert not [
            url for url in self.requests if not url.startswith(("file:", "blob:", "data:", "http://127.0.0.1:"))
        ]
