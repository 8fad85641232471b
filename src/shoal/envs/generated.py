"""Tasks drawn from a seed, one at a time, with train and eval kept apart by content.

A task's key says what it asks ("3+5" and "5+3" share one). A fixed share of all keys is held out for eval whatever the
seed, so that two runs with different seeds never train on each other's eval tasks either.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from shoal.envs.base import TaskList
from shoal.errors import ConfigError
from shoal.types import Task

HELD_OUT_ONE_IN = 5
MAX_DRAWS = 10_000

Draw = Callable[[random.Random], tuple[str, Task]]


def held_out(key: str) -> bool:
    """True if tasks with this key belong to eval."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"shoal-eval")
    return int.from_bytes(digest.digest(), "big") % HELD_OUT_ONE_IN == 0


def generated_tasks(draw: Draw, *, split: str, size: int, seed: int) -> TaskList:
    """`size` tasks of a split. `draw` returns (key, task) from a generator seeded by (seed, split, index)."""
    if split not in ("train", "eval"):
        raise ConfigError(f"unknown split {split!r}; generated environments have train and eval")

    def make(index: int) -> Task:
        rng = random.Random(f"shoal/{seed}/{split}/{index}")
        for _ in range(MAX_DRAWS):
            key, task = draw(rng)
            if held_out(key) == (split == "eval"):
                return task
        raise ConfigError(f"too few different tasks for a separate {split} split; widen the environment's args")

    return TaskList(size, make)


def check_sizes(num_train: int, num_eval: int) -> None:
    for name, value in (("num_train", num_train), ("num_eval", num_eval)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
