"""`shoal grpo-infer` as a process: start, stop, invalid settings, and restarts while clients wait."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.core.types import Completion, Request, SamplingParams
from shoal.rollout.remote.client import Address
from shoal.rollout.remote.shoal import HttpRolloutEngine
from shoal.runs.weight_files import describe
from support.ports import free_port

from .helpers.processes import Command, WarmPython, children_of, environment, wait_until

Start = Callable[..., Command]
REQUESTS = [
    Request(f"{i}", [20 + i % 3, 30, 40], SamplingParams(max_tokens=200, min_tokens=150, seed=i)) for i in range(6)
]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(warm: WarmPython, raw_model: Path, port: int, tmp_path: Path) -> Iterator[Start]:
    started: list[Command] = []
    (tmp_path / "infer.yaml").write_text(f"model: {raw_model}\nport: {port}\nmax_num_seqs: 8\nmax_model_len: 256\n")

    def run(*overrides: str, **env: str) -> Command:
        command = warm.start(["grpo-infer", "infer.yaml", *overrides], tmp_path, env=environment(**env))
        started.append(command)
        return command

    yield run
    for command in started:
        if command.running():
            command.kill()


def up(command: Command) -> Command:
    wait_until(lambda: "serving" in command.text() or not command.running(), 60, "the server")
    assert command.running(), command.text()
    return command


def get(port: int, path: str, token: str = "") -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


def token_file(folder: Path) -> Path:
    """The token file of a server that was started in the folder."""
    return folder / "outputs" / "handshake" / "infer.token"


def test_server_runs_until_a_signal(start: Start, port: int, tmp_path: Path):
    server = up(start())
    token = token_file(tmp_path).read_text()
    assert get(port, "/health")["ok"] and get(port, "/shoal/about", token)["max_model_len"] == 256
    assert token not in server.text()
    second = start()
    assert second.wait() == 2
    assert second.text().startswith(f"shoal: error: infer.port: {port} on 127.0.0.1 ")
    assert get(port, "/health")["ok"], "the first server still runs"
    server.send(signal.SIGTERM)
    assert server.wait(20) == -signal.SIGTERM and server.text().endswith("stopped by SIGTERM\n")
    assert token not in (tmp_path / "outputs" / "logs" / "infer.log").read_text()
    assert up(start()).running(), "the port is free again"


def test_serve_needs_no_file(warm: WarmPython, raw_model: Path, port: int, tmp_path: Path):
    (tmp_path / "mine").symlink_to(raw_model)
    server = warm.start(["serve", "mine", f"infer.port={port}", "infer.max_num_seqs=8"], tmp_path)
    try:
        up(server)
        assert [model["id"] for model in get(port, "/v1/models")["data"]] == ["mine", "mine-v0"]
        server.send(signal.SIGTERM)
        assert server.wait(20) == -signal.SIGTERM
        left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("output-")}
        assert left == {"mine"}, "it leaves no files"
    finally:
        if server.running():
            server.kill()
    folders = tmp_path / "folders"
    folders.mkdir()
    loading = warm.start(["serve", "mine", f"infer.port={port}"], tmp_path, env=environment(TMPDIR=str(folders)))
    wait_until(lambda: "loading" in loading.text(), 60, "the start")
    loading.send(signal.SIGTERM)
    assert loading.wait(20) and not list(folders.glob("shoal-serve-*"))
    for words, says in (
        (["infer.model=x"], "infer.model"),
        (["infer.prot=1"], "infer.prot"),
        (["--checkpoint", "3"], "--checkpoint"),
    ):
        wrong = warm.run(["serve", "mine", *words], tmp_path)
        assert wrong.wait() == 2 and says in wrong.text()


def test_chat_answers_one_question_or_several(raw_model: Path, tmp_path: Path):
    command = [sys.executable, "-m", "shoal", "chat", str(raw_model), "--temperature", "0", "--max-tokens", "6"]
    once = subprocess.run([*command, "hello"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert once.returncode == 0 and len(once.stdout) > 1, once.stderr
    text = "hello\nmore\n/new\nhello\n"
    several = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert several.returncode == 0, several.stderr
    parts = several.stdout.split("> ")
    assert len(parts) == 6 and parts[1] == parts[4] == once.stdout, (
        "a new conversation has the same answer as the first"
    )


def test_sighup_stops_it_cleanly(start: Start, tmp_path: Path):
    server = up(start())
    assert (tmp_path / "outputs" / "handshake" / "infer.json").is_file()
    server.send(signal.SIGHUP)
    assert server.wait(20) == -signal.SIGHUP and server.text().endswith("stopped by SIGHUP\n")
    assert not (tmp_path / "outputs" / "handshake" / "infer.json").exists(), "the heartbeat file is removed"


@pytest.mark.parametrize(
    ("overrides", "env", "says"),
    [
        (["infer.host=0.0.0.0"], {}, "infer.host"),
        (["infer.api_key_var=MY_KEY"], {}, "infer.api_key_var: the environment variable MY_KEY is not set"),
        (["infer.api_key_var=MY_KEY"], {"MY_KEY": " "}, "infer.api_key_var"),
        (
            ["infer.host=192.0.2.1", "infer.api_key_var=MY_KEY"],
            {"MY_KEY": "k"},
            "infer.host: cannot listen on 192.0.2.1",
        ),
        (["infer.model=nowhere/at/all"], {}, '"nowhere/at/all" does not exist'),
        (["infer.dtype=float16"], {}, "infer.dtype"),
        (["infer.max_loras=4"], {}, "infer.max_loras"),
        (["infer.engine_args={a: 1}"], {}, "infer.engine_args"),
    ],
)
def test_invalid_settings_print_one_line_and_exit_2(overrides: list[str], env: dict[str, str], says: str, start: Start):
    command = start(*overrides, **env)
    assert command.wait() == 2
    lines = command.text().splitlines()
    assert len(lines) == 1 and says in lines[0], command.text()


def test_every_client_needs_the_key(start: Start, port: int):
    up(start("infer.host=0.0.0.0", "infer.api_key_var=MY_KEY", MY_KEY="sesame"))

    async def run() -> None:
        engine = HttpRolloutEngine(Address(f"http://127.0.0.1:{port}/v1", key="sesame"))
        assert (await engine.generate(REQUESTS[0])).token_ids
        await engine.close()

    asyncio.run(run())
    assert get(port, "/health")["ok"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(port, "/v1/models")


async def draw(engine: HttpRolloutEngine) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in REQUESTS)))


def test_restarted_server_samples_the_same(start: Start, port: int, raw_model: Path, tmp_path: Path):
    """The client loads version 4 again and repeats every request."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(raw_model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.05, 0.1)
    model.save_pretrained(tmp_path / "outputs" / "weights" / "v4")
    manifest = {**describe(tmp_path / "outputs" / "weights" / "v4", 4, "full"), "sigma": 0.02}
    said: list[str | None] = []

    async def run() -> None:
        address = Address(f"http://127.0.0.1:{port}/v1", deadline_s=60, token_file=token_file(tmp_path))
        engine = HttpRolloutEngine(address, waiting=said.append)
        server = up(start())
        proof = await engine.load(4, manifest)
        undisturbed = await draw(engine)
        assert {span.version for completion in undisturbed for span in completion.spans} == {4}
        calls = asyncio.create_task(draw(engine))
        before = (await engine.health())["generated_tokens"]
        while (await engine.health())["generated_tokens"] < before + 60:
            await asyncio.sleep(0.01)
        server.send(signal.SIGKILL)
        await asyncio.to_thread(server.wait, 10)
        assert not children_of(server.pid)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(up, start())
        assert await asyncio.wait_for(calls, 60) == undisturbed
        token = token_file(tmp_path).read_text()
        assert get(port, "/shoal/version", token) == {"version": 4, "hash": proof}
        await engine.close()

    asyncio.run(run())
    assert any(
        text and text.startswith(f"waiting for the inference server at http://127.0.0.1:{port}") for text in said
    )
    assert said[-1] is None


def test_waiting_for_a_lost_server_ends_with_the_reason(start: Start, port: int, tmp_path: Path):
    from shoal.core.errors import DeadlineError

    async def run() -> None:
        server = up(start())
        address = Address(f"http://127.0.0.1:{port}/v1", deadline_s=1, token_file=token_file(tmp_path))
        engine = HttpRolloutEngine(address)
        await engine.load(0)
        calls = asyncio.create_task(draw(engine))
        await asyncio.sleep(0.1)
        server.send(signal.SIGKILL)
        with pytest.raises(DeadlineError, match=r"waited 1 s for the inference server"):
            await asyncio.wait_for(calls, 30)
        await engine.close()

    asyncio.run(run())
