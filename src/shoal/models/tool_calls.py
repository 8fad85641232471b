"""Tool calls as model families write them: how each syntax is recognised in a chat template, and how it is read.

`SYNTAXES` is the registry. To add a family, write a reader and an entry. A call that cannot be read stays in the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shoal.core.types import Tools

Parameters = Mapping[str, Mapping[str, Any]]  # tool name → parameter name → JSON schema
LONGEST_CALL = 100_000  # characters


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # without NaN and Infinity


class MalformedCall(ValueError):
    """The text is not a call in the expected syntax."""


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    id: str | None = None  # written by the model

    def as_openai(self, call_id: str) -> dict[str, Any]:
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": call_id, "type": "function", "function": function}


Reader = Callable[[re.Match[str], Parameters], list[ToolCall]]


@dataclass(frozen=True)
class CallSyntax:
    """How a family writes calls. `region` matches one or more calls at an `opener`; `read` gets its match."""

    name: str
    marks: tuple[str, ...]  # a chat template with one of these texts uses the syntax
    opener: re.Pattern[str]
    region: re.Pattern[str]
    read: Reader
    noise: tuple[str, ...] = ()  # markers around all calls
    bare: bool = False  # a whole answer that is one JSON object is a call too
    short_ids: bool = False  # the template requires ids of nine letters and digits


def parse_tool_calls(text: str, syntax: CallSyntax | None = None, tools: Tools = None) -> tuple[str, list[ToolCall]]:
    """Return the text without calls, and the calls. What cannot be read stays in the text.

    Without `syntax`, calls are `<tool_call>{…}</tool_call>` or one bare JSON object.
    """
    syntax, parameters = syntax or HERMES, parameters_of(tools)
    calls: list[ToolCall] = []
    rest, at = "", 0
    starts = [match.start() for match in syntax.opener.finditer(text)]
    # Only up to the next opener, so that many of them without an end take no long time.
    for start, end in pairwise([*starts, len(text)]):
        match = syntax.region.match(text, start, end)
        if match is not None and (found := _read(syntax.read, match, parameters)):
            calls += found
            rest += text[at:start]
            at = match.end()
    if not calls:
        whole = re.fullmatch(r"(.*)", text, re.DOTALL)
        found = _read(_read_objects, whole, parameters) if syntax.bare and whole else []
        return ("", found) if found else (text, [])
    rest += text[at:]
    for marker in syntax.noise:
        rest = rest.replace(marker, "")
    return rest.strip(), calls


def _read(read: Reader, match: re.Match[str], parameters: Parameters) -> list[ToolCall]:
    if len(match[0]) > LONGEST_CALL:
        return []
    try:
        calls = read(match, parameters)
        json.dumps([call.arguments for call in calls], ensure_ascii=False).encode()  # lone surrogates cannot be sent
        return calls
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):  # of json, ast and the readers
        return []


def parameters_of(tools: Tools) -> dict[str, dict[str, Any]]:
    """The parameter schemas of tools in OpenAI's format; whatever has another form is left out."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools or []:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        schema = function.get("parameters") if isinstance(function, Mapping) else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(function, Mapping) and isinstance(properties, Mapping):
            found[str(function.get("name"))] = dict(properties)
    return found


