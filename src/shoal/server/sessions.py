"""A rollout that an environment plays over HTTP: its sampling settings, its turns in exact token ids, and how a request
continues an earlier turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.core.protocols import Tokens
from shoal.core.types import Completion, Message, SamplingParams, Tools, Turn


class ChatTokens(Tokens, Protocol):
    """The tokenizer and chat template that a server needs; implemented by models.chat.Chat."""

    def prompt_ids(
        self, messages: Sequence[Message], tools: Tools = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]: ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    def full_text(self, token_ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    @property
    def splits_answers(self) -> bool:
        """Whether the chat template has reasoning."""
        ...

    def message(
        self, prompt_ids: Sequence[int], completion: Completion, tools: Tools = None, scope: str = ""
    ) -> Message: ...

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool: ...

    def split_so_far(self, text: str, thinking: bool) -> tuple[str, str]: ...


@dataclass
class SessionTurn:
    """A completed turn: its request, all token ids up to the end of the response, and the response message."""

    messages: list[Message]
    tools: Tools
    ids: list[int]
    response: Message


@dataclass
class Session:
    """Requests of a session use the sampling settings of the run, not those in the request body."""

    name: str
    sampling: SamplingParams
    context_tokens: int
    seed_of: Callable[[int], int]  # turn → seed
    turns: list[Turn] = field(default_factory=list)
    finished: list[SessionTurn] = field(default_factory=list)
    conversation: list[Message] = field(default_factory=list)
    begun: int = 0  # turns started, finished or not
    base_url: str = ""  # of the endpoint
    model: str = ""  # the model name that requests of this session carry
    closed: bool = False  # the environment has finished; later turns are not recorded

    def begin_turn(self) -> int:
        """A new turn number. Concurrent turns get different numbers."""
        self.begun += 1
        return self.begun - 1

    def prompt_ids(self, chat: ChatTokens, messages: list[Message], tools: Tools) -> list[int]:
        """If the messages continue an earlier turn: its exact ids plus the new messages. Otherwise a new rendering."""
        for past in reversed(tuple(self.finished)):
            before = len(past.messages)
            continues = messages[:before] == past.messages and len(messages) > before + 1 and tools == past.tools
            if continues and _same_response(messages[before], past.response):
                return chat.next_prompt_ids(past.ids, [*past.messages, past.response], messages[before + 1 :], tools)
        return chat.prompt_ids(messages, tools)

    def record(
        self,
        conversation: tuple[list[Message], Tools],
        prompt_ids: list[int],
        completion: Completion,
        response: Message,
    ) -> None:
        if self.closed:
            return
        messages, tools = conversation
        self.turns.append(Turn(prompt_ids, completion, self.sampling.temperature))
        self.finished.append(SessionTurn(messages, tools, [*prompt_ids, *completion.token_ids], response))
        self.conversation = [*messages, response]


def _same_response(sent_back: Message, response: Message) -> bool:
    """Compare role, text and tool call ids only: clients may add fields or drop empty ones."""

    def key(message: Message) -> tuple[Any, ...]:
        calls = [call.get("id") for call in message.get("tool_calls") or ()]
        return message.get("role"), (message.get("content") or "").strip(), calls

    return key(sent_back) == key(response)
