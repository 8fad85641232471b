"""Real datasets: broken rows are counted and reported, and nothing is replaced silently."""

import csv
import json
import os
import re
from pathlib import Path

import pytest

from shoal.core.errors import DataError
from shoal.core.types import Task
from shoal.envs.datasets import DatasetSpec, collect_row_problems, fingerprint, read_splits, to_messages
from shoal.envs.registry import load_environment


def make(row) -> Task:
    return Task(to_messages(row["prompt"]), {"answer": row.get("answer")})


def read(path, **spec) -> dict[str, list[Task]]:
    return read_splits(DatasetSpec(path=str(path), **spec), ("prompt", "answer"), make)


def prompts(tasks: list[Task]) -> list[str]:
    return [task.messages[-1]["content"] for task in tasks]


ROWS = [{"prompt": f"q{n} é", "answer": str(n)} for n in range(20)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_format_gives_the_same_tasks(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode())
    elif suffix == "json":
        path.write_text(json.dumps({"train": ROWS}))
    elif suffix == "csv":
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    splits = read(path)
    assert prompts(splits["train"]) == [row["prompt"] for row in ROWS[:18]]
    assert prompts(splits["eval"]) == [row["prompt"] for row in ROWS[18:]]


BAD_LINES = [
    (b"{not json", "not JSON"),
    (b'{"prompt": "a\x00b", "answer": "1"}', "not JSON"),
    (b'{"prompt": "a\\u0000b", "answer": "1"}', "NUL"),
    (b'{"prompt": "\xff\xfe", "answer": "1"}', "not UTF-8 at byte 12"),
    (b'{"prompt": "\\ud800", "answer": "1"}', "lone surrogate"),
    (b'{"prompt": null, "answer": "1"}', "prompt is null"),
    (b'{"prompt": "  ", "answer": "1"}', "prompt is empty"),
    (b'{"prompt": 7, "answer": "1"}', "of type int"),
    (b'{"promt": "x", "answer": "1"}', "no column 'prompt' for prompt; nearest is 'promt'"),
    (b'{"prompt": "x", "answer": null}', "answer is null"),
    (b'{"prompt": [{"role": "robot", "content": "x"}], "answer": "1"}', "unknown role 'robot'"),
    (b'{"prompt": [{"role": "user", "content": null}], "answer": "1"}', "user message is null"),
    (b'{"prompt": [{"content": "x"}], "answer": "1"}', "needs a role"),
    (b'{"prompt": [], "answer": "1"}', "text or a list of messages"),
    (b'{"prompt": "x", "answer": NaN}', "NaN is not a JSON number"),
    (b'["prompt"]', "of type list"),
    (b"[" * 100_000, "nested over 100 levels"),
]


@pytest.mark.parametrize("line, reason", BAD_LINES, ids=[reason for _, reason in BAD_LINES])
def test_bad_row_is_skipped_and_reported(tmp_path, caplog, line, reason):
    path = tmp_path / "rows.jsonl"
    good = b'{"prompt": "q", "answer": "1"}'
    path.write_bytes(b"\n".join([good, b"", line, good.replace(b"q", b"r")]))
    splits = read(path)
    assert prompts(splits["train"] + splits["eval"]) == ["q", "r"]
    assert "2 rows used, 1 invalid rows" in caplog.text
    assert f"{path}:3: " in caplog.text and reason in caplog.text


@pytest.mark.parametrize("line, reason", BAD_LINES, ids=[reason for _, reason in BAD_LINES])
def test_only_bad_rows_is_an_error(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line)
    with pytest.raises(DataError, match=re.escape(reason)) as caught:
        read(path)
    assert caught.value.exit_code == 2
    assert "no usable row (1 bad)" in str(caught.value)


def test_missing_column_is_reported_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n' * 3)
    with pytest.raises(DataError) as caught:
        read(path)
    first, second = str(caught.value).splitlines()
    assert "no usable row (3 bad)" in first
    assert second.strip() == (
        "in each of them: no column 'prompt' for prompt; columns are question, answer; "
        "set prompt in dataset.columns to the name of the column"
    )


def test_row_over_the_limit_is_skipped(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("shoal.envs.datasets.MAX_ROW_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q" * 200, "answer": "1"}, {"prompt": "q", "answer": "1"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert prompts(read(path)["train"]) == ["q"]
    assert "the limit is 100" in caplog.text


def test_csv_rows_with_bad_bytes_or_cells(tmp_path, caplog):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'prompt,answer\r\nq,1\r\n\xff,2\r\nr,3,4\r\ns\r\n"two\nlines",5\r\n')
    splits = read(path)
    assert prompts(splits["train"] + splits["eval"]) == ["q", "two\nlines"]
    assert "rows.csv:3: the prompt is not valid Unicode" in caplog.text
    assert "rows.csv:4: more cells than columns" in caplog.text
    assert "rows.csv:5: answer is null" in caplog.text


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("rows.jsonl", b"", "no usable row (it is empty)"),
        ("rows.jsonl", '{"a": 1}'.encode("utf-16"), "UTF-16"),
        ("rows.json", b"{", "not JSON"),
        ("rows.json", b'{"rows": []}', "needs a list of objects"),
        ("rows.json", b"\xff", "not UTF-8"),
        ("rows.parquet", b"PAR1nothing", "not a readable Parquet file"),
        ("rows.txt", b"x", "cannot read .txt"),
    ],
)
def test_unreadable_files(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(words)):
        read(tmp_path / name)


