"""Tool use in OpenAI's format: schemas from Python functions, and the environment `ToolUse`.

`models.tool_calls` reads the calls from the answers. They are in `tool_calls` of the answer's message.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from shoal.core.protocols import Episode
from shoal.core.types import Message, Task
from shoal.envs.base import Dialogue, MultiTurn
from shoal.models.tool_calls import ToolCall, parse_tool_calls

__all__ = ["ToolCall", "ToolDialogue", "ToolUse", "calls_of", "parse_tool_calls", "tool_schema", "tools_called"]

TOOL_LIMIT_S = 10.0
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def calls_of(message: Message) -> list[tuple[str, ToolCall]]:
    """The ids and calls of an answer."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        found.append((str(call["id"]), ToolCall(function["name"], json.loads(function["arguments"]))))
    return found


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function, from its signature and the first line of its docstring."""
    hints = get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints.get(name, str)
        properties[name] = {"type": _JSON_TYPES.get(getattr(kind, "__origin__", kind), "string")}
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    lines = (inspect.getdoc(function) or "").splitlines()
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": lines[0] if lines else "",
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


class ToolDialogue(Dialogue):
    """A dialogue whose prompts list the tools."""

    def __init__(self, environment: ToolUse, task: Task) -> None:
        super().__init__(environment, task)
        self.tools = [tool_schema(function) for function in environment.tools]


class ToolUse(MultiTurn):
    """The model may call `tools`, functions with type hints. An answer without a call ends the conversation."""

    tools: Sequence[Callable[..., Any]] = ()

    def start(self, task: Task) -> Episode:
        return ToolDialogue(self, task)

    async def reply(self, task: Task, messages: Sequence[Message]) -> list[Message] | None:
        return [
            {"role": "tool", "tool_call_id": call_id, "name": call.name, "content": await self.run_tool(call)}
            for call_id, call in calls_of(messages[-1])
        ] or None

    async def run_tool(self, call: ToolCall) -> str:
        """Run a tool and return its result, or an error message, as text for the model."""
        function = {tool.__name__: tool for tool in self.tools}.get(call.name)
        if function is None:
            return f"error: there is no tool {call.name!r}"
        try:
            async with asyncio.timeout(TOOL_LIMIT_S):
                if inspect.iscoroutinefunction(function):
                    return as_text(await function(**call.arguments))
                return as_text(await asyncio.to_thread(function, **call.arguments))
        except TimeoutError:
            return f"error: {call.name} took longer than {TOOL_LIMIT_S:g} s"
        except Exception as error:  # user code, called with arguments written by the model
            return f"error: {type(error).__name__}: {error}"


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def tools_called(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Return every tool call of a conversation, in order. For use in rewards."""
    return [call["function"] for message in messages for call in message.get("tool_calls") or ()]
