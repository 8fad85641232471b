"""Rows of preference data: every spelling gives the same pair, and unusable rows are named and excluded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import DataError
from shoal.core.types import Message, Task
from shoal.envs.datasets import DatasetSpec, collect_row_problems, preference_tasks, supervised_tasks

USER: Message = {"role": "user", "content": "one"}
SYSTEM: Message = {"role": "system", "content": "be brief"}
GOOD: Message = {"role": "assistant", "content": "ONE"}
BAD: Message = {"role": "assistant", "content": "two"}
WANTED = Task([USER], {"chosen": "ONE", "rejected": "two"})


def read(folder: Path, *rows: Any, **spec: Any) -> list[Task]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return preference_tasks(DatasetSpec(str(file), **spec))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "one", "chosen": "ONE", "rejected": "two"},
        {"prompt": [USER], "chosen": "ONE", "rejected": "two"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "one", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0},
    ],
    ids=["texts", "prompt as messages", "messages", "implicit prompt", "repeated prompt"],
)
def test_every_spelling_is_accepted(tmp_path: Path, row: dict[str, Any]):
    assert read(tmp_path, row) == [WANTED]


def test_longer_conversations_and_other_columns(tmp_path: Path):
    history = [SYSTEM, USER, GOOD, USER]
    (task,) = read(
        tmp_path, {"yes": [*history, GOOD], "no": [*history, BAD]}, columns={"chosen": "yes", "rejected": "no"}
    )
    assert (task.messages, task.data) == (history, WANTED.data)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "one", "chosen": "ONE", "rejected": "ONE"}, "are equal"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "are equal"),
        ({"chosen": "ONE", "rejected": "two"}, "no prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no prompt"),
        ({"prompt": "one", "chosen": "ONE"}, "no column 'rejected'"),
        ({"prompt": "one", "chosen": "ONE", "rejected": None}, "rejected is null"),
        ({"prompt": "one", "chosen": "ONE", "rejected": " "}, "the rejected is empty"),
        ({"prompt": "one", "chosen": "ONE", "rejected": 2}, "rejected is of type int"),
        ({"prompt": "one", "chosen": "ONE", "rejected": "\ud800"}, "not valid Unicode"),
        ({"prompt": 1, "chosen": "ONE", "rejected": "two"}, "the prompt is of type int"),
        ({"prompt": "three", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "other messages than the prompt"),
        ({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD, USER, GOOD]}, "more than the last message"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "more than the last message"),
        ({"chosen": [USER], "rejected": [USER, BAD]}, "chosen ends with the role user"),
        ({"prompt": "one", "chosen": [{**GOOD, "tool_calls": [{}]}], "rejected": "two"}, "tool calls"),
        ({"prompt": "one", "chosen": [{**GOOD, "reasoning_content": "hm"}], "rejected": "two"}, "reasoning is not in"),
        ({"prompt": "one", "completion": "ONE"}, "`shoal sft` trains on rows with one completion"),
        ({"messages": [USER, GOOD]}, "`shoal sft` trains on rows with one completion"),
        ([1], "of type list"),
    ],
)
def test_unusable_rows_are_named_and_counted(tmp_path: Path, row: Any, says: str):
    with collect_row_problems() as problems:
        assert read(tmp_path, row, {"prompt": "one", "chosen": "ONE", "rejected": "two"}) == [WANTED]
    (problem,) = problems
    assert problem.warning and "1 rows used, 1 invalid rows excluded" in problem.text
    assert "rows.jsonl:1: " in problem.text and says in problem.text


def test_pairs_are_not_for_supervised_training(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "one", "chosen": "ONE", "rejected": "two"}\n')
    with pytest.raises(DataError, match="a prompt and a completion; `shoal dpo` trains on chosen and rejected"):
        supervised_tasks(DatasetSpec(str(file)))


def test_no_usable_row(tmp_path: Path):
    with pytest.raises(DataError, match=r"no usable row \(2 bad\)[\s\S]*are equal"):
        read(tmp_path, *[{"prompt": "a", "chosen": "b", "rejected": "b"}] * 2)
