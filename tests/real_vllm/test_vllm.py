"""A real vLLM on the CPU: adapters, noise, updates in flight, refusals, and GRPO runs.

`make test-vllm` installs it and runs these tests and the contract suite (tests/contracts/test_rollout_engine.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from shoal.core.errors import ConfigError, StorageError
from shoal.core.types import Completion, Request
from shoal.rollout.remote.server_info import ServerFacts, check_facts
from shoal.rollout.remote.vllm import VllmRolloutEngine
from shoal.runs.weight_files import describe
from support import engine_servers
from support.engine_servers import (
    CPU,
    LORA_RANK,
    adapter,
    contract_model,
    settings,
    shared_vllm,
    vllm_python,
)
from support.engines import ask
from support.models import TOKENIZER, small_model
from support.ports import free_port
from support.vllm_runs import (
    OWN_STEPS,
    PROMPT,
    ROOT,
    engine_of,
    grpo,
    lines,
    logprobs,
    on_shared_vllm,
    own_server_run,
    pids,
    start_grpo,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def tokens_drawn() -> float:
    with urllib.request.urlopen(f"{shared_vllm()}/metrics", timeout=10) as reply:
        counts = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", reply.read().decode(), re.MULTILINE)
    return sum(map(float, counts))


async def under_way(engine: VllmRolloutEngine, request: Request) -> asyncio.Task[Completion]:
    """A request of which vLLM has sampled a few tokens."""
    before = await asyncio.to_thread(tokens_drawn)
    running = asyncio.create_task(engine.generate(request))
    async with asyncio.timeout(60):
        while await asyncio.to_thread(tokens_drawn) < before + 3:
            await asyncio.sleep(0.01)
    return running


def test_adapters_have_a_name_a_version(tmp_path: Path) -> None:
    first, first_model = adapter(tmp_path / "one", 1, 4)
    second, second_model = adapter(tmp_path / "two", 2, 4)

    async def check(engine: VllmRolloutEngine) -> None:
        assert await engine.load(1, first) != await engine.load(2, second)
        drawn = await engine.generate(ask("b", PROMPT))
        np.testing.assert_allclose(drawn.logprobs, logprobs(second_model, drawn), rtol=0, atol=1e-4)
        assert drawn.spans[0].version == 2
        listed = [model["id"] for model in (await engine.get("/v1/models"))["data"]]
        assert "pond-v000002" in listed and "pond-v000001" not in listed, "the old one is unloaded"
        running = await under_way(engine, ask("c", PROMPT, max_tokens=60, min_tokens=60, seed=4))
        await engine.load(1, first)
        across = await running
        assert [span.version for span in across.spans] == [2], "a request finishes with its first adapter"
        expected = logprobs(second_model, across, ended_late=True)
        np.testing.assert_allclose(across.logprobs, expected, rtol=0, atol=1e-4)
        after = await engine.generate(ask("d", PROMPT))
        np.testing.assert_allclose(after.logprobs, logprobs(first_model, after), rtol=0, atol=1e-4)

    on_shared_vllm(check, lora_rank=4, adapter_name="pond")


def test_weight_update_during_generation_is_recorded_per_token() -> None:
    """The first tokens have the log-probs of the old weights and the rest those of the new weights, from the token of
    the span.
    """
    old, new = small_model("qwen3", seed=8), small_model("qwen3", seed=21)

    async def check(engine: VllmRolloutEngine) -> None:
        manifest = engine_servers.publish(5, dict(new.named_parameters()))
        for _ in range(5):  # one may finish before the update
            await engine.load(0, describe(contract_model(), 0, "full"))
            running = await under_way(engine, ask("r", PROMPT, max_tokens=80, min_tokens=80, seed=3))
            await engine.load(5, manifest)
            drawn = await running
            if len(drawn.spans) > 1:
                break
        first, second = drawn.spans
        assert (first.version, second.version) == (0, 5) and first.end == second.start and second.end == 80
        for model, span in ((old, first), (new, second)):
            expected, part = logprobs(model, drawn, ended_late=True), slice(span.start, span.end)
            np.testing.assert_allclose(drawn.logprobs[part], expected[part], rtol=0, atol=1e-4)

    on_shared_vllm(check)


def test_broken_file_is_rejected_before_any_tensor_is_replaced() -> None:
    async def check(engine: VllmRolloutEngine) -> None:
        manifest = engine_servers.publish(6, dict(small_model("qwen3", seed=30).named_parameters()))
        path = Path(manifest["path"]) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(StorageError, match=r"model\.safetensors"):
            await engine.load(6, manifest)
        drawn = await engine.generate(ask("r", PROMPT))
        assert engine.version == 0 and drawn.spans[0].version == 0
        np.testing.assert_allclose(drawn.logprobs, logprobs(small_model("qwen3", seed=8), drawn), rtol=0, atol=1e-4)

    on_shared_vllm(check)


REFUSED = {
    "another-model": (
        {"model": "/models/another"},
        "train.model: ",
    ),
    "context": ({"context_tokens": 4096}, r"infer.max_model_len: .*4096.* 160"),
    "rank": ({"lora_rank": LORA_RANK + 1}, rf"train.lora_rank: {LORA_RANK + 1} .*{LORA_RANK}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_server_that_does_not_fit_is_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]

    async def connect() -> None:
        engine = VllmRolloutEngine(settings(shared_vllm(), **changes))
        try:
            await engine.connect()
        finally:
            await engine.close()

    with pytest.raises(ConfigError, match=message):
        asyncio.run(connect())


def check_run(out: Path, steps: int) -> None:
    """It trained with log-probs of the policy, and with another weight version in every step."""
    metrics = lines(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    assert all(row["mismatch/k3"] < 1e-9 for row in metrics), [row["mismatch/k3"] for row in metrics]
    assert all(row["optim/grad_norm"] > 0 and row["staleness/max"] == 0 for row in metrics)
    assert len({row["weights"] for row in lines(out / "journal.jsonl")}) == steps
    versions = {v for file in sorted((out / "rollouts").iterdir()) for row in lines(file) for _, _, v in row["spans"]}
    assert versions == set(range(steps))
    assert sorted(path.name for path in (out / "weights").iterdir()) == [f"v{steps - 1:06d}", f"v{steps:06d}"]


def test_run_with_a_server_of_its_own() -> None:
    out = own_server_run() / "out"
    check_run(out, OWN_STEPS)
    log = (out / "logs" / "vllm.log").read_text("utf-8")
    assert "'logprobs_mode': 'processed_logprobs'" in log and "'dtype': 'float32'" in log


@pytest.mark.parametrize("victim", ["engine", "engine that owes an answer"])
def test_server_that_dies_is_named_with_its_log(tmp_path: Path, victim: str) -> None:
    """vLLM answers that the stack trace above explains the error, but the trace is in its log. It never answers a
    request of the failed engine, and its process waits for these requests before it ends.
    (tests/e2e/test_server_lost.py kills the server itself.)
    """
    infer = {"engine_python": vllm_python(), "port": free_port(), "engine_args": {"enforce_eager": True}}
    process = start_grpo(tmp_path, infer=infer, train={"max_steps": 500})
    try:
        journal, weights = tmp_path / "out" / "journal.jsonl", tmp_path / "out" / "weights"
        wait_until(lambda: process.poll() is not None or (journal.exists() and journal.stat().st_size > 0), 300)
        pid = engine_of(infer["port"])
        if "owes" in victim:
            before = set(weights.iterdir())
            wait_until(lambda: not set(weights.iterdir()) <= before, 60)
            os.kill(pid, signal.SIGSTOP)  # the following request reaches the server, but not the engine
            time.sleep(3)
        os.kill(pid, signal.SIGKILL)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    said = errors[errors.index("shoal: error:") :] if "shoal: error:" in errors else out + errors
    assert process.returncode == 3, said
    how = (
        r"runs, but no longer listens"
        if "owes" in victim
        else r"(ended with exit code|runs, but no longer listens|failed: )"
    )
    assert re.search(rf"shoal: error: vLLM {how}", said) and str(Path("out/logs/vllm.log")) in said, said
    assert "Unclosed" not in out + errors and "Traceback" not in out + errors
    assert "EngineCore" in said, "the last error lines of its log"
    assert not pids("-f", f"port {infer['port']}"), "no process remains"


def test_split_run_samples_from_vllm(tmp_path: Path) -> None:
    """Three processes: grpo-infer starts vLLM, grpo-orch sends requests, grpo-train writes the weights that vLLM
    reloads.
    """
    infer = {"engine_python": vllm_python(), "port": free_port(), "engine_args": {"enforce_eager": True}}
    done = grpo(tmp_path, "--layout", "split", infer=infer, train={"max_steps": 2})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_run(tmp_path / "out", 2)


def test_run_with_adapters_on_a_server_that_runs(tmp_path: Path) -> None:
    train = {"lora": True, "lora_rank": 4, "lora_alpha": 8, "max_steps": 2}
    done = grpo(tmp_path, infer={}, train=train, orch={"client": {"base_url": f"{shared_vllm()}/v1"}})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_run(tmp_path / "out", 2)


LAUNCHED = """
from shoal.launcher import load_config, train


