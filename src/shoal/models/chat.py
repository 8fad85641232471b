"""Messages to token ids, and ids to text for people. Ids that were sampled are never turned back into tokens.

A later turn of a conversation is the exact ids so far plus the ids of what the template puts after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError
from shoal.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = list[dict[str, Any]] | None
# Stands for a message's content while the template is rendered; private-use characters no data set contains.
_MARK = "\ue0f1{}\ue0f2"


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Every token that is no text: those the tokenizer has a name for, and those only marked as special."""
    found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return found | {str(token.content): int(i) for i, token in added.items() if token.special}


PROMPTS_REMEMBERED = 1024
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
        self.token_text = lru_cache(maxsize=1 << 18)(self._token_text)  # more than vocabularies have

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as they are sent, with the run's own system prompt if one was given."""
        if self._system_prompt is None:
            return list(messages)
        rest = [m for m in messages if m.get("role") != "system"]
        return [{"role": "system", "content": self._system_prompt}, *rest]

    def exceeds(self, messages: Sequence[Message], room: int) -> bool:
        """Whether so many tokens cannot hold it, by its characters: a tokenizer takes minutes over 100 MB."""
        return sum(len(str(m.get("content") or "")) for m in messages) > room * LONGEST_TOKEN_CHARS

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The ids of a conversation the model is to answer; `tools` are schemas that the template lists.

        Remembered: every rollout of a group asks for the same prompt, and templates are slow.
        """
        key = repr((messages, tools))
        if key not in self._prompts:
            if len(self._prompts) >= PROMPTS_REMEMBERED:
                self._prompts.clear()
            self._prompts[key] = self._prompt_ids(self.prepare(messages), tools)
        return list(self._prompts[key])

    def _prompt_ids(self, messages: list[Message], tools: Tools) -> list[int]:
        if self._special_in(messages):
            return self._encode_marked(messages, 0, tools)
        return self._encode(self._render(messages, True, tools))

    def next_prompt_ids(
        self, so_far: Sequence[int], messages: Sequence[Message], following: Sequence[Message], tools: Tools = None
    ) -> list[int]:
        """`so_far` ends with the answer that is the last of `messages`; the ids that also hold `following`.

        What the template writes after an answer is found by rendering it with a mark in the answer's place, so nothing
        the model wrote is tokenised again, and a template that would strip it from history cannot.
        """
        messages = self.prepare(messages)
        # The answer's text holds its tool calls already; the template would write them a second time.
        said = {key: value for key, value in messages[-1].items() if key != "tool_calls"}
        tail = self._encode_marked([*messages[:-1], said, *following], len(messages) - 1, tools)
        if tail and so_far and so_far[-1] == tail[0]:
            tail = tail[1:]  # the model closed its turn itself
        return [*so_far, *tail]

    def encode(self, text: str) -> list[int]:
        """Text as it stands, special tokens read as such, nothing put around it."""
        return self._encode(text)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def full_text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _token_text(self, token_id: int) -> str:
        # Its Rust part, where it has one, is faster, and every token of every rollout is asked for.
        decoding = getattr(self.tokenizer, "backend_tokenizer", None) or self.tokenizer
        return str(decoding.decode([token_id], skip_special_tokens=False))

    def _render(self, messages: Sequence[Message], generation: bool, tools: Tools = None) -> str:
        listed = {"tools": tools} if tools else {}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=generation, **listed, **self._kwargs
                )
            )
        except Exception as error:  # Jinja, and whatever a template raises on purpose
            roles = [m.get("role") for m in messages]
            raise DataError(f"the chat template refuses messages with the roles {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _special_in(self, messages: Sequence[Message]) -> bool:
        return any(token in str(m.get("content") or "") for m in messages for token in self._special)

    def _encode_marked(self, messages: Sequence[Message], after: int, tools: Tools = None) -> list[int]:
        """Ids of the rendered messages, with contents encoded as plain text: a special token typed by a user is text.

        `after` > 0 leaves out everything up to and including the content of message `after`.
        """
        marked = [{**m, "content": _MARK.format(i)} for i, m in enumerate(messages)]
        text = self._render(marked, True, tools)
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
            raise DataError(f"the chat template leaves out or changes message {index} ({messages[index].get('role')})")
        return before, rest
