"""The control routes (load weights, pause, resume, adapters), their validation, and the model names of the server.

Commands are short or run on the engine's own thread. Requests in flight continue through all of them. Paths must be
inside the server's folders after symbolic links are resolved.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from shoal.core.protocols import NoiseMeter, RolloutEngine
from shoal.server.request_schema import (
    MAX_PATH_CHARACTERS,
    AdapterName,
    BadRequest,
    LoadAdapterBody,
    UnknownModel,
    UnloadAdapterBody,
    wrong_key,
)
from shoal.server.sessions import Session


class Names:
    """The model names that requests may use. While `adapter` is loaded by name, it is the only model. `trained` is the
    name of the adapter that a run trains (`orch.model.lora_adapter`)."""

    def __init__(self, model: str, version: Callable[[], int]) -> None:
        self.model = model
        self.adapter: str | None = None
        self.trained: str | None = None
        self.sessions: dict[str, Session] = {}
        self._version = version

    @property
    def pinned(self) -> str:
        """The name that includes the served version."""
        return f"{self.model}-v{self._version()}"

    def check(self, name: str | None) -> None:
        """Raises BadRequest or UnknownModel for a name that is not served."""
        if self.adapter is not None and name != self.adapter:
            if not name or name in (self.model, self.pinned):
                raise BadRequest(
                    f"the adapter {self.adapter!r} is loaded, and one set of weights is served at a time "
                    f"(infer.max_loras 1); set model to {self.adapter!r}, or unload the adapter",
                    "model",
                )
            raise self._unknown(name)
        if name and name not in (self.model, self.pinned, self.adapter, self.trained):
            raise self._unknown(name)

    def _unknown(self, name: str) -> UnknownModel:
        return UnknownModel(f"the model {name[:80]!r} does not exist; this server serves {self.listed()[0]!r}", "model")

    def listed(self) -> list[str]:
        if self.adapter is not None:
            return [self.adapter]
        return [self.model, self.pinned, *([self.trained] if self.trained is not None else [])]

    def as_openai(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._described(name) for name in self.listed()]}

    def one(self, name: str) -> dict[str, Any]:
        if name not in self.listed():
            raise self._unknown(name)
        return self._described(name)

    def _described(self, name: str) -> dict[str, Any]:
        parent = {} if name == self.model else {"parent": self.model}
        return {"id": name, "object": "model", "created": 0, "owned_by": "shoal", **parent}


Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Folder = Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]
Dtype = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "uint8"]


class OutsideRunFolder(BadRequest):
    status, code = 403, "outside"


class File(msgspec.Struct):
    bytes: Count
    digest: Digest


class Tensor(msgspec.Struct):
    name: str
    dtype: Dtype
    shape: list[Count]
    digest: Digest


class Manifest(msgspec.Struct):
    """The keys that every manifest may have. An engine may define more."""

    version: Count
    kind: Literal["full", "lora"] = "full"
    transport: str = "filesystem"
    path: Folder | None = None
    files: dict[FileName, File] = {}
    tensors: list[Tensor] | None = None
    address: Annotated[str, Meta(pattern=r"^.+:[0-9]{1,5}\Z")] | None = None
    adapter: dict[str, Any] | None = None
    adapter_name: AdapterName | None = None
    sigma: Annotated[float, Meta(ge=0, lt=1e18)] = 0.0
    noise_seed: Count = 0


def read_manifest(body: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """The validated manifest with its path resolved."""
    try:
        manifest = msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        raise BadRequest(f"invalid manifest: {error}", wrong_key(error)) from error
    if manifest.transport == "broadcast" and (manifest.tensors is None or manifest.address is None):
        raise BadRequest("invalid manifest: the transport broadcast requires tensors and address", "tensors")
    if manifest.transport != "broadcast" and manifest.tensors is not None:
        raise BadRequest("invalid manifest: tensors require the transport broadcast", "transport")
    given = {key: value for key, value in body.items() if value is not None}
    if manifest.path is None:
        return given
    if not manifest.files:
        raise BadRequest("invalid manifest: it lists no files, so the weights cannot be verified", "files")
    folder = find_folder(manifest.path, folders, "path")
    for name in manifest.files:
        find_folder(folder / name, folders, "files")
    return {**given, "path": str(folder)}


def find_folder(path: str | Path, folders: Sequence[Path], key: str) -> Path:
    """The resolved path, which must be inside one of the folders."""
    try:
        found = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL character, a symbolic link loop
        raise BadRequest(f"{key}: {str(path)[:80]!r} is not a valid path", key) from error
    roots = [folder.resolve() for folder in folders]
    if not any(found.is_relative_to(root) for root in roots):
        where = " or ".join(str(root) for root in roots) or "no folder"
        raise OutsideRunFolder(
            f"{key}: {str(path)[:200]!r} is not in {where}, the folder this server may read; move it there, or start "
            "the server with another infer.output_dir",
            key,
        )
    return found


def find_adapter(path: str, folders: Sequence[Path], key: str) -> Path:
    """The resolved folder, whose files must also be inside one of the folders. The engine reports a missing folder."""
    folder = find_folder(path, folders, key)
    try:
        files = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise BadRequest(f"{key}: {path[:80]!r} cannot be read: {error.strerror}", key) from error
    for file in files:
        find_folder(file, folders, key)
    return folder


class Command(NamedTuple):
    """A control route: the type its body is decoded to, the type that is published, and the function to run."""

    body: Any
    schema: Any
    run: Callable[[Any], Awaitable[dict[str, Any]]]


class AdapterEngine(RolloutEngine, Protocol):
    """An engine that can load an adapter by name."""

    async def load_adapter(self, folder: Path) -> str: ...

    async def unload_adapter(self) -> str: ...


@dataclass
class Control:
    """The control commands. `facts` never change (dtype, sizes, adapters); `hash` is that of the served weights.

    Weights and adapters are read only from `folders`.
    """

    engine: AdapterEngine
    names: Names
    facts: Mapping[str, Any]
    folders: tuple[Path, ...] = ()
    hash: str = ""
    paused: bool = False
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _version: int = 0  # the version of `hash`; the engine changes its own a moment earlier, on its thread

    def __post_init__(self) -> None:
        self._version = self.engine.version

    def about(self) -> dict[str, Any]:
        own = {"model": self.names.model, "incarnation": self.incarnation, "paused": self.paused}
        return {**own, **self.facts, "decoding": self.engine.path, **self.version()}

    def version(self) -> dict[str, Any]:
        return {"version": self._version, "hash": self.hash}

    def commands(self) -> dict[str, Command]:
        anything = dict[str, Any]
        return {
            "/shoal/load": Command(anything, Manifest, self.load),
            "/shoal/pause": Command(anything, anything, self.pause),
            "/shoal/resume": Command(anything, anything, self.resume),
            "/v1/load_lora_adapter": Command(LoadAdapterBody, LoadAdapterBody, self.load_adapter),
            "/v1/unload_lora_adapter": Command(UnloadAdapterBody, UnloadAdapterBody, self.unload_adapter),
        }

    async def load(self, body: Mapping[str, Any]) -> dict[str, Any]:
        manifest = read_manifest(body, self.folders)
        async with self._loading:
            found = await self.engine.load(manifest["version"], manifest)
            self.hash, self._version = found, self.engine.version
            if "path" in manifest or "tensors" in manifest:
                self.names.adapter, self.names.trained = None, manifest.get("adapter_name")
        measured = {"applied_sigma": self.engine.applied_sigma} if isinstance(self.engine, NoiseMeter) else {}
        return {**self.version(), **measured}

    async def pause(self, _: Mapping[str, Any]) -> dict[str, Any]:
        await self.engine.pause()
        self.paused = True
        return {"paused": True}

    async def resume(self, _: Mapping[str, Any]) -> dict[str, Any]:
        await self.engine.resume()
        self.paused = False
        return {"paused": False}

    async def load_adapter(self, body: LoadAdapterBody) -> dict[str, Any]:
        name = body.lora_name
        folder = find_adapter(body.lora_path, self.folders, "lora_path")
        async with self._loading:
            if self.names.adapter is not None:
                raise BadRequest(
                    f"the adapter {self.names.adapter!r} is loaded, and this engine serves one at a time "
                    "(infer.max_loras 1); unload it first",
                    "lora_name",
                )
            if name in (self.names.model, self.names.pinned):
                raise BadRequest(f"{name!r} is the name of the model; choose another for the adapter", "lora_name")
            await self._require_idle()
            self.hash = await self.engine.load_adapter(folder)
            self.names.adapter, self.names.trained = name, None
        return {"loaded": name, **self.version()}

    async def unload_adapter(self, body: UnloadAdapterBody) -> dict[str, Any]:
        name = body.lora_name
        async with self._loading:
            if name != self.names.adapter:
                raise UnknownModel(f"no adapter {name[:80]!r} is loaded", "lora_name")
            await self._require_idle()
            self.hash = await self.engine.unload_adapter()
            self.names.adapter = None
        return {"unloaded": name, **self.version()}

    async def _require_idle(self) -> None:
        """Adapters change only while no request runs, so that no completion mixes two."""
        health = await self.engine.health()
        busy = health["running"] + health["waiting"]
        if busy:
            raise BadRequest(f"{busy} requests are running; adapters can change only when none is", "lora_name")
