"""Rows for supervised training: both spellings, and a held-out split that stays held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.core.errors import DataError
from shoal.envs.datasets import DatasetSpec, supervised_tasks


def write(file: Path, *rows: dict) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def test_messages_and_prompt_with_completion(tmp_path: Path):
    answer = {"role": "assistant", "content": "ONE"}
    write(
        tmp_path / "rows.jsonl",
        {"messages": [{"role": "user", "content": "one"}, answer]},
        {"prompt": "two", "completion": "TWO"},
    )
    tasks = supervised_tasks(DatasetSpec(str(tmp_path / "rows.jsonl")))
    assert [(task.messages[0]["content"], task.data["completion"]) for task in tasks] == [
        ("one", "ONE"),
        ("two", "TWO"),
    ]


@pytest.mark.parametrize("home", [False, True])
def test_test_split_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: bool):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", {"prompt": "a", "completion": "A"})
    write(folder / "test.jsonl", {"prompt": "b", "completion": "B"})
    monkeypatch.setenv("HOME", str(tmp_path))
    tasks = supervised_tasks(DatasetSpec("~/data" if home else str(folder)))
    assert [task.data["completion"] for task in tasks] == ["A"]


def test_row_without_an_answer_is_not_usable(tmp_path: Path):
    write(tmp_path / "rows.jsonl", {"messages": [{"role": "user", "content": "one"}]})
    with pytest.raises(DataError, match="end with an assistant"):
        supervised_tasks(DatasetSpec(str(tmp_path / "rows.jsonl")))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"reasoning_content": "1 + 1 is 2"}, "reasoning is not in its content; write it into the content"),
        ({"thinking": "1 + 1 is 2"}, "reasoning is not in its content; write it into the content"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}, "tool calls, which are not supported"),
    ],
)
def test_partial_answer_is_not_lost_silently(tmp_path: Path, part: dict, says: str):
    messages = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2", **part}]
    write(tmp_path / "rows.jsonl", {"messages": messages})
    with pytest.raises(DataError, match=says):
        supervised_tasks(DatasetSpec(str(tmp_path / "rows.jsonl")))


def test_non_text_completion_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = [{"prompt": "a", "completion": "A"}, {"prompt": "b", "completion": "\ud800"}]
    write(tmp_path / "rows.jsonl", *rows)
    tasks = supervised_tasks(DatasetSpec(str(tmp_path / "rows.jsonl")))
    assert [task.data["completion"] for task in tasks] == ["A"]
    assert "rows.jsonl:2: the completion is not valid Unicode (a lone surrogate" in caplog.text
