"""Names the example classes of the classic release's own tests, so that `load_environment` finds them unchanged."""

from datasets import Dataset

from conftest import BasicToolEnv, SimpleMultiTurnEnv  # type: ignore[attr-defined]  # of the release's tests
from verifiers import Parser, Rubric, SingleTurnEnv  # type: ignore[attr-defined]


def says(completion, answer, **_):
    return float(answer in str(completion[-1]["content"]))


def letters(completion, **_):
    text = str(completion[-1]["content"])
    return sum(character.islower() for character in text) / max(len(text), 1)


def load_environment(kind="single", reward="says", **settings):
    rows = {"question": ["What is 2 + 2?", "Name the capital of France."], "answer": ["4", "Paris"]}
    kinds = {"single": SingleTurnEnv, "multi": SimpleMultiTurnEnv, "tools": BasicToolEnv}
    rubric = Rubric(funcs=[{"says": says, "letters": letters}[reward]], weights=[1.0])
    return kinds[kind](dataset=Dataset.from_dict(rows), parser=Parser(), rubric=rubric, **settings)
