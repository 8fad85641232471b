"""Short English phrases from a seeded generator: the offline text source of `reverse-text`.

Phrases are lower-case letters and single spaces, so that even a character-level tokenizer of 27 symbols covers them.
"""

from __future__ import annotations

import random

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
    """A phrase of min_len to max_len characters, lengths spread evenly over that range."""
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
    """Cut at the last word boundary that leaves at least min_len characters, or inside a word where there is none."""
    boundary = text.rfind(" ", min_len, length + 1)
    cut = text[: boundary if boundary >= min_len else length]
    return cut[:-1] + "s" if cut.endswith(" ") else cut
