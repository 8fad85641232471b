"""The stream of prompts: shuffled epochs over each environment, with environments mixed by weight, fixed or by step.

The order depends on the seed only, so a cursor of a few numbers is enough to resume. Prompts that are too long are
skipped and counted. The buffer may skip prompts that were too easy or too hard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.protocols import Environment
from shoal.core.types import Message, Prompt, RolloutGroup

Fits = Callable[[Sequence[Message]], bool]
WeightAt = Callable[[int], float]  # step → weight


@dataclass(frozen=True)
class Buffer:
    """Skips easy and hard prompts, judged by their last mean reward; the fractions are the shares that are kept.

    `zero_variance_fraction` counts once for each group in a row with equal rewards, hopeless or solved, at most four
    times: a prompt always has a chance to come back.
    """

    easy_threshold: float | None = None
    hard_threshold: float | None = None
    easy_fraction: float = 1.0
    hard_fraction: float = 1.0
    zero_variance_fraction: float = 1.0

    @property
    def active(self) -> bool:
        return self.easy_threshold is not None or self.hard_threshold is not None or self.zero_variance_fraction < 1

    def share(self, mean: float, zero_variance: int = 0) -> float:
        """`zero_variance`: groups in a row with equal rewards."""
        share = self.zero_variance_fraction ** min(zero_variance, 4)
        if self.easy_threshold is not None and mean > self.easy_threshold:
            return self.easy_fraction * share
        if self.hard_threshold is not None and mean < self.hard_threshold:
            return self.hard_fraction * share
        return share


@dataclass
class Cursor:
    """The state of a stream, as checkpoints store it."""

    positions: dict[str, int] = field(default_factory=dict)  # per environment, over all epochs
    drawn: dict[str, int] = field(default_factory=dict)  # prompts returned per environment, for the mixture
    due: dict[str, float] = field(default_factory=dict)  # sum of each environment's share, if shares change by step
    set_aside: int = 0  # prompts skipped because they are too long
    passed_over: int = 0  # prompts skipped by the buffer
    means: dict[str, float] = field(default_factory=dict)  # prompt_id → last mean reward, if the buffer is active
    zero_variance: dict[str, int] = field(default_factory=dict)  # prompt_id → groups in a row with equal rewards


class PromptStream:
    """An endless sequence of prompts."""

    def __init__(
        self,
        environments: Mapping[str, Environment],
        weights: Mapping[str, float | WeightAt],
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
                raise DataError(
                    f'environment {name} has no training prompts: its tasks("train") returned an empty list'
                )

    def __len__(self) -> int:
        return sum(len(self._environments[name].tasks("train")) for name in self._weights)

    def next(self, step: int = 1) -> Prompt:
        """The next prompt, for a group of this step."""
        name = self._next_environment(step)
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

    def position(self) -> dict[str, Any]:
        """Where the stream stands; `rewind` returns there. The history of the buffer is not part of it."""
        cursor = self.cursor
        place = {"positions": dict(cursor.positions), "drawn": dict(cursor.drawn), "due": dict(cursor.due)}
        return {**place, "set_aside": cursor.set_aside, "passed_over": cursor.passed_over}

    def rewind(self, position: Mapping[str, Any]) -> None:
        self.cursor = replace(self.cursor, **position)

    def _next_environment(self, step: int) -> str:
        """The environment furthest behind its share of all draws; ties go to the first."""
        weights = {name: weight(step) if callable(weight) else weight for name, weight in self._weights.items()}
        if any(callable(weight) for weight in self._weights.values()):
            due, total = self.cursor.due, sum(weights.values())
            due |= {name: due.get(name, 0.0) + weight / total for name, weight in weights.items()}
            weights = {name: due[name] for name, weight in weights.items() if weight > 0 and due[name] > 0}
        return min(weights, key=lambda name: (self.cursor.drawn[name] + 1) / weights[name])

    def _draw(self, name: str) -> Prompt:
        tasks = self._environments[name].tasks("train")
        position = self.cursor.positions[name]
        epoch, offset = divmod(position, len(tasks))
        index = int(self._order(name, epoch, len(tasks))[offset])
        prompt = Prompt(name, index, list(tasks[index].messages), "train", epoch)
        self.cursor.positions[name] = position + 1  # only now: a resumed run reads a task that raised an error again
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
        return self._hash(f"draw/{prompt.group_id}") / 2**64 < self._buffer.share(
            mean, self.cursor.zero_variance.get(prompt.prompt_id, 0)
        )

    def _hash(self, text: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self._seed}/{text}".encode(), digest_size=8).digest(), "little")

    @property
    def passed_over(self) -> int | None:
        """Prompts skipped by the buffer so far; None without one."""
        return self.cursor.passed_over if self._buffer.active else None

    def shares(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Metrics of the mixture, if there are several environments: the share of the groups that each has."""
        names = [group.prompt.env for group in groups]
        several = len(self._weights) > 1 and names
        return {f"batch/env/{name}": names.count(name) / len(names) for name in self._weights} if several else {}

    def observe(self, group: RolloutGroup) -> None:
        """Store what the buffer needs to know about a prompt."""
        rewards, prompt = group.rewards, group.prompt.prompt_id
        if self._buffer.active and rewards:
            self.cursor.means[prompt] = sum(rewards) / len(rewards)
            before = self.cursor.zero_variance.pop(prompt, 0)
            if len(rewards) > 1 and min(rewards) == max(rewards):
                self.cursor.zero_variance[prompt] = before + 1

    def state(self) -> dict[str, Any]:
        return asdict(self.cursor)

    def load_state(self, state: Mapping[str, Any]) -> None:
        if set(state["positions"]) != set(self._weights):
            found, wanted = sorted(state["positions"]), sorted(self._weights)
            raise DataError(f"the checkpoint's environments are {found}, not {wanted}")
        # Checkpoints of earlier versions have fewer fields.
        self.cursor = Cursor(**{name: state[name] for name in Cursor.__dataclass_fields__ if name in state})
