"""Exports the example classes of the tests of verifiers 0.x, so that `load_environment` finds them unchanged."""

from datasets import Dataset

import verifiers as vf
from conftest import BasicToolEnv, SimpleMultiTurnEnv  # type: ignore[attr-defined]  # of the release's tests
from verifiers import Parser, Rubric, SingleTurnEnv  # type: ignore[attr-defined]


def says(completion, answer, **_):
    return float(answer in str(completion[-1]["content"]))


def letters(completion, **_):
    text = str(completion[-1]["content"])
    return sum(character.islower() for character in text) / max(len(text), 1)


def rank(completions, **_):
    lengths = [len(str(completion[-1]["content"])) for completion in completions]
    return [float(sorted(lengths).index(length)) for length in lengths]


def rank_fails(completions, **_):
    raise ValueError("no ranking")


class Fails(SimpleMultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        if "break" in str(messages[-1]["content"]):
            raise vf.Error("broken")  # type: ignore[attr-defined]
        return await super().env_response(messages, state, **kwargs)


def load_environment(kind="single", reward="says", **settings):
    rows = {"question": ["What is 2 + 2?", "Name the capital of France."], "answer": ["4", "Paris"]}
    kinds = {"single": SingleTurnEnv, "multi": SimpleMultiTurnEnv, "tools": BasicToolEnv, "multi_fails": Fails}
    over_groups = {"rank": rank, "rank_fails": rank_fails}
    if reward in over_groups:
        rubric = Rubric(funcs=[over_groups[reward], says], weights=[1.0, 1.0])
    else:
        rubric = Rubric(funcs=[{"says": says, "letters": letters}[reward]], weights=[1.0])
    return kinds[kind](dataset=Dataset.from_dict(rows), parser=Parser(), rubric=rubric, **settings)
