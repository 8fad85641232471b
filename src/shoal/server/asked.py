"""What a client asked for, read and checked: messages, prompts, sampling, limits. Knows no HTTP and no engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.types import Message, SamplingParams

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_IDS = 64
_ROLES = ("system", "developer", "user", "assistant", "tool")
# What OpenAI's and vLLM's clients may ask for and no engine here does, with the values that ask for nothing.
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
    "ignore_eos": (None, False),
    "include_stop_str_in_output": (None, False),
    "structured_outputs": (None,),
    "prompt_logprobs": (None, False),
    "tool_choice": (None, "auto", "none"),
}


class BadRequest(ValueError):
    """The client's fault; the text is sent back with the status."""

    status, code = 400, "invalid_value"

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.param = param


class UnknownModel(BadRequest):
    status, code = 404, "model_not_found"


def read_messages(value: Any) -> list[Message]:
    """Checked, with lists of text parts joined: templates and comparisons want text."""
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message", "messages")
    return [_message(message) for message in value]


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise BadRequest(f"a message needs a role, one of {', '.join(_ROLES)}", "messages")
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise BadRequest("only text parts are understood in a message's content", "messages")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise BadRequest("a message's content must be text", "messages")
    kept = {key: item for key, item in message.items() if item is not None}
    return {**kept, "content": content or ""}


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools") or None
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise BadRequest("tools must be a list of functions", "tools")
    return tools


def read_ids(value: Any, what: str) -> list[int] | None:
    """A list of token ids, or None if it is something else."""
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return None
    if not value:
        raise BadRequest(f"{what} must not be empty", what)
    return list(value)


def read_count(body: Mapping[str, Any]) -> int:
    count = 1 if body.get("n") is None else body["n"]
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_CHOICES:
        raise BadRequest(f"n must be 1 to {MAX_CHOICES}", "n")
    return count


def read_seed(body: Mapping[str, Any]) -> int | None:
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise BadRequest("seed must be a whole number of at most 63 bits", "seed")
    return seed


def refuse_unknown(body: Mapping[str, Any]) -> None:
    """What would change the answer and is not done here is refused, not left out in silence."""
    for name, nothing in _UNKNOWN.items():
        if body.get(name) not in nothing:
            raise BadRequest(f"{name} is not available here; leave it out", name)
    if not isinstance(body.get("stream_options") or {}, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    logprobs = body.get("logprobs")
    if isinstance(logprobs, int) and not isinstance(logprobs, bool) and logprobs > 1:
        raise BadRequest("logprobs: only that of the token drawn is known here; ask for 1", "logprobs")


def read_sampling(body: Mapping[str, Any]) -> SamplingParams:
    """OpenAI's names, with their defaults; the rest of the context if max_tokens is left out."""
    values = {name: body.get(name) for name in ("temperature", "top_p", "top_k", "min_p", "min_tokens")}
    most = body.get("max_completion_tokens")
    values["max_tokens"] = body.get("max_tokens") if most is None else most
    given = {name: value for name, value in values.items() if value is not None}
    for name in ("temperature", "top_p", "min_p"):
        value = given.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise BadRequest(f"{name} must be a number of at least 0", name)
        if name != "temperature" and value > 1:
            raise BadRequest(f"{name} must be a number of 0 to 1", name)
    for name, least in (("top_k", -1), ("max_tokens", 1), ("min_tokens", 0)):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**31:
            raise BadRequest(f"{name} must be a whole number of at least {least}", name)
    given.setdefault("max_tokens", 2**31)
    return SamplingParams(**given, stop=_stops(body), stop_token_ids=_stop_ids(body))


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else stop
    texts = isinstance(stops, list | tuple) and all(isinstance(text, str) and text for text in stops)
    if not texts or len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in stops):
        what = f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters"
        raise BadRequest(f"stop must be a text or a list of texts, {what}", "stop")
    return tuple(stops)


def _stop_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    value = body.get("stop_token_ids") or []
    ids = read_ids(value, "stop_token_ids") if value else []
    if ids is None or len(ids) > MAX_STOP_IDS or any(i < 0 for i in ids):
        raise BadRequest(f"stop_token_ids must be a list of at most {MAX_STOP_IDS} token ids", "stop_token_ids")
    return tuple(ids)
