"""Tools: schemas of functions, formats of calls, and a conversation with both, computed manually."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from shoal.core.runner import GroupRunner, RunnerSettings
from shoal.core.types import Prompt, Request, Rollout, RolloutGroup, SamplingParams
from shoal.envs import ask
from shoal.envs.tools import ToolCall, ToolUse, calls_of, parse_tool_calls, tool_schema, tools_called
from shoal.models.chat import Chat
from shoal.rewards.pool import RewardPool
from shoal.runs.rollout_log import rollout_lines
from support.models import TOKENIZER
from support.scripted import ScriptedEngine

TEMPLATE = (
    "{%- if tools -%}{{ 'tools:' + (tools | tojson) + '\n' }}{%- endif -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{%- if m.get('tool_calls') -%}{{ 'AGAIN' }}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Anything below the first line is for people.
    """
    return a + b


class Sums(ToolUse):
    tools = (add,)

    def tasks(self, split: str):
        return [ask("2 + 3?", answer="5")]

    def reward(self, task, messages):
        return {"right": float("5" in messages[-1]["content"]), "calls": float(len(tools_called(messages)))}


def test_schema_of_a_function():
    assert tool_schema(add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("plain", "plain", []),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "", [ToolCall("f", {"x": 1})]),
        ('so\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> and', "so\n and", [ToolCall("f", {})]),
        ('{"name": "f", "parameters": {"x": 1}}', "", [ToolCall("f", {"x": 1})]),
        ('<tool_call>{"name": "f"</tool_call>', '<tool_call>{"name": "f"</tool_call>', []),
        (
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', '<tool_call>{"name": "f", "arguments": {}}', []),
    ],
)
def test_tool_call_formats(text: str, rest: str, calls: list[ToolCall]):
    assert parse_tool_calls(text) == (rest, calls)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (ToolCall("add", {"a": 2, "b": 3}), "5"),
        (ToolCall("add", {"a": 2}), "3"),
        (ToolCall("subtract", {}), "error: there is no tool 'subtract'"),
        (ToolCall("add", {"c": 2}), "error: TypeError: add() got an unexpected keyword argument 'c'"),
    ],
)
def test_results_and_failures_are_text_for_the_model(call: ToolCall, result: str):
    assert asyncio.run(Sums().run_tool(call)) == result


def play(answers: list[str], template: str) -> Rollout:
    """A rollout of Sums with these answers of the model."""

    def script(request: Request) -> Any:
        return answers[len(engine.requests) - 1], "stop"

    engine = ScriptedEngine(script)
    environments = {"sums": Sums()}
    pool = RewardPool(environments, workers=1)
    pool.start()
    tokenizer: Any = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    runner = GroupRunner(engine, environments, pool, Chat(tokenizer), RunnerSettings(2000))

    async def run() -> Rollout:
        try:
            return (
                await runner.run(
                    Prompt("sums", 0, Sums().tasks("train")[0].messages), 1, SamplingParams(max_tokens=100)
                )
            ).rollouts[0]
        finally:
            await pool.close()

    return asyncio.run(run())


def test_reasoning_is_no_part_of_the_answer_that_a_reward_sees():
    """A number in the reasoning earns nothing, and a call in the reasoning is not run."""
    said = '<think>5? <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call></think>I do not know.'
    rollout = play([said], TEMPLATE + "{# </think> #}")
    assert rollout.parts == {"right": 0.0, "calls": 0.0}
    answer = rollout.messages[-1]
    assert answer["content"] == "I do not know." and answer["reasoning_content"].startswith("5?")
    (line,) = rollout_lines([RolloutGroup(rollout.prompt, [rollout])], {}, str)
    assert line["completion"] == said and line["messages"][0]["reasoning"] == answer["reasoning_content"]
    assert line["turn_tokens"] == [len(rollout.turns[0].completion.token_ids)], "the report shows the parts as tokens"
    unsplit = play([said, "it is 2"], TEMPLATE)
    assert unsplit.parts["calls"] == 1.0, "the template does not know reasoning"


def test_conversation_with_a_tool_is_one_sequence():
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    rollout = play([call, "it is 5"], TEMPLATE)
    assert (rollout.raw_reward, rollout.parts) == (2.0, {"right": 1.0, "calls": 1.0}), rollout.error
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[2]["content"] == "5" and rollout.messages[1]["text"] == call
    assert calls_of(rollout.messages[1]) == [(rollout.messages[2]["tool_call_id"], ToolCall("add", {"a": 2, "b": 3}))]
    first, second = (str(TOKENIZER.decode(turn.prompt_ids)) for turn in rollout.turns)
    assert first.startswith("tools:[") and "AGAIN" not in second and second.count(call) == 1
    so_far = rollout.turns[0].prompt_ids + rollout.turns[0].completion.token_ids
    assert rollout.turns[1].prompt_ids[: len(so_far)] == so_far
