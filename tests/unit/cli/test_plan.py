"""`shoal plan`: fast, without torch, and one clear message for every wrong input."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.entry import main

SCRIPT = """
import sys
from shoal.cli.entry import main
code = main(["plan", "qwen2.5-7b", "--lora"])
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(code)
"""


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_takes_less_than_a_second():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert "step time" in done.stdout and "estimated, not measured" in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["qwen2.5-8b"], ["qwen2.5-8b", "qwen2.5-7b", "llama-3-70b"]),
        (["no/such-model"], ["no/such-model", "llama-3-70b"]),
        (["no/such/model"], ["no/such/model"]),
        (["model.gguf"], ["model.gguf"]),
        (["qwen2.5-0.5b", "--gpu", "h300"], ["--gpu", "h300", "h200", "t4"]),
        (["qwen2.5-0.5b", "--gpus", "0"], ["--gpus", "0"]),
        (["qwen2.5-0.5b", "--rollouts", "-8"], ["--rollouts", "-8"]),
        (["qwen2.5-0.5b", "--rollouts", "12"], ["--rollouts", "--group"]),
        (["qwen2.5-0.5b", "--new-tokens", "0"], ["--new-tokens"]),
        (["qwen2.5-0.5b", "--longest", "10"], ["--longest", "--new-tokens"]),
        (["qwen2.5-0.5b", "--lora-rank", "0"], ["--lora-rank"]),
        (["qwen2.5-0.5b", "--tp", "2"], ["--tp", "--sampler-gpus"]),
        (["qwen2.5-0.5b", "--max-num-seqs", "0"], ["--max-num-seqs"]),
        (["qwen2.5-0.5b", "--gpus", "4", "--sampler-gpus", "4"], ["--sampler-gpus", "--gpus"]),
        (["qwen2.5-0.5b", "--gpus", "4", "--sampler-gpus", "-1"], ["--sampler-gpus"]),
        (["qwen2.5-0.5b", "--gpus", "8", "--sampler-gpus", "3", "--tp", "2"], ["--tp", "--sampler-gpus"]),
        (["qwen2.5-0.5b", "--prompt-tokens", "4000", "--sequence-len", "2048"], ["--sequence-len"]),
        (["qwen2.5-0.5b", "--price-per-hour", "-1"], ["--price-per-hour"]),
        (["qwen2.5-0.5b", "--price-per-hour", "nan"], ["--price-per-hour"]),
        (["qwen2.5-0.5b", "--steps", "many"], ["--steps"]),
        (["qwen2.5-0.5b", "--teacher", "no-model"], ["--teacher", "no-model"]),
        (["missing.yaml"], ["missing.yaml"]),
        ([], ["MODEL"]),
    ],
)
def test_wrong_input_gives_one_message(words: list[str], named: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1
    assert all(word in shown.err for word in named), shown.err


def test_non_config_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    weights, deep, experts = (tmp_path / name for name in ("model.gguf", "deep.json", "config.json"))
    weights.write_bytes(b"GGUF" + bytes(2_000_000))
    deep.write_text("[" * 200_000)
    experts.write_text('{"num_experts": 4}')
    for path, word in ((weights, "bytes"), (deep, "deep.json"), (tmp_path, "mixture-of-experts")):
        assert main(["plan", str(path)]) == 2
        assert word in capsys.readouterr().err


def test_cost_is_hours_times_devices_times_price(capsys: pytest.CaptureFixture[str]):
    found = plan(capsys, "qwen2.5-0.5b", "--gpus", "4", "--steps", "50", "--price-per-hour", "2.5")
    assert found["run"]["hours"] == pytest.approx(50 * found["seconds"]["step"] / 3600)
    assert found["run"]["cost"] == pytest.approx(found["run"]["hours"] * 4 * 2.5)
    assert plan(capsys, "qwen2.5-0.5b")["run"]["cost"] is None


def test_run_that_does_not_fit_has_no_times(capsys: pytest.CaptureFixture[str]):
    found = plan(capsys, "llama-3-70b")
    assert not found["fits"] and found["seconds"] is None and found["run"] is None
    assert main(["plan", "llama-3-70b"]) == 0
    shown = capsys.readouterr().out
    assert "does not fit" in shown and "step time" not in shown


def test_options_override_the_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.yaml"
    file.write_text(
        "train: {model: qwen2.5-0.5b, output_dir: out, sequence_len: 1024, max_steps: 7, lora: true, lora_rank: 8,\n"
        "  recipe: fp8-hybrid}\n"
        "orch: {env: [reverse-text], batch_size: 64, rollouts_per_example: 16, sampling: {max_tokens: 900}}\n"
    )
    found = plan(capsys, str(file))["workload"]
    assert (found["rollouts"], found["group"], found["lora_rank"], found["steps"]) == (64, 16, 8, 7)
    assert (found["new_tokens"], found["sequence_len"], found["prompt_tokens"]) == (900, 1024, 124)
    changed = plan(capsys, str(file), "--new-tokens", "300", "--rollouts", "128")
    workload = changed["workload"]
    assert (workload["rollouts"], workload["new_tokens"], workload["longest"]) == (128, 300, 900)
    assert any("fp8-hybrid" in line for line in changed["assumptions"])
