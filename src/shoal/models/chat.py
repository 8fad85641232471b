"""Chat messages to token ids, and ids to text. Sampled ids are never re-tokenised.

The prompt of a later turn is the exact ids so far plus the ids of what the template adds after them.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shoal.core.errors import DataError
from shoal.core.types import Message, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Placeholder for a message's content while the template is rendered; private-use characters do not occur in data.
_MARK = "\ue0f1{}\ue0f2"


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
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._system_prompt = system_prompt
        self._special = [token for token in special_tokens(tokenizer) if token]
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
        return self._encode(self._render(messages, True, tools, template_kwargs))

    def next_prompt_ids(
        self, so_far: Sequence[int], messages: Sequence[Message], following: Sequence[Message], tools: Tools = None
    ) -> list[int]:
        """Extend `so_far`, which ends with the answer `messages[-1]`, by the ids of the messages `following`.

        The template is rendered with a placeholder instead of the answer, and only the text after it is tokenised. So
        sampled ids stay as they are, even if the template strips thinking from earlier turns.
        """
        messages = self.prepare(messages)
        # The answer's text contains its tool calls; the template would render them a second time.
        said = {key: value for key, value in messages[-1].items() if key != "tool_calls"}
        with self._lock:
            tail = self._encode_marked([*messages[:-1], said, *following], len(messages) - 1, tools)
        if tail and so_far and so_far[-1] == tail[0]:
            tail = tail[1:]  # the model sampled the end of its turn
        return [*so_far, *tail]

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
        listed = {"tools": tools} if tools else {}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=False,
                    add_generation_prompt=generation,
                    **listed,
                    **{**self._kwargs, **(template_kwargs or {})},
                )
            )
        except Exception as error:  # Jinja errors, and exceptions raised by the template itself
            roles = [m.get("role") for m in messages]
            raise DataError(f"the chat template rejected messages with the roles {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _special_in(self, messages: Sequence[Message]) -> bool:
        return any(token in str(m.get("content") or "") for m in messages for token in self._special)

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
        marked = [{**m, "content": _MARK.format(i)} for i, m in enumerate(messages)]
        text = self._render(marked, True, tools, template_kwargs)
        ids: list[int] = []
        first = 0
        if after > 0:
            _, text = self._split_at(text, messages, after)
            first = after + 1
        for i in range(first, len(messages)):
            before, text = self._split_at(text, messages, i)
            ids += self._encode(before)
            content = str(messages[i].get("content") or "")
            ids += list(self.tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True))
        return ids + self._encode(text)

    def _split_at(self, text: str, messages: Sequence[Message], index: int) -> tuple[str, str]:
        before, found, rest = text.partition(_MARK.format(index))
        if not found:
            raise DataError(f"the chat template drops or modifies message {index} ({messages[index].get('role')})")
        return before, rest
