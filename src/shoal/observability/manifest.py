"""What a published weight version consists of: a folder, its files with sizes and checksums, and one hash of it all.

The trainer describes the folder it wrote, an engine verifies it before a tensor is replaced. Reads files only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.errors import StorageError
from shoal.observability.digest import digest_files

Kind = Literal["full", "lora"]
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def describe(folder: Path, version: int, kind: Kind) -> dict[str, Any]:
    """The manifest of a finished folder: every file in it, none of its folders."""
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "manifest.json"]
    digests = digest_files(found)
    files = {
        path.name: {"bytes": path.stat().st_size, "digest": digest} for path, digest in zip(found, digests, strict=True)
    }
    about = {"version": version, "kind": kind, "transport": "filesystem"}
    return {**about, "path": str(folder.resolve()), "files": files}


def verify(manifest: Mapping[str, Any]) -> str:
    """Read every file once and compare; returns the version's hash."""
    folder, files = Path(str(manifest["path"])), manifest.get("files")
    if not isinstance(files, Mapping) or not files:
        raise StorageError(f"weights {folder}: the manifest names no files, so nothing can be verified")
    for name, expected in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise StorageError(f"weights {folder}: {name!r} is not a file name")
        _check(folder / name, expected)
    return version_hash(manifest)


def version_hash(manifest: Mapping[str, Any]) -> str:
    """blake2b over the version and the hashes of its files, or of its tensors, in order of their names."""
    hashes = {name: about["digest"] for name, about in manifest.get("files", {}).items()}
    hashes |= {tensor["name"]: tensor["digest"] for tensor in manifest.get("tensors", ())}
    digest = hashlib.blake2b(str(int(manifest["version"])).encode(), digest_size=16)
    for name in sorted(hashes):
        digest.update(f"\n{name} {hashes[name]}".encode())
    return digest.hexdigest()


def _check(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != int(expected["bytes"]):
            raise StorageError(f"weights {path}: {size} bytes, the manifest says {expected['bytes']}")
        if digest_files([path]) != [expected["digest"]]:
            raise StorageError(f"weights {path}: its content is not what the manifest says (checksum differs)")
    except OSError as error:
        raise StorageError(f"weights {path}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"weights {path}: the manifest must give bytes and digest") from error
