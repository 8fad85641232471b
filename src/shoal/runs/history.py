"""The recorded history of a run, journal.jsonl and metrics.jsonl: stored in checkpoints, verified when a run resumes.

Used by RunDir. A checkpoint contains both files as they were when it was written, so that lost, repeated and changed
lines can be restored. Checkpoints of earlier versions have no copy: duplicates are removed and the rest is reported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import StorageError
from shoal.runs.files import open_to_read, storage
from shoal.runs.journal import LineWriter, decode_line, is_up_to

HISTORY = "history"  # folder of a checkpoint


def store_history(checkpoint: Path, step: int, streams: Iterable[LineWriter]) -> None:
    """Copy the records up to `step`. While a thread writes a checkpoint, the run may record further steps."""
    (checkpoint / HISTORY).mkdir()
    for stream in streams:
        lines = _lines(stream.path)
        while lines and not is_up_to(decode_line(lines[-1]), step):
            lines.pop()
        (checkpoint / HISTORY / stream.path.name).write_bytes(b"".join(lines))


def restore_history(stream: LineWriter, checkpoint: Path, step: int) -> list[str]:
    """Compare a file that was cut to `step` with the checkpoint of that step, and repair it. Returns what was wrong."""
    name, copy, found = stream.path.name, checkpoint / HISTORY / stream.path.name, _lines(stream.path)
    problems = []
    if copy.exists():  # earlier versions of Shoal may have copied records of later steps, too
        stored = [line for line in _lines(copy) if is_up_to(decode_line(line), step)]
        if found != stored:
            stream.replace(stored)
            if not _was_amended(found, stored, step):
                problems = [f"{name}: {_difference(found, stored)}; restored from {checkpoint.name}"]
    else:
        stored, problems = _without_duplicates(found, name)
        if stored != found:
            stream.replace(stored)
    return problems + [f"{name}: {text}" for text in _gaps([json.loads(line) for line in stored], step)]


def recovered_status(checkpoints: Path, damage: StorageError) -> dict[str, Any]:
    """The identity of a run whose status.json is damaged, from the manifest of its newest checkpoint."""
    from shoal.runs.checkpoints import checkpoint_folders, read_manifest

    for folder in reversed(checkpoint_folders(checkpoints)):
        try:
            manifest = read_manifest(folder)
        except StorageError:
            continue
        status = {key: manifest[key] for key in ("run_id", "binding", "step") if key in manifest}
        return {"state": "interrupted", "resumable": True, **status}
    raise StorageError(
        f"{damage}; no checkpoint has the identity of the run either: restore status.json, or start another run"
    ) from damage


def _lines(path: Path) -> list[bytes]:
    with storage(f"read {path}"), open_to_read(path) as file:
        return [line for line in file if line.endswith(b"\n")]


def _was_amended(found: Sequence[bytes], stored: Sequence[bytes], step: int) -> bool:
    """An evaluation that a signal cut short is repeated after the checkpoint and added to its step."""
    changed = [pair for pair in zip(found, stored, strict=False) if pair[0] != pair[1]]
    if len(found) != len(stored) or len(changed) != 1:
        return False
    now, then = (decode_line(line) or {} for line in changed[0])
    return then.get("step") == step and now.items() >= then.items()


def _difference(found: Sequence[bytes], stored: Sequence[bytes]) -> str:
    lost = sum((Counter(stored) - Counter(found)).values())
    extra = sum((Counter(found) - Counter(stored)).values())
    if not lost and not extra:
        return "the lines were out of order"
    return f"{lost} recorded lines were missing, {extra} lines were changed or repeated"


def _without_duplicates(lines: Sequence[bytes], name: str) -> tuple[list[bytes], list[str]]:
    """One line per step, in order."""
    by_step: dict[int, bytes] = {}
    different = set()
    for line in lines:
        step = json.loads(line).get("step")
        if step is None:
            continue
        if by_step.setdefault(step, line) != line:
            different.add(step)
    kept = [by_step[step] for step in sorted(by_step)]
    if kept == list(lines):
        return kept, []
    removed = len(lines) - len(kept)
    what = f"{removed} repeated or damaged lines were removed" if removed else "the lines were out of order"
    problems = [f"{name}: {what}"]
    if different:
        problems.append(f"{name}: different lines for {_steps(different)}; the first of each is kept")
    return kept, problems


def _gaps(records: Sequence[Mapping[str, Any]], last: int) -> list[str]:
    """What is wrong with the records of steps 1 to `last`, and cannot be repaired."""
    problems = []
    if missing := set(range(1, last + 1)) - {record.get("step") for record in records}:
        problems.append(f"no line for {_steps(missing)}; it cannot be restored")
    if wrong := {record["step"] for record in records if record.get("version", record.get("step")) != record["step"]}:
        problems.append(f"the version of {_steps(wrong)} is not the number of the step")
    lists = [ids for record in records if isinstance(ids := record.get("rollout_ids"), list)]
    counts = Counter(str(name) for ids in lists for name in ids)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        problems.append(f"rollouts recorded in more than one step: {', '.join(twice[:3])} ({len(twice)} in total)")
    return problems


def _steps(numbers: Iterable[int]) -> str:
    shown = sorted(numbers)
    more = f" and {len(shown) - 9} more" if len(shown) > 9 else ""
    return f"step {', '.join(map(str, shown[:9]))}{more}"
