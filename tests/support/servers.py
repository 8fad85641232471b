"""A grpo-infer in this process, on a real socket, with a small model of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from shoal.build.infer import Inference, make_inference, start_server
from shoal.config.infer import InferConfig
from shoal.errors import EngineError
from shoal.server.control import Control
from shoal.server.listen import bind
from support.models import TOKENIZER


def save(model: Any, folder: Path) -> Path:
    """As `from_pretrained` of transformers, or PEFT, loads it."""
    model.save_pretrained(str(folder))
    TOKENIZER.save_pretrained(str(folder))
    return folder


@dataclass
class Server:
    url: str
    model: str
    inference: Inference
    control: Control
    failures: list[EngineError] = field(default_factory=list)

    async def ask(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and JSON, or text; a GET where there is no body."""
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            method = "GET" if body is None else "POST"
            async with http.request(method, self.url + path, json=body, **options) as reply:
                as_json = reply.content_type == "application/json"
                return reply.status, await (reply.json() if as_json else reply.text())

    async def until_idle(self) -> None:
        async with asyncio.timeout(20):
            while (health := await self.inference.engine.health())["running"] + health["waiting"]:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Server]:
    values = {"max_model_len": 128, "max_num_seqs": 8, "dtype": "float32", **settings}
    config = InferConfig.model_validate({"model": str(folder), **values})
    inference = await asyncio.to_thread(make_inference, config)
    failures: list[EngineError] = []
    listener, control = await start_server(config, inference, bind("127.0.0.1", 0), failures.append)
    try:
        yield Server(f"http://127.0.0.1:{listener.port}", str(folder), inference, control, failures)
    finally:
        await listener.close()
        await inference.close()
