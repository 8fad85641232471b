"""The run directory and its only writer, `RunDir`. Used by the loop and the commands; readers need only the files.

The order of writes matters in a power failure: metrics, events and rollouts are on disk before the checkpoint that
depends on them. `FollowerRunDir` is the read-only counterpart for ranks other than the main process.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.core.errors import ConfigError, StorageError, UsedFolderError
from shoal.runs.checkpoints import (
    Checkpoint,
    CheckpointStore,
    checkpoint_folders,
    read_state,
    sweep,
    write_folder,
    write_state,
)
from shoal.runs.files import (
    PROGRESS_NAME,
    TEMPORARY,
    RunLock,
    open_to_read,
    overwrite,
    remove_quietly,
    storage,
    write_atomic,
)
from shoal.runs.history import recovered_status, restore_history, store_history
from shoal.runs.journal import LineWriter, encode_line, read_lines
from shoal.runs.secrets import redact, secret_values

if TYPE_CHECKING:
    import numpy as np

    from shoal.core.types import RolloutGroup


State = Literal["running", "finished", "stopped", "failed", "interrupted", "solved"]
Split = Literal["train", "eval"]
ROLLOUT_FILES: dict[Split, str] = {"train": "step", "eval": "eval"}
EVAL = "eval:"  # names of held-out prompts in rollout files start with it
SHARDS = "shards"  # folder of a checkpoint with the files of each rank
_FOLDERS = ("rollouts", "checkpoints", "logs")


class RunDir:
    """The folder of one run, locked while this object is open. Use `create` or `resume`."""

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
        self.damage: list[str] = []  # what a resume found and could continue without

    @classmethod
    def create(
        cls, path: Path | str, resolved_config_text: str, binding: Mapping[str, Any], next_command: str | None = None
    ) -> RunDir:
        """Start a run in a new folder. `binding` holds the settings that a resume must not change (model, data, …).

        `next_command` continues the run if it is killed; without a checkpoint it starts from the beginning.
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
        """Open the folder of an earlier run. Removes partial lines and leftovers of unfinished writes.

        If status.json is damaged or lost, the identity of the run is read from its checkpoints.
        """
        path = Path(path)
        if not is_used(path):
            raise ConfigError(f"{path} has no run to resume; start one without --resume")
        lock, damage = RunLock(path), []
        try:
            try:
                status = read_status(path)
            except StorageError as error:
                status = recovered_status(path / "checkpoints", error)
                damage = [f"{error}; the identity of the run was read from its checkpoints"]
            run_dir = cls(path, lock, status)
            run_dir.damage = damage
            for folder in filter(Path.is_dir, (path, path / "rollouts", path / "checkpoints", path / "final")):
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
        """Raise ConfigError if a setting that identifies the run has changed."""
        wanted = _as_json(binding)
        if "binding" not in self.status:  # status.json is damaged, and the checkpoints are of an earlier version
            self.status["binding"] = wanted
            self.damage.append("the settings of the earlier run are unknown and were not compared with those of now")
        # earlier versions of Shoal did not record the digests of files
        noted = {key for key in wanted if key in self.binding or not key.endswith(" files")}
        changed = sorted(key for key in {*self.binding, *noted} if self.binding.get(key) != wanted.get(key))
        if changed:
            details = "; ".join(_change(key, self.binding.get(key), wanted.get(key)) for key in changed)
            raise ConfigError(
                f"{self.path} cannot be resumed with other settings: {details}; "
                "restore them, or choose another train.output_dir"
            )

    def reopen(self, resolved_config_text: str, binding: Mapping[str, Any], next_command: str) -> None:
        """Continue the run after `check_binding`. The status is written before the configuration."""
        try:
            self.check_binding(binding)
            at = self.status.get("step", 0)
            self.write_status("running", step=at, reason="resumed", resumable=True, next_command=next_command)
            self.write_config(resolved_config_text)
        except BaseException:
            self.close()
            raise

    def free_if_untouched(self) -> bool:
        """Remove the status of a run that never started, so that its folder can be used again. True if it did."""
        untouched = self.status.get("reason") == "started" and not self.checkpoints.steps()
        if untouched:
            remove_quietly(self.path / "status.json")
        return untouched

    def write_config(self, resolved_config_text: str) -> None:
        write_config(self.path, resolved_config_text)

    def write_status(
        self, state: State, *, step: int, reason: str, resumable: bool, next_command: str | None = None
    ) -> None:
        status = {"state": state, "step": step, "reason": redact(reason), "resumable": resumable}
        status["next_command"] = redact(next_command) if next_command else None
        self.status = {**status, "pid": os.getpid(), "updated_at": _now(), **_identity(self.status)}
        text = json.dumps(self.status, indent=1).encode() + b"\n"
        try:
            write_atomic(self.path / "status.json", text)
        except StorageError:
            overwrite(self.path / "status.json", text)
            raise

    def write_progress(self, progress: Mapping[str, Any]) -> None:
        write_progress(self.path, progress)

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append({"step": step, **_json_floats(metrics)})

    def amend_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the existing record of a step."""
        self.metrics.amend(step, _json_floats(metrics))

    def append_journal(self, step: int, record: Mapping[str, Any]) -> None:
        self.journal.append({"step": step, **record})

    def append_event(self, record: Mapping[str, Any]) -> None:
        self.events.append(record)

    def record_rollouts(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        policy_logprobs: Mapping[str, np.ndarray],
        token_text: Callable[[int], str],
    ) -> None:
        from shoal.runs.rollout_log import rollout_lines  # imports NumPy, which readers do not need

        self.write_rollouts(step, rollout_lines(groups, policy_logprobs, token_text))

    def record_evaluation(self, step: int, groups: Sequence[RolloutGroup], token_text: Callable[[int], str]) -> None:
        from shoal.runs.rollout_log import rollout_lines

        self.write_rollouts(step, rollout_lines(groups, {}, token_text), "eval")

    def write_rollouts(self, step: int, rollouts: Iterable[Mapping[str, Any]], split: Split = "train") -> Path:
        path = rollouts_path(self.path, step, split)
        secrets = secret_values()
        write_atomic(path, (encode_line(rollout, secrets) for rollout in rollouts))
        return path

    @contextmanager
    def checkpoint(
        self, step: int, state: Mapping[str, Any] | None = None, *, version: int | None = None
    ) -> Iterator[Path]:
        """Yield an empty folder that becomes checkpoints/step_N, with the state, atomically at the end of the block."""
        about = {"version": step if version is None else version, "created_at": _now(), "binding": self.binding}
        with self.checkpoints.write(step, about) as folder:
            yield folder
            if state is not None:
                write_state(folder, state)
            for stream in (self.metrics, self.journal, self.events):
                stream.sync()
            store_history(folder, step, (self.metrics, self.journal))

    def read_state(self, folder: Path) -> dict[str, Any]:
        return read_state(folder)

    def make_shards_folder(self) -> Path:
        """An empty folder next to the checkpoints, into which each rank writes its shard of the next one."""
        folder = self.path / "checkpoints" / f"{TEMPORARY}{SHARDS}"
        with storage(f"save {folder}"):
            remove_quietly(folder)
            folder.mkdir()
        return folder

    def take_shards(self, checkpoint: Path) -> None:
        """Move the shards of all ranks into the checkpoint that is being written."""
        with storage(f"save {checkpoint}"):
            (self.path / "checkpoints" / f"{TEMPORARY}{SHARDS}").rename(checkpoint / SHARDS)

    def export(self) -> AbstractContextManager[Path]:
        """Yield an empty folder that becomes `final/` at the end of the block."""
        return write_folder(self.path / "final")

    def newest_good_checkpoint(self) -> Checkpoint | None:
        """The newest verified checkpoint, or None if there are none. StorageError if all of them are damaged."""
        return self.checkpoints.newest_good()

    def prune_checkpoints(self, save_total_limit: int | None) -> list[int]:
        return self.checkpoints.prune(save_total_limit)

    def mark_best(self, step: int, value: float | None = None) -> None:
        self.checkpoints.mark_best(step, value)

    def cut_to(self, step: int) -> dict[str, int]:
        """Remove everything after `step`; it will be computed again. Returns the number of removed records by kind."""
        cut = {name: getattr(self, name).cut_to(step) for name in ("metrics", "journal", "events")}
        later = {
            split: [path for found, path in stored_rollouts(self.path, split) if found > step]
            for split in ROLLOUT_FILES
        }
        for path in (*later["train"], *later["eval"]):
            remove_quietly(path)
        self.checkpoints.reject_after(step)
        return {**cut, "rollouts": len(later["train"])}

    def restore_history(self, checkpoint: Checkpoint) -> list[str]:
        """Restore journal and metrics after `cut_to`. Returns what was wrong with them."""
        streams = (self.journal, self.metrics)
        return [line for stream in streams for line in restore_history(stream, checkpoint.path, checkpoint.step)]

    def close(self) -> None:
        for stream in (self.metrics, self.journal, self.events):
            stream.close()
        self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_used(path: Path) -> bool:
    """Whether the folder has a status.json or checkpoints. A dry run writes only config.yaml."""
    return (path / "status.json").exists() or bool(checkpoint_folders(path / "checkpoints"))


def write_config(path: Path, resolved_config_text: str) -> Path:
    """Write config.yaml, and create the folder if it does not exist. A dry run writes nothing else."""
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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{path / 'status.json'} is not a status file of Shoal: {error}") from error
    return status


def write_progress(path: Path, progress: Mapping[str, Any]) -> None:
    """Replace logs/progress.json, the current operation of a running run. Only the live page reads it, so errors are
    ignored and nothing is synced."""
    file = path / PROGRESS_NAME
    temporary = file.with_name(f"{TEMPORARY}{file.name}")
    with suppress(OSError):
        temporary.write_text(redact(json.dumps({"time": _now(), **progress})), "utf-8")
        temporary.replace(file)


def read_progress(path: Path) -> dict[str, Any] | None:
    try:
        progress = json.loads((path / PROGRESS_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return progress if isinstance(progress, dict) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path / "metrics.jsonl"))


def rollouts_path(path: Path, step: int, split: Split = "train") -> Path:
    return path / "rollouts" / f"{ROLLOUT_FILES[split]}_{step:06d}.jsonl"


def stored_rollouts(path: Path, split: Split) -> list[tuple[int, Path]]:
    """The steps whose rollouts are stored, and their files; for "eval" those of evaluations."""
    prefix = f"{ROLLOUT_FILES[split]}_"
    files = [(file.stem.removeprefix(prefix), file) for file in (path / "rollouts").glob(f"{prefix}*.jsonl")]
    return sorted((int(digits), file) for digits, file in files if digits.isdigit())


def _change(key: str, before: Any, now: Any) -> str:
    """Describe a changed setting. The value of `data` is a digest and row counts; the message shows the counts."""
    if key == "data" and isinstance(before, str) and isinstance(now, str):
        sizes = before.partition(" ")[2], now.partition(" ")[2]
        return "the data has changed" + (f" ({sizes[0]} before, {sizes[1]} now)" if sizes[0] != sizes[1] else "")
    if key.endswith(" files"):
        return f"the files of the {key.removesuffix(' files')} have changed"
    return f"{key} was {before!r}, is now {now!r}" + (" rollouts" if key == "orch.batch_size" else "")


def _identity(status: Mapping[str, Any]) -> dict[str, Any]:
    return {key: status[key] for key in ("run_id", "created_at", "binding") if key in status}


def _json_float(value: float) -> float | str:
    """JSON has no NaN or infinity. They are written as strings that float() reads back."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _json_floats(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: _json_float(value) for name, value in metrics.items()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _as_json(binding: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(binding)))


