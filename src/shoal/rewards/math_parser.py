"""Grade mathematics: extract the final answer of a completion and compare it with the gold answer.

Numbers are compared exactly, everything else by math-verify. Its timeouts are off, because they need SIGALRM on the
main thread. Run this in a killable process: some expressions take seconds and hundreds of megabytes.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache

from shoal.rewards.numeric import first_number, parse_number, same_number
from shoal.rewards.outcome import RewardValueError

MAX_ANSWER_CHARS = 2000
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_PHRASE = re.compile(r"\banswer\s*(?:is|:|=)\s*:?\s*([^\n]+)", re.IGNORECASE)
_WORDS = re.compile(r"(?:[A-Za-z]{3,}+[ ,.!?']*+)++")  # possessive: without them, matching can take exponential time
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_TIME = re.compile(r"\b(\d{1,2}):(\d{2})(?:\s*([ap])\.?m\b\.?)?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")


def process_results(completion: str, gold: object) -> tuple[bool, tuple[str | None, str]]:
    """Return (correct, (answer, gold answer)). If the completion states no answer, it is None and incorrect.

    A gold answer may be a number: 18 and 18.0 are "18".
    """
    if gold is None or isinstance(gold, bool):
        raise RewardValueError(f"the gold answer is {gold!r}, neither text nor a number")
    text = str(gold)
    gold_answer = extract_answer(text) or text.strip()
    answer = extract_answer(completion)
    correct = answer is not None and len(answer) <= MAX_ANSWER_CHARS and same_answer(answer, gold_answer)
    return correct, (answer, gold_answer)


def extract_answer(text: str) -> str | None:
    r"""Return the answer that a text states, None if it states none.

    In this order: the last \boxed{…}, the last <answer>…</answer>, the text after the last ####, the text after the
    last "answer is", and the last line if it is only a number. A number inside other text is no answer.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    tags = _TAG.findall(text)
    if tags:
        return _from_sentence(tags[-1].strip())
    hashes = _HASHES.findall(text)
    if hashes:
        return hashes[-1].strip() or None
    phrases = _PHRASE.findall(text)
    if phrases:
        return _from_sentence(phrases[-1])
    last = text.strip().rpartition("\n")[2].strip()
    return last if parse_number(last) is not None else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{…} or \fbox{…}, with balanced braces."""
    for start in sorted((m.end() for m in re.finditer(r"\\f?boxed\s*\{|\\fbox\s*\{", text)), reverse=True):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position]
    return None


def same_answer(answer: str, gold: str) -> bool:
    """True if the answers are equal as numbers, as text, or as expressions."""
    if same_number(answer, gold):
        return True
    times = [_minutes(text) for text in (answer, gold)]
    if None not in times:
        return times[0] == times[1]
    if parse_number(answer) is not None and parse_number(gold) is not None:
        return False
    if _plain(answer) == _plain(gold):
        return True
    if _WORDS.fullmatch(answer) and parse_number(gold) is not None:
        return False  # math-verify takes 20 ms to read words as products of symbols, which equal no number
    return _same_expression(answer, gold)


def prepare() -> None:
    """Import math-verify once in the server, so that workers start with it loaded."""
    _same_expression("x", "x^2")


def _from_sentence(text: str) -> str | None:
    """Return the number in a sentence ("18 dollars.", "3 + 5 = 8"), else its text up to the full stop."""
    if parse_number(text) is not None:
        return text.strip().rstrip(".")
    if time := _TIME.search(text):
        return time[0]
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0].strip().strip("*").strip()
    tail = sentence.rsplit("=", 1)[-1]
    if parse_number(tail) is None and ("\\" in tail or "$" in tail[1:]):
        return sentence or None  # a formula: do not shorten it
    return first_number(tail) or sentence or None


def _minutes(text: str) -> tuple[int, str] | None:
    """A time of day as minutes; the second part is "" if am or pm is missing in a 12-hour time."""
    found = _TIME.fullmatch(text.strip())
    if found is None or int(found[1]) > 24 or int(found[2]) > 59:
        return None
    hour, half = int(found[1]), (found[3] or "").lower()
    if half:
        hour = hour % 12 + 12 * (half == "p")
    return hour * 60 + int(found[2]), "" if not half and 1 <= hour <= 12 else "exact"


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text.strip().strip("$").rstrip(".")).casefold()


@lru_cache(maxsize=4096)
def _same_expression(answer: str, gold: str) -> bool:
    from math_verify import verify  # imports take 0.5 s, and most answers are plain numbers

    return bool(verify(_read(gold), _read(answer), timeout_seconds=0))


@lru_cache(maxsize=256)  # the gold answer is the same for all rollouts of a group
def _read(text: str) -> list:
    from math_verify import parse

    # math-verify warns about a timeout of 0, which is intended here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=0)
