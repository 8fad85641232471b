"""Who is there: one file a component in handshake/, with what it is configured for and a heartbeat.

Used by the three processes of the split layout. Clocks are never compared: a component is alive for as long as others
see its beat change. A run that ends is told to the others by name, in handshake/end.json.
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
from shoal.errors import StorageError
from shoal.observability.atomic import BLOCK_BYTES, overwrite, remove_quietly, storage, write_atomic
from shoal.observability.lock import RunLock

COMPONENTS = ("infer", "orch", "train")
FOLDER = "handshake"
END = "end.json"
BEAT_S = 0.5
PATIENCE_S = 3.0  # a busy machine may hold a beat up for a moment


@dataclass(frozen=True)
class End:
    """How the run ended, for whoever took part in it."""

    reason: str
    code: int
    told_by: str
    incarnations: tuple[str, ...] = ()


class Presence:
    """This process's own file. Held by a lock, so that one component is there once."""

    def __init__(self, output_dir: Path | str, component: str, section: Mapping[str, Any]) -> None:
        self.component = component
        self.incarnation = secrets.token_hex(8)
        self.folder = Path(output_dir) / FOLDER
        with storage(f"create {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            _keep_room(self.folder / END)
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
        self._thread = threading.Thread(target=self._keep_beating, name="presence", daemon=True)
        self._thread.start()

    def tell(self, **facts: Any) -> None:
        """Add to what the others read; at once, not with the next beat."""
        with self._guard:
            self._about.update(facts)
        self._write()

    def _write(self) -> None:
        with self._guard:
            self._beat += 1
            content = json.dumps({**self._about, "beat": self._beat}).encode()
            _write_even_if_full(self._path, content)

    def _keep_beating(self) -> None:
        while not self._stop.wait(BEAT_S):
            with suppress(StorageError):  # a full disk is told by whoever has something to lose
                self._write()

    def close(self, *, leave_word: bool = False) -> None:
        """`leave_word`: the file stays, for others that have yet to read it (they ended for what stands there)."""
        self._stop.set()
        self._thread.join(timeout=5)
        if not leave_word:
            remove_quietly(self._path)
        self._lock.release()


@dataclass
class Peer:
    """Another component as its file shows it."""

    component: str
    incarnation: str
    about: dict[str, Any]
    beat: int
    changed: float | None  # when its beat was last seen to change; None: it may be a file of the dead

    @property
    def section(self) -> dict[str, Any]:
        return self.about.get("section", {})


@dataclass
class Peers:
    """The other components, by their files. `look` reads them again; the rest answers from what was seen."""

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
            return  # not there yet, or gone; what was known of it stands until another comes
        known, now = self._seen.get(component), time.monotonic()
        if known is None or known.incarnation != incarnation:
            # A file that was here before this process may be left from a killed one; one that comes later is alive.
            self._seen[component] = Peer(component, incarnation, about, beat, None if first else now)
        elif known.beat != beat:
            known.beat, known.about, known.changed = beat, about, now

    def get(self, component: str) -> Peer | None:
        """The component, if it has shown itself alive at any time."""
        peer = self._seen.get(component)
        return peer if peer is not None and peer.changed is not None else None

    def is_alive(self, component: str) -> bool:
        return self.silent_s(component) < PATIENCE_S and self.get(component) is not None

    def silent_s(self, component: str) -> float:
        """Seconds without a sign of it; from this process's start if there never was one."""
        peer = self.get(component)
        changed = peer.changed if peer is not None else None
        return time.monotonic() - (self._since if changed is None else changed)

    def incarnations(self) -> tuple[str, ...]:
        """Of all whose files were read, of living ones or not."""
        return tuple(peer.incarnation for peer in self._seen.values())

    def missing(self) -> list[str]:
        return [name for name in COMPONENTS if name != self.own and not self.is_alive(name)]


def tell_end(folder: Path, end: End) -> None:
    """End the run for the incarnations named; whoever comes later starts another one."""
    about = {"reason": end.reason, "code": end.code, "told_by": end.told_by, "for": list(end.incarnations)}
    with suppress(StorageError):  # they have a deadline of their own
        _write_even_if_full(folder / END, json.dumps(about).encode())


def _keep_room(file: Path) -> None:
    """A disk that is full ends a run, and the end is told by a file: its block is taken while there are some."""
    with suppress(FileExistsError), file.open("xb") as made:
        made.write(b" " * BLOCK_BYTES)


def _write_even_if_full(file: Path, content: bytes) -> None:
    """Not durable: after a power cut everybody starts anew. A full disk has room for what is there already."""
    try:
        write_atomic(file, content, durable=False)
    except StorageError:
        overwrite(file, content)
        raise


def read_end(folder: Path, incarnation: str) -> End | None:
    """How the run of this incarnation ended; None while it has not."""
    try:
        about = json.loads((folder / END).read_bytes())
        if incarnation not in about["for"]:
            return None
        return End(str(about["reason"]), int(about["code"]), str(about["told_by"]), (incarnation,))
    except (OSError, ValueError, KeyError, TypeError):
        return None
