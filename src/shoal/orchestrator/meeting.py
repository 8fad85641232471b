"""The processes of the split layout meet, wait for each other with a deadline, and end together.

Every wait says for whom and since when. Whoever gives up tells the others why, so nobody is left behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shoal import __version__
from shoal.config.problems import Origins
from shoal.config.schema import InferConfig, OrchConfig, RunConfig, TrainConfig
from shoal.config.split import check_split, merge_sections, section_data
from shoal.errors import (
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
from shoal.transport.presence import COMPONENTS, End, Peers, Presence, read_end, tell_end

LOOK_S = 0.1
ENDED_BY = "ended the run: "
FIRST_WORD_S = 3.0  # of silence, before a wait is told
Tell = Callable[[str], None]


class Ended(Exception):
    """Another process ended the run, in order."""


@dataclass
class Waits:
    """Tells once a wait has lasted a moment, then at ever longer intervals, and when it is over."""

    tell: Tell
    lasted_s: Callable[[], float] = lambda: 0.0  # how long a wait had lasted when it was first heard of
    whom: str = "grpo-infer"  # is waited for where others put the wait into words
    _next: dict[str, float] = field(default_factory=dict)
    _since: float | None = None  # of a wait that is told in others' words

    def note(self, component: str, silent_s: float, where: str = "") -> None:
        if silent_s >= self._next.get(component, FIRST_WORD_S):
            self._next[component] = 2 * silent_s
            self.tell(f"waiting for grpo-{component} since {silent_s:.0f} s{where}")

    def over(self, component: str) -> None:
        if self._next.pop(component, None) is not None:
            self.tell(f"grpo-{component} is there")

    def heard(self, what: str | None) -> None:
        """A wait that somebody else keeps, in words, again and again; None when it is over."""
        if what is None:
            if self._next.pop("", None) is not None:
                self.tell(f"{self.whom} is there")
            self._since = None
            return
        now = time.monotonic()
        self._since = now - self.lasted_s() if self._since is None else self._since
        if now - self._since >= self._next.get("", FIRST_WORD_S):
            self._next[""] = 2 * (now - self._since)
            self.tell(what)


class Meeting:
    """This process among the three. `tell` gets what a person should know about waits."""

    def __init__(self, component: str, section: InferConfig | OrchConfig | TrainConfig, tell: Tell) -> None:
        self.presence = Presence(section.output_dir, component, section_data(section))
        self.deadline_s = section.deadline_s
        self._section = section
        self.peers = Peers(self.presence.folder, component)
        self.tell = tell
        self._waits = Waits(lambda text: self.tell(text))
        self._looked = 0.0

    @property
    def name(self) -> str:
        return f"grpo-{self.presence.component}"

    def look(self) -> None:
        """Read the others' files, now and then; raises Ended or an error if one of them ended the run."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        self.peers.look()
        end = read_end(self.presence.folder, self.presence.incarnation)
        if end is not None:
            raise_end(end)

    def others_expected(self) -> bool:
        """Whether files of the others are here, of living ones or not."""
        self.look()
        return bool(self.peers.incarnations())

    async def meet(self, *, patient: bool = False) -> None:
        """Until all three are there. A patient process waits for as long as it takes."""
        started = time.monotonic()
        while missing := self._missing():
            waited = time.monotonic() - started
            for component in missing if not patient or len(missing) == 1 else ():
                self._waits.note(component, waited, f", to come to {self.presence.folder.parent}")
            if not patient and waited > self.deadline_s:
                self._too_late(missing, waited)
            await asyncio.sleep(LOOK_S)

    def _missing(self) -> list[str]:
        self.look()
        missing = [name for name in COMPONENTS if name != self.presence.component and self.peers.get(name) is None]
        for name in set(COMPONENTS) - set(missing):
            if self.peers.is_alive(name):  # one that came once may be gone again
                self._waits.over(name)
        return missing

    def watch(self, component: str, what: str, since: float) -> None:
        """Called while waiting for `component` to do `what`: tells of its silence, and raises past the deadline."""
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

    def _too_late(self, missing: list[str], waited: float) -> None:
        who = " and ".join(f"grpo-{name}" for name in missing)
        raise DeadlineError(
            f"{self.name} waited {waited:.0f} s for {who}, which did not come to {self.presence.folder.parent}; start "
            f"all three with the same output_dir, or raise {self.presence.component}.deadline_s"
        )

    def agree(self, origins: Origins | None = None) -> RunConfig:
        """The configuration of the run from all three sections; what does not go together ends all three alike."""
        others = {name: peer.section for name in COMPONENTS if (peer := self.peers.get(name)) is not None}
        self._check_versions()
        config = merge_sections(self.presence.component, self._section, others)
        check_split(config).raise_errors(self._origins(origins or Origins(default="handshake")))
        return config

    def _check_versions(self) -> None:
        """Files and calls of another release may mean something else."""
        for name in COMPONENTS:
            peer = self.peers.get(name)
            theirs = peer.about.get("shoal", __version__) if peer is not None else __version__
            if theirs != __version__:
                raise ConfigError(
                    f"{self.name} is Shoal {__version__}, grpo-{name} is Shoal {theirs}; install one version "
                    "everywhere, and start all three again"
                )

    def _origins(self, origins: Origins) -> Origins:
        """What this process did not read itself was given to the process whose section it is."""
        read = {path[:1] for path in origins.places} | {(self.presence.component,)}
        others = {(name,): f"grpo-{name}" for name in COMPONENTS if (name,) not in read}
        return replace(origins, places={**origins.places, **others})

    def incarnation_of(self, component: str) -> str | None:
        peer = self.peers.get(component)
        return peer.incarnation if peer is not None else None

    def end_all(self, reason: str, code: int) -> None:
        """Tell whoever is in this run that it is over."""
        self.peers.look()
        tell_end(self.presence.folder, End(reason, code, self.name, self.peers.incarnations()))

    def close(self, error: BaseException | None = None) -> None:
        """A process that found a contradiction leaves its file, so that the others find it too."""
        self.presence.close(leave_word=isinstance(error, ConfigError))


def raise_end(end: End) -> None:
    # What was told on is told as it was: the first to know is the one to look at.
    said = end.reason if ENDED_BY in end.reason else f"{end.told_by} {ENDED_BY}{end.reason}"
    if end.code == EXIT_DONE:
        raise Ended(said)
    if end.code == EXIT_USAGE:
        raise ConfigError(said)
    if end.code == EXIT_STORAGE:
        raise StorageError(said)
    if end.code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        raise Interrupted(said, end.code)
    error = StoppedByPolicy(said)
    error.exit_code = end.code if end.code != EXIT_BUG else EXIT_STOPPED
    raise error


def ending_of(error: BaseException | None) -> tuple[str, int]:
    """(reason, exit code) that the others are told."""
    if error is None or isinstance(error, Ended):
        return "finished", EXIT_DONE
    if isinstance(error, ShoalError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return "interrupted", EXIT_INTERRUPTED
    return f"{type(error).__name__}: {error}", EXIT_BUG
