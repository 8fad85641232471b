"""The first example of each page about a Python interface runs unchanged, and so does the example file."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import SAVED, commands_of, save_files, text_of
from support.ports import free_port

from .helpers.processes import WarmPython

ROOT = Path(__file__).parents[2]


def first_example(page: str) -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def run(folder: Path, *arguments: str) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, env=env)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def models(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    assert warm.run(["make-model", "tiny", "models/tiny"], folder).wait() == 0
    return folder / "models"


@pytest.fixture
def reader(models: Path, tmp_path: Path) -> Path:
    """A folder with the model that the pages name."""
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def rewards(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["reward/mean"] for line in lines if line["step"] > 0]


def test_trainer_page_starts_with_a_working_script(warm: WarmPython, reader: Path):
    (reader / "example.py").write_text(first_example("grpo-trainer.md"))
    done = warm.run(["example.py"], reader, python=True)
    assert done.wait() == 0, done.text()[-4000:]
    found = rewards(reader / "outputs")
    assert len(found) == 20 and found[-1] > found[0] + 0.2
    assert float(done.text().splitlines()[-1]) > found[0]


def test_other_scripts_of_the_trainer_page_run_alone(warm: WarmPython, reader: Path):
    """The script for users of TRL, and the one with two reward functions, which the page does not train."""
    _, trl, two_functions = re.findall(r"```python\n(.*?)```", text_of("docs/grpo-trainer.md"), re.DOTALL)
    (reader / "example.py").write_text(trl)
    done = warm.run(["example.py"], reader, python=True)
    assert done.wait() == 0, done.text()[-4000:]
    assert len(rewards(reader / "outputs" / "trl")) == 2
    (reader / "example.py").write_text(two_functions)
    done = warm.run(["example.py"], reader, python=True)
    assert done.wait() == 0 and "warning" not in done.text(), done.text()[-4000:]


def test_recipe_page_starts_with_a_working_command(reader: Path):
    (reader / "example.py").write_text(first_example("recipes.md"))
    run(reader, "example.py")
    found = rewards(reader / "outputs" / "recipe")
    assert len(found) == 20  # ten epochs of eight prompts, four per step
    assert sum(found[-3:]) / 3 > sum(found[:3]) / 3 + 0.1


def test_preference_page_starts_with_a_working_command(warm: WarmPython, reader: Path):
    """The rows and the command of the page unchanged, and the names of its metrics."""
    page = text_of("docs/preference-data.md")
    ((name, body),) = SAVED.findall(page)
    (reader / name).write_text(body)
    (words,) = commands_of("docs/preference-data.md", "dpo")
    command = warm.run(words, reader)
    assert command.wait() == 0, command.text()[-2000:]
    assert "reference: a frozen copy" in command.text()
    run = reader / "outputs" / "preferences"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 10 and steps[-1]["dpo/loss"] < steps[0]["dpo/loss"] and steps[-1]["dpo/accuracy"] == 1
    assert {metric for metric in steps[0] if metric.startswith("dpo/")} <= set(re.findall(r"`(dpo/\w+)`", page))
    assert (run / "final" / "model.safetensors").is_file()


def test_server_page_starts_with_a_working_command(reader: Path):
    """The three blocks of the page, unchanged except for the port."""
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    port = free_port()
    first, second = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[:2]
    written = re.search(r"echo '(.+)' > infer.yaml", first)
    assert written is not None and "shoal grpo-infer infer.yaml " in first
    (reader / "infer.yaml").write_text(f"{written[1]}\nport: {port}\n")
    command = [sys.executable, "-m", "shoal", "grpo-infer", "infer.yaml"]
    with subprocess.Popen(command, cwd=reader, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "loading models/tiny\n"
            assert server.stdout.readline().startswith(f"serving models/tiny at http://127.0.0.1:{port}/v1")
            curl = subprocess.run(
                ["bash", "-c", second.replace("8000", str(port))], capture_output=True, text=True, timeout=60
            )
            assert len(json.loads(curl.stdout)["choices"][0]["message"]["content"]) > 0
            (reader / "example.py").write_text(first_example("server.md").replace("8000", str(port)))
            assert run(reader, "example.py").strip()
        finally:
            server.terminate()
        assert server.wait(20) == -signal.SIGTERM


def test_example_of_the_trainer_runs_alone(warm: WarmPython, reader: Path):
    arguments = ["--model", "models/tiny", "--num-steps", "2", "--max-new-tokens", "6", "--learning-rate", "1e-3"]
    done = warm.run([str(ROOT / "examples" / "grpo_trainer_math.py"), *arguments], reader, python=True)
    assert done.wait() == 0 and re.search(r"held-out reward \d\.\d+", done.text()), done.text()[-4000:]
    assert (reader / "outputs" / "grpo_trainer_math" / "final" / "model.safetensors").is_file()


def test_readme_command_trains(warm: WarmPython, tmp_path: Path):
    """The command of the README, with a tiny model and two steps."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    save_files(tmp_path)
    assert warm.run(["make-model", "tiny", "models/tiny"], tmp_path).wait() == 0
    (words,) = commands_of("README.md", "grpo")
    smaller = ["train.model=models/tiny", "train.max_steps=2", "orch.groups.uniform=keep"]
    command = warm.run([*words, *smaller], tmp_path)
    assert command.wait() == 0, command.text()[-2000:]
    (opened,) = re.findall(r"open `([\w./-]+)`", text_of("README.md"))
    assert (tmp_path / opened).is_file()
