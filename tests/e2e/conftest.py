"""One warm Python and one pre-trained tiny model for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .helpers.models import make_raw_model, warm_up, write_tasks
from .helpers.processes import WarmPython
from .helpers.runs import Run, base_config
from .helpers.split import InOne, colocated_config, compared, split_config


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    python = WarmPython()
    yield python
    python.close()


@pytest.fixture(scope="session")
def raw_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_raw_model(tmp_path_factory.mktemp("models") / "raw")


@pytest.fixture(scope="session")
def tasks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("data") / "tasks.jsonl")


@pytest.fixture(scope="session")
def model(warm: WarmPython, raw_model: Path, tasks_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_up(warm, raw_model, tasks_file, tmp_path_factory.mktemp("warm-up"))


@pytest.fixture
def new_run(warm: WarmPython, model: Path, tmp_path: Path) -> Callable[..., Run]:
    """new_run(name, train={...}, orch={...}): a folder with run.yaml. Starts nothing."""

    def make(name: str = "run", **sections: dict[str, Any]) -> Run:
        config = base_config(model)
        for section, values in sections.items():
            config.setdefault(section, {}).update(values)
        return Run(tmp_path / name, warm).write(config)

    return make


@pytest.fixture(scope="session")
def in_one(tmp_path_factory: pytest.TempPathFactory, warm: WarmPython, model: Path) -> InOne:
    """The result of the same run in one process, computed once per configuration."""
    known: dict[str, dict[str, Any]] = {}

    def compute(**changes: Any) -> dict[str, Any]:
        key = repr(changes)
        if key not in known:
            config = colocated_config(split_config(model, **changes))
            run = Run(tmp_path_factory.mktemp("in-one"), warm).write(config)
            command = run.grpo()
            assert command.wait() == 0, command.text()
            known[key] = compared(run)
        return known[key]

    return compute
