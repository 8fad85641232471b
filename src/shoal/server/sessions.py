"""One rollout played through the endpoint: its sampling, its turns in exact ids, and how a request continues them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.types import Completion, Message, SamplingParams, Turn

Tools = list[dict[str, Any]] | None


class Tokens(Protocol):
    """What a server needs of a tokenizer and its chat template; models.chat.Chat is one."""

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]: ...

    def next_prompt_ids(
        self, so_far: Sequence[int], messages: Sequence[Message], following: Sequence[Message], tools: Tools = None
    ) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def text(self, token_ids: Sequence[int]) -> str:
        """For people: special tokens left out."""
        ...

    def full_text(self, token_ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass
class Answered:
    """A request that was answered: what was asked, the ids up to and with the answer, and the answer as it was sent."""

    messages: list[Message]
    tools: Tools
    ids: list[int]
    answer: Message
    text: str


@dataclass
class Session:
    """The client's own sampling settings are not asked: a rollout is drawn as the run says."""

    name: str
    sampling: SamplingParams
    context_tokens: int
    seed_of: Callable[[int], int]  # turn → seed
    turns: list[Turn] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)
    conversation: list[Message] = field(default_factory=list)
    begun: int = 0  # turns asked for, answered or not
    closed: bool = False  # the environment is done; what still comes in is not part of the rollout

    def begin_turn(self) -> int:
        """The number of a turn, its own even if another is still being drawn."""
        self.begun += 1
        return self.begun - 1

    def prompt_ids(self, chat: Tokens, messages: list[Message], tools: Tools) -> list[int]:
        """The exact ids of an earlier turn and what follows it, if the messages continue one; else from the start."""
        for past in reversed(self.answered):
            before = len(past.messages)
            continues = messages[:before] == past.messages and len(messages) > before + 1 and tools == past.tools
            if continues and _same_answer(messages[before], past.answer):
                raw = {"role": "assistant", "content": past.text}
                return chat.next_prompt_ids(past.ids, [*past.messages, raw], messages[before + 1 :], tools)
        return chat.prompt_ids(messages, tools)

    def record(
        self, asked: tuple[list[Message], Tools], prompt_ids: list[int], completion: Completion, answer: Message
    ) -> None:
        if self.closed:
            return
        messages, tools = asked
        self.turns.append(Turn(prompt_ids, completion, self.sampling.temperature))
        self.answered.append(Answered(messages, tools, [*prompt_ids, *completion.token_ids], answer, completion.text))
        self.conversation = [*messages, answer]


def _same_answer(sent_back: Message, answer: Message) -> bool:
    """Clients may drop empty fields or add some; role, text and the calls' ids decide."""

    def key(message: Message) -> tuple[Any, ...]:
        calls = [call.get("id") for call in message.get("tool_calls") or ()]
        return message.get("role"), (message.get("content") or "").strip(), calls

    return key(sent_back) == key(answer)


def call_id(session: str, turn: int, number: int) -> str:
    return "call_" + hashlib.blake2b(f"{session}/{turn}/{number}".encode(), digest_size=8).hexdigest()
