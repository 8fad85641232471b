"""Shapes: their sizes, models of them without files, and where they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.cli.make_files import export
from shoal.config.infer import InferConfig
from shoal.config.model_names import SHAPES, model_problem
from shoal.config.rules import check_run, check_section
from shoal.config.schema import RunConfig
from shoal.core.errors import ConfigError, ModelError
from shoal.models.load import load_model
from shoal.models.random_models import make_model, shape_config
from shoal.models.tokenizer import check_found, load_tokenizer, locate

BILLIONS = {
    "tiny": 0.0006, "qwen3-0.6b": 0.596, "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.616, "qwen3.5-0.8b": 0.752,
    "smollm2-135m": 0.1345, "llama-3-8b": 8.03, "llama-3-70b": 70.55,
    "qwen3-30b-a3b": 30.53, "gemma-3-4b": 3.88, "gpt-oss-20b": 20.91,
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SHAPES)
def test_shape_has_the_size_of_its_model(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_shape_model_has_the_weights_of_its_files(tmp_path: Path) -> None:
    make_model("tiny", tmp_path)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    model = load_model("shape:tiny", torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), state), "other random numbers do not depend on it"
    written = load_model(str(tmp_path), torch.float32, CPU).state_dict()
    assert all(torch.equal(value, written[key]) for key, value in model.state_dict().items())
    assert load_tokenizer("shape:tiny").get_vocab() == load_tokenizer(str(tmp_path)).get_vocab()


def test_shape_is_refused_where_files_are_needed() -> None:
    check_found("train.model", "shape:tiny")
    with pytest.raises(ModelError, match="make-model DIR --shape tiny"):
        locate("shape:tiny")
    assert model_problem("shape:tiny") is None
    assert model_problem("shape:qwen3-06b") == ("there is no shape 'qwen3-06b'", "did you mean qwen3-0.6b?")
    with pytest.raises(ConfigError, match="has no files"):
        export("shape:tiny", "nowhere")
    assert check_section(InferConfig.model_validate({"model": "shape:tiny"})).errors
    data = {"train": {"model": "shape:tiny", "max_steps": 1}, "orch": {"env": "arithmetic"}}
    plain, remote = (RunConfig.model_validate(data | {"infer": {"engine": name}}) for name in ("embedded", "vllm"))
    assert not [e for e in check_run(plain).errors if "files" in str(e)]
    assert [e for e in check_run(remote).errors if "files" in str(e)]
