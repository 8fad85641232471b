"""README and start page: every command passes the real parser, every file named exists, the tree is current.

Commands run where a reader would stand: files the page says to save are saved, `make-model` makes its model, and a
`final/` that an earlier run would have left is that model. Training itself is cut to two steps.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.entry import VERBS, make_app
from shoal.envs.registry import load_environment

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/start.md"]
WRITTEN = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SAVED = re.compile(r"[Ss]ave this as `([\w./-]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
OURS = re.compile(r"`((?:src|tests|docs|examples|benchmarks|\.ci)/[\w./-]+)`")
RUNS_FAST = {"envs", "init", "config-reference", "make-model"}  # needs no training: run for real
CHECKED = {"grpo", "sft"}  # have --dry-run


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands_of(page: str) -> list[list[str]]:
    """The `shoal …` lines of its shell blocks, as a shell splits them."""
    blocks = [body for kind, body in BLOCK.findall(text_of(page)) if kind in ("bash", "sh", "shell")]
    lines = [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in split if words and words[0] == "shoal"]


def inline_commands_of(page: str) -> list[list[str]]:
    return [found.split() for found in re.findall(r"`shoal ([^`\n]+)`", BLOCK.sub("", text_of(page)))]


def anchors_of(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader of the page stands: a clone, here with nothing but the examples in it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_files(folder: Path) -> None:
    """What the pages tell the reader to save; the start page goes on with what the README had saved."""
    saved = {name: body for page in PAGES for name, body in SAVED.findall(text_of(page))}
    assert saved.keys() == {"shout.py", "run.yaml", "rows.jsonl"}
    for name, body in saved.items():
        (folder / name).write_text(body, encoding="utf-8")


def leave_results(words: list[str], model: Path) -> None:
    """What earlier commands of the page would have left, where this one names it."""
    for folder in {match for word in words for match in re.findall(r"outputs/[\w-]+", word)}:
        if any(f"{folder}/final" in word for word in words):
            shutil.copytree(model, Path(folder) / "final", dirs_exist_ok=True)
        if f"{folder}/config.yaml" in words:
            source = next(line for page in PAGES for line in commands_of(page) if f"train.output_dir={folder}" in line)
            assert main([*source, "--dry-run"]) == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_accepted(page: str, reader: Path, capsys: pytest.CaptureFixture[str]):
    save_files(reader)
    commands = commands_of(page)
    assert {words[0] for words in commands} >= {"grpo", "make-model"}
    for words in commands:
        leave_results(words, reader / "models" / "tiny")
        make_app().parse_args(words, print_error=False, exit_on_error=False)
        if words[0] in RUNS_FAST:
            assert main(words) == 0, capsys.readouterr().err
        elif words[0] in CHECKED:
            assert main([word for word in words if word != "--dry-run"] + ["--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_running_text_are_commands(page: str):
    for words in inline_commands_of(page):
        assert words[0] in VERBS or words[0].startswith("--"), words
        flags = [word for word in words if word.startswith("--")]
        known = subprocess.run(
            [sys.executable, "-m", "shoal", *words[:1], *([] if words[0].startswith("--") else ["--help"])],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert known.returncode == 0 and all(flag in known.stdout for flag in flags if flag != "--help"), words


def test_a_wrong_command_would_be_seen(reader: Path):
    with pytest.raises(Exception, match="--no-such-flag"):
        make_app().parse_args(["grpo", "--no-such-flag"], print_error=False, exit_on_error=False)
    assert main(["grpo", "train.modle=x", "--dry-run"]) == 2


def test_the_ten_lines_are_an_environment(reader: Path):
    save_files(reader)
    assert len([line for line in (reader / "shout.py").read_text().splitlines() if line]) <= 10
    environment = load_environment("shout.py:Shout")
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert len(train) == 6 and len(held_out) == 2
    assert not {str(task.messages) for task in train} & {str(task.messages) for task in held_out}
    answers = {"SHOAL": 1.0, "SHoal": 0.4, "shoal": 0.0, "": 0.0}
    for answer, reward in answers.items():
        assert environment.reward(train[0], [{"role": "assistant", "content": answer}]) == pytest.approx(reward)


def test_the_readme_trains(reader: Path):
    """Its own two commands, in a new process, for two steps instead of thirty."""
    save_files(reader)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for words in commands_of("README.md"):
        shorter = ["train.max_steps=2" if word.startswith("train.max_steps=") else word for word in words]
        result = subprocess.run(
            [sys.executable, "-m", "shoal", *shorter], capture_output=True, text=True, timeout=240, env=environment
        )
        assert result.returncode == 0, result.stderr[-2000:]
    (opened,) = re.findall(r"open `([\w./-]+)`", text_of("README.md"))
    assert (reader / opened).is_file()


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_exist(path: Path):
    text = path.read_text(encoding="utf-8")
    for target in LINK.findall(BLOCK.sub("", text)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors_of(file), f"{path.name} links to {target}, which has no such heading"
    for name in OURS.findall(BLOCK.sub("", text)):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def tree_paths() -> list[str]:
    """The paths of the README's tree, folders ending in a slash."""
    (tree,) = [body for kind, body in BLOCK.findall(text_of("README.md")) if not kind]
    paths, above = [], ""
    for line in tree.splitlines():
        name = line.split()[0]
        inner = line.startswith("  ")
        paths.append(f"{above}{name}" if inner else name)
        if not inner:
            above = name
    return paths


def test_the_tree_is_current():
    paths = tree_paths()
    for path in paths:
        assert (ROOT / path).exists(), f"the README's tree names {path}, which is gone"
        assert (ROOT / path).is_dir() == path.endswith("/"), path
    for folder in ("src/shoal/", "tests/", "docs/"):
        ignored = {"__pycache__", "__init__.py", "conftest.py", "images"}
        found = {
            f"{folder}{entry.name}{'/' if entry.is_dir() else ''}"
            for entry in (ROOT / folder).iterdir()
            if entry.name not in ignored and entry.suffix != ".pyc"
        }
        missing = found - set(paths)
        assert not missing, f"not in the README's tree: {sorted(missing)}"


def test_the_picture_is_small_enough_to_read_at_once():
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text_of("README.md"))
    assert 10_000 < (ROOT / picture).stat().st_size < 300_000