class FollowerRunDir:
    """Replaces RunDir in ranks other than the main process, which writes everything."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.status: dict[str, Any] = {}

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def write_status(self, *_: Any, **__: Any) -> None: ...

    def write_progress(self, progress: Mapping[str, Any]) -> None: ...

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def amend_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def append_journal(self, step: int, record: Mapping[str, Any]) -> None: ...

    def append_event(self, record: Mapping[str, Any]) -> None: ...

    def record_rollouts(self, step: int, groups: Any, policy_logprobs: Any, token_text: Any) -> None: ...

    def record_evaluation(self, step: int, groups: Any, token_text: Any) -> None: ...

    def mark_best(self, step: int, value: float) -> None: ...

    def read_state(self, folder: Path) -> dict[str, Any]:
        return read_state(folder)

    def free_if_untouched(self) -> bool:
        return True

    def checkpoint(self, step: int, state: Mapping[str, Any] | None = None) -> AbstractContextManager[Path]:
        raise _only_main()

    def make_shards_folder(self) -> Path:
        raise _only_main()

    def take_shards(self, checkpoint: Path) -> None:
        raise _only_main()

    def prune_checkpoints(self, save_total_limit: int | None) -> list[int]:
        raise _only_main()

    def export(self) -> AbstractContextManager[Path]:
        raise _only_main()

    def close(self) -> None: ...

    def __enter__(self) -> FollowerRunDir:
        return self

    def __exit__(self, *_: object) -> None: ...


def _only_main() -> RuntimeError:
    return RuntimeError("only the main process writes checkpoints")
