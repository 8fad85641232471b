"""Checkpoints of the state between two steps: shards of all ranks, the policy's files, and what the loop remembers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.observability.atomic import open_to_read, storage
from shoal.observability.journal import encode_line
from shoal.observability.watchdog import within
from shoal.orchestrator.parts import LoopSettings, Parts, Progress

LOOP_FILE = "loop.json"


class Saving:
    def __init__(self, parts: Parts, settings: LoopSettings) -> None:
        self._parts = parts
        self._settings = settings
        self.saved_step: int | None = None  # of the newest checkpoint

    async def save(self, step: int, boundary: Mapping[str, Any]) -> None:
        """A complete checkpoint, once a step. Without a boundary the run failed within a step, and that step is
        computed again.
        """
        parts = self._parts
        if self.saved_step == step or not boundary:
            return
        parts.doing(f"saving the checkpoint of step {step}")
        with parts.phases("save"):
            if parts.save_shards is not None:
                await self._write_shards(parts.save_shards)
            await parts.ranks.on_main(lambda: self._write_checkpoint(step, boundary))
        self.saved_step = step
        self._settings.save.saved()

    async def _write_shards(self, save_shards: Callable[[Path], None]) -> None:
        """Every rank its own, aside; the checkpoint takes them in, and a run that is cut here sweeps them away."""

        async def make_room() -> str:
            return str(self._parts.run_dir.make_shards_folder().resolve())

        shards = self._parts.on_device(save_shards, Path(await self._parts.ranks.on_main(make_room)))
        await within(self._settings.save_deadline_s, shards, "writing the shards", "train.save_deadline_s")

    async def _write_checkpoint(self, step: int, boundary: Mapping[str, Any]) -> None:
        parts, settings = self._parts, self._settings
        with parts.run_dir.checkpoint(step) as folder:
            if parts.save_shards is not None:
                parts.run_dir.take_shards(folder)
            files, limit = parts.on_device(parts.files.save, folder), settings.save_deadline_s
            await within(limit, files, "writing the checkpoint", "train.save_deadline_s")
            state = encode_line(msgspec.to_builtins(boundary))  # without secrets, which prompts may hold
            (folder / LOOP_FILE).write_bytes(state)
        parts.run_dir.prune_checkpoints(settings.save_total_limit)
        parts.run_dir.write_status(
            "running", step=step, reason="checkpoint", resumable=True, next_command=settings.next_command
        )

    def mark_best(self, progress: Progress) -> None:
        """The newest checkpoint is the best one, if its evaluation says so."""
        best, writes = progress.best, self._parts.ranks.rank == 0
        if self._settings.keep_best and progress.best_step == progress.step and best is not None and writes:
            self._parts.run_dir.mark_best(progress.step, best)


def read_state(folder: Path) -> dict[str, Any]:
    with storage(f"read {folder / LOOP_FILE}"), open_to_read(folder / LOOP_FILE) as file:
        return json.loads(file.read())  # a prompt may be no text to stricter readers
