"""docs/models.md equals the page generated from the recorded results of `make test-models`."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from support.pages import ROOT


@pytest.fixture
def models_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import models_page

    yield models_page
    for name in ("models_page", "readme_tables", "performance_tables"):
        sys.modules.pop(name, None)


def test_page_is_current(models_page: Any) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text("utf-8"))
    assert models_page.PAGE.read_text("utf-8") == models_page.page(result), "run python benchmarks/models_page.py"


def test_family_names_the_detected_format(models_page: Any) -> None:
    works = {"status": "works", "path": "modules"}
    assert models_page.group_of(works) == models_page.MODULES
    assert models_page.group_of(works | {"path": "fused"}) == models_page.FUSED
    assert models_page.group_of(works | {"unverified": "sinks"}) == models_page.CPU_ONLY
    assert models_page.group_of({"status": "refused", "reason": "it has indexed layers"}).startswith("refused: indexed")
    assert models_page.group_of({"status": "not built", "reason": ""}) is None
