"""The commands as a user types them: help, refusals, exit codes and files."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.entry import VERBS, main
from shoal.cli.make_files import example_files
from shoal.cli.output import complain

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "grpo"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "verb", ["grpo", "grpo-infer", "serve", "chat", "sft", "dpo", "eval", "envs", "make-model", "init", "demo"]
)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    assert f"shoal {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("wrong", [["--no-such-flag"], ["nothing/here.yaml", "--no-such-flag=1"]])
def test_wrong_use_of_every_command_is_one_line_and_exit_code_2(
    verb: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main([verb, *wrong]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("shoal: error: ") and len(said.err.splitlines()) == 1
    assert list(Path().iterdir()) == []


def test_help_is_also_a_command(capsys: pytest.CaptureFixture[str]):
    assert main(["help"]) == 0
    text = capsys.readouterr().out
    assert main(["--help"]) == 0 and capsys.readouterr().out == text


def test_option_spelling_suggests_the_key(capsys: pytest.CaptureFixture[str]):
    assert main(["grpo", "--learning-rate", "1e-5"]) == 2
    said = capsys.readouterr().err
    assert "keys are written as train.learning_rate=VALUE; see `shoal grpo --help`" in said
    assert len(said.splitlines()) == 1
    assert main(["serve", "models/tiny", "--port", "8001"]) == 2
    assert "keys are written as infer.port=VALUE; see `shoal serve --help`" in capsys.readouterr().err
    assert main(["grpo", "--nonsense", "1"]) == 2 and "keys are written" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "train.model=x"], "use `shoal grpo`"),
        (["evaluate"], "use `shoal eval`"),
        (["watch"], "`shoal watch` needs RUN; see `shoal watch --help`"),
        (["envs", "show"], "`shoal envs show` needs ID; see"),
        (["eval", "a", "b", "--env", "arithmetic"], "unexpected argument b; see `shoal eval --help`"),
        (["eval", "models/tiny"], "`shoal eval` needs --env VALUE; see"),
        (["watch", "run", "--port"], 'Command "watch" parameter --port requires an argument'),
    ],
)
def test_missing_argument_has_its_help_name(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "key", "overrides"),
    [
        ("grpo-train", "train.loss.type", ["train.model=tiny", "train.output_dir=run"]),
        (
            "grpo-orch",
            "orch.reward.function",
            ["orch.env=[{id: arithmetic}]", "orch.output_dir=run", "orch.model.name=tiny"],
        ),
    ],
    ids=("loss", "reward"),
)
def test_partial_run_reports_missing_parts_at_once(
    verb: str, key: str, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Not if the others have joined, because it would wait for them."""
    (tmp_path / "mine.py").write_text("def other(): ...\n")
    assert main([verb, *overrides, f"{key}=mine.py:nope"]) == 2
    said = capsys.readouterr().err
    assert f"{key}: " in said and "mine.py" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_examples_are_written_and_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["init", "mine"]) == 0
    *written, suggested = capsys.readouterr().out.splitlines()
    assert str(Path("mine/grpo/train.yaml")) in written
    assert main(suggested.removeprefix("try: shoal ").split()) == 0
    capsys.readouterr()
    assert main(["init", "mine"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_examples_name_a_schema_file_that_exists(capsys: pytest.CaptureFixture[str]):
    assert main(["init", "mine"]) == 0
    assert main(["envs", "new", "my-env"]) == 0
    for file in (*Path("mine/grpo").glob("*.yaml"), Path("my-env/run.yaml")):
        name = file.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
        assert json.loads((file.parent / name).read_text())["title"].endswith("Config")
    capsys.readouterr()
    assert main(["schema", "train"]) == 0
    assert capsys.readouterr().out == Path("mine/grpo/train.schema.json").read_text()
    assert main(["schema", "nothing"]) == 2


def test_shell_completion_knows_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--install-completion", "--shell", "bash"]) == 0
    (script,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.name == "shoal")
    assert "grpo-infer" in script.read_text()


def test_packaged_examples_are_those_of_the_repository():
    packaged = example_files()
    for file in EXAMPLES.glob("*.yaml"):
        assert packaged[f"grpo/{file.name}"] == file.read_text(encoding="utf-8")
    assert len(packaged) >= 3


def test_shapes(capsys: pytest.CaptureFixture[str]):
    assert main(["shapes"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name}  " in shown for name in ("cpu-fp32", "1xgpu-bf16")) and "train.recipe=bf16" in shown


def test_envs(capsys: pytest.CaptureFixture[str]):
    assert main(["envs"]) == 0
    assert "reverse-text" in capsys.readouterr().out
    assert main(["envs", "show", "reverse-text"]) == 0
    assert "<reversed_text>" in capsys.readouterr().out
    assert main(["envs", "show", "revrese-text"]) == 2
    assert "reverse-text" in capsys.readouterr().err


def test_tools_of_a_stateful_environment_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    look = "def look(self) -> str:\n        'Look around.'\n        return 'a tree'"
    methods = f"def reset(self):\n        return 'go'\n    {look}\n"
    (tmp_path / "garden.py").write_text(f"class Garden:\n    {methods}")
    assert main(["envs", "show", f"{tmp_path}/garden.py:Garden"]) == 0
    shown = capsys.readouterr().out
    assert "written by reset" in shown and "tools: look" in shown


def test_new_environment_passes_its_own_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["envs", "new", "letter-count"]) == 0
    assert "letter-count/letter_count.py" in capsys.readouterr().out
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path / "letter-count",
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert result.returncode == 0 and "3 passed" in result.stdout, result.stdout + result.stderr
    os.chdir(tmp_path / "letter-count")
    assert main(["grpo", "run.yaml", "train.model=Qwen/Qwen3-0.6B", "--dry-run"]) == 0
    assert main(["envs", "show", "letter_count:LetterCount"]) == 0
    assert "How many letters" in capsys.readouterr().out
    assert main(["envs", "new", "letter-count", "--folder", "."]) == 2
    assert main(["envs", "new", "Letter Count"]) == 2
    assert "lower-case letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["make-model"], "make-model tiny DIR"),
        (["make-model", "huge", "dir"], "make-model tiny DIR"),
        (["make-model", "dir", "--shape", "qwen3-0.6"], "qwen3-0.6b"),
        (["make-model", "tiny", "dir", "--seed", "-1"], "--seed"),
        (["make-model", "tiny", "dir", "--seed", "x"], "--seed"),
        (["eval", "Qwen/Qwen3-0.6B", "--env", "nope"], "unknown environment"),
        (["eval", "./nothing", "--env", "arithmetic"], "does not exist"),
        (["eval", "Qwen/Qwen3-0.6B", "--env", "arithmetic", "--max-tokens", "0"], "max_tokens"),
        (["eval", "Qwen/Qwen3-0.6B", "--env", "arithmetic", "--arg", "level"], "key=value"),
        (["eval", "Qwen/Qwen3-0.6B"], "--env"),
        (["demo", "--seed", "-3"], "--seed"),
        (["export", "./nothing", "out"], "does not exist"),
        (["eval", "Qwen/Qwen3-0.6B", "--env", "arithmetic", "--adapter", "x"], "--adapter"),
        (["serve", "Qwen/Qwen3-0.6B", "--adapter", "x", "--checkpoint", "best"], "cannot be combined with --adapter"),
        (["eval", "Qwen/Qwen3-0.6B", "--env", "arithmetic", "--against", "./nothing"], "--against"),
        (["eval", "Qwen/Qwen3-0.6B", "--env", "arithmetic", "--checkpoint", "best"], "--checkpoint"),
        (["nonsense"], "nonsense"),
        (["grpo"], "shoal init"),
        (["grpo", "run.yaml", "--train", "t.yaml"], "--train"),
        (["grpo", "--train", "t.yaml"], "--orch"),
        (["sft"], "sft.yaml"),
        (["dpo"], "dpo.yaml"),
        (["dpo", "--model", "Qwen/Qwen3-0.6B", "--max-steps", "2"], "dataset"),
    ],
    ids=" ".join,
)
def test_wrong_commands(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.err.startswith("shoal: error: ")
    assert len(printed.err.splitlines()) == 1 and printed.out == ""


def test_bug_writes_a_crash_bundle_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("something inside with canary-777")

    monkeypatch.setattr("shoal.cli.make_files.example_files", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SOME_API_KEY", "canary-777")
    assert main(["init", "there"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" not in err and "RuntimeError" in err
    bundle = next(tmp_path.glob("crash-*.txt"))
    assert str(bundle) in err
    text = bundle.read_text()
    assert "something inside" in text and "Traceback" in text and "canary" not in text
    assert bundle.stat().st_mode & 0o077 == 0


def test_missing_package_is_not_a_bug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def incomplete() -> None:
        exec("import opentelemetry_gone.trace", {"__name__": "fastapi.telemetry"})

    monkeypatch.setattr("shoal.cli.make_files.example_files", incomplete)
    assert main(["init", "there"]) == 2
    err = capsys.readouterr().err
    assert "the Python package opentelemetry_gone, which fastapi imports, is missing; install Shoal again" in err


def test_missing_module_of_a_package_is_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def outdated() -> None:
        exec("import json.of_a_later_release")

    monkeypatch.setattr("shoal.cli.make_files.example_files", outdated)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["init", "there"]) == 70


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.make_files.example_files", interrupted)
    assert main(["init", "there"]) == 130


def test_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m shoal config-reference | head -1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("shapes >&-", 0, ""),
        ("shapes >&- 2>&- <&-", 0, ""),
        ("shapes > /dev/full", 4, "shoal: error: could not write the output: the disk is full; free some space\n"),
        ("--help > /dev/full", 4, "shoal: error: could not write the output: the disk is full; free some space\n"),
        ("grpo nope.yaml 2> /dev/full", 2, ""),
        ("grpo nope.yaml 2>&-", 2, ""),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_or_full_streams_are_not_bugs(shell: str, code: int, said: str, unbuffered: str):
    """The output is closed or the disk is full: the exit code shows it, and no crash is reported."""
    given = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run(f"{sys.executable} -m shoal {shell}", shell=True, capture_output=True, text=True, env=given)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", said)


def test_child_processes_have_streams():
    """A child of a command with closed output. Otherwise the first file that it opens would become its output."""
    child = "import sys; sys.exit(0 if sys.stdout is not None else 3)"
    work = "import subprocess, sys; from shoal.cli.entry import guarded; "
    work += f"sys.exit(guarded(lambda: subprocess.call([sys.executable, '-c', {child!r}]), []))"
    command = f"{sys.executable} -c {shlex.quote(work)} >&-"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_plain_ascii_terminal():
    result = subprocess.run(
        [sys.executable, "-m", "shoal", "grpo", "nope.yaml"],
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    assert result.returncode == 2
    assert result.stderr.decode("ascii").startswith("shoal: error: nope.yaml: no such file")


def test_reference_process_with_an_adapter_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["grpo-train", str(EXAMPLES / "train.yaml"), "train.lora=true", "--forward-only"]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and said.startswith("shoal: error: --forward-only: train.lora:")
    assert not Path("outputs").exists()


def test_indented_line_continues_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The end of a server's log was counted as a dozen errors."""
    complain("vLLM ended with exit code 1. The last lines in vllm.log:\n  loading\n  out of luck")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "shoal: error: vLLM ended with exit code 1. The last lines in vllm.log:"
    assert rest == ["  loading", "  out of luck"]
    complain("a.b: is wrong\nc.d: is missing")
    assert capsys.readouterr().err.splitlines() == ["shoal: 2 errors:", "  a.b: is wrong", "  c.d: is missing"]
