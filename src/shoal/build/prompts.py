"""The stream of prompts of a run: which fit, which are set aside and told, which come again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.build.prepare import Prepared
from shoal.config.orch import OrchConfig
from shoal.errors import DataError
from shoal.observability.events import EventLog
from shoal.orchestrator.prompts import Buffer, Fits, PromptStream
from shoal.types import Message, Task

if TYPE_CHECKING:
    from shoal.models.chat import Chat

TEMPLATE_BYTES = 2048  # more than any chat template writes around a short conversation


def make_stream(orch: OrchConfig, prepared: Prepared, chat: Chat, events: EventLog) -> PromptStream:
    assert orch.seq_len is not None and orch.sampling.max_tokens is not None and orch.sampling.seed is not None
    room = orch.seq_len - orch.sampling.max_tokens
    fitting = fits_in(chat, room)
    for env in orch.env:
        _tell_unfit(env.label, prepared.environments[env.label].tasks("train"), fitting, room, events)

    def fits(messages: Sequence[Message]) -> bool:
        if fitting(messages):
            return True
        if not events.counts["set-aside"]:  # said once; the journal counts
            events.warn("set-aside", f"a prompt is longer than {room} tokens (seq_len - max_tokens) and is set aside")
        return False

    weights = {env.label: env.weight for env in orch.env}
    return PromptStream(prepared.environments, weights, orch.sampling.seed, fits, _buffer(orch))


def _tell_unfit(name: str, tasks: Sequence[Task], fits: Fits, room: int, events: EventLog) -> None:
    """Count the prompts of a data set that are too long; generated ones are met as they are drawn."""
    if not isinstance(tasks, list):
        return
    # A token is at least one byte, so most prompts need no tokenizer to be sure of.
    long = [task for task in tasks if _bytes_of(task) + TEMPLATE_BYTES > room]
    unfit = [task for task in long if not fits(task.messages)]
    if tasks and len(unfit) == len(tasks):
        raise DataError(f"no prompt of {name} fits: prompt plus sampling.max_tokens exceeds orch.seq_len")
    if unfit:
        said = f"{len(unfit)} of {len(tasks)} prompts of {name} are longer than {room} tokens (seq_len - max_tokens)"
        events.warn("set-aside", f"{said} and are set aside", data={"prompts": len(unfit), "of": len(tasks)})


def _bytes_of(task: Task) -> int:
    return sum(len(str(message.get("content") or "").encode("utf-8", "surrogatepass")) for message in task.messages)


def _buffer(orch: OrchConfig) -> Buffer:
    buffer = orch.buffer
    return Buffer(
        buffer.easy_threshold,
        buffer.hard_threshold,
        1.0 if buffer.easy_fraction is None else buffer.easy_fraction,
        1.0 if buffer.hard_fraction is None else buffer.hard_fraction,
    )


def fits_in(chat: Chat, room: int) -> Callable[[Sequence[Message]], bool]:
    return lambda messages: not chat.exceeds(messages, room) and 0 < len(chat.prompt_ids(messages)) <= room
