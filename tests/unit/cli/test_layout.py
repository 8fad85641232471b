"""The arguments of the three processes of `shoal grpo --layout split`."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.grpo import _implied
from shoal.config.load import load_run, load_section
from shoal.config.resolve import resolve_run

FILE = """
train: {model: m, max_steps: 4, sequence_len: 128}
orch: {env: [{id: reverse-text}], max_steps: 4}
"""


@pytest.mark.parametrize(
    ("override", "train", "orch"),
    [
        ("orch.max_steps=9", (9, None), 9),
        ("train.max_steps=9", (9, None), 9),
        ("train.epochs=2", (None, 2), None),
    ],
)
def test_length_from_the_command_line_applies_to_all_components(
    override: str, train: tuple[int | None, int | None], orch: int | None, tmp_path: Path
):
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    given = load_run(str(file), overrides=[override]).config
    told = _implied(given, resolve_run(given))
    section = {name: load_section(name, str(file), told[name]).config for name in ("train", "orch")}
    assert (section["train"].max_steps, section["train"].epochs) == train
    assert section["orch"].max_steps == orch
