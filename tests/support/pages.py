"""The commands and files of the README, the tutorial and the start page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/tutorial.md", "docs/start.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SAVED = re.compile(r"[Ss]ave\s+this\s+as\s+`([\w./-]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands_of(page: str, verb: str | None = None) -> list[list[str]]:
    """The `shoal …` lines of its shell blocks (with one verb), split as a shell does."""
    blocks = [body for kind, body in BLOCK.findall(text_of(page)) if kind in ("bash", "sh", "shell")]
    lines = [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    split = [shlex.split(line, comments=True) for line in lines]
    found = [words[1:] for words in split if words and words[0] == "shoal"]
    return [words for words in found if verb in (None, words[0])]


def save_files(folder: Path) -> None:
    """Save the files of all pages and create the data of the tutorial."""
    saved: dict[str, str] = {}
    for page in PAGES:
        for name, body in SAVED.findall(text_of(page)):
            assert saved.setdefault(name, body) == body, f"{page} has another {name}"
    assert saved.keys() == {"make_orders.py", "orders.py", "orders.yaml", "sums.yaml", "rows.jsonl"}
    for name, body in saved.items():
        (folder / name).write_text(body, encoding="utf-8")
    subprocess.run([sys.executable, "make_orders.py"], cwd=folder, check=True, timeout=60)
