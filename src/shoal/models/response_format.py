"""Splits an answer into reasoning, content and tool calls, as the chat template of the model writes them.

The format is recognised from the template, not from the name of the model. An answer without a marker of the format is
content, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.core.types import Tools
from shoal.models.tool_calls import CallSyntax, ToolCall, named_call, parse_tool_calls, syntax_of

# What opens and closes reasoning, in the order in which they are looked for.
REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>thought", "<channel|>"),
)
HARMONY = ("<|channel|>", "<|message|>")  # of gpt-oss
_HARMONY_MARKERS = ("<|start|>", *HARMONY, "<|end|>", "<|call|>", "<|return|>")
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_HARMONY_HEADER = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True)
class ParsedResponse:
    """The parts of an answer. `marked` is false if the text has no marker, so that it is the content unchanged."""

    content: str
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    marked: bool = False


@dataclass(frozen=True)
class ResponseFormat:
    """How the answers of a model are written."""

    syntax: CallSyntax
    reasoning: tuple[str, str] | None = None
    harmony: bool = False

    @classmethod
    def of(cls, template: Any, special_tokens: Iterable[str] = ()) -> ResponseFormat:
        """The format of a tokenizer's chat template, or of its templates by name."""
        text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template or "")
        reasoning = next((tags for tags in REASONING_TAGS if tags[1] in text), None)
        return cls(syntax_of(text, special_tokens), reasoning, all(marker in text for marker in HARMONY))

    @property
    def markers(self) -> tuple[str, ...]:
        """What separates reasoning from content."""
        return _HARMONY_MARKERS if self.harmony else self.reasoning or ()

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the prompt, of which only the end matters, ends inside the reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def parse(
        self, text: str, *, thinking: bool = False, tools: Tools = None, with_calls: bool = True
    ) -> ParsedResponse:
        """`thinking`: the prompt opened the reasoning. `with_calls`: tool calls are looked for."""
        if self.harmony and any(marker in text for marker in HARMONY):
            return _parse_harmony(text, bool(tools))
        reasoning, content, marked = _split_reasoning(text, self.reasoning, thinking)
        calls: list[ToolCall] = []
        if tools:
            content, calls = parse_tool_calls(content, self.syntax, tools)
        return ParsedResponse(content, reasoning, calls, marked or bool(calls))


def _split_reasoning(text: str, tags: tuple[str, str] | None, thinking: bool) -> tuple[str, str, bool]:
    """Reasoning, content, and whether the text has reasoning. Reasoning without an end goes on to the end."""
    if tags is None or not (thinking or tags[0] in text or tags[1] in text):
        return "", text, False
    opening, closing = tags
    thoughts: list[str] = []
    content = ""
    # Some templates open the reasoning in the prompt, where the caller did not look; then only its end is there.
    inside = thinking or (closing in text and opening not in text.partition(closing)[0])
    rest = text.removeprefix(opening) if thinking else text
    while rest:
        if inside:
            thought, _, rest = rest.partition(closing)
            thoughts.append(thought.strip())
        else:
            before, _, rest = rest.partition(opening)
            content += before
        inside = not inside
    return "\n".join(filter(None, thoughts)), content.strip(), True


def _parse_harmony(text: str, with_calls: bool) -> ParsedResponse:
    """Messages with channels: analysis is reasoning; final, and commentary without a recipient, are content."""
    parts: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: list[ToolCall] = []
    for message in text.split("<|start|>"):
        header, found, body = message.partition(HARMONY[1])
        if not found:
            continue
        body, channel, recipient = (
            _HARMONY_END.split(body)[0],
            _HARMONY_HEADER.search(header),
            _RECIPIENT.search(header),
        )
        if recipient is not None:
            call = _harmony_call(recipient[1], body) if with_calls else None
            if call is not None:
                calls.append(call)
                continue
        kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        parts[kind].append(body.strip())
    reasoning, content = ("\n".join(filter(None, parts[kind])) for kind in ("reasoning", "content"))
    return ParsedResponse(content, reasoning, calls, marked=True)


def _harmony_call(name: str, body: str) -> ToolCall | None:
    try:
        return named_call(name, body)
    except (ValueError, RecursionError):
        return None


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """The number of characters at the end of a text that may be the start of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest
