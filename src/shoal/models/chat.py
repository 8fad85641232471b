"""Chat messages to token ids, and ids to text. Sampled ids are never re-tokenised.

The prompt of a later turn is the exact ids so far plus the ids of what the template adds after them.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from shoal.core.errors import DataError
from shoal.core.types import Completion, Message, Tools
from shoal.models.response_format import ParsedResponse, ResponseFormat, held_back

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Placeholder for a message's content while the template is rendered; private-use characters do not occur in data.
_MARK = "\ue0f1{}\ue0f2"
_MARKS = re.compile("\ue0f1(\\d{1,9})\ue0f2")
_SPECIAL_TEXT = 10**8  # placeholders from here on stand for the text of a special token
_PROMPT_TAIL_TOKENS = 16  # of a prompt, enough to see whether it opens the reasoning
History = Literal["sampled", "template"]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """All special tokens: those with a name in the tokenizer, and added tokens marked as special."""
    found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return found | {str(token.content): int(i) for i, token in added.items() if token.special}


PROMPTS_REMEMBERED = 1024
MOST_REMEMBERED = 2**22  # characters and ids of remembered prompts together
LONGEST_TOKEN_CHARS = 256  # vocabularies have runs of up to 128 spaces or dashes


class Chat:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        history: History = "sampled",
    ) -> None:
        """`history`: later prompts contain the sampled ids of earlier turns, or what the template makes of them."""
        self.tokenizer = tokenizer
        self._history = history
        self._kwargs = dict(template_kwargs or {})
        self._system_prompt = system_prompt
        special = special_tokens(tokenizer)
        self._special = [token for token in special if token]
        self.format = ResponseFormat.of(getattr(tokenizer, "chat_template", None), self._special)
        self._special_ids = frozenset(special.values())
        self._any_special = re.compile(
            "|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"\b\B"
        )
        self._prompts: dict[str, list[int]] = {}
        self._remembered = 0  # characters and ids in _prompts
        self._tools_checked = False
        self._lock = threading.Lock()  # encoding switches a setting of the tokenizer; servers encode in a thread
        self.token_text = lru_cache(maxsize=1 << 18)(self._token_text)  # more than vocabularies have

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as sent to the template, with the run's system prompt if one is configured."""
        if self._system_prompt is None:
            return list(messages)
        rest = [m for m in messages if m.get("role") != "system"]
        return [{"role": "system", "content": self._system_prompt}, *rest]

    def exceeds(self, messages: Sequence[Message], room: int) -> bool:
        """Whether the messages cannot fit into `room` tokens, judged by characters: tokenizing 100 MB takes minutes."""
        return sum(len(str(m.get("content") or "")) for m in messages) > room * LONGEST_TOKEN_CHARS

    def prompt_ids(
        self, messages: Sequence[Message], tools: Tools = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a prompt; `tools` are schemas for the template.

        Cached: all rollouts of a group share a prompt, and rendering templates is slow.
        """
        if template_kwargs:
            self._check_template_kwargs(template_kwargs)
        key = repr((messages, tools, template_kwargs))
        with self._lock:
            found = self._prompts.get(key)
            if found is None:
                found = self._prompt_ids(self.prepare(messages), tools, template_kwargs)
                self._remember(key, found)
        return list(found)

    def _remember(self, key: str, ids: list[int]) -> None:
        self._remembered += len(key) + len(ids)
        if len(self._prompts) >= PROMPTS_REMEMBERED or self._remembered > MOST_REMEMBERED:
            self._prompts.clear()
            self._remembered = len(key) + len(ids)
        if self._remembered <= MOST_REMEMBERED:
            self._prompts[key] = ids

    def _check_template_kwargs(self, template_kwargs: Mapping[str, Any]) -> None:
        """Variables of the template only: an argument such as chat_template would replace the template itself."""
        reserved = inspect.signature(self.tokenizer.apply_chat_template).parameters
        if wrong := sorted(reserved.keys() & template_kwargs.keys()):
            raise DataError(f"chat_template_kwargs: {wrong[0]} is not a variable of the chat template")

    def _check_tools(self, messages: list[Message], tools: Tools) -> None:
        self._tools_checked = True
        if self._render(messages, True, tools) == self._render(messages, True):
            log.warning("the chat template ignores tools, so the model does not see them; use a model that has tools")

    def _prompt_ids(
        self, messages: list[Message], tools: Tools, template_kwargs: Mapping[str, Any] | None
    ) -> list[int]:
        if tools and not self._tools_checked:
            self._check_tools(messages, tools)
        if self._special_in(messages):
            return self._encode_marked(messages, 0, tools, template_kwargs)
        return self._encode_pieces(self._render(messages, True, tools, template_kwargs), {})

    def message(
        self, prompt_ids: Sequence[int], completion: Completion, tools: Tools = None, scope: str = ""
    ) -> Message:
        """The answer as a message: `content`, and if the answer has them, `reasoning_content` and `tool_calls`.

        `text` is the whole answer where it differs from the content. `scope` makes the ids of calls unique.
        """
        parsed, text = self._parse(prompt_ids, completion, tools)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [
                call.as_openai(call.id or self._call_id(f"{scope}/{len(prompt_ids)}/{number}"))
                for number, call in enumerate(parsed.calls)
            ]
        return message if parsed.content == text else {**message, "text": text}

    def _parse(self, prompt_ids: Sequence[int], completion: Completion, tools: Tools) -> tuple[ParsedResponse, str]:
        text, thinking = completion.text, self.opens_reasoning(prompt_ids)
        has_special = any(i in self._special_ids for i in completion.token_ids[:-1])
        raw = self._text_with_markers(completion) if has_special else text
        parsed = self.format.parse(raw, thinking=thinking, tools=tools)
        if not parsed.marked:
            return ParsedResponse(text), text
        if not has_special:
            return parsed, text
        content, reasoning = (self._any_special.sub("", part).strip() for part in (parsed.content, parsed.reasoning))
        return ParsedResponse(content, reasoning, parsed.calls, marked=True), text

    @property
    def splits_answers(self) -> bool:
        """Whether the chat template has reasoning."""
        return bool(self.format.markers)

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside the reasoning."""
        if self.format.reasoning is None:
            return False
        return self.format.opens_reasoning(self.full_text(prompt_ids[-_PROMPT_TAIL_TOKENS:]))

    def split_so_far(self, text: str, thinking: bool) -> tuple[str, str]:
        """Reasoning and content of the part `text` of an answer, which has special tokens. A marker is not split."""
        certain = text[: len(text) - held_back(text, self.format.markers)]
        if not certain.strip():
            return "", ""  # white space before the reasoning is no part of the answer
        parsed = self.format.parse(certain, thinking=thinking)
        reasoning, content = (self._any_special.sub("", part) for part in (parsed.reasoning, parsed.content))
        return (reasoning.strip(), content.strip()) if parsed.marked else (reasoning, content)

    def _text_with_markers(self, completion: Completion) -> str:
        """The text with special tokens, cut where a stop string cut the text without them."""
        full, whole = self.full_text(completion.token_ids), self.text(completion.token_ids)
        cut = whole[len(completion.text) :] if whole.startswith(completion.text) else ""
        return full[: full.rindex(cut)] if cut and cut in full else full

    def _call_id(self, place: str) -> str:
        digest = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        return digest[:9] if self.format.syntax.short_ids else f"call_{digest}"

    def next_prompt_ids(
        self, so_far: Sequence[int], messages: Sequence[Message], following: Sequence[Message], tools: Tools = None
    ) -> list[int]:
        """Extend `so_far`, which ends with the answer `messages[-1]`, by the ids of the messages `following`.

        The template is rendered with a placeholder in the answer, and only the text after it is tokenised. So sampled
        ids stay as they are, even if the template strips thinking from earlier turns. With the history of the template,
        all messages are rendered again.
        """
        if self._history == "template":
            return self.prompt_ids([*messages, *following], tools)
        messages = self.prepare(messages)
        with self._lock:
            if messages[-1].get("tool_calls") and (ended := self._after_calls(so_far, messages, following, tools)):
                return [*so_far, *ended]
            # The answer's text contains its tool calls; the template would render them a second time.
            said = {"role": "assistant", "content": ""}
            tail = self._encode_marked([*messages[:-1], said, *following], len(messages) - 1, tools)
        if tail and so_far and so_far[-1] == tail[0]:
            tail = tail[1:]  # the model sampled the end of its turn
        return [*so_far, *tail]

    def _after_calls(
        self, so_far: Sequence[int], messages: list[Message], following: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """The ids after the end of a turn with tool calls, which `so_far` ends with; None if that cannot be found.

        Templates may write results of tools in another way, or refuse them, without the calls before. The calls are
        rendered with a placeholder as their last argument. What the template writes after the sampled end follows.
        """
        end = self._token_text(so_far[-1]) if so_far and so_far[-1] in self._special_ids else ""
        argument, first = _MARK.format(0), _MARK.format(1)
        functions = [{**call["function"], "arguments": {"x": argument}} for call in messages[-1]["tool_calls"]]
        calls = [{**c, "function": f} for c, f in zip(messages[-1]["tool_calls"], functions, strict=True)]
        before = [*messages[:-1], {"role": "assistant", "content": "", "tool_calls": calls}]
        marks = {1 + i: message for i, message in enumerate(following)}
        try:
            text = self._render([*before, *_marked(marks, marks)], True, tools)
            # The sampled end closes the turn, and is not one that the template writes after the results.
            if not end or argument not in text or end not in text.rpartition(argument)[2].partition(first)[0]:
                return None
            special = {i: message for i, message in marks.items() if self._special_in([message])}
            text = self._render([*before, *_marked(marks, special)], True, tools)
        except DataError:
            return None
        return self._encode_pieces(text.rpartition(argument)[2].partition(end)[2], special)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text, special tokens recognised. `add_special_tokens`: BOS as the tokenizer adds it."""
        with self._lock:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def full_text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _token_text(self, token_id: int) -> str:
        # The Rust backend is faster, and this runs for every token of every rollout.
        decoding = getattr(self.tokenizer, "backend_tokenizer", None) or self.tokenizer
        return str(decoding.decode([token_id], skip_special_tokens=False))

    def _render(
        self,
        messages: Sequence[Message],
        generation: bool,
        tools: Tools = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        given_tools = {"tools": self._as_plain(list(tools))} if tools else {}
        variables = {**given_tools, **self._kwargs, **(template_kwargs or {})}
        problem: Exception | None = None
        # Most templates need the arguments of calls as objects, some as JSON.
        has_calls = any(message.get("tool_calls") for message in messages)
        for as_objects in (True, False) if has_calls else (True,):
            try:
                given = [self._for_template(message, as_objects) for message in messages]
                return str(
                    self.tokenizer.apply_chat_template(
                        given, tokenize=False, add_generation_prompt=generation, **variables
                    )
                )
            except Exception as error:  # Jinja errors, exceptions raised by the template, calls of another form
                problem = problem or error
        roles = [m.get("role") for m in messages]
        raise DataError(f"the chat template rejected messages with the roles {roles}: {problem}") from problem

    def _for_template(self, message: Message, as_objects: bool) -> Message:
        """A message as templates expect it: text as content, arguments of calls as objects or as JSON."""
        found = {key: v if key == "content" else self._as_plain(v) for key, v in message.items() if key != "text"}
        found["content"] = "" if message.get("content") is None else message["content"]
        if self.format.harmony and message.get("reasoning_content"):
            found["thinking"] = found["reasoning_content"]
            if message.get("tool_calls"):  # the template accepts one of the two
                found["content"] = ""
        if message.get("tool_calls"):
            found["tool_calls"] = [_with_arguments(call, as_objects) for call in found["tool_calls"]]
        return found

    def _as_plain(self, value: Any) -> Any:
        """Tools, reasoning, calls or a name with placeholders for special tokens, which are encoded as text."""
        if isinstance(value, str):
            return self._any_special.sub(lambda f: _MARK.format(_SPECIAL_TEXT + self._special.index(f[0])), value)
        if isinstance(value, Mapping):
            return {key: self._as_plain(item) for key, item in value.items()}
        return [self._as_plain(item) for item in value] if isinstance(value, list) else value

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _special_in(self, messages: Sequence[Message]) -> bool:
        """Whether a content has special tokens or a placeholder, which must not be read as such."""
        texts = [str(m.get("content") or "") for m in messages]
        return any(token in text for text in texts for token in (*self._special, _MARK[0]))

    def _encode_marked(
        self,
        messages: Sequence[Message],
        after: int,
        tools: Tools = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the rendered messages. Contents are encoded as plain text, so users cannot inject special tokens.

        `after` > 0 skips everything up to and including the content of message `after`.
        """
        numbered = dict(enumerate(messages))
        special = {i: m for i, m in numbered.items() if (i > after or after == 0) and self._special_in([m])}
        answer = {after: messages[after]} if after > 0 else {}
        text = self._render(_marked(numbered, special | answer), True, tools, template_kwargs)
        if answer:
            _, found, text = text.partition(_MARK.format(after))
            if not found:
                raise _dropped(after, messages[after])
        return self._encode_pieces(text, special)

    def _encode_pieces(self, text: str, messages: Mapping[int, Message]) -> list[int]:
        """The ids of a rendered text. Each placeholder is replaced by the content of its message, as plain text."""
        ids: list[int] = []
        pieces = _MARKS.split(text)  # text, number, text, …
        for i, message in messages.items():
            if str(i) not in pieces[1::2]:
                raise _dropped(i, message)
        for at, piece in enumerate(pieces):
            if at % 2 == 0:
                ids += self._encode(piece) if piece else []
                continue
            number = int(piece) - _SPECIAL_TEXT
            content = str(messages[int(piece)].get("content") or "") if int(piece) in messages else ""
            content = self._special[number] if 0 <= number < len(self._special) else content
            ids += list(self.tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True))
        return ids


def _marked(messages: Mapping[int, Message], which: Mapping[int, Message]) -> list[Message]:
    """The messages, with a placeholder as the content of some."""
    return [{**m, "content": _MARK.format(i)} if i in which else m for i, m in messages.items()]


def _dropped(index: int, message: Message) -> DataError:
    return DataError(f"the chat template drops or modifies message {index} ({message.get('role')})")


def _with_arguments(call: Mapping[str, Any], as_object: bool) -> dict[str, Any]:
    """A tool call with its arguments as an object or as JSON; arguments that are not JSON stay as they are."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if as_object and isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments)
    elif not as_object and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function}
