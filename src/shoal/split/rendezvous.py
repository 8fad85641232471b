"""Handshake of the split layout: heartbeat files, the wait for the other processes, and the common end of a run.

Each component has a file in handshake/ with its section and a heartbeat. A component is alive while its beat changes;
clocks of machines are never compared. Every wait is reported and has a deadline. A process that ends the run writes the
reason to handshake/end.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.config.infer import InferConfig
from shoal.config.orch import OrchConfig
from shoal.config.problems import Origins
from shoal.config.rules import check_split, merge_sections, section_data
from shoal.config.schema import RunConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_TERMINATED,
    EXIT_USAGE,
    ConfigError,
    DeadlineError,
    Interrupted,
    ShoalError,
    StoppedByPolicy,
    StorageError,
)
from shoal.rollout.remote.client import Tell, WaitReporter
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


LOOK_S = 0.1
ENDED_BY = "ended the run: "


class RunEndedByPeer(Exception):
    """Another process ended the run normally."""


class Rendezvous:
    """This process and what it sees of the other two. `tell` receives reports of waits."""

    def __init__(self, component: str, section: InferConfig | OrchConfig | TrainConfig, tell: Tell) -> None:
        self.presence = HeartbeatFile(section.output_dir, component, section_data(section))
        self.deadline_s = section.deadline_s
        self._section = section
        self.peers = Peers(self.presence.folder, component)
        self.tell = tell
        self._waits = WaitReporter(lambda text: self.tell(text))
        self._looked = 0.0

    @property
    def name(self) -> str:
        return f"grpo-{self.presence.component}"

    def look(self) -> None:
        """Read the files of the others at most every LOOK_S. Raises RunEndedByPeer or an error if one ended the run."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        self.peers.look()
        end = read_end(self.presence.folder, self.presence.incarnation)
        if end is not None:
            raise_end(end)

    def expects_peers(self) -> bool:
        """Whether files of the others exist, alive or not."""
        self.look()
        return bool(self.peers.incarnations())

    async def meet(self, *, patient: bool = False) -> None:
        """Wait until all three are present. With `patient` there is no deadline."""
        started = time.monotonic()
        while missing := self._missing():
            waited = time.monotonic() - started
            for component in missing if not patient or len(missing) == 1 else ():
                self._waits.note(component, waited, f" to join in {self.presence.folder.parent}")
            if not patient and waited > self.deadline_s:
                self._raise_missing(missing, waited)
            await asyncio.sleep(LOOK_S)

    def _missing(self) -> list[str]:
        self.look()
        missing = [name for name in COMPONENTS if name != self.presence.component and self.peers.get(name) is None]
        for name in set(COMPONENTS) - set(missing):
            if self.peers.is_alive(name):  # a process that was present may be gone
                self._waits.over(name)
        return missing

    def watch(self, component: str, what: str, since: float) -> None:
        """Called while waiting for `component` to do `what`: reports a missing heartbeat, raises at the deadline."""
        self.look()
        if self.peers.is_alive(component):
            self._waits.over(component)
        else:
            self._waits.note(component, self.peers.silent_s(component))
        waited = time.monotonic() - since
        if waited > self.deadline_s:
            silent = self.peers.silent_s(component)
            gone = "" if self.peers.is_alive(component) else f", which has been silent for {silent:.0f} s"
            raise DeadlineError(
                f"{self.name} waited {waited:.0f} s for grpo-{component} to {what}{gone}; start it again and resume, "
                f"or raise {self.presence.component}.deadline_s"
            )

    def _raise_missing(self, missing: list[str], waited: float) -> None:
        who = " and ".join(f"grpo-{name}" for name in missing)
        raise DeadlineError(
            f"{self.name} waited {waited:.0f} s for {who}, which did not join in {self.presence.folder.parent}; start "
            f"all three with the same output_dir, or raise {self.presence.component}.deadline_s"
        )

    def agree(self, origins: Origins | None = None) -> RunConfig:
        """The configuration of the run from all three sections. A conflict raises the same error in all three."""
        others = {name: peer.section for name in COMPONENTS if (peer := self.peers.get(name)) is not None}
        self._check_versions()
        config = merge_sections(self.presence.component, self._section, others)
        check_split(config).raise_errors(self._origins(origins or Origins(default="handshake")))
        return config

    def _check_versions(self) -> None:
        """All three must run the same release, since formats may differ."""
        for name in COMPONENTS:
            peer = self.peers.get(name)
            theirs = peer.about.get("shoal", __version__) if peer is not None else __version__
            if theirs != __version__:
                raise ConfigError(
                    f"{self.name} is Shoal {__version__}, grpo-{name} is Shoal {theirs}; install one version "
                    "everywhere, and start all three again"
                )

    def _origins(self, origins: Origins) -> Origins:
        """Values of another section are attributed to the process of that section."""
        read = {path[:1] for path in origins.places} | {(self.presence.component,)}
        others = {(name,): f"grpo-{name}" for name in COMPONENTS if (name,) not in read}
        return replace(origins, places={**origins.places, **others})

    def incarnation_of(self, component: str) -> str | None:
        peer = self.peers.get(component)
        return peer.incarnation if peer is not None else None

    def end_all(self, reason: str, code: int) -> None:
        """End the run for all processes that take part in it."""
        self.peers.look()
        write_run_end(self.presence.folder, RunEnd(reason, code, self.name, self.peers.incarnations()))

    def close(self, error: BaseException | None = None) -> None:
        """After a configuration conflict the file stays, so that the others find the conflict too."""
        self.presence.close(leave_word=isinstance(error, ConfigError))


def raise_end(end: RunEnd) -> None:
    # A forwarded reason is unchanged: it names the process that ended the run first.
    reason = end.reason if ENDED_BY in end.reason else f"{end.told_by} {ENDED_BY}{end.reason}"
    if end.code == EXIT_DONE:
        raise RunEndedByPeer(reason)
    if end.code == EXIT_USAGE:
        raise ConfigError(reason)
    if end.code == EXIT_STORAGE:
        raise StorageError(reason)
    if end.code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        raise Interrupted(reason, end.code)
    error = StoppedByPolicy(reason)
    error.exit_code = end.code if end.code != EXIT_BUG else EXIT_STOPPED
    raise error


def ending_of(error: BaseException | None) -> tuple[str, int]:
    """(reason, exit code) for the other processes."""
    if error is None or isinstance(error, RunEndedByPeer):
        return "finished", EXIT_DONE
    if isinstance(error, ShoalError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return "interrupted", EXIT_INTERRUPTED
    return f"{type(error).__name__}: {error}", EXIT_BUG
