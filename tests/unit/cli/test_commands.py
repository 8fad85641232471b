"""The commands as a user types them: help, dry runs, refusals, exit codes and what they leave on disk."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.init import example_files
from shoal.cli.output import complain
from shoal.config.load import load_run

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "grpo"
THREE = ["grpo"] + [
    part for name in ("train", "infer", "orch") for part in (f"--{name}", str(EXAMPLES / f"{name}.yaml"))
]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def timed(*argv: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Seconds of processor time, the best of three: other work may share the machine."""
    best, result = float("inf"), None
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([sys.executable, "-m", "shoal", *argv], capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert result is not None
    return best, result


def test_help_is_fast_and_names_the_verbs():
    seconds, result = timed("--help")
    assert result.returncode == 0
    assert all(verb in result.stdout for verb in ("grpo", "sft", "eval", "envs", "make-model", "init"))
    assert seconds < 0.3


def test_dry_run_is_fast():
    seconds, result = timed(*THREE, "--dry-run")
    assert result.returncode == 0
    assert seconds < 1.0


NO_CUDA = "train.device: cuda was asked for but this machine has no CUDA device; use cpu"
NO_FP8 = "train.recipe: fp8-hybrid needs a GPU with FP8 units; on this CPU use train.recipe=fp32"
SFT = ["sft", "--model", "Qwen/Qwen3-0.6B", "--dataset", "rows.jsonl", "--max-steps", "3"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (THREE, NO_FP8),
        ([*THREE, "--layout", "split"], NO_FP8),
        (["grpo-train", str(EXAMPLES / "train.yaml")], NO_FP8),
        ([*SFT, "train.recipe=fp8-hybrid"], NO_FP8),
        ([*THREE, "train.recipe=auto", "train.device=cuda"], NO_CUDA),
        ([*THREE, "train.recipe=auto", "train.gpus=2"], "train.gpus: 2 GPUs were asked for"),
    ],
    ids=["grpo", "split", "grpo-train", "sft", "device", "gpus"],
)
def test_a_dry_run_notes_what_the_run_would_be_refused_for_here(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It may be made where no GPU is, for a machine that has one."""
    monkeypatch.setattr("shoal.cli.machine.has_gpu", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert main([*argv, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert [line for line in shown.err.splitlines() if f"note: a run on this machine would be refused: {said}" in line]
    assert "Qwen/Qwen3-0.6B" in shown.out
    assert main([*THREE, "train.recipe=auto", "--dry-run"]) == 0
    assert "refused" not in capsys.readouterr().err


def test_a_driver_that_torch_cannot_use_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A CPU build of torch beside a driver, or CUDA_VISIBLE_DEVICES that hides the devices."""
    monkeypatch.setattr("shoal.cli.machine.has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*THREE, "--dry-run"]) == 0
    assert f"note: a run on this machine would be refused: {NO_FP8}" in capsys.readouterr().err


def test_a_dry_run_refuses_a_dtype_that_no_machine_has(capsys: pytest.CaptureFixture[str]):
    assert main(["grpo-infer", str(EXAMPLES / "infer.yaml"), "infer.dtype=float16", "--dry-run"]) == 2
    assert "infer.dtype: the embedded engine computes in bfloat16 or float32, not float16" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["grpo", "grpo-infer", "sft", "eval", "envs", "make-model", "init", "demo"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    assert f"shoal {verb}" in capsys.readouterr().out


def test_a_key_written_as_an_option_is_answered_with_the_key(capsys: pytest.CaptureFixture[str]):
    assert main(["grpo", "--learning-rate", "1e-5"]) == 2
    said = capsys.readouterr().err
    assert "keys are written as train.learning_rate=VALUE; see `shoal grpo --help`" in said
    assert len(said.splitlines()) == 1
    assert main(["grpo", "--nonsense", "1"]) == 2 and "keys are written" not in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_dry_run_prints_and_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*THREE, "--dry-run", "train.recipe=auto", "train.learning_rate=1e-4"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    written = list((tmp_path / "outputs").rglob("*"))
    assert [path.name for path in written] == ["config.yaml"]
    assert written[0].read_text() == printed.out
    assert load_run(str(written[0])).config.train.learning_rate == 1e-4


def test_dry_run_may_be_repeated_and_run_from_its_own_output(capsys: pytest.CaptureFixture[str]):
    assert main([*THREE, "--dry-run"]) == 0
    first = capsys.readouterr().out
    assert main(["grpo", "outputs/config.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == first


def test_notices_go_to_stderr(capsys: pytest.CaptureFixture[str]):
    assert main([*THREE, "--dry-run", "train.lora=false"]) == 0
    err = capsys.readouterr().err
    assert all(line.startswith("note: ") for line in err.splitlines()) and "train.learning_rate" in err


def test_a_used_folder_is_refused_with_the_two_ways_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*THREE, "--dry-run"]) == 0
    (tmp_path / "outputs" / "status.json").write_text("{}")
    before = (tmp_path / "outputs" / "config.yaml").read_text()
    capsys.readouterr()
    assert main([*THREE, "--dry-run", "train.learning_rate=1e-4"]) == 2
    err = capsys.readouterr().err
    assert "--resume" in err and "train.output_dir=" in err
    assert main([*THREE, "--dry-run", "--resume", "train.learning_rate=1e-4"]) == 0
    assert "resume changes train.learning_rate: 0.0002 → 0.0001" in capsys.readouterr().err
    assert (tmp_path / "outputs" / "config.yaml").read_text() == before
    assert main([*THREE, "--dry-run", "--resume", "train.seed=4"]) == 2
    assert "train.seed: 0 → 4" in capsys.readouterr().err


def test_nothing_to_resume_yet(capsys: pytest.CaptureFixture[str]):
    assert main([*THREE, "--dry-run", "--resume"]) == 0
    assert "nothing to resume" in capsys.readouterr().err


def test_the_server_s_file_is_checked_alone(capsys: pytest.CaptureFixture[str]):
    assert main(["grpo-infer", str(EXAMPLES / "infer.yaml"), "--dry-run"]) == 0
    assert "Qwen/Qwen3-0.6B" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "orch"])
def test_files_of_the_split_layout_are_checked_alone(name: str, capsys: pytest.CaptureFixture[str]):
    file = str(EXAMPLES / f"{name}.yaml")
    assert main([f"grpo-{name}", file, "--dry-run"]) == 0
    assert "Qwen/Qwen3-0.6B" in capsys.readouterr().out
    assert main([f"grpo-{name}", file, f"{name}.nonsense=1", "--dry-run"]) == 2
    assert f"{name}.nonsense" in capsys.readouterr().err


def test_sft_from_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    flags = ["--model", "Qwen/Qwen3-0.6B", "--dataset", "rows.jsonl", "--max-steps", "3", "--output-dir", "1e5"]
    assert main(["sft", *flags, "batch_size=2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "batch_size: 2" in out and "max_steps: 3" in out and "output_dir: '1e5'" in out
    assert (tmp_path / "1e5" / "config.yaml").read_text() == out


def test_examples_are_written_and_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["init", "mine"]) == 0
    *written, suggested = capsys.readouterr().out.splitlines()
    assert str(Path("mine/grpo/train.yaml")) in written
    assert main(suggested.removeprefix("try: shoal ").split()) == 0
    capsys.readouterr()
    assert main(["init", "mine"]) == 2
    assert "exists already" in capsys.readouterr().err


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


def test_a_new_environment_passes_its_own_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
    assert "small letters, digits and dashes" in capsys.readouterr().err


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
        (["eval", "Qwen/Qwen3-0.6B", "--env", "arithmetic", "--against", "./nothing"], "--against"),
        (["eval", "Qwen/Qwen3-0.6B", "--env", "arithmetic", "--checkpoint", "best"], "--checkpoint"),
        (["nonsense"], "nonsense"),
        (["grpo"], "shoal init"),
        (["grpo", "run.yaml", "--train", "t.yaml"], "--train"),
        (["grpo", "--train", "t.yaml"], "--orch"),
        (["sft"], "sft.yaml"),
    ],
    ids=" ".join,
)
def test_wrong_commands(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.err.startswith("shoal: error: ")
    assert len(printed.err.splitlines()) == 1 and printed.out == ""


def test_a_bug_leaves_a_bundle_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("something inside with canary-777")

    monkeypatch.setattr("shoal.cli.init.example_files", broken)
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


def test_a_package_that_is_missing_is_no_bug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def incomplete() -> None:
        exec("import opentelemetry_gone.trace", {"__name__": "fastapi.telemetry"})

    monkeypatch.setattr("shoal.cli.init.example_files", incomplete)
    assert main(["init", "there"]) == 2
    err = capsys.readouterr().err
    assert "the Python package opentelemetry_gone, which fastapi imports, is missing; install Shoal again" in err


def test_a_part_of_a_package_that_is_missing_is_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def outdated() -> None:
        exec("import json.of_a_later_release")

    monkeypatch.setattr("shoal.cli.init.example_files", outdated)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["init", "there"]) == 70


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.init.example_files", interrupted)
    assert main(["init", "there"]) == 130


