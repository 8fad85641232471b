"""Weight versions as folders: weights/v000007 with a manifest, whole or not there, the newest two kept.

The trainer writes, an engine reads; what they have in common is the manifest (observability/manifest.py). An engine
compares what it reads, and a trainer that comes back publishes again, so nothing has to outlast the machine.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.observability.atomic import fault, remove_quietly, storage, sweep_folder, write_atomic
from shoal.observability.checkpoints import write_folder
from shoal.observability.manifest import Kind, describe

FOLDER, MANIFEST = "weights", "manifest.json"
KEPT = 2
PLACE = "published"  # the how manieth version of this folder: clocks are set back, and so are runs


class FolderWeightChannel:
    """`export` writes the current weights into a folder; `noise_seed` is what an engine draws its noise from."""

    def __init__(
        self, output_dir: Path | str, kind: Kind, export: Callable[[Path], Awaitable[Any]], noise_seed: int = 0
    ) -> None:
        self._folder = Path(output_dir) / FOLDER
        self._kind: Kind = kind
        self._export = export
        self._noise_seed = noise_seed
        self._published: list[str] = []  # newest last; a run that went back may publish a lower number again
        with storage(f"create {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            sweep_folder(self._folder)
            # An engine may still be reading what an earlier trainer wrote last.
            found = sorted((_place(path), path.name) for path in self._folder.iterdir())
        self._published = [name for _, name in found]
        self._count = found[-1][0] if found else 0  # of all that was ever published here

    async def publish(self, version: int) -> Mapping[str, Any]:
        target = self._folder / f"v{version:06d}"
        with write_folder(target, durable=False) as folder:
            await self._export(folder)
            fault("publish:exported")
            manifest = describe(folder, version, self._kind)
            about = {"path": str(target.resolve()), "noise_seed": self._noise_seed, PLACE: self._count + 1}
            manifest = {**manifest, **about}
            write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode(), durable=False)
        self._count += 1
        self._prune(target.name)
        return manifest

    def _prune(self, newest: str) -> None:
        older = [name for name in self._published if name != newest]
        self._published = [*older[1 - KEPT :], newest]
        for old in self._folder.iterdir():
            if old.name not in self._published:
                remove_quietly(old)


def _place(version: Path) -> int:
    """0 where nothing says so: it was there before, or is no version."""
    try:
        return int(json.loads((version / MANIFEST).read_bytes())[PLACE])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
