"""The catalogue and the losses say the same, and a knob that is not used is refused (identity 7)."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from shoal.algorithms.losses import LOSSES
from shoal.algorithms.losses.masked import Masked
from shoal.algorithms.terms import CORRECTIONS
from shoal.config.catalogue import CORRECTION_CATALOGUE, LOSS_CATALOGUE

EVERY_KNOB = sorted({param.name for spec in LOSS_CATALOGUE.values() for param in spec.params})
DOCS = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_names_agree() -> None:
    assert list(LOSSES) == list(LOSS_CATALOGUE)
    assert LOSSES["ppo"] is LOSSES["grpo"] and LOSS_CATALOGUE["ppo"] is LOSS_CATALOGUE["grpo"]
    assert len({spec.name for spec in LOSS_CATALOGUE.values()}) == 11
    assert {"none", *CORRECTIONS} == set(CORRECTION_CATALOGUE)


@pytest.mark.parametrize("name", LOSSES)
def test_parameters_and_defaults_agree(name: str) -> None:
    assert {f.name: f.default for f in fields(LOSSES[name])} == LOSS_CATALOGUE[name].defaults  # type: ignore[arg-type]
    assert LOSSES[name](**LOSS_CATALOGUE[name].resolve({})) is not None


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_parameters_agree(name: str) -> None:
    assert {f.name: f.default for f in fields(CORRECTIONS[name])} == CORRECTION_CATALOGUE[name].defaults


@pytest.mark.parametrize("name", LOSSES)
def test_a_knob_of_another_loss_is_refused(name: str) -> None:
    own = LOSS_CATALOGUE[name].defaults
    for knob in EVERY_KNOB:
        problems = LOSS_CATALOGUE[name].problems({knob: 1.0})
        if knob not in own:
            assert problems == {knob: f"is not used by {LOSS_CATALOGUE[name].name}"}


def test_flags() -> None:
    unique = {spec.name: spec for spec in LOSS_CATALOGUE.values()}
    assert {n for n, s in unique.items() if s.takes_kl} == {"grpo", "reinforce", "importance_sampling"}
    assert {n for n, s in unique.items() if not s.takes_correction} == {"reinforce", "decoupled", "masked", "dppo"}
    assert {n for n, s in unique.items() if s.needs_old} == {"gspo", "decoupled"}
    assert {n for n, s in unique.items() if s.default_advantage_std == "none"} == {"masked"}
    assert {n for n, s in unique.items() if s.default_aggregation != "token-mean"} == {"gspo"}
    assert Masked().default_aggregation == "token-mean"
    assert Masked(ratio_type="sequence").default_aggregation == "seq-mean-token-mean"
    assert LOSSES["gspo"]().default_aggregation == "seq-mean-token-mean"


@pytest.mark.parametrize(
    ("name", "given", "knob"),
    [
        ("grpo", {"clip_low": 1.5}, "clip_low"),
        ("grpo", {"clip_high": 0.0}, "clip_high"),
        ("grpo", {"clip_low": math.nan}, "clip_low"),
        ("grpo", {"clip_low": True}, "clip_low"),
        ("grpo", {"clip_low": "a lot"}, "clip_low"),
        ("dapo", {"dual_clip": 1.0}, "dual_clip"),
        ("dapo", {"clip_high": None}, "clip_high"),
        ("reinforce", {"ratio": "off"}, "ratio"),
        ("importance_sampling", {"ratio_low": 1.0, "ratio_high": 1.0}, "ratio_low"),
        ("masked", {"token_mask_low": 9.0}, "token_mask_low"),
        ("masked", {"sequence_clip_high": 5.0}, "sequence_clip_high"),
        ("decoupled", {"cap": 0.5}, "cap"),
    ],
)
def test_values_that_cannot_work_are_refused(name: str, given: dict, knob: str) -> None:
    assert list(LOSS_CATALOGUE[name].problems(given)) == [knob]
    with pytest.raises(ValueError, match=f"{name}: {knob}"):
        LOSSES[name](**given)


def test_what_is_fine_is_not_refused() -> None:
    assert LOSS_CATALOGUE["masked"].problems({"sequence_clip_high": 5.0, "ratio_type": "sequence"}) == {}
    assert LOSS_CATALOGUE["importance_sampling"].problems({"ratio_low": None}) == {}
    assert LOSS_CATALOGUE["grpo"].resolve({"clip_low": 0.3})["clip_high"] == 0.3


def shown(value: object) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def test_the_page_lists_every_knob_as_it_is() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", DOCS.read_text(), flags=re.M))
    expected = {
        (spec.name, p.name, p.same_as or shown(p.default), p.range_text.replace(" | ", ", "))
        for spec in (*LOSS_CATALOGUE.values(), *CORRECTION_CATALOGUE.values())
        for p in spec.params
    }
    assert rows == expected