def letters(task, messages):
    return sum(letter.isalpha() for letter in messages[-1]["content"]) / 10


def main(args):
    train(load_config(args, reward=letters))
"""


def test_launcher_starts_a_server(tmp_path: Path) -> None:
    row = {"question": "Ann has 6 pens and buys 7. How many?", "answer": "6 + 7 = 13\n#### 13"}
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 8, "utf-8")
    (tmp_path / "task.py").write_text(LAUNCHED, "utf-8")
    config = {
        "experiment_name": "e", "trial_name": "t", "allocation_mode": "vllm:d1t1+d1", "total_train_steps": 2,
        "rollout": {"engine_python": vllm_python(), "port": free_port()}, "train_dataset": {"path": "data"},
        "actor": {"path": str(contract_model()), "mb_spec": {"max_tokens_per_mb": 128}},
        "gconfig": {"max_new_tokens": 10},
    }  # fmt: skip
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(config), "utf-8")
    env = {**os.environ, **CPU, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "shoal.launcher.local", "task.py", "--config", "file.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_run(tmp_path / "outputs" / "e" / "t", 2)


def test_unknown_engine_argument_is_named(tmp_path: Path) -> None:
    infer = {"engine_python": vllm_python(), "port": free_port(), "engine_args": {"enforce_eeger": True}}
    done = grpo(tmp_path, infer=infer)
    assert done.returncode == 2
    assert "error: infer.engine_args: vLLM does not know --enforce-eeger" in done.stdout + done.stderr


def test_tied_embeddings_on_a_cpu_are_refused(tmp_path: Path) -> None:
    """A reload does not change the packed copy of the tied head, so training would silently use a wrong head."""
    tied = tmp_path / "model"
    small_model("qwen3", seed=8, tie_word_embeddings=True).save_pretrained(tied)
    TOKENIZER.save_pretrained(tied)
    facts = asyncio.run(facts_of(shared_vllm()))
    assert facts.on_cpu
    with pytest.raises(ConfigError, match="vLLM on a CPU does not renew the output layer"):
        check_facts("vLLM", replace(facts, model=str(tied)), settings(shared_vllm(), model=str(tied)))
    check_facts("vLLM", facts, settings(shared_vllm()))
    check_facts("vLLM", replace(facts, model=str(tied)), settings(shared_vllm(), model=str(tied), lora_rank=4))


async def facts_of(url: str) -> ServerFacts:
    engine = VllmRolloutEngine(settings(url))
    try:
        return await engine.facts()
    finally:
        await engine.close()


@pytest.mark.parametrize("layout", ["colocated", "split"])
def test_tied_embeddings_on_a_cpu_are_refused_before_vllm_serves(tmp_path: Path, layout: str) -> None:
    tied = tmp_path / "model"
    small_model("qwen3", seed=8, tie_word_embeddings=True).save_pretrained(tied)
    TOKENIZER.save_pretrained(tied)
    infer = {"engine_python": vllm_python(), "port": free_port()}
    done = grpo(tmp_path, "--layout", layout, infer=infer, train={"model": str(tied)})
    assert done.returncode == 2
    assert "vLLM on a CPU does not renew the output layer" in done.stdout + done.stderr
    if layout == "colocated":  # in the split layout it starts to load if the others join late
        assert not (tmp_path / "out" / "logs" / "vllm.log").exists()


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_two_steps_in_the_training_process(tmp_path: Path, lora: bool) -> None:
    """`GRPOTrainer(use_vllm=True)`: arguments arrive, weights are proved after each sync, sleep and wake are called."""
    script = Path(__file__).parent / "in_process.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [vllm_python(), str(script), str(contract_model()), str(tmp_path / "out"), "lora" if lora else "full"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads((tmp_path / "out" / "seen.json").read_text("utf-8"))
    assert seen["llm"]["enforce_eager"] is True and seen["llm"]["max_num_seqs"] == 8, "as in vllm_args"
    assert seen["llm"]["gpu_memory_utilization"] == 0.5 and seen["llm"]["logprobs_mode"] == "processed_logprobs"
    assert seen["llm"]["model"] == str(contract_model()) and seen["llm"].get("enable_lora", False) is lora
    assert seen["sleep"] and all(call == {"level": 1} for call in seen["sleep"]), "weights are never discarded"
    assert len(seen["wake_up"]) >= 2
    metrics, journal = lines(tmp_path / "out" / "metrics.jsonl"), lines(tmp_path / "out" / "journal.jsonl")
    assert len(metrics) == 2 and metrics[0]["mismatch/k3"] < 1e-9
    assert (metrics[1]["mismatch/k3"] < 1e-9) is lora, "the full run has noise in its second step"
    assert lora or [row["noise/applied"] for row in metrics] == pytest.approx([0.0, 0.2], rel=0.2)
    assert len({row["weights"] for row in journal}) == 2 and all(row["optim/grad_norm"] > 0 for row in metrics)
