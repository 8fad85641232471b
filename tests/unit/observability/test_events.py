"""What the parts below the loop warn of reaches the run, and telling never ends what was told about."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from shoal.observability.events import EventLog, told_from_below


class Store:
    def __init__(self, error: Exception | None = None) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.error = error

    def append_event(self, record: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.records.append(record)


def test_warnings_from_below_are_events() -> None:
    store = Store()
    with told_from_below(EventLog(store)):
        logging.getLogger("shoal.engine.engine").warning("decoding without graphs: %s", "why")
        logging.getLogger("shoal.trainer.sft").info("nothing to tell")
        logging.getLogger("shoal.transport.broadcast").warning("has its own ways")
    logging.getLogger("shoal.engine.engine").warning("nobody listens any more")
    assert [(r["kind"], r["level"], r["message"]) for r in store.records] == [
        ("slower", "warning", "decoding without graphs: why")
    ]


def test_a_full_disk_is_not_the_engines_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with told_from_below(EventLog(Store(OSError("full")))):
        logging.getLogger("shoal.engine.engine").warning("decoding without graphs")
