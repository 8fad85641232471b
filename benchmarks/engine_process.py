"""The embedded engine in a separate process that loads weights from a file, to measure the possible overlap.

Used by benchmarks/asynchronous.py only. With one thread per process, sampling and training run at the same time on two
cores. Messages are MessagePack on a pipe. Requests, engine and results equal those of the co-located run.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.types import Completion, Request

START_LIMIT_S = 120.0


class EngineProcess:
    """Implements RolloutEngine with a child process, which inherits stderr."""

    path, activity, opening = "in a child process", "", ""

    def __init__(self, config: Path) -> None:
        self.version = 0
        self.busy_s = 0.0  # as counted by the child
        self._answers: dict[str, asyncio.Future[Any]] = {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            [sys.executable, __file__, str(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        ready = self._expect("ready")
        threading.Thread(target=self._listen, daemon=True).start()
        await asyncio.wait_for(ready, START_LIMIT_S)

    def _listen(self) -> None:
        assert self._child.stdout is not None
        while message := read_message(self._child.stdout):
            self._loop.call_soon_threadsafe(self._on_group_done, message)

    def _on_group_done(self, message: dict[str, Any]) -> None:
        self.busy_s = message["busy_s"]
        answer = self._answers.pop(message["id"], None)
        if answer is not None and not answer.done():
            answer.set_result(message["value"])

    def _expect(self, name: str) -> asyncio.Future[Any]:
        self._answers[name] = self._loop.create_future()
        return self._answers[name]

    async def _ask(self, kind: str, name: str, value: Any) -> Any:
        assert self._child.stdin is not None
        answer = self._expect(name)
        write_message(self._child.stdin, {"kind": kind, "id": name, "value": value})
        return await answer

    async def generate(self, request: Request) -> Completion:
        return msgspec.convert(await self._ask("generate", request.request_id, request), Completion)

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        assert manifest is not None
        proof = await self._ask("load", f"load {version}", {"version": version, "path": manifest["path"]})
        self.version = version
        return proof

    async def connect(self) -> None: ...

    async def describe(self) -> dict[str, Any]:
        return {}

    async def rest(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def health(self) -> dict[str, Any]:
        return {"ok": self._child.poll() is None, "version": self.version}

    async def close(self) -> None:
        self._child.kill()
        self._child.wait()


class FileWeights:
    """Implements WeightChannel: writes the trainer's parameters into one file."""

    def __init__(self, model: Any, path: Path, on_device: Any) -> None:
        self._model = model
        self._path = path
        self._on_device = on_device

    async def publish(self, version: int) -> Mapping[str, Any]:
        await self._on_device(self._write)
        return {"path": str(self._path)}

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.detach() for name, tensor in self._model.named_parameters()}, self._path)


def read_message(stream: Any) -> dict[str, Any] | None:
    size = stream.read(4)
    return msgspec.msgpack.decode(stream.read(int.from_bytes(size, "little"))) if len(size) == 4 else None


def write_message(stream: Any, message: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


class Served:
    """The child's side: the engine's thread makes steps, the event loop reads and answers."""

    def __init__(self, config: Path) -> None:
        import torch

        from shoal.build.load import PythonObjects
        from shoal.build.sampler import DeviceThread, load_model
        from shoal.config.load import load_run
        from shoal.engine.engine import EmbeddedEngine, EngineSettings
        from shoal.rollout.embedded import EmbeddedRolloutEngine

        torch.set_num_threads(1)
        settings = load_run(str(config)).config
        assert settings.infer.max_model_len is not None
        thread = DeviceThread(settings.orch.deadline_s)
        model = load_model(settings, PythonObjects(), thread)
        self.device = thread.executor
        self.model = model
        assert model.view is not None
        slots = settings.infer.max_num_seqs or settings.orch.batch_size
        limits = EngineSettings(slots, settings.infer.max_model_len, eos_token_ids=model.eos_token_ids)
        self.inner = EmbeddedEngine(model.view, model.layers, limits, model.chat.text)
        self.engine = EmbeddedRolloutEngine(self.inner, self.device)
        self._out = sys.stdout.buffer
        sys.stdout = sys.stderr  # no other thread writes to the pipe
        self.busy_s, self._open, self._since = 0.0, 0, 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()
        self._answer("ready", None)
        while message := await loop.run_in_executor(None, read_message, sys.stdin.buffer):
            task = asyncio.create_task(self._do(message))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _do(self, message: dict[str, Any]) -> None:
        if message["kind"] == "load":
            value = message["value"]
            await self.engine.pause()
            await asyncio.get_running_loop().run_in_executor(self.device, self._read, value["path"])
            self._answer(message["id"], await self.engine.load(value["version"]))
            await self.engine.resume()
            return
        self._count(+1)
        try:
            completion = await self.engine.generate(msgspec.convert(message["value"], Request))
        finally:
            self._count(-1)
        self._answer(message["id"], completion)

    def _count(self, by: int) -> None:
        """Busy is the time with at least one open request."""
        now = asyncio.get_running_loop().time()
        self.busy_s += (now - self._since) * (self._open > 0)
        self._since, self._open = now, self._open + by

    def _read(self, path: str) -> None:
        import torch
        from safetensors.torch import load_file

        with torch.no_grad():
            parameters = dict(self.model.decoder.model.named_parameters())
            for name, tensor in load_file(path).items():
                parameters[name].copy_(tensor)

    def _answer(self, name: str, value: Any) -> None:
        write_message(self._out, {"id": name, "value": value, "busy_s": self.busy_s})


if __name__ == "__main__":
    asyncio.run(Served(Path(sys.argv[1])).run())
