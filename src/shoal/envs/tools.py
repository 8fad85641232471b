"""Tool use in OpenAI's format: schemas from Python functions, a parser of tool calls, the environment `ToolUse`.

`parse_tool_calls` accepts `<tool_call>{…}</tool_call>` or one bare JSON object. Calls that are not valid JSON stay in
the text.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from shoal.core.protocols import Episode
from shoal.core.types import Message, Task
from shoal.envs.base import Dialogue, MultiTurn
from shoal.rewards.outcome import answer_of

TOOL_LIMIT_S = 10.0
_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]

    def as_openai(self, call_id: str) -> dict[str, Any]:
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": call_id, "type": "function", "function": function}


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text without tool calls, and the calls."""
    found = [(match.span(), _as_call(match.group(1))) for match in _TAGGED.finditer(text)]
    if found and all(call is not None for _, call in found):
        rest = text
        for (start, end), _ in reversed(found):
            rest = rest[:start] + rest[end:]
        return rest.strip(), [call for _, call in found if call is not None]
    whole = _as_call(text.strip()) if not found else None
    return ("", [whole]) if whole is not None else (text, [])


def _as_call(text: str) -> ToolCall | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters"))
    return ToolCall(data["name"], arguments) if isinstance(arguments, dict) else None


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
        _, calls = parse_tool_calls(answer_of(messages))
        if not calls:
            return None
        results = []
        for number, call in enumerate(calls):
            call_id = f"call_{len(messages)}_{number}"
            # For the rollout record only: the chat template receives the text that the model wrote.
            messages[-1].setdefault("tool_calls", []).append(call.as_openai(call_id))
            content = await self.run_tool(call)
            results.append({"role": "tool", "tool_call_id": call_id, "name": call.name, "content": content})
        return results

    async def run_tool(self, call: ToolCall) -> str:
        """Run a tool and return its result, or an error message, as text for the model."""
        function = {tool.__name__: tool for tool in self.tools}.get(call.name)
        if function is None:
            return f"error: there is no tool {call.name!r}"
        try:
            async with asyncio.timeout(TOOL_LIMIT_S):
                if inspect.iscoroutinefunction(function):
                    return _as_text(await function(**call.arguments))
                return _as_text(await asyncio.to_thread(function, **call.arguments))
        except TimeoutError:
            return f"error: {call.name} took longer than {TOOL_LIMIT_S:g} s"
        except Exception as error:  # user code, called with arguments written by the model
            return f"error: {type(error).__name__}: {error}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def tools_called(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Return every tool call of a conversation, in order. For use in rewards."""
    return [call["function"] for message in messages for call in message.get("tool_calls") or ()]
