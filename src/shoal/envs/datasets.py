"""Read datasets from files, folders or the Hugging Face hub into tasks for "train" and "eval".

Files are JSONL, JSON, CSV or Parquet. Invalid rows are excluded, counted and reported with file and line; bytes that
are not UTF-8 are reported, never replaced. A dataset without a valid row raises DataError. Called by environments that
take a dataset and by `api`. A resumed run must have the same `fingerprint`.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config.section_rules import DATA_SUFFIXES
from shoal.core.errors import DataError
from shoal.core.protocols import Events
from shoal.core.types import Message, Task

log = logging.getLogger(__name__)

EVAL_SPLITS = ("eval", "test", "validation", "valid", "val", "dev")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """`orch.dataset`. `columns` maps Shoal's names (prompt, answer) to column names; `name` may be "repo:config"."""

    path: str | None = None
    name: str | None = None
    split: str | None = None  # the training split; "train" if unset
    columns: Mapping[str, str] = field(default_factory=dict)
    max_rows: int | None = None


@dataclass(frozen=True)
class DataNotice:
    """What was done with the rows of a data set: a warning if some are invalid, else for information."""

    text: str
    warning: bool

    def record(self, events: Events, note: Callable[[str], None]) -> None:
        if self.warning:
            events.warn("data", self.text)
        else:
            events.emit("data", self.text)
            note(self.text)


@contextmanager
def collect_row_problems() -> Iterator[list[DataNotice]]:
    """Collect what was done with rows; the caller records it once the run directory exists."""
    collected: list[DataNotice] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            collected.append(DataNotice(record.getMessage(), record.levelno >= logging.WARNING))

    listener, level = Listener(logging.INFO), log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        yield collected
    finally:
        log.removeHandler(listener)
        log.setLevel(level)


MakeTask = Callable[[Mapping[str, Any]], Task]


def read_train(spec: DatasetSpec, needed: Sequence[str], make: MakeTask) -> list[Task]:
    """Return all tasks of the training split, with no rows held out."""
    return _tasks(spec, _source(spec, spec.split or "train"), needed, make)


