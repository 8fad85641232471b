"""A split run of a checkpoint with a vision tower. benchmarks/vllm_families.py compares exports of many families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.families import build
from support.engine_servers import vllm_python
from support.models import TOKENIZER
from support.ports import free_port
from support.vllm_runs import grpo, lines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# vLLM's attention on a CPU needs heads of at least 32 dimensions, and it does not renew a tied output layer.
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
PROCESSOR = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
STEPS = 2


def test_split_run_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """vLLM loads every version, its probes differ by version, and its log-probs are those of the trainer."""
    model = tmp_path / "model"
    build("gemma3", sizes=HEADS, own={"tie_word_embeddings": False}).save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), "utf-8")
    arguments = {"enforce_eager": True, "language_model_only": True}
    infer = {"engine_python": vllm_python(), "port": free_port(), "engine_args": arguments}
    train = {"model": str(model), "max_steps": STEPS, "learning_rate": 1e-3}
    done = grpo(tmp_path, "--layout", "split", infer=infer, train=train)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = lines(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert all(row["mismatch/k3"] < 1e-8 and row["optim/grad_norm"] > 0 for row in metrics), metrics
    assert len({row["weights"] for row in lines(tmp_path / "out" / "journal.jsonl")}) == STEPS
