"""A real OpenEnv server, run by the Python with openenv: `openenv_server.py PORT actions|mcp`."""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from pydantic import Field


class CounterAction(Action):
    """Add to the counter."""

    amount: int = Field(description="how much to add")


class CounterObservation(Observation):
    text: str = ""


class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, target=0, **more):
        self.count, self.target = 0, target
        return CounterObservation(text=f"Reach {target}.")

    def step(self, action, timeout_s=None, **more):
        self.count += action.amount
        right = float(self.count == self.target)
        return CounterObservation(text=f"now {self.count}", reward=right, done=self.count >= self.target)

    @property
    def state(self):
        return State(step_count=self.count)


class Tools(MCPEnvironment):
    """The same counter as an MCP tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp, self.count = FastMCP("counter"), 0

        @mcp.tool
        def add(amount: int) -> str:
            """Add to the counter."""
            self.count += amount
            return f"now {self.count}"

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **more):
        self.count = 0
        return Observation()

    def step(self, action, timeout_s=None, **more):
        return self._scored(super().step(action, timeout_s, **more))

    async def step_async(self, action, timeout_s=None, **more):
        return self._scored(await super().step_async(action, timeout_s, **more))

    def _scored(self, observation):
        observation.reward, observation.done = float(self.count == 3), self.count >= 3
        return observation

    def _step_impl(self, action, timeout_s=None, **more):
        raise ValueError("only tools")

    @property
    def state(self):
        return State(step_count=self.count)


if __name__ == "__main__":
    kinds = {
        "actions": (Counter, CounterAction, CounterObservation),
        "mcp": (Tools, CallToolAction, CallToolObservation),
    }
    app = create_fastapi_app(*kinds[sys.argv[2]], max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