def read_json_call(data: Any) -> ToolCall:
    """`{"name": …, "arguments": …}`; the arguments may be called `parameters`, and may be JSON in a string."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        raise MalformedCall("no name")
    arguments = data.get("arguments", data.get("parameters"))
    call_id = data.get("id")
    return ToolCall(data["name"], _arguments(arguments), call_id if isinstance(call_id, str) else None)


def _arguments(value: Any) -> dict[str, Any]:
    value = _DECODER.decode(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise MalformedCall("the arguments are not an object")
    return value


def named_call(name: str, arguments: str, call_id: str | None = None) -> ToolCall:
    """A call whose arguments are a JSON object; text after the object is ignored."""
    if not name.strip():
        raise MalformedCall("no name")
    return ToolCall(name.strip(), _arguments(_DECODER.raw_decode(arguments.strip())[0]), call_id)


def _read_json(match: re.Match[str], _: Parameters) -> list[ToolCall]:
    """One JSON call or a list of them."""
    data = _DECODER.raw_decode(match[1].strip())[0]
    return [read_json_call(item) for item in (data if isinstance(data, list) else [data])]


def _read_objects(match: re.Match[str], _: Parameters) -> list[ToolCall]:
    """JSON calls, separated by semicolons or white space, and nothing else."""
    calls, text = [], match[1].strip()
    while text:
        data, end = _DECODER.raw_decode(text)
        calls.append(read_json_call(data))
        text = text[end:].lstrip(" \t\r\n;")
    return calls


def _read_llama(match: re.Match[str], parameters: Parameters) -> list[ToolCall]:
    return _read_python(match, parameters) if match[1].startswith("[") else _read_objects(match, parameters)


def _typed(value: str, schema: Any) -> Any:
    """A parameter written without quotes, as its schema declares it. Without a schema: JSON if it is valid."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if "string" in kinds and not ("null" in kinds and value == "null"):
        return value
    lowered = value.strip()
    lowered = {"True": "true", "False": "false", "None": "null"}.get(lowered, lowered)
    try:
        return _DECODER.decode(lowered)
    except (ValueError, RecursionError):
        return _python_value(value) if {"object", "array"} & set(kinds) else value


def _tagged_call(name: str, pairs: Sequence[tuple[str, str]], parameters: Parameters) -> ToolCall:
    name, schemas = name.strip(), parameters.get(name.strip(), {})
    if not name:
        raise MalformedCall("no name")
    return ToolCall(name, {key.strip(): _typed(value, schemas.get(key.strip())) for key, value in pairs})


_XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_INVOKE_PARAMETER = re.compile(r'<parameter name="([^"\n]+)">(.*?)</parameter>', re.DOTALL)
_GLM_PARAMETER = re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"\n]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)


def _read_xml(match: re.Match[str], parameters: Parameters) -> list[ToolCall]:
    return [_tagged_call(match[1], _XML_PARAMETER.findall(match[2]), parameters)]


def _read_invoke(match: re.Match[str], parameters: Parameters) -> list[ToolCall]:
    return [_tagged_call(match[1], _INVOKE_PARAMETER.findall(match[2]), parameters)]


def _read_glm(match: re.Match[str], parameters: Parameters) -> list[ToolCall]:
    return [_tagged_call(match[1], _GLM_PARAMETER.findall(match[2]), parameters)]


def _read_dsml(match: re.Match[str], _: Parameters) -> list[ToolCall]:
    found = _DSML_PARAMETER.findall(match[2])
    return [
        ToolCall(match[1], {key: value if text == "true" else _DECODER.decode(value) for key, text, value in found})
    ]


def _read_mistral(match: re.Match[str], parameters: Parameters) -> list[ToolCall]:
    """`[{"name": …, "arguments": …}]`, or `name[CALL_ID]id[ARGS]{…}`."""
    body = match[1].strip()
    if body.startswith(("[", "{")):
        return _read_json(match, parameters)
    named = re.match(r"([^\[{]+?)(?:\[CALL_ID\]([^\[{]+))?(?:\[ARGS\])?\s*(\{.*)", body, re.DOTALL)
    if named is None:
        raise MalformedCall("no arguments")
    return [named_call(named[1], named[3], named[2])]


def _read_kimi(match: re.Match[str], _: Parameters) -> list[ToolCall]:
    call_id = match[1].strip()  # functions.NAME:NUMBER
    name = re.sub(r":\d+$", "", call_id).removeprefix("functions.")
    return [named_call(name, match[2], call_id)]


def _read_deepseek(match: re.Match[str], _parameters: Parameters) -> list[ToolCall]:
    """`function<sep>NAME`, then a block of JSON; since V3.1 `NAME<sep>JSON`."""
    first, second = match[1].strip(), match[2].strip()
    if first != "function":
        return [named_call(first, second)]
    name, _, block = second.partition("\n")
    return [named_call(name, block.strip().removeprefix("```json"))]


def _read_gemma(match: re.Match[str], _: Parameters) -> list[ToolCall]:
    """Objects with keys and words without quotes, and texts between `<|"|>`."""
    pieces = match[2].split('<|"|>')
    plain = [re.sub(r'([{,]\s*)([^\s"{}\[\],:]+)\s*:', r'\1"\2":', piece) for piece in pieces[::2]]
    plain = [re.sub(r"\b(?:None|True|False)\b", lambda word: _WORDS[word[0]], piece) for piece in plain]
    texts = [json.dumps(piece) for piece in pieces[1::2]] + [""]
    return [named_call(match[1], "".join(a + b for a, b in zip(plain, texts, strict=True)))]


