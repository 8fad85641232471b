"""The control routes: token, manifest validation, permitted folders."""

from __future__ import annotations

import asyncio
import shutil
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, EngineError
from shoal.rollout.remote.client import Address
from shoal.rollout.remote.shoal import HttpRolloutEngine
from shoal.runs.secrets import read_token, write_token
from shoal.runs.weight_files import describe
from support.models import lora_decoder, small_model
from support.servers import Server, save, serving

SHA = "0" * 64
TENSOR = {"name": "a", "dtype": "float32", "shape": [2], "digest": SHA}
Work = Callable[[Server], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(small_model("qwen3", seed=3), tmp_path_factory.mktemp("steering") / "model")


def steered(folder: Path, work: Work, **settings: Any) -> None:
    async def main() -> None:
        async with serving(folder, **settings) as server:
            await work(server)
            assert not server.failures and (await server.ask("/health"))[1]["ok"]

    asyncio.run(main())


def test_token_is_private_and_new_per_server(folder: Path):
    seen = []

    async def work(server: Server) -> None:
        assert stat.S_IMODE(server.token_file.stat().st_mode) == 0o600
        assert server.token_file == folder.parent / "handshake" / "infer.token"
        seen.append(read_token(server.token_file))
        assert (await server.ask("/shoal/pause", {}, headers={}))[0] == 401
        assert (await server.ask("/shoal/about", headers={}))[0] == 401
        assert (await server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={}))[0] == 200
        assert (await server.ask("/shoal/resume", {})) == (200, {"paused": False})

    steered(folder, work)
    steered(folder, work)
    assert len({*seen, None}) == 3


def test_api_key_creates_no_token(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "sesame")

    async def main() -> None:
        async with serving(folder, api_key_var="MY_KEY", output_dir=str(tmp_path)) as server:
            assert not (tmp_path / "handshake").exists()
            assert (await server.ask("/shoal/about", headers={"Authorization": "Bearer sesame"}))[0] == 200
            with pytest.raises(ConfigError, match=r"requires a key.*orch\.client\.api_key_var"):
                await HttpRolloutEngine(server.address(deadline_s=5)).describe()

    asyncio.run(main())


def test_shoal_engine_sends_the_token_and_awaits_a_slow_server(folder: Path):
    async def work(server: Server) -> None:
        right = server.token_file.read_text()
        server.token_file.unlink()
        engine = HttpRolloutEngine(server.address(deadline_s=20))
        asking = asyncio.create_task(engine.describe())
        await asyncio.sleep(0.3)
        assert not asking.done(), "the file may not be written yet"
        server.token_file.write_text(right)
        assert (await asking)["model"] == server.model
        await engine.pause()
        await engine.resume()
        await engine.close()

    steered(folder, work)


def test_token_of_another_run_is_reported_at_once(folder: Path, tmp_path: Path):
    write_token(tmp_path / "infer.token")

    async def work(server: Server) -> None:
        other = Address(f"{server.url}/v1", deadline_s=20, token_file=tmp_path / "infer.token")
        engine = HttpRolloutEngine(other)
        with pytest.raises(ConfigError, match=r"rejected the control token of this run .*orch\.client\.base_url"):
            await asyncio.wait_for(engine.describe(), 5)
        await engine.close()

    steered(folder, work)


def test_oversized_answer_is_not_read(folder: Path):
    async def work(server: Server) -> None:
        engine = HttpRolloutEngine(server.address(deadline_s=5, answer_bytes=100))
        with pytest.raises(EngineError, match=r"answered /shoal/about with more than 100 bytes"):
            await engine.describe()
        await engine.close()

    steered(folder, work)


