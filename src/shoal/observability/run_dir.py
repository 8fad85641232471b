"""The run directory, and the only writer of it. Used by the orchestrator and the commands; readers need only the files.

Order matters for a power cut: metrics, events and rollouts are on disk before the checkpoint that speaks of them.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from shoal.errors import ConfigError, StorageError, UsedFolderError
from shoal.observability.atomic import TEMPORARY, open_to_read, overwrite, remove_quietly, storage, write_atomic
from shoal.observability.checkpoints import Checkpoint, CheckpointStore, sweep, write_folder
from shoal.observability.journal import LineWriter, encode_line, read_lines
from shoal.observability.lock import RunLock
from shoal.observability.redact import redact, secret_values

State = Literal["running", "finished", "stopped", "failed", "interrupted", "solved"]
SHARDS = "shards"  # of a checkpoint: what each of several processes wrote
_FOLDERS = ("rollouts", "checkpoints", "logs")


class RunDir:
    """One run's folder, locked for as long as this object is open. Make one with `create` or `resume`."""

    def __init__(self, path: Path, lock: RunLock, status: dict[str, Any]) -> None:
        self.path = path
        self.status = status
        self._lock = lock
        with storage(f"prepare {path}"):
            for name in _FOLDERS:
                (path / name).mkdir(exist_ok=True)
        self.metrics = LineWriter(path / "metrics.jsonl")
        self.journal = LineWriter(path / "journal.jsonl", durable=True)
        self.events = LineWriter(path / "events.jsonl")
        self.checkpoints = CheckpointStore(path / "checkpoints", status["run_id"])

    @classmethod
    def create(
        cls, path: Path | str, resolved_config_text: str, binding: Mapping[str, Any], next_command: str | None = None
    ) -> RunDir:
        """Start a run in a new folder. `binding` is what a resume must find unchanged (model, data, seed, …).

        `next_command` is how to go on, should it be killed: without a checkpoint, from the beginning.
        """
        path = Path(path)
        with storage(f"create {path}"):
            path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(path)
        try:
            if is_used(path):
                raise UsedFolderError(
                    f"{path} already holds a run; continue it with --resume, or choose another train.output_dir"
                )
            status = {"run_id": secrets.token_hex(8), "binding": _as_json(binding), "created_at": _now()}
            run_dir = cls(path, lock, status)
            run_dir.write_config(resolved_config_text)
            resumable = next_command is not None
            run_dir.write_status("running", step=0, reason="started", resumable=resumable, next_command=next_command)
        except BaseException:
            lock.release()
            raise
        return run_dir

    @classmethod
    def resume(cls, path: Path | str) -> RunDir:
        """Open the folder of an earlier run: torn lines are cut and leftovers of unfinished writes removed."""
        path = Path(path)
        if not is_used(path):
            raise ConfigError(f"{path} holds no run to resume; start one without --resume")
        lock = RunLock(path)
        try:
            run_dir = cls(path, lock, read_status(path))
            for folder in (path, path / "rollouts", path / "checkpoints"):
                sweep(folder)
        except BaseException:
            lock.release()
            raise
        return run_dir

    @property
    def binding(self) -> dict[str, Any]:
        return self.status.get("binding", {})

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def check_binding(self, binding: Mapping[str, Any]) -> None:
        """Refuse to continue a run as another one."""
        wanted = _as_json(binding)
        noted = {key for key in wanted if key in self.binding or not key.endswith(" files")}  # an earlier Shoal did not
        changed = sorted(key for key in {*self.binding, *noted} if self.binding.get(key) != wanted.get(key))
        if changed:
            details = "; ".join(_change(key, self.binding.get(key), wanted.get(key)) for key in changed)
            raise ConfigError(
                f"{self.path} cannot be resumed with other settings: {details}; give what it was, or another folder"
            )

    def reopen(self, resolved_config_text: str, binding: Mapping[str, Any], next_command: str) -> None:
        """Go on with the run: it must be the same one; the status says so before the configuration changes."""
        try:
            self.check_binding(binding)
            at = self.status.get("step", 0)
            self.write_status("running", step=at, reason="resumed", resumable=True, next_command=next_command)
            self.write_config(resolved_config_text)
        except BaseException:
            self.close()
            raise

    def free_if_untouched(self) -> bool:
        """A run that was refused before its first step never was: the folder may be used again. True if it was so."""
        untouched = self.status.get("reason") == "started" and not self.checkpoints.steps()
        if untouched:
            remove_quietly(self.path / "status.json")
        return untouched

    def write_config(self, resolved_config_text: str) -> None:
        write_config(self.path, resolved_config_text)

    def write_status(
        self, state: State, *, step: int, reason: str, resumable: bool, next_command: str | None = None
    ) -> None:
        told = {"state": state, "step": step, "reason": redact(reason), "resumable": resumable}
        told["next_command"] = redact(next_command) if next_command else None
        self.status = {**told, "pid": os.getpid(), "updated_at": _now(), **_identity(self.status)}
        text = json.dumps(self.status, indent=1).encode() + b"\n"
        try:
            write_atomic(self.path / "status.json", text)
        except StorageError:
            overwrite(self.path / "status.json", text)
            raise

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append({"step": step, **_spelt(metrics)})

    def amend_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add to the record of a step that is there."""
        self.metrics.amend(step, _spelt(metrics))

    def append_journal(self, step: int, record: Mapping[str, Any]) -> None:
        self.journal.append({"step": step, **record})

    def append_event(self, record: Mapping[str, Any]) -> None:
        self.events.append(record)

    def write_rollouts(self, step: int, rollouts: Iterable[Mapping[str, Any]]) -> Path:
        path = rollouts_path(self.path, step)
        secrets = secret_values()
        write_atomic(path, (encode_line(rollout, secrets) for rollout in rollouts))
        return path

    @contextmanager
    def checkpoint(self, step: int, *, version: int | None = None) -> Iterator[Path]:
        """Yields an empty folder; what is in it when the block ends becomes checkpoints/step_N, atomically."""
        about = {"version": step if version is None else version, "created_at": _now()}
        with self.checkpoints.write(step, about) as folder:
            yield folder
            for stream in (self.metrics, self.journal, self.events):
                stream.sync()

    def make_shards_folder(self) -> Path:
        """An empty folder beside the checkpoints, for what several processes write of the next one."""
        folder = self.path / "checkpoints" / f"{TEMPORARY}{SHARDS}"
        with storage(f"save {folder}"):
            remove_quietly(folder)
            folder.mkdir()
        return folder

    def take_shards(self, checkpoint: Path) -> None:
        """What they wrote becomes part of the checkpoint that is being written."""
        with storage(f"save {checkpoint}"):
            (self.path / "checkpoints" / f"{TEMPORARY}{SHARDS}").rename(checkpoint / SHARDS)

    def export(self) -> AbstractContextManager[Path]:
        """Yields an empty folder that becomes `final/` when the block ends."""
        return write_folder(self.path / "final")

    def newest_good_checkpoint(self) -> Checkpoint | None:
        """(step, path, skipped), or None if there never was one; StorageError if there are some and none is good."""
        return self.checkpoints.newest_good()

    def prune_checkpoints(self, save_total_limit: int | None) -> list[int]:
        return self.checkpoints.prune(save_total_limit)

    def mark_best(self, step: int, value: float | None = None) -> None:
        self.checkpoints.mark_best(step, value)

    def cut_to(self, step: int) -> dict[str, int]:
        """Forget everything after `step`; it will be computed again. Returns how much was cut, by kind."""
        cut = {name: getattr(self, name).cut_to(step) for name in ("metrics", "journal", "events")}
        later = [path for path in (self.path / "rollouts").glob("step_*.jsonl") if _step_of(path) > step]
        for path in later:
            remove_quietly(path)
        self.checkpoints.set_aside_after(step)
        return {**cut, "rollouts": len(later)}

    def close(self) -> None:
        for stream in (self.metrics, self.journal, self.events):
            stream.close()
        self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_used(path: Path) -> bool:
    """A folder counts as used once it holds status.json; a dry run leaves only config.yaml."""
    return (path / "status.json").exists()


def write_config(path: Path, resolved_config_text: str) -> Path:
    """Write config.yaml, making the folder if need be (all that a dry run writes)."""
    with storage(f"create {path}"):
        path.mkdir(parents=True, exist_ok=True)
    write_atomic(path / "config.yaml", redact(resolved_config_text).encode("utf-8", "backslashreplace"))
    return path / "config.yaml"


def read_status(path: Path) -> dict[str, Any]:
    with storage(f"read {path / 'status.json'}"), open_to_read(path / "status.json") as file:
        text = file.read()
    try:
        status = json.loads(text)
        status["run_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path / 'status.json'} is not a status file of Shoal: {error}") from error
    return status


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path / "metrics.jsonl"))


def rollouts_path(path: Path, step: int) -> Path:
    return path / "rollouts" / f"step_{step:06d}.jsonl"


def _step_of(path: Path) -> int:
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits.isdigit() else 0


def _change(key: str, before: Any, now: Any) -> str:
    """What is told of a setting that may not change. Data is a digest and counts, of which people read the counts."""
    if key == "data" and isinstance(before, str) and isinstance(now, str):
        sizes = before.partition(" ")[2], now.partition(" ")[2]
        return "the data is not the same" + (f" ({sizes[0]} then, {sizes[1]} now)" if sizes[0] != sizes[1] else "")
    if key.endswith(" files"):
        return f"the files of the {key.removesuffix(' files')} are not the same"
    return f"{key} was {before!r}, is {now!r}" + (" rollouts" if key == "orch.batch_size" else "")


def _identity(status: Mapping[str, Any]) -> dict[str, Any]:
    return {key: status[key] for key in ("run_id", "created_at", "binding") if key in status}


def _spell(value: float) -> float | str:
    """JSON has no NaN; null would hide which of the three it was, and float() reads these words back."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _spelt(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: _spell(value) for name, value in metrics.items()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _as_json(binding: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(binding)))