def test_a_reader_that_goes_away_is_no_error():
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
def test_streams_that_are_closed_or_full_are_no_bug(shell: str, code: int, said: str, unbuffered: str):
    """Nobody listens, or the disk is full: the exit code says which, and no crash is told."""
    given = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run(f"{sys.executable} -m shoal {shell}", shell=True, capture_output=True, text=True, env=given)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", said)


def test_plain_ascii_terminal():
    result = subprocess.run(
        [sys.executable, "-m", "shoal", "grpo", "nope.yaml"],
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    assert result.returncode == 2
    assert result.stderr.decode("ascii").startswith("shoal: error: nope.yaml: no such file")


def test_a_trainer_that_only_serves_the_reference_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["grpo-train", str(EXAMPLES / "train.yaml"), "--forward-only"]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and said.startswith("shoal: error: --forward-only:") and "train.reference=frozen" in said
    assert not Path("outputs").exists()


def test_an_indented_line_belongs_to_the_error_above(capsys: pytest.CaptureFixture[str]) -> None:
    """The end of a server's log was counted as a dozen errors."""
    complain("vLLM ended with exit code 1. The last lines in vllm.log:\n  loading\n  out of luck")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "shoal: error: vLLM ended with exit code 1. The last lines in vllm.log:"
    assert rest == ["  loading", "  out of luck"]
    complain("a.b: is wrong\nc.d: is missing")
    assert capsys.readouterr().err.splitlines() == ["shoal: 2 errors:", "  a.b: is wrong", "  c.d: is missing"]
