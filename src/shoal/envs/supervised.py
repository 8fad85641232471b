"""Rows for supervised training: messages that end with an answer, or a prompt and a completion. Called by api.sft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.envs.datasets import DatasetSpec, check_unicode, has_eval_split, read_splits, to_messages
from shoal.errors import DataError
from shoal.types import Task


def supervised_tasks(spec: DatasetSpec) -> list[Task]:
    """What is asked, with the completion in the task's data. A held-out split of the data set's own is left alone."""
    splits = read_splits(spec, (), _task)
    return splits["train"] if has_eval_split(spec) else [*splits["train"], *splits["eval"]]


def _task(row: Mapping[str, Any]) -> Task:
    if row.get("messages") is None:
        messages, completion = to_messages(row.get("prompt")), row.get("completion")
    else:
        messages = to_messages(row["messages"])
        completion = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not isinstance(completion, str) or not messages:
        raise DataError("a row needs messages that end with an assistant's, or a prompt and a completion")
    check_unicode(completion, "completion")
    return Task(messages, {"completion": completion})
