"""What crosses between orchestrator and trainer: groups to learn from, and what was learned.

Texts stay behind: training needs ids, log-probs and rewards. Numbers travel whole, so both sides compute with the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from shoal.errors import EngineError
from shoal.observability.metrics import Tally
from shoal.orchestrator.learn import Learned
from shoal.types import Rollout, RolloutGroup, Turn


def pack_groups(groups: Sequence[RolloutGroup]) -> bytes:
    return msgspec.msgpack.encode([_lean(group) for group in groups])


def unpack_groups(data: bytes) -> list[RolloutGroup]:
    try:
        return msgspec.msgpack.decode(data, type=list[RolloutGroup])
    except msgspec.MsgspecError as error:
        raise EngineError(f"the rollouts of a step cannot be read: {error}") from error


def _lean(group: RolloutGroup) -> RolloutGroup:
    prompt = replace(group.prompt, messages=[])
    return replace(group, prompt=prompt, rollouts=[_lean_rollout(rollout) for rollout in group.rollouts])


def _lean_rollout(rollout: Rollout) -> Rollout:
    prompt = replace(rollout.prompt, messages=[])
    return replace(rollout, prompt=prompt, messages=[], error=None, turns=[_lean_turn(t) for t in rollout.turns])


def _lean_turn(turn: Turn) -> Turn:
    return replace(turn, completion=replace(turn.completion, text=""))


def pack_learned(learned: Learned, tally: Tally, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    logprobs = {name: [str(values.dtype), values.tobytes()] for name, values in learned.policy_logprobs.items()}
    return {
        "trained_rollouts": learned.trained_rollouts,
        "trained_tokens": learned.trained_tokens,
        "sample_tokens": learned.sample_tokens,
        "skipped": learned.skipped,
        "moved": learned.moved,
        "policy_logprobs": logprobs,
        "tally": tally.state(),
        "rollouts": [[[r.reward, r.advantage] for r in group.rollouts] for group in groups],
    }


def unpack_learned(value: Mapping[str, Any], tally: Tally, groups: Sequence[RolloutGroup]) -> Learned:
    """What the step came to; rewards and advantages are noted in the groups, as if they had been learned from here."""
    tally.take(value["tally"])
    for group, rollouts in zip(groups, value["rollouts"], strict=True):
        for rollout, (reward, advantage) in zip(group.rollouts, rollouts, strict=True):
            rollout.reward, rollout.advantage = reward, advantage
    logprobs = {name: np.frombuffer(data, dtype=dtype) for name, (dtype, data) in value["policy_logprobs"].items()}
    return Learned(
        list(value["trained_rollouts"]),
        int(value["trained_tokens"]),
        int(value["sample_tokens"]),
        bool(value["skipped"]),
        bool(value["moved"]),
        logprobs,
    )
