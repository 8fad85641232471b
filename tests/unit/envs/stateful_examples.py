"""Stateful environments for tests: a correct one, and failures in each of its methods."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from shoal.envs import BrokenEnvironment, EndEpisode, ask

KINDS = (
    "plain", "reset raises", "reset hangs", "reset ends", "reset returns a number", "reset returns much",
    "reward raises", "reward hangs", "reward is a list", "close raises", "close hangs", "random",
)  # fmt: skip
LOG = Path()  # set before the workers fork: a line for each object that was created, and that was closed


def note(event: str, kind: str) -> None:
    with LOG.open("a") as log:
        log.write(f"{event} {kind} {os.getpid()} {time.monotonic()}\n")


def misbehave(kind: str, method: str) -> None:
    if kind == f"{method} raises":
        raise ValueError(f"no {method}")
    if kind == f"{method} hangs":
        time.sleep(60)
    if kind == f"{method} ends":
        os._exit(3)


class Counter:
    """Counts to three."""

    max_reward = 1.0
    max_turns = 4

    @staticmethod
    def tasks(split: str) -> list[Any]:
        return [ask("Count to 3.", kind=kind, unused=1) for kind in KINDS]

    def __init__(self) -> None:
        self.count = 0
        self.kind = "?"

    def reset(self, kind: str) -> Any:
        self.kind = kind
        note("made", kind)
        misbehave(kind, "reset")
        special = {"reset returns a number": 7, "reset returns much": "x" * 2**21, "random": f" {random.random()}"}
        return special.get(kind)

    def add(self, amount: int) -> int:
        """
        Add to the counter.

        Args:
            amount: How much to add.
        """
        self.count += amount
        return self.count

    async def add_later(self, amount: int) -> dict[str, int]:
        """
        Add to the counter, asynchronously.

        Args:
            amount: How much to add.
        """
        self.count += amount
        return {"count": self.count}

    def finish(self) -> str:
        """End the game."""
        raise EndEpisode(f"you reached {self.count}")

    def hang(self) -> None:
        """Never return."""
        time.sleep(60)

    def die(self) -> None:
        """End the process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def give_up(self) -> None:
        """Report that the environment is broken."""
        raise BrokenEnvironment("the board is gone")

    def _hidden(self) -> None:
        """Is no tool."""

    def get_reward(self) -> Any:
        misbehave(self.kind, "reward")
        return [1.0] if self.kind == "reward is a list" else float(self.count == 3)

    def close(self) -> None:
        misbehave(self.kind, "close")
        note("closed", self.kind)
