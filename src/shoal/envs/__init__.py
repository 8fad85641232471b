"""Environments: where tasks come from and how answers are judged.

`SingleTurn` and `MultiTurn` are the base classes for an environment of one's own, `registry.load_environment` turns an
id into one. Nothing here imports torch, and nothing here starts a process: rewards run in `shoal.rewards.pool`.
"""

from shoal.envs.base import MultiTurn, SingleTurn, answer_of, ask
from shoal.types import Message, Task

__all__ = ["Message", "MultiTurn", "SingleTurn", "Task", "answer_of", "ask"]
