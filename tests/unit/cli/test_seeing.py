"""report, watch, show, doctor and explain as a user types them: output and refusals."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.entry import main
from shoal.runs.run_dir import RunDir
from shoal.watch.machine import check_machine

Output = pytest.CaptureFixture[str]
FIRST = {"step": 1, "reward/mean": 0.25, "completion/truncated_frac": 0.9}
TOKENS = {"token_texts": ["It", " is", " \x1b[31mred"], "loss_mask": [1, 1, 0], "sampler_logprobs": [-0.1, -3.0, 0.0]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        for step in (1, 2, 3):
            run_dir.append_metrics(step, {name: value for name, value in FIRST.items() if name != "step"})
            run_dir.write_rollouts(step, [rollout("a", 0, 1.0), rollout("a", 1, 0.0), rollout("b", 0, 0.5)])
        run_dir.write_status("finished", step=3, reason="finished", resumable=False)
    return tmp_path / "run"


def rollout(name: str, index: int, reward: float) -> dict[str, object]:
    return {
        "rollout_id": f"{name}/{index}", "prompt_id": name, "group": name, "env": "letters", "status": "ok",
        "prompt": f"[user] What is {name}?", "completion": "It is red", "reward": reward, "parts": {"style": reward},
        "advantage": 2 * reward - 1, **TOKENS, "policy_logprobs": [-0.1, -2.0, 0.0],
    }  # fmt: skip


def test_report_writes_one_file_or_prints_json(run: Path, tmp_path: Path, capsys: Output) -> None:
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").is_file() and "wrote" in capsys.readouterr().out
    assert main(["report", str(run), str(run), "--out", str(tmp_path / "both.html")]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["runs"][0]["series"]["reward/mean"] == [0.25] * 3
    assert data["runs"][0]["rollouts"]["2"][0]["rollouts"][1]["reward"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "nowhere"], "nowhere: is not a folder"),
        (["report", "."], "is not a run directory (it has no status.json); name one of the runs in it: run"),
        (["report", "empty"], "is not a run directory (it has no status.json); name the output_dir of a run"),
        (["report", "RUN", "--json", "--out", "x"], "--out has no effect"),
        (["report", "RUN", "--out", "no/x.html"], "--out: cannot write to no: No such file or directory"),
        (["report", "RUN", "--out", "/proc/x.html"], "--out: cannot write to /proc: "),
        (["report", "RUN", "--out", "."], "--out: . is a folder; name a file in it"),
        (["watch", "nowhere"], "nowhere: is not a folder"),
        (["watch", "RUN", "--port", "99999"], "--port: must be between 0 and 65535"),
        (["show", "RUN", "--step", "9"], "--step: 9 has no rollouts; this run has 1 to 3"),
        (["show", "RUN", "--group", "zebra"], "--group: zebra is not in this step; it has groups 1 to 2"),
        (["show", "RUN", "--tint", "rainbow"], "--tint"),
        (["doctor", "nowhere"], "nowhere: is not a folder"),
        (["explain", "ratio_max"], "did you mean policy/ratio_max, mismatch/ratio_max"),
    ],
)
def test_refusals_name_the_argument_and_a_fix(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(run.parent)
    Path("empty").mkdir()
    assert main([str(run) if word == "RUN" else word for word in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error


def test_show_prints_a_group_without_escapes(run: Path, capsys: Output) -> None:
    assert main(["show", str(run)]) == 0
    text = capsys.readouterr().out
    assert "step 3, a" in text and "What is a?" in text and "\x1b" not in text
    assert "1  reward 1  style 1  advantage +1.00" in text and "2  reward 0  style 0  advantage -1.00" in text
    assert text.count("It is red") == 2
    assert main(["show", str(run), "--step", "2", "--group", "2"]) == 0
    assert "step 2, b" in capsys.readouterr().out
    assert main(["show", str(run), "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["1", "a", "[user]", "What", "is", "a?", "[1", "0]"]


@pytest.mark.parametrize("tint", ["advantage", "logprob", "ratio"])
def test_tokens_are_colored_in_a_terminal(tint: str) -> None:
    from shoal.cli.inspect_run import colored_completion
    from shoal.watch.report.rollouts import describe_group

    (up, down) = describe_group("a", [rollout("a", 0, 1.0), rollout("a", 1, 0.0)])["rollouts"]
    first, second = colored_completion(up, tint), colored_completion(down, tint)
    assert first.plain == "It is red"
    colours = {str(span.style) for span in first.spans}
    if tint == "advantage":
        assert colours != {str(span.style) for span in second.spans}, "up and down have different colors"
    assert any("rgb(" in colour for colour in colours) and "bright_black italic" in colours


def test_doctor_names_metric_steps_and_remedy(run: Path, capsys: Output) -> None:
    assert main(["doctor", str(run)]) == 0
    text = capsys.readouterr().out
    assert "warning: 90% of the completions are truncated" in text
    assert "seen in: completion/truncated_frac, steps 1–3, 3 steps" in text
    assert "change: raise orch.sampling.max_tokens" in text and text.strip().endswith("1 warning, 0 notices")
    assert main(["doctor", str(run), "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["check"] == "truncated" and finding["steps"] == [1, 3]


def test_doctor_checks_the_machine(capsys: Output) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("python", "torch", "transformers", "GPU", "memory", "disk", "port 7447"):
        assert f"  {name} " in text, name
    assert importlib.util.find_spec("torch") is None or "torch cannot be queried" not in text


def test_port_in_use_is_detected(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 7447))
            taken.listen()
        except OSError:
            pass  # a run that is being watched counts as in use
        (fact,) = [fact for fact in check_machine(tmp_path) if fact.name == "port 7447"]
    assert fact.value.startswith("in use")


def test_explain_knows_all_metric_names_and_aliases(capsys: Output) -> None:
    assert main(["explain", "masked"]) == 0
    text = capsys.readouterr().out
    assert "Share of trained tokens masked" in text and "lower train.learning_rate" in text
    assert main(["explain", "eval/gsm8k/mean"]) == 0
    assert "eval/gsm8k/mean (eval/<env>/mean) [reward]" in capsys.readouterr().out
    for other, ours in (
        ("k3", "mismatch/k3"),  # a word of the step line
        ("ent", "policy/entropy"),
        ("gen", "time/rollout"),
        ("response_length/clip_ratio", "completion/truncated_frac"),
        ("clip_ratio/region_mean", "policy/clip_frac"),
    ):
        assert main(["explain", other]) == 0
        assert f"{other} ({ours})" in capsys.readouterr().out
    assert main(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 50


def test_commands_do_not_import_torch(run: Path) -> None:
    code = (
        "import sys\nfrom shoal.cli import main\n"
        f"assert [main([verb, {str(run)!r}]) for verb in ('report', 'doctor', 'show')] == [0, 0, 0]\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "False", done.stderr
