"""What a training run steers a server by: which weights it serves, pause and resume, what it can do, adapters by name.

Every command is short or runs on the engine's own thread; requests in flight are kept through all of them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shoal.protocols import RolloutEngine
from shoal.server.asked import BadRequest, UnknownModel
from shoal.server.manifest import find_adapter, read_manifest, read_name, read_text
from shoal.server.names import Names

INCARNATION = "x-shoal-incarnation"  # the header that names the process
Command = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


class AdapterEngine(RolloutEngine, Protocol):
    """An engine that people may put an adapter on, beside what a training run publishes."""

    @property
    def path(self) -> str:
        """How tokens are decoded, in words."""
        ...

    async def load_adapter(self, folder: Path) -> str: ...

    async def unload_adapter(self) -> str: ...


@dataclass
class Control:
    """`facts` are those that never change: dtype, sizes, adapters; `hash` is that of the weights served now.

    Weights and adapters are read from `folders` and nowhere else.
    """

    engine: AdapterEngine
    names: Names
    facts: Mapping[str, Any]
    folders: tuple[Path, ...] = ()
    hash: str = ""
    paused: bool = False
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _version: int = 0  # which the hash is of: the engine's own changes a moment earlier, on its thread

    def __post_init__(self) -> None:
        self._version = self.engine.version

    def about(self) -> dict[str, Any]:
        mine = {"model": self.names.model, "incarnation": self.incarnation, "paused": self.paused}
        return {**mine, **self.facts, "decoding": self.engine.path, **self.version()}

    def version(self) -> dict[str, Any]:
        return {"version": self._version, "hash": self.hash}

    def commands(self) -> dict[str, Command]:
        return {
            "/shoal/load": self.load,
            "/shoal/pause": self.pause,
            "/shoal/resume": self.resume,
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
        }

    async def load(self, body: Mapping[str, Any]) -> dict[str, Any]:
        manifest = read_manifest(body, self.folders)
        async with self._loading:
            found = await self.engine.load(manifest["version"], manifest)
            self.hash, self._version = found, self.engine.version
            if "path" in manifest or "tensors" in manifest:
                self.names.adapter = None
        return self.version()

    async def pause(self, _: Mapping[str, Any]) -> dict[str, Any]:
        await self.engine.pause()
        self.paused = True
        return {"paused": True}

    async def resume(self, _: Mapping[str, Any]) -> dict[str, Any]:
        await self.engine.resume()
        self.paused = False
        return {"paused": False}

    async def load_adapter(self, body: Mapping[str, Any]) -> dict[str, Any]:
        name = read_name(body, "lora_name")
        folder = find_adapter(read_text(body, "lora_path"), self.folders, "lora_path")
        async with self._loading:
            if self.names.adapter is not None:
                raise BadRequest(
                    f"the adapter {self.names.adapter!r} is loaded and this engine holds one at a time "
                    "(infer.max_loras 1); unload it first",
                    "lora_name",
                )
            if name in (self.names.model, self.names.pinned):
                raise BadRequest(f"{name!r} is the model's own name; give the adapter another", "lora_name")
            await self._idle()
            self.hash = await self.engine.load_adapter(folder)
            self.names.adapter = name
        return {"loaded": name, **self.version()}

    async def unload_adapter(self, body: Mapping[str, Any]) -> dict[str, Any]:
        name = read_text(body, "lora_name")
        async with self._loading:
            if name != self.names.adapter:
                raise UnknownModel(f"no adapter {name[:80]!r} is loaded", "lora_name")
            await self._idle()
            self.hash = await self.engine.unload_adapter()
            self.names.adapter = None
        return {"unloaded": name, **self.version()}

    async def _idle(self) -> None:
        """A completion is never half of one adapter: whoever changes it by name waits until nothing is drawn."""
        health = await self.engine.health()
        busy = health["running"] + health["waiting"]
        if busy:
            raise BadRequest(f"{busy} requests are being answered; change adapters when none is", "lora_name")
