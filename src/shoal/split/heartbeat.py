"""Heartbeat files of the split layout: one per component in handshake/, with its section and a heartbeat.

A component is alive while its beat changes; clocks of machines are never compared. handshake/end.json ends the run.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.core.errors import StorageError
from shoal.runs.files import BLOCK_BYTES, RunLock, overwrite, remove_quietly, storage, write_atomic

COMPONENTS = ("infer", "orch", "train")
FOLDER = "handshake"
END = "end.json"
BEAT_S = 0.5
PATIENCE_S = 3.0  # a busy machine may delay a beat


@dataclass(frozen=True)
class RunEnd:
    """How the run ended, for the named incarnations."""

    reason: str
    code: int
    told_by: str
    incarnations: tuple[str, ...] = ()


class HeartbeatFile:
    """The file of this process. A lock prevents a second process of the same component."""

    def __init__(self, output_dir: Path | str, component: str, section: Mapping[str, Any]) -> None:
        self.component = component
        self.incarnation = secrets.token_hex(8)
        self.folder = Path(output_dir) / FOLDER
        with storage(f"create {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            _reserve_block(self.folder / END)
        self._lock = RunLock(self.folder, f"{component}.lock", f"a grpo-{component} is in {output_dir} already:")
        self._path = self.folder / f"{component}.json"
        self._about: dict[str, Any] = {
            "component": component,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "shoal": __version__,
            "section": dict(section),
        }
        self._guard = threading.Lock()
        self._beat = 0
        self._stop = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._beat_until_closed, name="heartbeat", daemon=True)
        self._thread.start()

    def tell(self, **facts: Any) -> None:
        """Publish further facts immediately."""
        with self._guard:
            self._about.update(facts)
        self._write()

    def _write(self) -> None:
        with self._guard:
            self._beat += 1
            content = json.dumps({**self._about, "beat": self._beat}).encode()
            _write_even_if_full(self._path, content)

    def _beat_until_closed(self) -> None:
        while not self._stop.wait(BEAT_S):
            with suppress(StorageError):  # a full disk is reported by the process that writes run data
                self._write()

    def close(self, *, leave_word: bool = False) -> None:
        """With `leave_word` the file stays, for others that still have to read it."""
        self._stop.set()
        self._thread.join(timeout=5)
        if not leave_word:
            remove_quietly(self._path)
        self._lock.release()


@dataclass
class Peer:
    """Another component, as read from its file."""

    component: str
    incarnation: str
    about: dict[str, Any]
    beat: int
    changed: float | None  # when its beat last changed; None = never seen, so the process may be dead

    @property
    def section(self) -> dict[str, Any]:
        return self.about.get("section", {})


@dataclass
class Peers:
    """The other components. `look` reads their files; the other methods use what was read last."""

    folder: Path
    own: str
    _seen: dict[str, Peer] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)
    _looked: set[str] = field(default_factory=set)

    def look(self) -> None:
        for component in COMPONENTS:
            if component != self.own:
                self._read(component)

    def _read(self, component: str) -> None:
        first = component not in self._looked
        self._looked.add(component)
        try:
            about = json.loads((self.folder / f"{component}.json").read_bytes())
            incarnation, beat = str(about["incarnation"]), int(about["beat"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # absent; the last known state stays until another incarnation appears
        known, now = self._seen.get(component), time.monotonic()
        if known is None or known.incarnation != incarnation:
            # A file older than this process may be from a killed process; a newer one is from a live process.
            self._seen[component] = Peer(component, incarnation, about, beat, None if first else now)
        elif known.beat != beat:
            known.beat, known.about, known.changed = beat, about, now

    def get(self, component: str) -> Peer | None:
        """The component, if it was seen alive at any time."""
        peer = self._seen.get(component)
        return peer if peer is not None and peer.changed is not None else None

    def is_alive(self, component: str) -> bool:
        return self.silent_s(component) < PATIENCE_S and self.get(component) is not None

    def silent_s(self, component: str) -> float:
        """Seconds since its last heartbeat, or since the start of this process if there was none."""
        peer = self.get(component)
        changed = peer.changed if peer is not None else None
        return time.monotonic() - (self._since if changed is None else changed)

    def incarnations(self) -> tuple[str, ...]:
        """The incarnations in all files that were read, alive or not."""
        return tuple(peer.incarnation for peer in self._seen.values())

    def missing(self) -> list[str]:
        return [name for name in COMPONENTS if name != self.own and not self.is_alive(name)]


def write_run_end(folder: Path, end: RunEnd) -> None:
    """End the run for the named incarnations. Later incarnations start another run."""
    about = {"reason": end.reason, "code": end.code, "told_by": end.told_by, "for": list(end.incarnations)}
    with suppress(StorageError):  # the others have their own deadlines
        _write_even_if_full(folder / END, json.dumps(about).encode())


def _reserve_block(file: Path) -> None:
    """Reserve the disk block of the end file, since a full disk is one reason to end a run."""
    with suppress(FileExistsError), file.open("xb") as made:
        made.write(b" " * BLOCK_BYTES)


def _write_even_if_full(file: Path, content: bytes) -> None:
    """Overwrites in place if the disk is full. Not durable: after a power cut all processes start again."""
    try:
        write_atomic(file, content, durable=False)
    except StorageError:
        overwrite(file, content)
        raise


def read_end(folder: Path, incarnation: str) -> RunEnd | None:
    """How the run of this incarnation ended; None while it has not."""
    try:
        about = json.loads((folder / END).read_bytes())
        if incarnation not in about["for"]:
            return None
        return RunEnd(str(about["reason"]), int(about["code"]), str(about["told_by"]), (incarnation,))
    except (OSError, ValueError, KeyError, TypeError):
        return None
