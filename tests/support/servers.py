"""A grpo-infer in this process, on a real socket, with its own small model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from shoal.config.infer import InferConfig
from shoal.core.errors import EngineError
from shoal.rollout.remote.client import Address
from shoal.runs.secrets import CONTROL
from shoal.server.access import bind
from shoal.server.control import Control
from shoal.split.inference_process import Inference, make_inference, start_server
from support.models import TOKENIZER


def save(model: Any, folder: Path) -> Path:
    """In the format that `from_pretrained` of transformers or PEFT loads."""
    model.save_pretrained(str(folder))
    TOKENIZER.save_pretrained(str(folder))
    return folder


@dataclass
class Server:
    url: str
    model: str
    token_file: Path
    inference: Inference
    control: Control
    failures: list[EngineError] = field(default_factory=list)

    async def ask(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Returns the status and JSON or text. Without a body it is a GET. Sends the token unless headers are given."""
        if "headers" not in options:
            options["headers"] = {"Authorization": f"Bearer {self.token_file.read_text()}"}
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            method = "GET" if body is None else "POST"
            async with http.request(method, self.url + path, json=body, **options) as reply:
                as_json = reply.content_type == "application/json"
                return reply.status, await (reply.json() if as_json else reply.text())

    def address(self, **options: Any) -> Address:
        return Address(f"{self.url}/v1", token_file=self.token_file, **options)

    async def until_idle(self) -> None:
        async with asyncio.timeout(20):
            while (health := await self.inference.engine.health())["running"] + health["waiting"]:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Server]:
    """By default the run folder is the folder of the model."""
    own = {"max_model_len": 128, "max_num_seqs": 8, "dtype": "float32", "output_dir": str(folder.parent)}
    values = {**own, **settings}
    config = InferConfig.model_validate({"model": str(folder), **values})
    inference = await asyncio.to_thread(make_inference, config)
    failures: list[EngineError] = []
    listener, control = await start_server(config, inference, bind("127.0.0.1", 0), failures.append)
    try:
        url, token_file = f"http://127.0.0.1:{listener.port}", Path(config.output_dir) / "handshake" / CONTROL
        yield Server(url, str(folder), token_file, inference, control, failures)
    finally:
        await listener.close()
        await inference.close()
