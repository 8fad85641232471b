"""The request bodies, declared as msgspec Structs: decoding, validation and the OpenAPI schema derive from them."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from shoal.core.types import Message, SamplingParams

MAX_CHOICES = 16
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_PATH_CHARACTERS = 4096
MAX_TOKENS = 2**31
MAX_TOP_LOGPROBS = 20
T = TypeVar("T")
_collector = threading.Lock()

# Parameters that no engine here implements, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "auto", "none"),
    "functions": (None, []),
    "ignore_eos": (None, False),
    "include_stop_str_in_output": (None, False),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None, False),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "auto", "none"),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


class BadRequest(ValueError):
    """An error of the client. Its text is sent back with the status."""

    status, code = 400, "invalid_value"

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.param = param


class UnknownModel(BadRequest):
    status, code = 404, "model_not_found"


Probability = Annotated[float, Meta(ge=0, le=1)]
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
TopCount = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
# Raw: the value is read up to its end, but no objects are made of it.
Ignored = Annotated[msgspec.Raw, Meta(description="Accepted; has no effect.")]
ABSENT: Any = msgspec.field(default_factory=msgspec.Raw)
Unsupported = Annotated[Any, Meta(description="Only the default value is supported.")]


class StreamOptions(Struct):
    include_usage: bool | None = None


class SamplingBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The keys that text and chat completions share."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Probability | None = None
    max_tokens: PositiveCount | None = None
    min_tokens: TokenCount | None = None
    stop: Annotated[str, Meta(max_length=256)] | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | TopCount | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: Ignored = ABSENT
    metadata: Ignored = ABSENT
    store: Ignored = ABSENT
    service_tier: Ignored = ABSENT
    safety_identifier: Ignored = ABSENT
    prompt_cache_key: Ignored = ABSENT
    prompt_cache_options: Ignored = ABSENT
    prompt_cache_retention: Ignored = ABSENT
    request_id: Ignored = ABSENT
    priority: Ignored = ABSENT

    best_of: Unsupported = None
    logit_bias: Unsupported = None
    presence_penalty: Unsupported = None
    frequency_penalty: Unsupported = None
    repetition_penalty: Unsupported = None
    response_format: Unsupported = None
    ignore_eos: Unsupported = None
    include_stop_str_in_output: Unsupported = None
    structured_outputs: Unsupported = None
    prompt_logprobs: Unsupported = None

    supported: ClassVar[frozenset[str]] = frozenset()  # keys of UNSUPPORTED that this body implements

    def check_supported(self) -> None:
        """Reject parameters that would change the result but are not implemented, instead of ignoring them."""
        for name, defaults in UNSUPPORTED.items():
            if name not in self.supported and getattr(self, name, None) not in defaults:
                raise BadRequest(f"{name} is not supported; remove it", name)

    def top(self) -> int:
        """How many of the most likely tokens are reported per position."""
        return 0 if self.logprobs is None or isinstance(self.logprobs, bool) else self.logprobs

    def sampling(self) -> SamplingParams:
        """OpenAI's names and defaults. Without max_tokens, a completion may use the rest of the context."""
        names = ("temperature", "top_p", "top_k", "min_p", "min_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        limits = (getattr(self, "max_completion_tokens", None), self.max_tokens, MAX_TOKENS)
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            **given,
            max_tokens=next(limit for limit in limits if limit is not None),
            stop=tuple(stop for stop in stops if stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )


class CompletionBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt` is a text, a list of token ids, or a list of either."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    add_special_tokens: bool = True
    echo: bool | None = None
    max_tokens: TokenCount | None = None  # 0 with echo: nothing is sampled
    suffix: Unsupported = None
    top_logprobs: Unsupported = None
    supported: ClassVar[frozenset[str]] = frozenset({"echo"})

    def prompts(self) -> list[str | list[int]]:
        """One item per prompt."""
        prompt = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if all(isinstance(item, int) for item in prompt):
            return [prompt]  # type: ignore[list-item]
        if any(isinstance(item, int) or not item for item in prompt):
            raise BadRequest("prompt must be a text, a list of token ids, or a list of either; none empty", "prompt")
        if len(prompt) > MAX_PROMPTS:
            raise BadRequest(f"prompt: at most {MAX_PROMPTS} prompts per request", "prompt")
        return prompt  # type: ignore[return-value]


class TextPart(Struct):
    text: str
    type: Literal["text"]


class ChatMessage(Struct, kw_only=True):
    """The keys that are checked. Others, such as tool_calls, are passed on to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None


Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]


class ChatBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: PositiveCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: TopCount | None = None
    parallel_tool_calls: Ignored = ABSENT
    prediction: Ignored = ABSENT
    audio: Unsupported = None
    echo: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    modalities: Unsupported = None
    moderation: Unsupported = None
    reasoning_effort: Unsupported = None
    tool_choice: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    supported: ClassVar[frozenset[str]] = frozenset({"top_logprobs"})

    def top(self) -> int:
        if super().top() > 1:
            raise BadRequest("logprobs must be true or false; top_logprobs is the number of tokens", "logprobs")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs requires logprobs: true", "top_logprobs")
        return self.top_logprobs or 0


class SessionBody(Struct, kw_only=True):
    """POST /v1/chat/completions in a session. Other keys are ignored: the run's own sampling settings apply."""

    model: str
    messages: Messages
    tools: list[dict[str, Any]] | None = None
    logprobs: Any = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TokenizeBody(Struct, kw_only=True):
    """POST /tokenize: `prompt`, or `messages` with the chat template applied."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Struct):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(min_length=1)]


AdapterName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class LoadAdapterBody(Struct):
    """POST /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]


class UnloadAdapterBody(Struct):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]


class ModelName(Struct):
    """The one key that decides which body a chat request has."""

    model: Any = None


@lru_cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(raw: bytes, kind: type[T]) -> T:
    """The body as `kind`. Raises BadRequest with the key that is wrong."""
    try:
        with _no_collection():
            return _decoder(kind).decode(raw or b"{}")
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), wrong_key(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """A body of many small lists starts many collections of all objects, which stop the event loop for seconds. They
    free nothing: parsed JSON has no cycles.

    The switch is global. Without the lock, a thread that reads it while another has turned it off could leave it off.
    """
    with _collector:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def wrong_key(error: msgspec.ValidationError) -> str | None:
    found = re.search(r"`\$\.(\w+)", str(error)) or re.search(r"field `(\w+)`", str(error))
    return found[1] if found else None


def chat_messages(messages: Iterable[dict[str, Any]]) -> list[Message]:
    """Validated messages. Lists of text parts are joined, because templates and comparisons need text."""
    return [_message(message) for message in messages]


def _message(message: dict[str, Any]) -> Message:
    try:
        content = msgspec.convert(message, ChatMessage).content
    except msgspec.ValidationError as error:
        raise BadRequest(f"messages: {error}", "messages") from error
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    return {**{key: item for key, item in message.items() if item is not None}, "content": text}


def openapi(bodies: Mapping[str, Any], gets: Iterable[str], version: str) -> dict[str, Any]:
    """The OpenAPI document of the routes; `bodies` maps a POST path to the type of its body."""
    template = "#/components/schemas/{name}"
    schemas, components = msgspec.json.schema_components(bodies.values(), ref_template=template)
    answers = {"200": {"description": "JSON"}, "default": {"description": "`error` with message, type, param and code"}}
    paths: dict[str, Any] = {}
    for path in gets:
        keys = [{"name": key, "in": "path", "required": True, "schema": {"type": "string"}} for key in _keys_in(path)]
        paths[path.replace(":path", "")] = {"get": {"parameters": keys, "responses": answers}}
    for path, schema in zip(bodies, schemas, strict=True):
        content = {"application/json": {"schema": schema}}
        paths[path] = {"post": {"requestBody": {"content": content}, "responses": answers}}
    info = {"title": "Shoal", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _keys_in(path: str) -> list[str]:
    return re.findall(r"{(\w+)", path)