WRONG: dict[str, dict[str, Any]] = {
    "version": {"version": "1"},
    "kind": {"kind": "half"},
    "path": {"path": 7},
    "files": {"files": [1]},
    "bytes": {"files": {"model.safetensors": {"bytes": "x", "digest": SHA}}},
    "digest": {"files": {"model.safetensors": {"bytes": 1, "digest": "../.."}}},
    "file name": {"files": {"../config.json": {"bytes": 1, "digest": SHA}}},
    "no files": {"files": {}},
    "tensors": {"path": None, "tensors": 5, "transport": "broadcast"},
    "tensors by folder": {"tensors": [TENSOR]},
    "no address": {"path": None, "tensors": [TENSOR], "transport": "broadcast"},
    "address": {"path": None, "tensors": [TENSOR], "transport": "broadcast", "address": "there"},
    "dtype": {"path": None, "tensors": [{**TENSOR, "dtype": "save"}], "transport": "broadcast", "address": "a:1"},
    "shape": {"path": None, "tensors": [{**TENSOR, "shape": [-1]}], "transport": "broadcast", "address": "a:1"},
    "sigma": {"sigma": "much"},
    "noise_seed": {"noise_seed": -1},
}


def test_invalid_manifest_gives_one_line_and_no_500(folder: Path):
    good = describe(folder, 1, "full")

    async def work(server: Server) -> None:
        for name, change in WRONG.items():
            status, reply = await server.ask("/shoal/load", {**good, **change})
            said = reply["error"]["message"]
            assert status == 400 and said.startswith("invalid manifest: "), (name, status, reply)
            assert len(said.splitlines()) == 1 and len(said) < 200, (name, said)
        assert (await server.ask("/shoal/load", {**good, "transport": "pigeon"}))[0] == 409
        assert (await server.ask("/shoal/version"))[1]["version"] == 0
        assert (await server.ask("/shoal/load", good))[0] == 200

    steered(folder, work)


def test_weights_and_adapters_come_from_the_runs_folder_alone(folder: Path, tmp_path: Path):
    """By their path, by dots, by a link to a folder, by a link to a file."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(small_model("qwen3", seed=4), run / "weights")
    adapter = save(lora_decoder(seed=3).model, run / "adapter")
    outside = describe(save(small_model("qwen3", seed=5), elsewhere), 1, "full")
    (run / "link").symlink_to(elsewhere)
    linked = run / "linked"
    linked.mkdir()
    for file in elsewhere.iterdir():
        (linked / file.name).symlink_to(file)
    halves = [run / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    for half in halves:  # an adapter of which one file is elsewhere
        shutil.copytree(adapter, half)
        (half / half.name).rename(elsewhere / half.name)
        (half / half.name).symlink_to(elsewhere / half.name)

    async def work(server: Server) -> None:
        for path in (str(elsewhere), f"{run}/../elsewhere", str(run / "link"), str(linked), "/etc", "."):
            status, reply = await server.ask("/shoal/load", {**outside, "path": path})
            assert (status, reply["error"]["code"]) == (403, "outside"), path
            assert f"is not in {run}," in reply["error"]["message"]
        for path in (str(elsewhere), str(run / "link"), str(linked), *map(str, halves), "/"):
            status, reply = await server.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path})
            assert (status, reply["error"]["param"]) == (403, "lora_path"), path
        for name in ("../a", "a/b", "", "-a", "a b", "a" * 65, "a\n", 5):
            status, reply = await server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter)})
            assert (status, reply["error"]["param"]) == (400, "lora_name"), name
        status, reply = await server.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "\0"})
        assert (status, reply["error"]["param"]) == (400, "lora_path")
        assert (await server.ask("/shoal/load", describe(run / "weights", 1, "full")))[0] == 200
        assert (await server.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapter)}))[0] == 200

    steered(folder, work, output_dir=str(run), enable_lora=True, max_lora_rank=8)


def test_adapter_with_invalid_settings_changes_nothing(folder: Path, tmp_path: Path):
    path = save(lora_decoder(seed=3).model, tmp_path / "adapter")
    config = path / "adapter_config.json"
    text = config.read_text()

    async def work(server: Server) -> None:
        asked = {"prompt": [20], "seed": 1, "max_tokens": 20, "return_token_ids": True}
        before = (await server.ask("/v1/completions", asked))[1]["choices"]
        for key in ('"r": ', '"lora_alpha": '):
            config.write_text(text.replace(key, f'{key}"much", "x": '))
            status, reply = await server.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(path)})
            assert status == 409 and "must be numbers" in reply["error"]["message"], reply
        assert (await server.ask("/v1/completions", asked))[1]["choices"] == before

    steered(folder, work, output_dir=str(tmp_path), enable_lora=True, max_lora_rank=8)
