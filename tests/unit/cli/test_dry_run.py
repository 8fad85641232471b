"""Dry runs: fast, the printed config equals the written one, files are checked separately, notes about this machine."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.entry import main
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
    """Seconds of CPU time, the best of three, because other work may share the machine."""
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
    assert all(verb in result.stdout for verb in ("grpo", "sft", "dpo", "eval", "envs", "make-model", "init"))
    assert seconds < 0.3


def test_dry_run_is_fast():
    seconds, result = timed(*THREE, "--dry-run")
    assert result.returncode == 0
    assert seconds < 1.0


NO_CUDA = "train.device: cuda is not available on this machine; use cpu"
NO_FP8 = "train.recipe: fp8-hybrid requires a GPU with FP8 support; on a CPU use train.recipe=fp32"
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
def test_dry_run_notes_what_this_machine_would_refuse(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A machine without a GPU can check the config of a machine with one."""
    monkeypatch.setattr("shoal.cli.grpo.has_gpu", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert main([*argv, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert [line for line in shown.err.splitlines() if f"note: a run on this machine would be refused: {said}" in line]
    assert "Qwen/Qwen3-0.6B" in shown.out
    assert main([*THREE, "train.recipe=auto", "--dry-run"]) == 0
    assert "refused" not in capsys.readouterr().err


def test_driver_that_torch_cannot_use_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A CPU build of torch beside a driver, or CUDA_VISIBLE_DEVICES that hides the devices."""
    monkeypatch.setattr("shoal.cli.grpo.has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*THREE, "--dry-run"]) == 0
    assert f"note: a run on this machine would be refused: {NO_FP8}" in capsys.readouterr().err


def test_dry_run_refuses_an_unknown_dtype(capsys: pytest.CaptureFixture[str]):
    assert main(["grpo-infer", str(EXAMPLES / "infer.yaml"), "infer.dtype=float16", "--dry-run"]) == 2
    assert "infer.dtype: the embedded engine supports bfloat16 and float32, not float16" in capsys.readouterr().err


def test_dry_run_prints_the_written_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
    one = ["grpo", "train.model=Qwen/Qwen3-0.6B", "train.max_steps=1", "orch.env=arithmetic", "--dry-run"]
    for loss, told in (([], True), (["train.loss.type=grpo"], False)):
        assert main([*one, *loss]) == 0
        assert ("train.loss.type: is masked, the default: no clip, but" in capsys.readouterr().err) is told


def test_used_folder_message_names_both_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


def test_dry_run_with_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*THREE, "--dry-run", "--resume"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*THREE, "--dry-run", "train.resume_from_checkpoint=true"]) == 0
    assert "nothing to resume" in capsys.readouterr().err
    (tmp_path / "outputs" / "run.lock").touch()  # killed before its first record
    assert main([*THREE, "--dry-run", "--resume"]) == 0
    assert "nothing to resume" in capsys.readouterr().err


def test_server_file_is_checked_alone(capsys: pytest.CaptureFixture[str]):
    assert main(["grpo-infer", str(EXAMPLES / "infer.yaml"), "--dry-run"]) == 0
    assert "Qwen/Qwen3-0.6B" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "orch"])
def test_files_of_the_split_layout_are_checked_alone(name: str, capsys: pytest.CaptureFixture[str]):
    file = str(EXAMPLES / f"{name}.yaml")
    assert main([f"grpo-{name}", file, "--dry-run"]) == 0
    assert "Qwen/Qwen3-0.6B" in capsys.readouterr().out
    assert main([f"grpo-{name}", file, f"{name}.nonsense=1", "--dry-run"]) == 2
    assert f"{name}.nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "given", "key"),
    [
        ("train", "train.model=Qwen/Qwen3-0.6B", "train.loss.type"),
        ("orch", str(EXAMPLES / "orch.yaml"), "orch.groups.filter"),
    ],
)
def test_code_named_in_files_of_the_split_layout_is_loaded(
    name: str, given: str, key: str, capsys: pytest.CaptureFixture[str]
):
    Path("mine.py").write_text("")
    for named, said in (("nofile.py:x", 'there is no file "nofile.py"'), ("mine.py:x", "mine.py has no 'x'")):
        assert main([f"grpo-{name}", given, f"{key}={named}", "--dry-run"]) == 2
        shown = capsys.readouterr().err
        assert f"{key}: {said}" in shown


def test_sft_from_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    flags = ["--model", "Qwen/Qwen3-0.6B", "--dataset", "rows.jsonl", "--max-steps", "3", "--output-dir", "1e5"]
    assert main(["sft", *flags, "batch_size=2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "batch_size: 2" in out and "max_steps: 3" in out and "output_dir: '1e5'" in out
    assert (tmp_path / "1e5" / "config.yaml").read_text() == out


def test_dpo_from_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    flags = ["--model", "Qwen/Qwen3-0.6B", "--dataset", "rows.jsonl", "--max-steps", "3", "--output-dir", "out"]
    assert main(["dpo", *flags, "loss.type=ipo", "train.lora=true", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "loss:\n  type: ipo\n  beta: 0.1\n" in out and "reference: adapter-off" in out
    assert (tmp_path / "out" / "config.yaml").read_text() == out
    assert main(["dpo", "out/config.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == out


MINE = """
print("imported")
class Shout:
    def __init__(self): raise RuntimeError("needs what is not here")
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (['orch.env=[{id: "mine.py:Shoutt"}]'], "orch.env: mine.py has no 'Shoutt'; nearest is 'Shout'"),
        (['orch.env=[{id: "broken.py:X"}]'], "orch.env: broken.py:X: importing it raised SyntaxError"),
        (['orch.env=[{id: "ends.py:X"}]'], "orch.env: ends.py:X: importing it raised SystemExit"),
        (
            ["orch.env=[{id: arithmetic, args: {level: 9}}]"],
            "orch.env.0.args: environment 'arithmetic': args.level",
        ),
        (
            ["orch.env=[{id: arithmetic}]", "orch.eval.env=[{id: arithmetic, name: sums, args: {level: 9}}]"],
            "orch.eval.env.0.args: environment 'arithmetic': args.level is 9",
        ),
        (
            ["orch.env=[{id: reverse-text, args: {min_len: 50}}]"],
            "orch.env: reverse-text: min_len 50",
        ),
        (
            ["orch.env=[{id: dataset, args: {reward: 'mine.py:no'}}]", "orch.dataset.path=rows.jsonl"],
            "orch.env: mine.py has no 'no'",
        ),
        (["orch.env=[{id: arithmetic}]", "train.loss.type=mine.py:no"], "train.loss.type: mine.py has no 'no'"),
        (["orch.env=[{id: arithmetic}]", "orch.groups.filter=mine.py:nosuch"], "orch.groups.filter: mine.py has no"),
        (["orch.env=[{id: arithmetic}]", "orch.reward.function=mine.py:no"], "orch.reward.function: mine.py has no"),
    ],
    ids=["name", "syntax", "ends", "argument", "evaluated", "bounds", "grader", "loss", "filter", "reward"],
)
@pytest.mark.parametrize("layout", ([], ["--layout", "split"]), ids=["one process", "split"])
def test_dry_run_refuses_unusable_user_code(
    words: list[str], said: str, layout: list[str], capsys: pytest.CaptureFixture[str]
):
    Path("mine.py").write_text(MINE)
    Path("broken.py").write_text("class X(\n")
    Path("ends.py").write_text("raise SystemExit(0)\n")
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    argv = ["grpo", "train.model=Qwen/Qwen3-0.6B", "train.max_steps=3", "train.output_dir=out", *layout, "--dry-run"]
    assert main([*argv, *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("out", "config.yaml").exists()


def test_dry_run_creates_no_user_environment_and_separates_its_output(capsys: pytest.CaptureFixture[str]):
    Path("own.py").write_text(MINE)
    argv = ["grpo", "train.model=Qwen/Qwen3-0.6B", "train.max_steps=3", "train.output_dir=out", "--dry-run"]
    assert main([*argv, 'orch.env=[{id: "own.py:Shout"}]']) == 0
    said = capsys.readouterr()
    assert "imported" not in said.out and "imported" in said.err and said.out.startswith("train:")
