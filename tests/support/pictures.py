"""Takes the pictures of the documentation from real runs, at three widths, with the browser of the tests.

python tests/support/pictures.py RUN FOLLOWED

RUN is the demo's run directory. FOLLOWED is a run that draws prompts repeatedly: the demo's GRPO run with `num_train:
128`. Writes into docs/images/.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.watch.report.page import write_report
from support.browser import Watched, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def show_rollouts(page: Page) -> None:
    page.keyboard.press("2")
    page.wait_for_selector("#group .rollout")
    page.select_option("#step", "60")
    page.wait_for_timeout(300)


def show_prompt(page: Page) -> None:
    page.keyboard.press("2")
    page.wait_for_selector("#group .rollout")
    page.keyboard.press("x")
    page.wait_for_selector("#group .columns")


def hover_reward(page: Page) -> None:
    box = page.locator('[data-chart="Reward"] .u-over').bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.62 * box["width"], box["y"] + 0.4 * box["height"])


# name → run, width, height, dark, action before the picture
PICTURES = {
    "report": (0, 1600, 1010, False, hover_reward),
    "rollouts": (0, 1200, 760, False, show_rollouts),
    "prompt-dark": (1, 1200, 900, True, show_prompt),
    "phone": (0, 390, 844, False, show_rollouts),
}


def main(runs: list[Path]) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for name, (which, width, height, dark, prepare) in PICTURES.items():
            file = write_report(runs[which], out=Path(folder) / f"{which}.html")
            watched = Watched(browser, width, height, dark)
            page = watched.open(file)
            page.wait_for_selector("#charts canvas")
            page.wait_for_timeout(400)
            prepare(page)
            page.wait_for_timeout(300)
            page.screenshot(path=IMAGES / f"{name}.png")
            watched.close()
            print(f"{name}.png {(IMAGES / f'{name}.png').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:3]])
