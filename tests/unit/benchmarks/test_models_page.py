"""docs/models.md equals the page generated from the recorded results of `make test-models`."""

from __future__ import annotations

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
    assert models_page.PAGE.read_text("utf-8") == models_page.recorded_page(), "run python benchmarks/models_page.py"


def test_result_in_vllm(models_page: Any) -> None:
    def told(**kinds: Any) -> str:
        return models_page.in_vllm({"family": "f", **kinds})

    equal = {"dtype": "float32", "logprob_gap": 2e-6, "logprob_gap_mean": 1e-6}
    bf16 = {"dtype": "bfloat16", "logprob_gap": 0.2, "logprob_gap_mean": 0.02}
    assert told(full=equal) == told(full=equal, merged=equal) == "equal"
    assert told(full=bf16) == "equal (bf16)"
    assert "0.2" in told(full={**bf16, "dtype": "float32"}), "not equal in fp32"
    mixed = told(full=equal, merged={"error": "ValueError: too small. See the log"})
    assert mixed == "full: equal; merged LoRA: not loaded: too small"
    assert told(not_exported="x") == models_page.in_vllm(None) == ""


def test_family_names_the_detected_format(models_page: Any) -> None:
    works = {"status": "works", "path": "modules"}
    assert models_page.group_of(works) == models_page.MODULES
    assert models_page.group_of(works | {"path": "fused"}) == models_page.FUSED
    assert models_page.group_of(works | {"unverified": "sinks"}) == models_page.CPU_ONLY
    assert models_page.group_of({"status": "refused", "reason": "it has indexed layers"}).startswith("refused: indexed")
    assert models_page.group_of({"status": "not built", "reason": ""}) is None
