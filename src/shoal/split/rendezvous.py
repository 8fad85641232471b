"""Brings the three processes of the split layout together: they meet, wait for each other, and end together.

Every wait is reported and has a deadline. A process that ends the run tells the others why.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

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
from shoal.split.heartbeat import COMPONENTS, HeartbeatFile, Peers, RunEnd, read_end, write_run_end

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
