"""From a configuration to the command line of a server, and refusals before loading."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.build.remote_engines import absent_server, as_flags, check_engine, check_tied, launch_of
from shoal.config.resolve import resolve_run
from shoal.config.rules import check_run
from shoal.config.schema import RunConfig
from shoal.core.errors import ConfigError, EngineError
from shoal.split.inference_process import serve_others
from shoal.watch.machine import has_gpu
from support.ports import free_port


def config(infer: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    train = {"model": "org/model", "max_steps": 2, "sequence_len": 128, **sections.get("train", {})}
    orch = {"env": [{"id": "arithmetic"}], "batch_size": 16, "rollouts_per_example": 4, **sections.get("orch", {})}
    return RunConfig.model_validate({"train": train, "infer": infer, "orch": orch})


def command(infer: dict[str, Any], **sections: dict[str, Any]) -> list[str]:
    return list(launch_of(resolve_run(config(infer, **sections)).infer, Path("out"), "float32").command)


def value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_vllm_receives_run_settings_and_training_requirements() -> None:
    flags = command({"engine": "vllm", "engine_python": "/venv/bin/python", "port": 8001, "tp": 2})
    assert flags[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert value(flags, "--logprobs-mode") == "processed_logprobs" and "--enable-scale-out" in flags
    assert value(flags, "--generation-config") == "vllm"
    expected = {"--model": "org/model", "--port": "8001", "--dtype": "float32", "--max-model-len": "128"}
    expected |= {"--tensor-parallel-size": "2", "--max-num-seqs": "16", "--host": "127.0.0.1"}
    assert {name: value(flags, name) for name in expected} == expected
    assert "--enable-prefix-caching" in flags and "--enable-lora" not in flags


def test_adapter_slots_fit_rank_and_previous_adapter() -> None:
    infer = {"engine": "vllm", "engine_python": "/venv/bin/python"}
    flags = command(infer, train={"lora": True, "lora_rank": 12})
    assert (value(flags, "--max-lora-rank"), value(flags, "--max-loras")) == ("16", "2")
    flags = command({**infer, "engine": "sglang"}, train={"lora": True, "lora_rank": 12})
    assert (value(flags, "--max-lora-rank"), value(flags, "--max-loras-per-batch")) == ("12", "2")
    assert "--enable-deterministic-inference" in flags and value(flags, "--model-path") == "org/model"


def test_engine_args_are_passed_on_and_win() -> None:
    given = {"max_num_seqs": 4, "enforce_eager": True, "async_scheduling": False, "hf_overrides": {"a": 1}}
    flags = command({"engine": "vllm", "engine_python": "/venv/bin/python", "engine_args": given})
    assert value(flags, "--max-num-seqs") == "4" and flags.count("--max-num-seqs") == 1
    assert "--enforce-eager" in flags and "--no-async-scheduling" in flags
    assert value(flags, "--hf-overrides") == '{"a": 1}'


def test_lists_are_shown_one_item_per_line() -> None:
    assert list(as_flags({"a_b": [1, "x"], "c": None})) == ["--a-b", "1", "x"]


def test_config_key_is_not_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "s3cret")
    infer = {"engine": "vllm", "engine_python": "/venv/bin/python", "api_key_var": "ENGINE_KEY"}
    launch = launch_of(resolve_run(config(infer)).infer, Path("out"))
    assert launch.environment["VLLM_API_KEY"] == "s3cret" and "s3cret" not in " ".join(launch.command)


def test_vllm_on_a_cpu_disables_chunked_prefill_by_default() -> None:
    """vLLM fails at the first split prompt with a seed, and every request of a run has a seed."""

    def flags(on_cpu: bool, **arguments: Any) -> list[str]:
        infer = {"engine": "vllm", "engine_python": "/venv/bin/python", "engine_args": arguments}
        return list(launch_of(resolve_run(config(infer)).infer, Path("out"), "float32", on_cpu=on_cpu).command)

    assert "--no-enable-chunked-prefill" in flags(True)
    assert not [flag for flag in flags(False) if "chunked" in flag]
    asked = flags(True, enable_chunked_prefill=True)
    assert "--enable-chunked-prefill" in asked and "--no-enable-chunked-prefill" not in asked


@pytest.mark.parametrize(
    ("infer", "sections", "says"),
    [
        ({"engine": "vllm", "engine_args": {"a": 1}}, {}, "infer.engine_args"),
        ({"engine": "vllm", "tp": 2}, {}, "infer.tp"),
        (
            {"engine": "vllm", "engine_python": "/p"},
            {"orch": {"client": {"base_url": "http://10.0.0.1:8000/v1"}}},
            "infer.engine_python",
        ),
        ({"engine": "sglang", "in_process": True}, {}, "infer.in_process"),
        ({"engine": "embedded", "engine_python": "/p"}, {}, "infer.engine_python"),
        ({"engine": "sglang"}, {"train": {"noise_scheduler": {"enabled": True}}}, "train.noise_scheduler"),
        ({"engine": "vllm"}, {"train": {"lora": True, "qlora_bnb": True}}, "infer.engine"),
        ({"engine": "vllm"}, {"orch": {"sampling": {"top_p": 0.9}}}, "orch.sampling"),
    ],
)
def test_contradictions_are_named(infer: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    errors = [".".join(map(str, problem.path)) for problem in check_run(config(infer, **sections)).errors]
    assert says in errors


def test_running_server_needs_only_its_address() -> None:
    attach = {"orch": {"client": {"base_url": "http://10.0.0.1:8000/v1"}}}
    assert not check_run(config({"engine": "vllm"}, **attach)).errors


def test_missing_engine_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"infer.engine_python: /p is not an executable file"):
        check_engine(config({"engine": "vllm", "engine_python": "/p"}), 1)
    with pytest.raises(ConfigError, match="has no package vllm"):
        check_engine(config({"engine": "vllm", "engine_python": sys.executable}), 1)
    with pytest.raises(ConfigError, match=r"orch.client.api_key_var: the environment variable NO_SUCH_KEY is not set"):
        check_engine(config({"engine": "vllm"}, orch={"client": {"api_key_var": "NO_SUCH_KEY"}}), 1)
    # The orchestrator of a split run may be on another machine than the server's Python and its key.
    check_engine(config({"engine": "vllm", "engine_python": "/p", "api_key_var": "NO_SUCH_KEY"}), 1, starts=False)
    with pytest.raises(ConfigError, match="several training processes"):
        check_engine(config({"engine": "vllm"}), 2)


@pytest.mark.skipif(has_gpu(), reason="vLLM would be on the GPU")
def test_tied_model_on_a_cpu_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    vllm = {"engine": "vllm", "engine_python": "/p"}
    for ties in (True, False):
        (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": ties}), "utf-8")
        full = config(vllm, train={"model": str(tmp_path)})
        if ties:
            with pytest.raises(ConfigError, match="does not renew the output layer of a model with tied embeddings"):
                check_tied(full)
            check_tied(config(vllm, train={"model": str(tmp_path), "lora": True}))
            check_tied(config({}, train={"model": str(tmp_path)}))
        else:
            check_tied(full)


def test_absent_server_is_reported_before_loading() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        attached = resolve_run(config({"engine": "vllm"}, orch={"client": {"base_url": f"http://127.0.0.1:{port}/v1"}}))
        said = absent_server(attached)
        assert (
            said is not None
            and f"infer.engine_python: is not given and nothing answers at http://127.0.0.1:{port}" in said
        )
        assert "or set infer.engine_python to the Python that has vLLM" in said
        server.listen()
        assert absent_server(attached) is None
    assert absent_server(resolve_run(config({"engine": "vllm", "engine_python": "/p"}))) is None
    assert absent_server(resolve_run(config({}))) is None


@pytest.mark.parametrize(("serves", "kind"), [(True, EngineError), (False, ConfigError)])
def test_grpo_infer_distinguishes_a_failed_server_from_a_failed_start(
    tmp_path: Path, serves: bool, kind: type[Exception]
) -> None:
    """Exit code 3 or 2 for all processes of a split run: 3 can be resumed unchanged, 2 needs another configuration."""
    port, python = free_port(), tmp_path / "python"
    serve = f'import socket; socket.create_server(("127.0.0.1", {port})).accept(); '
    end = 'print("RuntimeError: no"); raise SystemExit(1)'
    script = f"{sys.executable} -c '{serve * serves}{end}'"
    python.write_text(f"#!/bin/sh\ncase $1 in -m) exec {script};; esac\n", "utf-8")  # -c: the check whether it has vLLM
    python.chmod(0o755)
    given = {"engine": "vllm", "engine_python": str(python), "port": port, "output_dir": str(tmp_path)}
    infer = resolve_run(config({**given, "model": "org/model"})).infer.model_copy(update={"output_dir": str(tmp_path)})
    with pytest.raises(kind, match="vLLM ended with exit code 1") as caught:
        asyncio.run(serve_others(infer, lambda _: None))
    assert type(caught.value) is kind and "RuntimeError: no" in str(caught.value)