def test_missing_files_and_splits(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no train file"):
        read(tmp_path)
    with pytest.raises(DataError, match="exactly one of path and name"):
        read_splits(DatasetSpec(), ("prompt",), make)


def test_folder_with_its_own_eval_split_and_shards(tmp_path):
    for name, rows in (("train-00001-of-00002", ROWS[5:9]), ("train-00000-of-00002", ROWS[:5]), ("test", ROWS[9:12])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    splits = read(tmp_path)
    assert prompts(splits["train"]) == [row["prompt"] for row in ROWS[:9]]
    assert prompts(splits["eval"]) == [row["prompt"] for row in ROWS[9:12]]


def test_columns_and_max_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"q": f"q{n}", "a": n, "extra": 1}) for n in range(10)))
    splits = read(path, columns={"prompt": "q", "answer": "a"}, max_rows=4)
    assert prompts(splits["train"]) == ["q0", "q1", "q2"]
    assert splits["eval"][0].data == {"answer": 3}


def test_held_out_prompt_is_not_trained_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": "1"}) for p in ["a", "b", "c", "a"]))
    splits = read(path)
    assert (prompts(splits["train"]), prompts(splits["eval"])) == (["b", "c"], ["a"])
    path.write_text('{"prompt": "a", "answer": "1"}\n' * 4)
    with pytest.raises(DataError, match=r"all 4 rows have the same prompts"):
        read(path)


def test_fingerprint_detects_every_change():
    base = [make(row) for row in ROWS]
    changed = [*base[:-1], Task(base[-1].messages, {"answer": "20"})]
    marks = {fingerprint(tasks) for tasks in (base, changed, base[:-1], base[::-1])}
    assert len(marks) == 4
    assert fingerprint(base) == fingerprint([make(row) for row in ROWS])


def test_held_out_rows_and_removed_duplicates_are_reported(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"q{n % 18}", "answer": str(n)} for n in range(20)]  # the last two equal the first two
    file.write_text("\n".join(map(json.dumps, rows)))
    with collect_row_problems() as found:
        splits = read_splits(DatasetSpec(path=str(file)), ("prompt", "answer"), make)
    assert (len(splits["train"]), len(splits["eval"])) == (16, 2)
    (notice,) = found
    assert not notice.warning and "the last 2 of 20 rows" in notice.text and "2 other rows" in notice.text


@pytest.mark.shared
@pytest.mark.skipif("SHOAL_SHARED" not in os.environ, reason="SHOAL_SHARED is not set")
def test_all_of_gsm8k():
    folder = Path(os.environ["SHOAL_SHARED"]) / "data" / "gsm8k"
    environment = load_environment("gsm8k", {"path": str(folder)})
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert (len(train), len(held_out)) == (7473, 1319)
    for split, file, with_comma in ((train, "train", 79), (held_out, "test", 14)):
        rows = [json.loads(line) for line in (folder / f"{file}.jsonl").open(encoding="utf-8")]
        assert sum("," in row["answer"].split("####")[1] for row in rows) == with_comma
        for row, task in zip(rows, split, strict=True):
            number = int(row["answer"].split("####")[1].replace(",", ""))
            assert int(task.data["answer"]) == number
            answers = {f"\\boxed{{{number:,}}}": 1.0, f"The answer is {number}.": 1.0, f"#### {number + 1}": 0.0}
            for answer, reward in answers.items():
                assert environment.reward(task, [{"role": "assistant", "content": answer}]) == reward
    assert not {t.messages[0]["content"] for t in train} & {t.messages[0]["content"] for t in held_out}


def test_data_set_by_name_through_the_datasets_library(tmp_path, monkeypatch, caplog):
    """`name` is passed to datasets.load_dataset: here a local folder, with its own column names."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "pairs"
    folder.mkdir()
    rows: list[dict[str, str | None]] = [{"q": f"q{n}", "a": str(n)} for n in range(6)]
    rows[2]["q"] = None
    for split, part in (("train", rows[:4]), ("test", rows[4:])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
    spec = DatasetSpec(name=str(folder), columns={"prompt": "q", "answer": "a"})
    splits = read_splits(spec, ("prompt", "answer"), make)
    assert prompts(splits["train"]) == ["q0", "q1", "q3"] and prompts(splits["eval"]) == ["q4", "q5"]
    assert "3 rows used, 1 invalid rows" in caplog.text and "[train]:row 3: prompt is null" in caplog.text
    with pytest.raises(DataError, match=r"orch\.dataset\.path, or dataset\.path of shoal sft"):
        read_splits(DatasetSpec(name="no/such-data-set"), ("prompt",), make)
