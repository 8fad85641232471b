"""Answers of every family in its real format: the same two calls, malformed calls, and reasoning."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.models.response_format import ParsedResponse, ResponseFormat
from shoal.models.tool_calls import SYNTAXES, ToolCall, parse_tool_calls

FIRST = {"city": 'Zürich "x"', "days": 3, "opts": {"a": [1, {"b": None}], "t": True}}
SECOND = {"city": "東京\n<b>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}},
            },
        },
    }
]
JSON_1, JSON_2 = (json.dumps(arguments, ensure_ascii=False) for arguments in (FIRST, SECOND))
OPTS = '{"a": [1, {"b": null}], "t": true}'


@dataclass(frozen=True)
class Family:
    """`marks`: a part of the family's chat template. `first` and `second`: its calls, `joined` as two of them."""

    syntax: str
    marks: str
    first: str
    second: str
    joined: str = "{first}{second}"


def xml(parameters: dict[str, str], name: str = "weather", tag: str = "tool_call", line: str = "\n") -> str:
    body = "".join(f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in parameters.items())
    return f"<{tag}>\n<function={name}>\n{body}</function>\n</{tag}>"


def invoke(parameters: dict[str, str]) -> str:
    body = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters.items())
    return f'<invoke name="weather">\n{body}</invoke>\n'


def dsml(parameters: dict[str, tuple[str, str]]) -> str:
    body = "".join(
        f'<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>\n'
        for key, (text, value) in parameters.items()
    )
    return f'<｜DSML｜invoke name="weather">\n{body}</｜DSML｜invoke>\n'


def glm(parameters: dict[str, str], line: str) -> str:
    pairs = [f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in parameters.items()]
    return f"<tool_call>weather{line}{''.join(pairs)}</tool_call>"


