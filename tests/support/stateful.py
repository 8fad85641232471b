"""Rollouts of a stateful environment in which the policy makes given tool calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from shoal.core.runner import GroupRunner, RunnerSettings
from shoal.core.types import Prompt, Request, Rollout, SamplingParams
from shoal.envs.stateful import StatefulEnvironment
from shoal.models.chat import Chat
from shoal.rewards.pool import RewardPool
from support.models import TOKENIZER
from support.scripted import ScriptedEngine

CHAT = Chat(TOKENIZER)


def play(kind: Any, calls: Sequence[tuple[str, dict[str, Any]]], size: int = 1, **options: Any) -> list[Rollout]:
    """Rollouts in which the policy makes these calls, one per turn."""
    environment = StatefulEnvironment(kind, name="env")
    pool = environment.pool = RewardPool({"env": environment}, call_timeout_s=10, **options)
    said = [f"<tool_call>{json.dumps({'name': name, 'arguments': values})}</tool_call>" for name, values in calls]

    def script(request: Request) -> tuple[str, Any]:
        return [*said, "ok"][int(request.request_id.rpartition("/")[2])], "stop"

    pool.start()
    try:
        runner = GroupRunner(ScriptedEngine(script), {"env": environment}, pool, CHAT, RunnerSettings(4000))
        return asyncio.run(runner.run(Prompt("env", 0, []), size, SamplingParams(max_tokens=300))).rollouts
    finally:
        asyncio.run(pool.close())


def results(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.messages if message["role"] == "tool"]
