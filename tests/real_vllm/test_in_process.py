"""vLLM in this process with requests in flight: new versions, cancelled requests, and its failure."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engine_servers import CPU, adapter, contract_model, vllm_python
from support.models import EOS, VOCABULARY, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
(PROMPT,) = random_prompts(5, 12)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Any]]:
    folder = tmp_path_factory.mktemp("adapters")
    return [adapter(folder / str(seed), seed, 4) for seed in (1, 2)]


@pytest.fixture(scope="module")
def said(models: list[tuple[dict[str, Any], Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One vLLM for all tests, because it takes most of a minute to start."""
    folder = tmp_path_factory.mktemp("in_process")
    asked = {"model": str(contract_model()), "prompt": PROMPT, "vocab_size": VOCABULARY, "eos": [EOS]}
    asked["adapters"] = [manifest for manifest, _ in models]
    (folder / "asked.json").write_text(json.dumps(asked), "utf-8")
    env = {**os.environ, **CPU, "PYTHONPATH": str(ROOT / "src"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    script = Path(__file__).parent / "in_process_engine.py"
    command = [vllm_python(), str(script), str(folder / "asked.json"), str(folder / "said.json")]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "said.json").read_text("utf-8"))


@torch.no_grad()
def expected(model: Any, ids: list[int]) -> np.ndarray:
    """Log-probs at positions where the end token was excluded (min_tokens), so the others are renormalised."""
    rows = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].double()
    rows[:, EOS] = -torch.inf
    return rows.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()


def test_request_keeps_its_adapter(said: dict[str, Any], models: list[tuple[dict[str, Any], Any]]):
    found = said["versions"]
    assert found["still"], "the version arrived during sampling"
    assert found["meanwhile"]["adapters"] == [1], "the request keeps its adapter; the next request uses the new one"
    for name, version in (("across", 1), ("after", 2)):
        drawn, model = found[name], models[version - 1][1]
        assert drawn["spans"] == [[0, len(drawn["ids"]), version]]
        np.testing.assert_allclose(drawn["logprobs"], expected(model, drawn["ids"]), rtol=0, atol=1e-4)
    assert np.abs(expected(models[1][1], found["across"]["ids"]) - found["across"]["logprobs"]).max() > 1e-2
    assert found["later"] == {"requests": 0, "adapters": [2]}, "and the old one is removed afterwards"
    assert found["unproved"] is None, "the probe is requested when nothing is being sampled"


def test_cancelled_request_is_aborted_in_vllm(said: dict[str, Any]):
    found = said["cancelled"]
    assert found["left"]["requests"] == 0
    assert len(found["again"]["ids"]) == 16 and found["again"] == found["undisturbed"]


def test_no_tokens_are_sampled_in_a_pause(said: dict[str, Any]):
    assert said["paused"] == {"held": True, "tokens": 120}


def test_failed_pause_is_reported_and_changes_nothing(said: dict[str, Any]):
    assert said["not_paused"]["said"] == "vLLM was not paused: its turn on the device did not end in 0.2 s"
    assert said["not_paused"]["tokens"] == 120


def test_sleeping_engine_wakes_on_request(said: dict[str, Any]):
    found = said["asleep"]
    assert found["cancelled"] and found["words"] == 1 and found["slept"], "the name of an ended call can be used again"
    assert found["still"], "it keeps sleeping"
    assert found["awake"] and found["tokens"] == 8


def test_health_reports_a_broken_vllm(said: dict[str, Any]):
    found = said["broken"]
    assert found["well"]["ok"] is True and "reason" not in found["well"]
    first, second = found["said"]
    assert first == "vLLM failed: RuntimeError: the device is lost"
    assert second == "vLLM failed earlier: the device is lost", "immediately, without another request"
    assert found["ill"]["ok"] is False and found["ill"]["reason"] == "the device is lost"
