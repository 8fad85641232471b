"""Records the results of a complete run of `make test-models`."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import transformers

from models.families import FAMILIES

_FINDINGS: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    found = dict(report.user_properties).get("finding")
    if report.when == "call" and isinstance(found, dict):
        _FINDINGS[str(found["family"])] = found


def pytest_sessionfinish() -> None:
    if set(_FINDINGS) != set(FAMILIES):
        return
    from models.test_families import RECORDED

    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    rows = [_FINDINGS[family] for family in FAMILIES]
    result = {"versions": versions, "threads": os.environ.get("OMP_NUM_THREADS"), "families": rows}
    RECORDED.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
