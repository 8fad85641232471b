"""What a vLLM in this process is drawing: requests taken up, stepped, aborted, each with the adapter it began with.

Used by vllm_inprocess.py. Everything but the inbox belongs to the device's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.rollout.answers import Answer, Reading
from shoal.rollout.vllm import sampling_parameters
from shoal.types import Completion, Request

STEPS_PER_TURN = 16


@dataclass
class Call:
    """A request as it runs: under a name of its own, so that one that is asked again is never answered by the old."""

    name: str
    request: Request
    limit: int
    answer: asyncio.Future[Completion]
    adapter: Any = None  # a LoRARequest, if it began with one
    version: int = 0  # that it began with


class Drawing:
    """`engine` is an LLMEngine; `parameters` makes its sampling parameters; `wake` comes before a request."""

    def __init__(self, engine: Any, parameters: Callable[..., Any], reading: Reading, wake: Callable[[], None]) -> None:
        self._engine = engine
        self._parameters = parameters
        self._reading = reading
        self._wake = wake
        self.inbox: deque[Call | str] = deque()  # filled by coroutines; str = a call that nobody waits for any more
        self.calls: dict[str, Call] = {}  # what vLLM has
        self.adapter: Any = None  # a LoRARequest
        self.version = 0
        self._earlier: list[Any] = []  # adapters that requests may still be drawn with

    @property
    def busy(self) -> bool:
        return bool(self.inbox or self.calls)

    def turn(self) -> list[tuple[Call, Answer]]:
        """Step until something finishes or the turn is over; requests join and leave at every step."""
        for _ in range(STEPS_PER_TURN):
            while self.inbox:
                self._take(self.inbox.popleft())
            outputs = self._engine.step() if self.calls else []
            finished = [(self.calls.pop(output.request_id), output) for output in outputs if output.finished]
            if finished or not self.calls:
                self._drop_unused()
                return [(call, _answer(output.outputs[0])) for call, output in finished]
        return []

    def _take(self, word: Call | str) -> None:
        if isinstance(word, str):
            if self.calls.pop(word, None) is not None:
                self._engine.abort_request([word])
            return
        self._wake()  # for a request alone: the name of one that has ended must not wake it while the device trains
        values = sampling_parameters(word.request, word.limit, self._reading.ends(word.request))
        prompt = {"prompt_token_ids": list(word.request.prompt_ids)}
        word.adapter, word.version = self.adapter, self.version
        self._engine.add_request(word.name, prompt, self._parameters(**values), lora_request=word.adapter)
        self.calls[word.name] = word

    def switch(self, adapter: Any) -> None:
        """For requests that come from now on. Those in vLLM finish with theirs, and it stays as long as they do."""
        if self.adapter is not None:
            self._earlier.append(self.adapter)
        self.adapter = adapter
        self._drop_unused()

    def _drop_unused(self) -> None:
        used = {call.adapter.lora_int_id for call in self.calls.values() if call.adapter is not None}
        for adapter in [adapter for adapter in self._earlier if adapter.lora_int_id not in used]:
            self._engine.remove_lora(adapter.lora_int_id)
            self._earlier.remove(adapter)


def _answer(output: Any) -> Answer:
    ids = list(output.token_ids)
    logprobs: list[float] = [entry[token].logprob for token, entry in zip(ids, output.logprobs or (), strict=True)]
    spans = [(span["start"], span["end"], str(span["version"])) for span in map(_as_dict, output.weight_versions or ())]
    return Answer(ids, logprobs, str(output.finish_reason), spans)


def _as_dict(span: Any) -> Mapping[str, Any]:
    return span if isinstance(span, Mapping) else {name: getattr(span, name) for name in ("start", "end", "version")}
