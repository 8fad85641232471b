"""Which prompt comes next: seeded epochs over each environment, environments mixed by weight, a cursor to resume from.

A position gives the same prompt in every process, so the cursor is a few numbers. Prompts that do not fit are passed
over and counted; easy and hard ones are drawn less often if the buffer says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.errors import DataError
from shoal.protocols import Environment
from shoal.types import Message, Prompt, RolloutGroup

Fits = Callable[[Sequence[Message]], bool]


@dataclass(frozen=True)
class Buffer:
    """Thresholds on a prompt's last mean reward, and how often a prompt beyond one is still drawn."""

    easy_threshold: float | None = None
    hard_threshold: float | None = None
    easy_fraction: float = 1.0
    hard_fraction: float = 1.0

    @property
    def active(self) -> bool:
        return self.easy_threshold is not None or self.hard_threshold is not None

    def share(self, mean: float) -> float:
        if self.easy_threshold is not None and mean > self.easy_threshold:
            return self.easy_fraction
        if self.hard_threshold is not None and mean < self.hard_threshold:
            return self.hard_fraction
        return 1.0


@dataclass
class Cursor:
    """Positions drawn so far in each environment, and prompts drawn from each (for the mixture)."""

    positions: dict[str, int] = field(default_factory=dict)
    drawn: dict[str, int] = field(default_factory=dict)
    set_aside: int = 0
    passed_over: int = 0
    means: dict[str, float] = field(default_factory=dict)  # prompt_id → last mean reward, if the buffer is active


class PromptStream:
    def __init__(
        self,
        environments: Mapping[str, Environment],
        weights: Mapping[str, float],
        seed: int,
        fits: Fits,
        buffer: Buffer | None = None,
    ) -> None:
        self._environments = environments
        self._weights = dict(weights)
        self._seed = seed
        self._fits = fits
        self._buffer = buffer or Buffer()
        self._orders: dict[tuple[str, int], np.ndarray] = {}
        self.cursor = Cursor(dict.fromkeys(weights, 0), dict.fromkeys(weights, 0))
        for name in weights:
            if not len(environments[name].tasks("train")):
                raise DataError(f"environment {name} has no training prompts")

    def __len__(self) -> int:
        return sum(len(self._environments[name].tasks("train")) for name in self._weights)

    def next(self) -> Prompt:
        name = self._next_environment()
        size = len(self._environments[name].tasks("train"))
        passed, unfit = 0, set()
        while True:
            prompt = self._draw(name)
            if not self._fits(prompt.messages):
                self.cursor.set_aside += 1
                unfit.add(prompt.index)
                if len(unfit) == size:
                    raise DataError(f"no prompt of {name} fits: prompt plus sampling.max_tokens exceeds orch.seq_len")
            elif passed >= size or self._wanted(prompt):
                break
            else:
                self.cursor.passed_over += 1
                passed += 1
        self.cursor.drawn[name] += 1
        return prompt

    def _next_environment(self) -> str:
        """The environment furthest behind its share; ties go to the first."""
        return min(self._weights, key=lambda name: (self.cursor.drawn[name] + 1) / self._weights[name])

    def _draw(self, name: str) -> Prompt:
        tasks = self._environments[name].tasks("train")
        position = self.cursor.positions[name]
        epoch, offset = divmod(position, len(tasks))
        index = int(self._order(name, epoch, len(tasks))[offset])
        prompt = Prompt(name, index, list(tasks[index].messages), "train", epoch)
        self.cursor.positions[name] = position + 1  # one that fails is met again by a run that continues
        return prompt

    def _order(self, name: str, epoch: int, size: int) -> np.ndarray:
        if (name, epoch) not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key[0] != name}  # one epoch at a time
            generator = np.random.Generator(np.random.Philox(self._hash(f"order/{name}/{epoch}")))
            self._orders[name, epoch] = generator.permutation(size)
        return self._orders[name, epoch]

    def _wanted(self, prompt: Prompt) -> bool:
        mean = self.cursor.means.get(prompt.prompt_id)
        if mean is None:
            return True
        return self._hash(f"draw/{prompt.group_id}") / 2**64 < self._buffer.share(mean)

    def _hash(self, text: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self._seed}/{text}".encode(), digest_size=8).digest(), "little")

    def observe(self, group: RolloutGroup) -> None:
        """Remember how a prompt went, for the buffer."""
        if self._buffer.active and group.rewards:
            self.cursor.means[group.prompt.prompt_id] = sum(group.rewards) / len(group.rewards)

    def state(self) -> dict[str, Any]:
        cursor = self.cursor
        return {
            "positions": dict(cursor.positions),
            "drawn": dict(cursor.drawn),
            "set_aside": cursor.set_aside,
            "passed_over": cursor.passed_over,
            "means": dict(cursor.means),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        if set(state["positions"]) != set(self._weights):
            raise DataError(
                f"the checkpoint's environments are {sorted(state['positions'])}, not {sorted(self._weights)}"
            )
        self.cursor = Cursor(**{name: state[name] for name in Cursor.__dataclass_fields__})
