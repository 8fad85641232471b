"""Names of models: local paths are refused without a request to the hub, with the nearest existing path."""

from pathlib import Path

import pytest

from shoal.config.model_names import model_problem, similar_path
from shoal.config.orch import OrchConfig
from shoal.config.problems import dotted
from shoal.config.rules import check_section


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("models/tiny", "outputs/run/final"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "models" / "small.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        ("./modles/tiny", 'did you mean "models/tiny"?'),
        ("outputs/rn/final", 'did you mean "outputs/run/final"?'),
        ("outputs/run/last", 'folder is "outputs/run"'),
        ("models/tny", 'did you mean "models/tiny"?'),
        ("models/smal.gguf", 'did you mean "models/small.gguf"?'),
        ("~/models/tny", "models/tiny"),
        ("./qqqqqq", "make-model"),
        ("qqqqqq.gguf", "make-model"),
        ("~nobody-of-this-name/model", "make-model"),
        ("models/" + "a" * 300, 'folder is "models"'),
    ],
)
def test_missing_path_names_the_nearest_one(model: str, remedy: str):
    problem = model_problem(model)
    assert problem is not None and "does not exist" in problem[0] and remedy in problem[1]


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B", "modles/tiny", "models/tiny", "./models/small.gguf"])
def test_hub_ids_and_existing_paths(model: str):
    assert model_problem(model) is None


def test_absolute_path(tmp_path: Path):
    assert str(tmp_path / "models" / "tiny") in str(similar_path(str(tmp_path / "model" / "tiny")))
    assert similar_path("/qqqqqq/tiny") is None


def test_sections_of_the_split_layout():
    section = OrchConfig.model_validate({"env": [{"id": "arithmetic"}], "model": {"name": "./modles/tiny"}})
    assert [dotted(problem.path) for problem in check_section(section).errors] == ["orch.model.name"]


def test_long_paths_are_not_shortened(tmp_path: Path):
    folder = tmp_path / ("a" * 90) / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert similar_path(str(folder.parent / "tny")) == f'did you mean "{folder}"?'