def read_splits(spec: DatasetSpec, needed: Sequence[str], make: MakeTask) -> dict[str, list[Task]]:
    """Return the tasks of train and eval. Without an eval split, the last tenth (at most 256 rows) is held out."""
    train_split = spec.split or "train"
    train = _tasks(spec, _source(spec, train_split), needed, make)
    eval_split = _eval_split(spec, train_split)
    if eval_split is not None:
        return {"train": train, "eval": _tasks(spec, _source(spec, eval_split), needed, make)}
    held_out = min(256, max(1, len(train) // 10)) if len(train) > 1 else 0
    keep = len(train) - held_out
    held = train[keep:]
    held_prompts = {_canonical(task.messages) for task in held}
    trained = [task for task in train[:keep] if _canonical(task.messages) not in held_prompts]
    if train and held and not trained:
        raise DataError(
            f"{spec.path or spec.name}: all {len(train)} rows have the same prompts as the {len(held)} held-out rows; "
            "provide other prompts or a test split"
        )
    if held:
        removed = keep - len(trained)
        some = "1 other row is" if removed == 1 else f"{removed} other rows are"
        same = f"; {some} left out, with the prompt of a held-out row" if removed else ""
        text = "%s: no eval or test split, so the last %d of %d rows are held out for evaluation%s"
        log.info(text, spec.path or spec.name, len(held), len(train), same)
    return {"train": trained, "eval": held}


def to_messages(prompt: Any) -> list[Message]:
    """Convert a prompt column (text, or a list of {role, content}) to messages. Raises DataError for other values."""
    if isinstance(prompt, str):
        _check_text(prompt, "prompt")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"the prompt is {_kind(prompt)}; it must be text or a list of messages")
    for message in prompt:
        if not isinstance(message, dict) or "role" not in message:
            raise DataError("a message needs a role and content")
        if message["role"] not in ROLES:
            raise DataError(f"unknown role {str(message['role'])[:40]!r}; roles are {', '.join(ROLES)}")
        _check_text(message.get("content"), f"{message['role']} message")
    return [dict(message) for message in prompt]


def fingerprint(tasks: Iterable[Task]) -> str:
    """Return the blake2b digest of the messages and data of all tasks, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for task in tasks:
        digest.update(_canonical([task.messages, task.data]))
        digest.update(b"\n")
    return digest.hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _tasks(spec: DatasetSpec, rows: Iterator[RawRow], needed: Sequence[str], make: MakeTask) -> list[Task]:
    tasks: list[Task] = []
    problems: list[tuple[str, str]] = []
    for raw in rows:
        if spec.max_rows is not None and len(tasks) >= spec.max_rows:
            break
        try:
            if raw.row is None:
                raise DataError(raw.problem or "unreadable")
            if is_too_deep(raw.row):
                raise DataError(TOO_DEEP)
            tasks.append(make(_with_columns(raw.row, spec.columns, needed)))
        except DataError as error:
            problems.append((raw.where, str(error)))
    source = spec.path or spec.name
    alike = len(problems) > 1 and len({what for _, what in problems}) == 1
    listed = [("in each of them", problems[0][1])] if alike else problems[:SHOWN_PROBLEMS]
    shown = "".join(f"\n  {where}: {what}" for where, what in listed)
    if not tasks:
        raise DataError(f"{source}: no usable row ({f'{len(problems)} bad' if problems else 'it is empty'}){shown}")
    if problems:
        log.warning("%s: %d rows used, %d invalid rows excluded%s", source, len(tasks), len(problems), shown)
    return tasks


def _with_columns(row: dict[str, Any], columns: Mapping[str, str], needed: Sequence[str]) -> dict[str, Any]:
    """Rename the columns of a row to Shoal's names and check the required ones."""
    mapped = dict(row)
    for name in dict.fromkeys((*needed, *columns)):
        column = columns.get(name, name)
        if column not in row:
            near = difflib.get_close_matches(column, list(map(str, row)), n=1)
            hint = f"nearest is {near[0]!r}" if near else f"columns are {', '.join(map(str, list(row)[:12]))}"
            fix = f"set {name} in dataset.columns to the name of the column"
            raise DataError(f"no column {column!r} for {name}; {hint}; {fix}")
        mapped[name] = row[column]
    for name in needed:
        value = mapped[name]
        if value is None:
            raise DataError(f"{name} is null")
        if isinstance(value, str):
            _check_text(value, name)
        elif name == "prompt":
            to_messages(value)
    return mapped


def _check_text(text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise DataError(f"the {what} is {_kind(text)}, not text")
    if not text.strip():
        raise DataError(f"the {what} is empty")
    check_unicode(text, what)


def check_unicode(text: str, what: str) -> None:
    if "\0" in text:
        raise DataError(f"the {what} contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"the {what} is not valid Unicode (a lone surrogate, or bytes that are not UTF-8)") from None


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _eval_split(spec: DatasetSpec, train_split: str) -> str | None:
    """Return the name of the dataset's own held-out split, None if there is none."""
    if spec.path is None:
        import datasets  # slow to import, and only hub names need it

        available = _from_hub(spec, datasets.get_dataset_split_names)
        return next((name for name in EVAL_SPLITS if name in available and name != train_split), None)
    path = Path(spec.path).expanduser()
    if path.is_dir():
        return next((name for name in EVAL_SPLITS if name != train_split and _split_files(path, name)), None)
    return None


def _source(spec: DatasetSpec, split: str) -> Iterator[RawRow]:
    if (spec.path is None) == (spec.name is None):
        raise DataError("a dataset needs exactly one of path and name")
    if spec.path is None:
        return _hub_rows(spec, split)
    path = Path(spec.path).expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    files = _split_files(path, split) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no {split} file; looked for {', '.join(split + suffix for suffix in DATA_SUFFIXES)}")
    return (row for file in files for row in read_file(file, split))


def _split_files(folder: Path, split: str) -> list[Path]:
    """Return `train.jsonl`, or the shards of a split such as `train-00000-of-00002.parquet`."""
    for suffix in DATA_SUFFIXES:
        whole = folder / f"{split}{suffix}"
        if whole.is_file():
            return [whole]
    return sorted(file for file in folder.glob(f"{split}-*") if file.suffix in DATA_SUFFIXES)


def _hub_rows(spec: DatasetSpec, split: str) -> Iterator[RawRow]:
    import datasets

    rows = _from_hub(spec, lambda name, config: datasets.load_dataset(name, config, split=split))
    return (RawRow(f"{spec.name}[{split}]:row {number}", dict(row)) for number, row in enumerate(rows, start=1))


def _from_hub(spec: DatasetSpec, read: Callable[[str, str | None], Any]) -> Any:
    name, _, config = str(spec.name).partition(":")
    try:
        return read(name, config or None)
    except Exception as error:  # the hub client has many exception types; all mean that the data is unavailable
        first_line = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise DataError(
            f"dataset {spec.name!r} cannot be loaded: {first_line}. Without a network, set the path of a local copy "
            "(orch.dataset.path, or dataset.path of shoal sft)"
        ) from error


PAIR = {"chosen", "rejected"}


def supervised_tasks(spec: DatasetSpec) -> list[Task]:
    """Return tasks for supervised training; `data["completion"]` is the target text. An eval split is not used."""
    splits = read_splits(spec, (), _task)
    has_eval_split = _eval_split(spec, spec.split or "train") is not None
    return splits["train"] if has_eval_split else [*splits["train"], *splits["eval"]]


def _task(row: Mapping[str, Any]) -> Task:
    if row.get("messages") is None:
        messages, completion = to_messages(row.get("prompt")), row.get("completion")
    else:
        messages = to_messages(row["messages"])
        _check_answer(messages[-1], "messages")
        completion = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not isinstance(completion, str) or not messages:
        other = "; `shoal dpo` trains on chosen and rejected" if row.keys() >= PAIR else ""
        raise DataError(f"a row needs messages that end with an assistant message, or a prompt and a completion{other}")
    check_unicode(completion, "completion")
    return Task(messages, {"completion": completion})


def preference_tasks(spec: DatasetSpec) -> list[Task]:
    """Return tasks for preference training; `data` has the texts `chosen` and `rejected`."""
    return read_train(spec, (), _pair)


def _pair(row: Mapping[str, Any]) -> Task:
    """Each side is a text, or messages that end with the answer. Messages that both start with are the prompt."""
    if not PAIR & row.keys() and {"messages", "completion"} & row.keys():
        raise DataError("a row needs chosen and rejected; `shoal sft` trains on rows with one completion")
    row = _with_columns(dict(row), {}, sorted(PAIR))
    chosen, rejected = (_side(row[name], name) for name in ("chosen", "rejected"))
    prompt = to_messages(row["prompt"]) if row.get("prompt") is not None else []
    shared = chosen[:-1]
    answers = {name: str(side[-1]["content"]) for name, side in (("chosen", chosen), ("rejected", rejected))}
    if shared != rejected[:-1]:
        raise DataError("chosen and rejected differ in more than the last message")
    if answers["chosen"] == answers["rejected"]:
        raise DataError("chosen and rejected are equal")
    if shared and prompt and shared != prompt:
        raise DataError("chosen and rejected start with other messages than the prompt")
    if not (shared or prompt):
        raise DataError("there is no prompt; add a column prompt, or start chosen and rejected with the same messages")
    return Task(shared or prompt, answers)


def _side(value: Any, name: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if not isinstance(value, list):
        raise DataError(f"{name} is {_kind(value)}; it must be text or a list of messages")
    messages = to_messages(value)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{name} ends with the role {messages[-1]['role']}, not with an assistant message")
    _check_answer(messages[-1], name)
    return messages


def _check_answer(message: Message, name: str) -> None:
    """Only the content of an answer is trained, so an answer with other parts would lose them."""
    if message.get("tool_calls"):
        raise DataError(f"{name} ends with tool calls, which are not supported")
    if message.get("reasoning_content") or message.get("thinking"):
        raise DataError(
            f"{name} ends with an answer whose reasoning is not in its content; write it into the content, as the "
            "model does (such as <think>…</think>)"
        )


MAX_ROW_BYTES = 16 * 2**20
MAX_ROW_LEVELS = 100  # of nested lists and objects; JSON writers fail at about 1,000
TOO_DEEP = f"nested over {MAX_ROW_LEVELS} levels deep"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a file: `row`, or the `problem` with reading it."""

    where: str  # file:line
    row: dict[str, Any] | None = None
    problem: str | None = None


def read_file(path: Path, split: str) -> Iterator[RawRow]:
    """Read a file according to its suffix. `split` selects a list in a JSON file that contains several."""
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    suffix = path.suffix.lower()
    try:
        if suffix == ".json":
            yield from _read_json(path, split)
        elif suffix in readers:
            yield from readers[suffix](path)
        else:
            raise DataError(f"{path}: cannot read {suffix or 'a file without suffix'}; use {', '.join(DATA_SUFFIXES)}")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        # Split on \n only: str.splitlines would also split at U+2028, which JSON strings may contain.
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = _without_bom(line, path)
            if line.strip():
                yield _parse(line, f"{path}:{number}")


def _without_bom(data: bytes, path: Path) -> bytes:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: this is UTF-16; save it as UTF-8")
    return data.removeprefix(b"\xef\xbb\xbf")


def _parse(line: bytes, where: str) -> RawRow:
    if len(line) > MAX_ROW_BYTES:
        return RawRow(where, problem=f"a row of {len(line):,} bytes; the limit is {MAX_ROW_BYTES:,}")
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return RawRow(where, problem=f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return RawRow(where, problem=f"not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return RawRow(where, problem=f"not JSON: {error}")
    except RecursionError:
        return RawRow(where, problem=TOO_DEEP)
    return _object(row, where)


def _object(row: Any, where: str) -> RawRow:
    if not isinstance(row, dict):
        return RawRow(where, problem=f"the row is of type {type(row).__name__}, not an object with columns")
    return RawRow(where, row)


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested so deep that the row could be read, but not always written."""
    level = [value]
    for _ in range(MAX_ROW_LEVELS):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _read_json(path: Path, split: str) -> Iterator[RawRow]:
    try:
        content = json.loads(_without_bom(path.read_bytes(), path).decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{path}: a row is {TOO_DEEP}; remove it") from error
    if isinstance(content, dict):
        content = next((content[key] for key in (split, "data") if isinstance(content.get(key), list)), None)
    if not isinstance(content, list):
        raise DataError(f"{path}: needs a list of objects, or an object with a list under {split!r} or 'data'")
    for number, row in enumerate(content, start=1):
        yield _object(row, f"{path}:item {number}")


def _read_csv(path: Path) -> Iterator[RawRow]:
    # surrogateescape turns invalid bytes into lone surrogates, which the row checks report.
    text = _without_bom(path.read_bytes(), path).decode("utf-8", "surrogateescape")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield RawRow(f"{path}:{reader.line_num}", problem=str(error))
            continue
        if row is None:
            return
        where = f"{path}:{reader.line_num}"
        if None in row:
            yield RawRow(where, problem="more cells than columns in the header")
        else:
            yield RawRow(where, dict(row))


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow.parquet as parquet  # slow to import, and only this format needs it

    try:
        table = parquet.read_table(path)
        for number, row in enumerate(table.to_pylist(), start=1):
            yield RawRow(f"{path}:row {number}", row)
    except OSError:
        raise
    except Exception as error:  # pyarrow has its own exception types for broken files and encodings
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
