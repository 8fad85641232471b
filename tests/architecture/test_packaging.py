"""All files pin the same versions, and the package contains the files that it needs at run time."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=\[; ]", requirement)[0].lower().replace("_", "-")


def test_uv_has_the_same_pins():
    assert PYPROJECT["tool"]["uv"]["constraint-dependencies"] == PINS


def test_every_direct_dependency_is_pinned():
    project = PYPROJECT["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    missing = {name_of(item) for item in needed} - {name_of(pin) for pin in PINS}
    assert not missing
    assert "torch==2.13.0" in PINS


def test_pyproject_holds_ranges_not_pins():
    assert not [item for item in PYPROJECT["project"]["dependencies"] if "==" in item]
    assert PYPROJECT["project"]["requires-python"] == ">=3.11"


def test_example_files_match_the_packaged_ones():
    for file in (ROOT / "examples" / "grpo").glob("*.yaml"):
        assert (ROOT / "src" / "shoal" / "examples_data" / "grpo" / file.name).read_bytes() == file.read_bytes()
