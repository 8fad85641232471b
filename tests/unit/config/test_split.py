"""Three sections checked together: the same result as for one file, without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config.infer import InferConfig
from shoal.config.load import load_section
from shoal.config.orch import OrchConfig
from shoal.config.rules import check_section, check_split, merge_sections, section_data
from shoal.config.train import TrainConfig
from shoal.core.errors import ConfigError

TRAIN = {"model": "m", "max_steps": 4, "sequence_len": 128, "output_dir": "there"}
ORCH: dict[str, Any] = {"env": [{"id": "reverse-text", "args": {"api_key": "canary"}}], "model": {"name": "m"}}


@pytest.mark.parametrize(
    ("url", "port", "asked"),
    [
        ("http://127.0.0.1:8000/v1", 8000, None),
        ("http://node2:8001/v1", 8000, 8001),
        ("https://node2/v1", 8000, 443),
        ("http://[::1]:8000/v1", 8001, 8000),
    ],
)
def test_address_with_another_port_is_reported(url: str, port: int, asked: int | None):
    own = TrainConfig.model_validate(TRAIN)
    orch = OrchConfig.model_validate(ORCH | {"client": {"base_url": url}})
    infer = InferConfig.model_validate({"model": "m", "port": port})
    config = merge_sections("train", own, {"infer": section_data(infer), "orch": section_data(orch)})
    said = [line for line in check_split(config).notice_lines() if "base_url" in line]
    expected = f"orch.client.base_url: has port {asked}, but grpo-infer listens on {port} (infer.port)"
    assert [line.partition(";")[0] for line in said] == ([expected] if asked is not None else [])


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://", "http://node2:port/v1", "http://[::1/v1", "ftp://node2/v1"]
)
def test_invalid_address_is_refused(url: str):
    findings = check_section(OrchConfig.model_validate(ORCH | {"client": {"base_url": url}}))
    assert [".".join(map(str, problem.path)) for problem in findings.errors] == ["orch.client.base_url"]


def problems(train: dict[str, Any], infer: dict[str, Any], orch: dict[str, Any]) -> list[str]:
    own = TrainConfig.model_validate(TRAIN | train)
    others = {
        "infer": section_data(InferConfig.model_validate({"model": "m", "output_dir": "here"} | infer)),
        "orch": section_data(OrchConfig.model_validate(ORCH | orch)),
    }
    config = merge_sections("train", own, others)
    assert {config.train.output_dir, config.infer.output_dir, config.orch.output_dir} == {"there"}
    return [".".join(map(str, problem.path)) for problem in check_split(config).errors]


@pytest.mark.parametrize(
    ("train", "infer", "orch", "key"),
    [
        ({}, {"model": "n"}, {}, "infer.model"),
        ({}, {}, {"max_steps": 5}, "orch.max_steps"),
        ({}, {}, {"seq_len": 64}, "orch.seq_len"),
        ({}, {"max_model_len": 64}, {}, "train.sequence_len"),
        ({}, {}, {"sampling": {"max_tokens": 128}}, "orch.sampling.max_tokens"),
        ({"lora": True, "lora_rank": 8}, {}, {"model": {"name": "m", "lora_rank": 4}}, "orch.model.lora_rank"),
        ({"lora": True, "lora_alpha": 8}, {}, {"model": {"name": "m", "lora_alpha": 4}}, "orch.model.lora_alpha"),
        ({"lora": True, "lora_rank": 8}, {"max_lora_rank": 4}, {}, "train.lora_rank"),
        ({"lora": True}, {"enable_lora": False}, {}, "infer.enable_lora"),
        ({}, {"weights": "own"}, {}, "infer.weights"),
        ({"lora": True, "qlora_bnb": True}, {"engine": "vllm"}, {}, "infer.engine"),
        ({"lora": True, "qlora_fp8": True}, {"engine": "sglang"}, {}, "infer.engine"),
        ({"noise_scheduler": {"enabled": True}}, {"engine": "sglang"}, {}, "train.noise_scheduler"),
        ({}, {"engine": "vllm"}, {"sampling": {"top_p": 0.9}}, "orch.sampling"),
        ({}, {"engine": "sglang", "engine_python": "/p", "api_key_var": "KEY"}, {}, "infer.api_key_var"),
    ],
)
def test_contradictions_between_sections(train: dict[str, Any], infer: dict[str, Any], orch: dict[str, Any], key: str):
    assert key in problems(train, infer, orch)


def test_embedded_engine_does_what_servers_cannot():
    """A quantised base too: its old log-probs are computed again."""
    found = problems({"lora": True, "qlora_bnb": True}, {}, {"sampling": {"top_p": 0.9}})
    assert not [key for key in found if key != "train.model"]


def test_keys_of_the_split_layout_are_accepted():
    split = {"weight_broadcast": {"type": "nccl"}, "rollout_transport": {"type": "tcp"}, "deadline_s": 5.0}
    found = problems(split, {"port": 9000, "deadline_s": 5.0}, {"client": {"base_url": "http://127.0.0.1:9000/v1"}})
    assert not [key for key in found if key != "train.model"]


def test_secrets_are_not_sent_to_other_processes():
    told = section_data(OrchConfig.model_validate(ORCH))
    assert "canary" not in repr(told)
    with pytest.raises(ConfigError, match=r"handshake: orch\.batch"):
        merge_sections("train", TrainConfig.model_validate(TRAIN), {"infer": {}, "orch": told | {"batch": 4}})


def test_section_is_found_in_a_file_for_the_whole_run(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  model: m\n  max_steps: 3\norch:\n  env: reverse-text\n")
    assert load_section("train", str(file)).config.max_steps == 3
    assert load_section("orch", str(file), ["orch.batch_size=32"]).config.batch_size == 32
    assert load_section("infer", str(file), ["infer.port=9"]).config.port == 9
    loaded = load_section("train", str(file))
    assert loaded.origins.at(("train", "max_steps")) == f"{file}:3"
