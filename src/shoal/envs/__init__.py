"""Environments provide tasks and score answers.

`SingleTurn` and `MultiTurn` are the base classes of user environments. `registry.load_environment` loads an environment
by id. This package does not import torch. Rewards run in `shoal.rewards.pool`.
"""

from shoal.core.types import Message, Task
from shoal.envs.base import MultiTurn, SingleTurn, ask
from shoal.envs.stateful import BrokenEnvironment, EndEpisode
from shoal.rewards.outcome import answer_of, full_text_of, reasoning_of

__all__ = [
    "BrokenEnvironment",
    "EndEpisode",
    "Message",
    "MultiTurn",
    "SingleTurn",
    "Task",
    "answer_of",
    "ask",
    "full_text_of",
    "reasoning_of",
]
