"""`reverse-text`: write a text backwards. The texts are generated English phrases or come from a dataset.

Generated phrases consist of lower-case letters and single spaces, so a character-level tokenizer of 27 symbols works.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Annotated

from pydantic import Field

from shoal.core.errors import ConfigError
from shoal.core.types import Message, Task
from shoal.envs.base import EvalSize, Generated, TaskSeed, TrainSize, ask
from shoal.envs.datasets import DatasetSpec, read_splits
from shoal.rewards.outcome import answer_of

_WORD_LISTS = {
    "adjectives": """
old new quiet loud warm cold bright dark small tall short long round flat deep soft hard sweet sour dry wet heavy light
clean dusty empty full early late gentle rough smooth sharp plain proud brave calm clever eager fair fresh golden green
blue red grey white silver wooden hollow hungry idle kind lazy lonely lucky merry narrow wide odd patient polite quick
rare rich rusty sleepy slow steady strange strong tidy tiny true weary wild wise young northern southern distant hidden
broken famous frozen humble little modern noisy pleasant simple sudden tender useful
""",
    "nouns": """
river mill garden window door road bridge forest field mountain valley island harbour boat sailor captain farmer baker
teacher painter doctor miller tailor child brother sister uncle neighbour traveller stranger king queen cat dog horse
fox owl crow goose sheep rabbit mouse spider bee fish whale tree oak pine apple pear plum bread butter cheese honey
kettle lamp candle mirror table chair basket bottle blanket hammer ladder letter book page story song drum violin clock
bell tower castle cottage kitchen market village city street corner station train wagon wheel engine storm cloud rain
snow wind shadow morning evening winter summer spring autumn moon star sun fire stone sand shore lake stream meadow
""",
    "verbs": """
watches finds follows remembers paints carries visits builds repairs opens closes hears sees likes loves misses keeps
leaves crosses reaches passes meets greets helps teaches asks answers calls brings sells buys borrows counts cleans
washes hides guards moves turns lifts drops throws catches holds shares
""",
    "prepositions": """
near under above behind beside beyond past inside outside around against across before after
""",
    "determiners": """
the a one that this every another our my your his her
""",
    "adverbs": """
slowly quickly quietly gladly often always never again today tonight soon early late twice together alone
""",
}
ADJECTIVES, NOUNS, VERBS, PREPOSITIONS, DETERMINERS, ADVERBS = (words.split() for words in _WORD_LISTS.values())
WORDS = sorted({*ADJECTIVES, *NOUNS, *VERBS, *ADVERBS, *PREPOSITIONS})


def draw_phrase(rng: random.Random, min_len: int, max_len: int) -> str:
    """Draw a phrase with a length uniform in min_len to max_len characters."""
    length = rng.randint(min_len, max_len)
    words: list[str] = []
    while len(" ".join(words)) < length + 1:
        words.extend(_clause(rng) if length > 12 else [rng.choice(WORDS)])
    return _fit(" ".join(words), length, min_len)


def _clause(rng: random.Random) -> list[str]:
    words = [*_noun_phrase(rng), rng.choice(VERBS), *_noun_phrase(rng)]
    if rng.random() < 0.5:
        words += [rng.choice(PREPOSITIONS), *_noun_phrase(rng)]
    if rng.random() < 0.3:
        words.append(rng.choice(ADVERBS))
    return words


def _noun_phrase(rng: random.Random) -> list[str]:
    adjective = [rng.choice(ADJECTIVES)] if rng.random() < 0.5 else []
    noun = rng.choice(NOUNS)
    words = [rng.choice(DETERMINERS), *adjective, noun]
    if words[0] == "a" and words[1][0] in "aeiou":
        words[0] = "an"
    return words


def _fit(text: str, length: int, min_len: int) -> str:
    """Cut at the last word boundary that leaves at least min_len characters, else inside a word."""
    boundary = text.rfind(" ", min_len, length + 1)
    cut = text[: boundary if boundary >= min_len else length]
    return cut[:-1] + "s" if cut.endswith(" ") else cut


SYSTEM_PROMPT = (
    "Reverse the text you are given, character by character. "
    "Write the reversed text inside <reversed_text> and </reversed_text> tags."
)
TAG = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


class ReverseText(Generated):
    """Write a short English text backwards, character by character."""

    name = "reverse-text"
    max_reward = 1.0

    def __init__(
        self,
        min_len: Annotated[int, Field(ge=2, description="characters of the shortest text")] = 8,
        max_len: Annotated[int, Field(ge=2, description="characters of the longest text")] = 40,
        num_train: TrainSize = 5000,
        num_eval: EvalSize = 200,
        seed: TaskSeed = 0,
        system_prompt: Annotated[str, Field(description="replaces the built-in system prompt")] = SYSTEM_PROMPT,
        dataset: DatasetSpec | None = None,
    ) -> None:
        if min_len > max_len:
            raise ConfigError(f"reverse-text: min_len {min_len} is larger than max_len {max_len}")
        self._bounds = (min_len, max_len)
        super().__init__(num_train, num_eval, seed)
        self._system_prompt = system_prompt
        self._dataset = dataset
        self._splits: dict[str, list[Task]] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        if self._dataset is None:
            return super().tasks(split)
        if self._splits is None:
            self._splits = read_splits(self._dataset, ("prompt",), lambda row: self._task(str(row["prompt"]).strip()))
        return self._splits[split]

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        found = TAG.search(answer_of(messages))
        response = found.group(1).strip() if found else ""
        return SequenceMatcher(None, response, task.data["answer"]).ratio()

    def solution(self, task: Task) -> str:
        return f"<reversed_text>{task.data['answer']}</reversed_text>"

    def _task(self, text: str) -> Task:
        return ask(text, system=self._system_prompt, answer=text[::-1])

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        text = draw_phrase(rng, *self._bounds)
        return text, self._task(text)