RAW_1, RAW_2 = {"city": 'Zürich "x"', "days": "3", "opts": OPTS}, {"city": "東京\n<b>"}
CITY_2 = "東京\n<b>"
FAMILIES = {
    "hermes": Family(
        "hermes",
        "<tool_call>",
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON_1}}}\n</tool_call>\n',
        f'<tool_call>{{"name": "weather", "arguments": {json.dumps(JSON_2)}}}</tool_call>',
    ),
    "qwen3-coder": Family("xml", "<tool_call>\n<function=example>", xml(RAW_1) + "\n", xml(RAW_2)),
    "seed-oss": Family(
        "xml", "<function=", xml(RAW_1, tag="seed:tool_call", line=""), xml(RAW_2, tag="seed:tool_call", line="")
    ),
    "llama": Family(
        "llama",
        '"parameters": dictionary of argument name and its value',
        f'{{"name": "weather", "parameters": {JSON_1}}}',
        f'{{"type": "function", "name": "weather", "parameters": {JSON_2}}}',
        "<|python_tag|>{first}; {second}<|eom_id|>",
    ),
    "llama-pythonic": Family(
        "llama",
        "<|python_tag|>",
        "[weather(city='Zürich \"x\"', days=3, opts={'a': [1, {'b': None}], 't': True})]",
        "[weather(city='東京\\n<b>')]",
        "[weather(city='Zürich \"x\"', days=3, opts={{'a': [1, {{'b': None}}], 't': True}}), "
        "weather(city='東京\\n<b>')]",
    ),
    "mistral-nemo": Family(
        "mistral",
        "[TOOL_CALLS]",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON_1}, "id": "abcdefghi"}}]</s>',
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON_2}}}]</s>',
        f'[TOOL_CALLS][{{{{"name": "weather", "arguments": {JSON_1.replace("{", "{{").replace("}", "}}")}}}}}, '
        f'{{{{"name": "weather", "arguments": {JSON_2.replace("{", "{{").replace("}", "}}")}}}}}]</s>',
    ),
    "mistral-small": Family(
        "mistral",
        "[TOOL_CALLS]",
        f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{JSON_1}",
        f"[TOOL_CALLS]weather[ARGS]{JSON_2}</s>",
    ),
    "glm-4.6": Family("glm", "<arg_key>", glm(RAW_1, "\n") + "\n", glm(RAW_2, "\n")),
    "glm-4.7": Family("glm", "<arg_key>", glm(RAW_1, ""), glm(RAW_2, "")),
    "kimi": Family(
        "kimi",
        "<|tool_call_argument_begin|>",
        f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON_1}<|tool_call_end|>",
        f"<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{JSON_2}<|tool_call_end|>",
        "<|tool_calls_section_begin|>{first}{second}<|tool_calls_section_end|>",
    ),
    "deepseek-v3": Family(
        "deepseek",
        "<｜tool▁call▁begin｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON_1}\n```<｜tool▁call▁end｜>\n",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON_2}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>{first}{second}<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": Family(
        "deepseek",
        "<｜tool▁call▁begin｜>",
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON_1}<｜tool▁call▁end｜>",
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON_2}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>{first}{second}<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.2": Family(
        "deepseek-dsml",
        "<｜DSML｜function_calls>",
        dsml({"city": ("true", 'Zürich "x"'), "days": ("false", "3"), "opts": ("false", OPTS)}),
        dsml({"city": ("true", CITY_2)}),
        "<｜DSML｜function_calls>\n{first}{second}</｜DSML｜function_calls>",
    ),
    "gemma-4": Family(
        "gemma",
        "<|tool_call>call:",
        '<|tool_call>call:weather{city:<|"|>Zürich "x"<|"|>,days:3,opts:{a:[1,{b:null}],t:true}}<tool_call|>',
        f'<|tool_call>call:weather{{city:<|"|>{CITY_2}<|"|>}}<tool_call|>',
    ),
    "lfm2": Family(
        "lfm2",
        "<|tool_list_start|>",
        f"<|tool_call_start|>[weather(city='Zürich \"x\"', days=3, opts={OPTS})]<|tool_call_end|>",
        '<|tool_call_start|>[weather(city="東京\\n<b>")]<|tool_call_end|>',
    ),
    "minimax-m2": Family(
        "minimax",
        "<minimax:tool_call>",
        invoke(RAW_1),
        invoke(RAW_2),
        "<minimax:tool_call>\n{first}{second}</minimax:tool_call>",
    ),
    "minimax-m1": Family(
        "minimax-json",
        "<tool_calls>",
        f'<tool_calls>\n{{"name": "weather", "arguments": {JSON_1}}}\n</tool_calls>',
        f'<tool_calls>\n{{"name": "weather", "arguments": {JSON_2}}}\n</tool_calls>',
    ),
    "granite-3": Family(
        "json-list",
        "<|tool_call|>",
        f'<|tool_call|>[{{"name": "weather", "arguments": {JSON_1}}}]',
        f'<|tool_call|>[{{"name": "weather", "arguments": {JSON_2}}}]',
    ),
    "gpt-oss": Family(
        "hermes",
        "<|start|>assistant<|channel|>final<|message|>",
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON_1}<|call|>",
        f"<|channel|>commentary to=functions.weather<|message|>{JSON_2}<|call|>",
        "{first}<|start|>assistant{second}",
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_calls_of_every_family(family: Family) -> None:
    fmt = ResponseFormat.of(family.marks)
    assert fmt.syntax.name == family.syntax
    for text, arguments in ((family.first, FIRST), (family.second, SECOND)):
        parsed = fmt.parse(text, tools=TOOLS)
        assert [(call.name, call.arguments) for call in parsed.calls] == [("weather", arguments)]
    both = family.joined.format(first=family.first, second=family.second)
    parsed = fmt.parse(both, tools=TOOLS)
    assert [call.arguments for call in parsed.calls] == [FIRST, SECOND]
    assert parsed.content.replace("</s>", "") == "" and parsed.marked


def test_without_tools_there_are_no_calls(family: Family) -> None:
    parsed = ResponseFormat.of(family.marks).parse(family.first)
    assert parsed.calls == [] and parsed.content


def test_truncated_call_is_not_a_call(family: Family) -> None:
    """Every prefix of a call is read without an error, and none of them is another call."""
    fmt = ResponseFormat.of(family.marks)
    for size in range(len(family.first)):
        for call in fmt.parse(family.first[:size], tools=TOOLS).calls:
            assert (call.name, call.arguments) == ("weather", FIRST)


def test_text_before_a_call_stays(family: Family) -> None:
    if family.syntax == "llama" or "message" in family.marks:
        return  # the complete answer is the call
    parsed = ResponseFormat.of(family.marks).parse("I look it up.\n" + family.first, tools=TOOLS)
    assert parsed.content.replace("</s>", "") == "I look it up." and len(parsed.calls) == 1


