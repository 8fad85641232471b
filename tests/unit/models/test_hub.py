"""A model given by name: one request to the hub, and one line for every outcome. The hubs here are small servers on
this machine, or none.
"""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from shoal.core.errors import ModelError
from shoal.models import tokenizer
from shoal.models.random_models import character_tokenizer, make_model
from shoal.models.tokenizer import check_found, locate
from support.ports import free_port


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, status: int) -> Iterator[list[str]]:
    """A hub that answers everything with the same status; records its requests."""
    asked: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    point_at(monkeypatch, server.server_address[1])
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()


def point_at(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Like HF_ENDPOINT, which the library reads once at import, as it does the offline setting."""
    from huggingface_hub import constants

    address = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"http://127.0.0.1:{port}{address}")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    for variable in tokenizer.OFFLINE:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tokenizer, "_ANSWERS", {})


def test_unreachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    point_at(monkeypatch, port)
    with pytest.raises(ModelError) as told:
        check_found("train.model", "nobody/nothing")
    for part in ("train.model: 'nobody/nothing'", f"http://127.0.0.1:{port}", "[Errno 111]", "HF_HUB_ETAG_TIMEOUT"):
        assert part in str(told.value)


def test_restored_network_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not immediately: otherwise every file of a model would wait for a missing hub."""
    point_at(monkeypatch, free_port())
    with pytest.raises(ModelError, match="could not be downloaded"):
        locate("somebody/something")
    answers = tokenizer._ANSWERS
    with hub(monkeypatch, 200) as asked:
        monkeypatch.setattr(tokenizer, "_ANSWERS", answers)
        with pytest.raises(ModelError, match="could not be downloaded"):
            locate("somebody/something")
        assert asked == []
        monkeypatch.setattr(tokenizer, "ASKED_AGAIN_S", 0.0)
        assert locate("somebody/something") == ("somebody/something", None)


def test_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_at(monkeypatch, silent.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(ModelError, match=r"could not be downloaded from .*timed out"):
            locate("nobody/nothing")
        assert time.monotonic() - began < 20, "the limit is one second; retries would take half a minute"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_hub_denies_access(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    with hub(monkeypatch, status) as asked, pytest.raises(ModelError) as told:
        locate("nobody/nothing")
    assert "the hub refused access" in str(told.value)
    assert asked == ["/nobody/nothing/resolve/main/config.json"], "one request"


@pytest.mark.parametrize("status", [200, 429, 503])
def test_available_or_busy_hub_is_left_to_the_libraries(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    with hub(monkeypatch, status) as asked:
        assert locate("somebody/something") == ("somebody/something", None)
        assert locate("somebody/something") == ("somebody/something", None)
    assert len(asked) == 1, "once per process"


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize("value", ["1", "true"])
def test_offline_mode_is_named_without_a_request(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    with hub(monkeypatch, 200) as asked, pytest.raises(ModelError) as told:
        monkeypatch.setenv(variable, value)
        check_found("train.model", "nobody/nothing")
    for part in ("train.model: 'nobody/nothing'", f"{variable}={value}", f"unset {variable}"):
        assert part in str(told.value)
    assert asked == []


LOADING = """
from shoal.models.tokenizer import load_tokenizer
print(len(load_tokenizer("somebody/something")))
import torch
from shoal.models.load import load_model
from shoal.models.lora import LoraSettings, attach
model = attach(load_model("somebody/something", torch.float32, torch.device("cpu")), LoraSettings(2))
print(model.peft_config["default"].base_model_name_or_path)
from pathlib import Path
from types import SimpleNamespace
from shoal.trainer.checkpoint import export_weights
decoder = SimpleNamespace(model=model)
export_weights(SimpleNamespace(decoder=decoder), load_tokenizer("somebody/something"), Path("saved"))
"""


def python_without_a_hub(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """With a hub address that nobody listens on."""
    kept = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    env = {**kept, "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_command_prints_one_line_and_leaves_no_files(tmp_path: Path) -> None:
    train = {"model": "nobody/nothing", "output_dir": "out", "max_steps": 1}
    orch = {"env": [{"id": "reverse-text"}], "batch_size": 8, "rollouts_per_example": 8}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"train": train, "orch": orch}))
    ended = python_without_a_hub(tmp_path, "-m", "shoal", "grpo", "run.yaml")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("shoal: error: train.model: 'nobody/nothing'") and "could not be downloaded" in line
    assert not (tmp_path / "out").exists()


def test_cached_model_needs_no_hub(tmp_path: Path) -> None:
    """Without the offline setting, libraries request every missing file of a model, half a minute each."""
    kept = tmp_path / "home" / "hub" / "models--somebody--something"
    make_model("tiny", tmp_path / "tiny", 0)
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots").mkdir()
    shutil.move(tmp_path / "tiny", kept / "snapshots" / "abc")
    ended = python_without_a_hub(tmp_path, "-c", LOADING)
    assert ended.returncode == 0, ended.stderr
    assert "Retrying" not in ended.stderr
    assert ended.stderr.count("somebody/something: it could not be downloaded") == 1
    assert ended.stdout.split() == [str(len(character_tokenizer())), "somebody/something"], "an adapter names its base"
    assert "Could not find a config file" not in ended.stderr, "saving an adapter sends no request either"
    assert "base_model: somebody/something" in (tmp_path / "saved" / "README.md").read_text()