_WORDS = {"None": "null", "True": "true", "False": "false"}


def _read_python(match: re.Match[str], parameters: Parameters) -> list[ToolCall]:
    """`[name(key=value), …]` with literal values; or JSON calls."""
    body = match[1].strip()
    if body.startswith(("{", "[{")):
        return _read_json(match, parameters)
    tree = ast.parse(body, mode="eval").body
    return [_python_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise MalformedCall("not a call with named arguments")
    return ToolCall(ast.unparse(node.func), {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords})


_CONSTANTS = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """The value of a literal of Python or JSON."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(key)): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        if isinstance(value, int | float):
            return -value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    raise MalformedCall("not a literal")


def _python_value(text: str) -> Any:
    """The value of a literal that some templates write as Python does; the text itself if it is none."""
    try:
        return _literal(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _syntax(name: str, marks: str | tuple[str, ...], opener: str, rest: str, read: Reader, **more: Any) -> CallSyntax:
    """`opener` and `rest` are the parts of the region's pattern."""
    marks = (marks,) if isinstance(marks, str) else marks
    return CallSyntax(name, marks, re.compile(opener), re.compile(opener + rest, re.DOTALL), read, **more)


HERMES = _syntax("hermes", "<tool_call>", "<tool_call>", r"\s*(.*?)\s*</tool_call>", _read_json, bare=True)
# In the order in which they are looked for: a mark of a later syntax may occur in the templates of an earlier one.
SYNTAXES = (
    _syntax(
        "deepseek-dsml", "｜DSML｜", '<｜DSML｜invoke name="', r'([^"\n]+)">(.*?)</｜DSML｜invoke>', _read_dsml,
        noise=tuple(f"<{slash}｜DSML｜{name}>" for name in ("function_calls", "tool_calls") for slash in ("", "/")),
    ),
    _syntax(
        "deepseek", "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>", "(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>",
        _read_deepseek, noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    _syntax(
        "kimi", "<|tool_call_argument_begin|>", r"<\|tool_call_begin\|>",
        r"(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", _read_kimi,
        noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    _syntax("gemma", "<|tool_call>", r"<\|tool_call>", r"call:([^\s{]+)(\{.*?\})<tool_call\|>", _read_gemma),
    _syntax(
        "lfm2", ("<|tool_call_start|>", "<|tool_list_start|>"), r"<\|tool_call_start\|>", r"(.*?)<\|tool_call_end\|>",
        _read_python,
    ),
    _syntax("mistral", "[TOOL_CALLS]", r"\[TOOL_CALLS\]", "(.*)", _read_mistral, short_ids=True),
    _syntax(
        "minimax", "minimax:tool_call", '<invoke name="', r'([^"\n]+)">(.*?)</invoke>', _read_invoke,
        noise=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    _syntax("minimax-json", "<tool_calls>", "<tool_calls>", "(.*?)</tool_calls>", _read_objects),
    _syntax("glm", "<arg_key>", "<tool_call>", "([^<{]+)((?:<arg_key>.*?)?)</tool_call>", _read_glm),
    _syntax(
        "xml", "<function=", "<(?:seed:)?tool_call>",
        r"\s*<function=([^>\n]+)>(.*?)</function>\s*</(?:seed:)?tool_call>", _read_xml,
    ),
    HERMES,
    _syntax("json-list", "<|tool_call|>", r"<\|tool_call\|>", "(.*)", _read_json),
    _syntax(
        "llama", ("<|python_tag|>", "dictionary of argument name"), r"\A\s*(?:<\|python_tag\|>)?\s*",
        r"([\[{].*?)\s*(?:<\|eo[tm]_id\|>)?\s*\Z", _read_llama,
    ),
)  # fmt: skip


def syntax_of(template: str, special_tokens: Iterable[str] = ()) -> CallSyntax:
    """The syntax with a mark in the chat template, else among the special tokens, else the one of Hermes."""
    for texts in ([template], set(special_tokens)):
        for syntax in SYNTAXES:
            if any(mark in text for mark in syntax.marks for text in texts):
                return syntax
    return HERMES
