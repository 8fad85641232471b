"""The run directory as processes other than the main one have it: they may know where it is, and write nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class FollowerRunDir:
    """Takes the place of a RunDir. What would be written is written once, by the main process."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.status: dict[str, Any] = {}

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def write_status(self, *_: Any, **__: Any) -> None: ...

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def amend_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def append_journal(self, step: int, record: Mapping[str, Any]) -> None: ...

    def append_event(self, record: Mapping[str, Any]) -> None: ...

    def write_rollouts(self, step: int, rollouts: Iterable[Mapping[str, Any]]) -> None: ...

    def free_if_untouched(self) -> bool:
        return True

    @contextmanager
    def checkpoint(self, step: int, *, version: int | None = None) -> Iterator[Path]:
        raise RuntimeError("only the main process writes checkpoints")
        yield self.path

    def close(self) -> None: ...

    def __enter__(self) -> FollowerRunDir:
        return self

    def __exit__(self, *_: object) -> None: ...
