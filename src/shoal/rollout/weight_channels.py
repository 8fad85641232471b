"""Weight channels without a network: version folders (weights/v000007 with a manifest), or the same process.

The trainer publishes, an engine loads. An engine verifies the files against the manifest (runs/weight_files.py), and a
restarted trainer publishes again, so the files need not survive a power cut.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.runs.checkpoints import write_folder
from shoal.runs.files import fault, remove_quietly, storage, sweep_folder, write_atomic
from shoal.runs.weight_files import Kind, describe

FOLDER, MANIFEST = "weights", "manifest.json"
KEPT = 2
PLACE = "published"  # running number of the version in this folder; version numbers and clocks may go back


class FolderWeightChannel:
    """Writes each version with `export` and keeps the newest two. `noise_seed` is the seed of the engine's noise."""

    def __init__(
        self, output_dir: Path | str, kind: Kind, export: Callable[[Path], Awaitable[Any]], noise_seed: int = 0
    ) -> None:
        self._folder = Path(output_dir) / FOLDER
        self._kind: Kind = kind
        self._export = export
        self._noise_seed = noise_seed
        self._published: list[str] = []  # newest last; a resumed run may publish a lower version again
        with storage(f"create {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            sweep_folder(self._folder)
            # An engine may still be reading the last version of an earlier trainer.
            found = sorted((_place(path), path.name) for path in self._folder.iterdir())
        self._published = [name for _, name in found]
        self._count = found[-1][0] if found else 0  # versions ever published in this folder

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
    """The running number in the manifest, or 0 if there is none."""
    try:
        return int(json.loads((version / MANIFEST).read_bytes())[PLACE])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


class InProcessWeights:
    """An engine in the same process reads the trainer's tensors, so there is nothing to transfer."""

    async def publish(self, version: int) -> Mapping[str, Any]:
        return {"version": version}
