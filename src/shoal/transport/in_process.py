"""Weights on their way to an engine in the same process: nothing moves, the engine already sees the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class InProcessWeights:
    async def publish(self, version: int) -> Mapping[str, Any]:
        return {"version": version}
