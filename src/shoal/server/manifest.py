"""What a command names, checked before an engine sees it: manifests, folders, names of adapters.

A folder is one of those the server was told of, or lies in one; whatever a link leads elsewhere is elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.server.asked import BadRequest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_PATH_CHARACTERS = 4096
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Folder = Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]
Dtype = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "uint8"]


class Outside(BadRequest):
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
    """What any manifest may say; keys beside these are an engine's own affair."""

    version: Count
    kind: Literal["full", "lora"] = "full"
    transport: str = "filesystem"
    path: Folder | None = None
    files: dict[FileName, File] = {}
    tensors: list[Tensor] | None = None
    address: Annotated[str, Meta(pattern=r"^.+:[0-9]{1,5}\Z")] | None = None
    adapter: dict[str, Any] | None = None
    sigma: Annotated[float, Meta(ge=0, lt=1e18)] = 0.0
    noise_seed: Count = 0


def read_manifest(body: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """The manifest as an engine may take it, its path resolved."""
    try:
        manifest = msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        key = re.search(r"`\$\.(\w+)", str(error)) or re.search(r"field `(\w+)`", str(error))
        raise BadRequest(f"the manifest is wrong: {error}", key[1] if key else None) from error
    if manifest.transport == "broadcast" and (manifest.tensors is None or manifest.address is None):
        raise BadRequest("the manifest is wrong: a broadcast needs tensors and address", "tensors")
    if manifest.transport != "broadcast" and manifest.tensors is not None:
        raise BadRequest("the manifest is wrong: tensors come by the transport broadcast", "transport")
    said = {key: value for key, value in body.items() if value is not None}
    if manifest.path is None:
        return said
    if not manifest.files:
        raise BadRequest("the manifest is wrong: it names no files, so nothing can be verified", "files")
    folder = find_folder(manifest.path, folders, "path")
    for name in manifest.files:
        find_folder(folder / name, folders, "files")
    return {**said, "path": str(folder)}


def find_folder(path: str | Path, folders: Sequence[Path], key: str) -> Path:
    """Where it really is, which must be in one of the folders."""
    try:
        found = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a ring of links
        raise BadRequest(f"{key}: {str(path)[:80]!r} is no path", key) from error
    roots = [folder.resolve() for folder in folders]
    if not any(found.is_relative_to(root) for root in roots):
        where = " or ".join(str(root) for root in roots) or "no folder"
        raise Outside(
            f"{key}: {str(path)[:200]!r} is not in {where}, which this server may read; put it there, or start the "
            "server with another infer.output_dir",
            key,
        )
    return found


def find_adapter(path: str, folders: Sequence[Path], key: str) -> Path:
    """A folder whose files are in one of the folders, too. One that is not there is the engine's to name."""
    folder = find_folder(path, folders, key)
    try:
        files = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise BadRequest(f"{key}: {path[:80]!r} cannot be read: {error.strerror}", key) from error
    for file in files:
        find_folder(file, folders, key)
    return folder


def read_text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value or len(value) > MAX_PATH_CHARACTERS:
        raise BadRequest(f"{key} must be a text", key)
    return value


def read_name(body: Mapping[str, Any], key: str) -> str:
    name = read_text(body, key)
    if not NAME.fullmatch(name):
        what = "must be a plain name: letters, digits, dots, dashes and underscores, 64 at most"
        raise BadRequest(f"{key}: {name[:80]!r} {what}", key)
    return name
