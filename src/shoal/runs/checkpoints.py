"""Checkpoints and exports of a run directory: written to a temporary folder, hashed, renamed, verified before use.

Used by RunDir. A checkpoint is good if its manifest is undamaged, belongs to this run and step, and lists exactly the
files of the folder with their sizes and checksums.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import StorageError
from shoal.runs.files import (
    TEMPORARY,
    digest_files,
    fault,
    follow_umask,
    fsync_tree,
    move_into_place,
    open_to_read,
    remove_quietly,
    storage,
    storage_error,
    sweep_folder,
    write_atomic,
)
from shoal.runs.journal import encode_line

FORMAT = 2
MANIFEST = "manifest.json"
BEST = "best.json"
LOOP_FILE = "loop.json"
REJECTED = "rejected-"
_NAME = re.compile(r"step_(\d{6,})")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint. `skipped` lists newer ones that are damaged, with the reason."""

    step: int
    path: Path
    manifest: Mapping[str, Any]
    skipped: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        """Unpacks as (step, path, skipped)."""
        return iter((self.step, self.path, self.skipped))


class CheckpointStore:
    """The `checkpoints/` folder of one run."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder
        self._run_id = run_id
        self._known_good: set[int] = set()  # written or verified by this process; avoids hashing gigabytes again

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, good or not, oldest first."""
        return [_step_of(path) for path in checkpoint_folders(self.folder)]

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    @contextmanager
    def write(self, step: int, about: Mapping[str, Any]) -> Iterator[Path]:
        """Yield an empty folder. It becomes the checkpoint if the block ends without an error."""
        target = self.path(step)
        with write_folder(target) as folder:
            yield folder
            with storage(f"save {target}"):
                self._seal(folder, {**about, "step": step, "run_id": self._run_id})
        self._known_good.add(step)

    def _seal(self, folder: Path, about: Mapping[str, Any]) -> None:
        fsync_tree(folder)
        fault("checkpoint:files")
        found = _files(folder)
        digests = dict(zip(found, digest_files(found.values()), strict=True))
        files = {name: {"bytes": path.stat().st_size, "digest": digests[name]} for name, path in found.items()}
        manifest = {"format": FORMAT, **about, "files": files}
        manifest["digest"] = _digest(manifest)
        write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        fault("checkpoint:manifest")

    def newest_good(self) -> Checkpoint | None:
        skipped: list[str] = []
        for step in reversed(self.steps()):
            try:
                manifest = self.verify(step)
            except StorageError as error:
                skipped.append(str(error))
                continue
            return Checkpoint(step, self.path(step), manifest, skipped)
        if skipped:
            raise StorageError("no undamaged checkpoint: " + "; ".join(skipped))
        return None

    def verify(self, step: int) -> dict[str, Any]:
        """The manifest of a good checkpoint. Raises StorageError with the reason for any other."""
        path = self.path(step)
        manifest = read_manifest(path)
        if manifest.get("format") != FORMAT:
            raise StorageError(f"{path} has format {manifest.get('format')}, this Shoal reads {FORMAT}")
        if manifest.get("run_id") != self._run_id or manifest.get("step") != step:
            raise StorageError(f"{path} belongs to another run or step")
        with storage(f"read {path}"):
            _compare(path, manifest["files"])
        self._known_good.add(step)
        return manifest

    def reject_after(self, step: int) -> None:
        """Rename checkpoints later than `step` to rejected-*: their history was cut, so a resume must not use them."""
        with storage(f"rename checkpoints after step {step}"):
            for later in self.steps():
                if later > step:
                    move_into_place(self.path(later), self.folder / f"{REJECTED}{self.path(later).name}")
                    self._known_good.discard(later)
        if (best := self.best()) is not None and best > step:
            remove_quietly(self.folder / BEST)

    def mark_best(self, step: int, value: float | None = None) -> None:
        write_atomic(self.folder / BEST, json.dumps({"step": step, "value": value}).encode())

    def best(self) -> int | None:
        try:
            return int(json.loads((self.folder / BEST).read_text())["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def prune(self, limit: int | None) -> list[int]:
        """Remove the oldest checkpoints until `limit` are left. The newest good one and the best one always stay."""
        if limit is None:
            return []
        steps = self.steps()
        protected = {self.newest_known_good(), self.best()}
        surplus = len(steps) - max(limit, 1)
        removed = [step for step in steps if step not in protected][: max(surplus, 0)]
        with storage(f"remove old checkpoints in {self.folder}"):
            for step in removed:
                # Rename first, so that an interrupted removal leaves a temporary folder, not a damaged checkpoint.
                removing = self.path(step).rename(self.folder / f"{TEMPORARY}removed-{step}")
                fault("prune:renamed")
                remove_quietly(removing)
        return removed

    def newest_known_good(self) -> int | None:
        """The step of the newest good checkpoint. Does not read checkpoints that this process wrote or verified."""
        for step in reversed(self.steps()):
            if step in self._known_good:
                return step
            try:
                self.verify(step)
            except StorageError:
                continue
            return step
        return None


def checkpoint_folders(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, good or not, oldest first."""
    with storage(f"list {folder}"):
        entries = list(folder.iterdir()) if folder.is_dir() else []
    return sorted((entry for entry in entries if _NAME.fullmatch(entry.name)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def resume_hint(folder: Path) -> str:
    """A message that says where an interrupted run continues. Nothing is verified; the next start does that."""
    found = checkpoint_folders(folder)
    if not found:
        return "there is no checkpoint yet, so the run starts again from the beginning"
    return f"the run continues from the checkpoint of step {_step_of(found[-1])}"


@contextmanager
def write_folder(target: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that replaces `target` if the block ends without an error.

    Without `durable` the folder survives a killed process, but may be lost or incomplete after a power failure.
    """
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    try:
        with storage(f"save {target}"):
            remove_quietly(temporary)
            temporary.mkdir()
            yield temporary
            follow_umask(temporary)
            if durable:
                fsync_tree(temporary)
            fault("folder:synced")
            move_into_place(temporary, target, durable)
    except BaseException as error:
        remove_quietly(temporary)
        if type(error).__name__ == "SafetensorError":  # how safetensors reports a full disk
            number = _OS_ERROR.search(str(error))
            cause = OSError(int(number[1]), str(error)) if number else Exception(str(error))
            raise storage_error(f"save {target}", cause) from error
        raise


def sweep(folder: Path) -> list[str]:
    with storage(f"clean up {folder}"):
        return sweep_folder(folder)


def _files(folder: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise StorageError(f"{path} is a symbolic link; a checkpoint may contain only regular files")
        if path.is_file() and path != folder / MANIFEST:
            found[path.relative_to(folder).as_posix()] = path
    return found


def _digest(manifest: Mapping[str, Any]) -> str:
    plain = json.dumps({key: manifest[key] for key in sorted(manifest) if key != "digest"}, sort_keys=True)
    return hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        with open_to_read(path / MANIFEST) as file:
            manifest = json.loads(file.read())
        valid = isinstance(manifest, dict) and isinstance(manifest["files"], dict)
        valid = valid and manifest["digest"] == _digest(manifest)
    except FileNotFoundError:
        raise StorageError(f"{path} has no manifest") from None
    except (OSError, ValueError, KeyError, RecursionError):
        valid, manifest = False, {}
    if not valid:
        raise StorageError(f"{path} has a damaged manifest")
    return manifest


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of the loop, with secrets hidden: prompts may contain them."""
    (folder / LOOP_FILE).write_bytes(encode_line(msgspec.to_builtins(state)))


def read_state(folder: Path) -> dict[str, Any]:
    with storage(f"read {folder / LOOP_FILE}"), open_to_read(folder / LOOP_FILE) as file:
        return json.loads(file.read())  # json accepts lone surrogates in prompts; msgspec does not


def _compare(path: Path, expected: Mapping[str, Any]) -> None:
    found = _files(path)
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise StorageError(f"{path} is missing {', '.join(missing)}")
    if extra:
        raise StorageError(f"{path} contains files that are not in its manifest: {', '.join(extra)}")
    for name, entry in expected.items():
        size = found[name].stat().st_size
        if size != entry["bytes"]:
            raise StorageError(f"{path}/{name} has {size} bytes instead of {entry['bytes']}")
    for name, digest in zip(expected, digest_files(found[name] for name in expected), strict=True):
        if digest != expected[name]["digest"]:
            raise StorageError(f"{path}/{name} has changed since it was written")
