"""Every architecture works or is refused with a reason: `make test-models`. Ten families are part of `make test`.

A complete run writes benchmarks/results/models.json, which is the source of docs/models.md and of a table in the
README. A family that worked in the recorded run must still work.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from models.check import check
from models.families import FAMILIES

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "models.json"
TEN = ("llama", "qwen3", "gemma2", "phi3", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_oss", "lfm2", "qwen3_5_text")
GOOD = ("works", "refused", "not built")


def _recorded() -> dict[str, str]:
    rows = json.loads(RECORDED.read_text("utf-8"))["families"] if RECORDED.exists() else []
    return {row["family"]: row["status"] for row in rows}


def _chosen() -> list[str]:
    """All families, or the tenth that SHOAL_MODELS_TENTH selects."""
    tenth = os.environ.get("SHOAL_MODELS_TENTH", "")
    shuffled = random.Random(0).sample(FAMILIES, len(FAMILIES))
    return sorted(shuffled[int(tenth) % 10 :: 10]) if tenth else list(FAMILIES)


@pytest.mark.models
@pytest.mark.parametrize("family", _chosen())
def test_family_works_or_is_refused(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    finding = check(family, tmp_path)
    record_property("finding", finding.as_dict())
    assert finding.status in GOOD, finding.reason
    if _recorded().get(family) == "works":
        assert finding.status == "works", finding.reason


@pytest.mark.parametrize("family", TEN)
def test_ten_families(family: str, tmp_path: Path) -> None:
    finding = check(family, tmp_path)
    assert (finding.status, finding.lora) == ("works", "works"), finding.reason