def test_malformed_call_keeps_the_other_calls() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for broken in ("{", '{"name": "f", "arguments": 3}', '{"name": "", "arguments": {}}', '{"arguments": {}}', "[NaN]"):
        text = f"<tool_call>{broken}</tool_call>"
        assert parse_tool_calls(text + good) == (text, [ToolCall("f", {})])


def test_special_ids_of_the_model_are_kept() -> None:
    kimi = ResponseFormat.of(FAMILIES["kimi"].marks).parse(FAMILIES["kimi"].second, tools=TOOLS)
    mistral = ResponseFormat.of("[TOOL_CALLS]").parse(FAMILIES["mistral-small"].first, tools=TOOLS)
    assert [call.id for call in (*kimi.calls, *mistral.calls)] == ["functions.weather:1", "abcdefghi"]


@pytest.mark.parametrize(
    ("declared", "written", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"type": "integer"}, "three", "three"),
        ({}, "[1]", [1]),
        ({}, "NaN", "NaN"),
        ({}, "plain text", "plain text"),
    ],
)
def test_untyped_parameters_follow_the_schema(declared: dict[str, object], written: str, value: object) -> None:
    tools = [{"function": {"name": "weather", "parameters": {"properties": {"x": declared}}}}]
    (call,) = ResponseFormat.of("<function=").parse(xml({"x": written}), tools=tools).calls
    assert call.arguments == {"x": value}


@pytest.mark.parametrize(
    ("template", "thinking", "text", "reasoning", "content"),
    [
        ("…</think>…", False, "<think>\nsum\n</think>\n\n5", "sum", "5"),
        ("…</think>…", True, "sum\n</think>\n\n5", "sum", "5"),
        ("…</think>…", True, "<think>sum</think>5", "sum", "5"),
        ("…</think>…", False, "sum</think>5", "sum", "5"),
        ("…</think>…", False, "<think>a</think>x<think>b</think>y", "a\nb", "xy"),
        ("…</think>…", True, "cut off", "cut off", ""),
        ("…</think>…", False, " plain \n", "", " plain \n"),
        ("no reasoning", False, "<think>sum</think> 5", "", "<think>sum</think> 5"),
        ("[/THINK]", False, "[THINK]sum[/THINK]5", "sum", "5"),
        ("</seed:think>", False, "<seed:think>sum</seed:think>5", "sum", "5"),
        ("<|channel>thought\n<channel|>", False, "<|channel>thought\nsum\n<channel|>5", "sum", "5"),
    ],
)
def test_reasoning_is_split_off(template: str, thinking: bool, text: str, reasoning: str, content: str) -> None:
    parsed = ResponseFormat.of(template).parse(text, thinking=thinking)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_harmony_channels() -> None:
    fmt = ResponseFormat.of(FAMILIES["gpt-oss"].marks)
    said = "<|channel|>analysis<|message|>two and two<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    assert fmt.parse(said) == ParsedResponse("4", "two and two", marked=True)
    called = "<|channel|>analysis<|message|>ask<|end|><|start|>assistant" + FAMILIES["gpt-oss"].first
    parsed = fmt.parse("<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant" + called, tools=TOOLS)
    assert (parsed.reasoning, parsed.content, [call.arguments for call in parsed.calls]) == (
        "ask",
        "One moment.",
        [FIRST],
    )
    assert fmt.parse("<|channel|>analysis<|message|>cut").reasoning == "cut"
    assert fmt.parse("no channels") == ParsedResponse("no channels")


PIECES = [piece for family in FAMILIES.values() for piece in (family.first[:12], family.first[-9:], "{", '"', "[")]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=8).map("".join), st.booleans())
def test_any_text_is_read_without_an_error(text: str, thinking: bool) -> None:
    for family in FAMILIES.values():
        ResponseFormat.of(family.marks + "</think>").parse(text, thinking=thinking, tools=TOOLS)


def test_long_and_nested_answers_are_parsed_fast() -> None:
    started = time.monotonic()
    for syntax in SYNTAXES:
        for text in ("[" * 50_000, syntax.marks[0] * 20_000, "<tool_call>" + "{" * 20_000, "-" * 20_000 + "1"):
            parse_tool_calls(text, syntax, TOOLS)
    assert time.monotonic() - started < 20, "a quadratic search takes minutes"
