"""Find numbers in text and compare them exactly, as fractions. Called by graders. Nothing is evaluated.

Accepts commas, currency and percent signs, units, simple and LaTeX fractions. Sizes are bounded: 1e999999999 is not a
number here, so it cannot exhaust memory.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 60
MAX_EXPONENT = 60

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+"
_FRACTION = rf"(?:{_DIGITS})\s*/\s*(?:{_DIGITS})"
NUMBER = re.compile(rf"(?<![A-Za-z0-9])(?:[-+]?\$?|\$[-+])(?:{_FRACTION}|{_DIGITS})(?:[eE][-+]?\d+)?(?:\s?\\?%)?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))")
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)\s*/\s*(\d+)")
_PLAIN = re.compile(r"([-+]?)(\d+(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d+))?")
# "18 dollars" and "5cm" are numbers with a unit; "5x", "5xy" and "2 pi" are not.
_UNIT = re.compile(
    r"(?:\s+(?!pi\b|sqrt)[A-Za-z]{2}[A-Za-z./\s]*|\s*(?:[kcm]?m|k?g|lbs?|oz|ft|hrs?|h|mins?|s|m?[lL]|mph|km/h|am|pm|°[CF]?))"
    r"(?:\^?\{?[23]\}?|[²³])?\s*"
)
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_CURRENCY = re.compile(r"\\?\$|[€£¥₹]|\b(?:USD|EUR|GBP)\b")
_SPACING = re.compile(r"\\[,;:! ]|\{,\}|\\left|\\right|~")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number, with or without a unit, else None. A percent sign is a unit."""
    if len(text) > 4 * MAX_DIGITS:
        return None
    text = _normalise(text).replace("%", " ").strip()
    mixed = _MIXED.fullmatch(text)
    if mixed:
        sign, whole, over, under = mixed.groups()
        value = _divide(Fraction(int(over)), Fraction(int(under)))
        return None if value is None else (int(whole) + value) * (-1 if sign == "-" else 1)
    numerator = _PLAIN.match(text)
    if numerator is None:
        return None
    rest = text[numerator.end() :]
    value = _decimal(numerator)
    over = re.match(r"\s*/\s*", rest)
    denominator = _PLAIN.match(rest, over.end()) if over else None
    if denominator is not None:
        rest = rest[denominator.end() :]
        divisor = _decimal(denominator)
        value = None if value is None or divisor is None else _divide(value, divisor)
    if value is None or (rest and not _UNIT.fullmatch(rest)):
        return None
    return value * _SCALES.get((rest.split() or [""])[0].lower(), 1)


def last_number(text: str) -> str | None:
    """Return the last number of a text, as written, or None."""
    found = [match.group().strip() for match in NUMBER.finditer(text.replace("−", "-"))]
    return found[-1] if found else None


def first_number(text: str) -> str | None:
    """Return the first number of a text, as written, or None."""
    found = NUMBER.search(text.replace("−", "-"))
    return found.group().strip() if found else None


def same_number(answer: str, gold: str) -> bool:
    """True if two texts are the same number. 25% equals both 25 and 0.25, because the sign is often omitted."""
    left, right = parse_number(answer), parse_number(gold)
    if left is None or right is None:
        return False
    if left == right:
        return True
    percents = ("%" in answer, "%" in gold)
    if percents == (True, False):
        return left / 100 == right
    return left == right / 100 if percents == (False, True) else False


def _normalise(text: str) -> str:
    """Remove what does not change the value: currency, spacing, thousands separators, LaTeX commands."""
    text = _TEXT.sub(r" \1 ", text.replace("−", "-").replace("\\%", "%"))
    text = _LATEX_FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]} ", text)
    text = _SPACING.sub("", _CURRENCY.sub("", text)).strip().strip("*`").strip()
    text = text.removesuffix(".")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(
        r"^([-+]?\d{1,3})((?:[ \u00a0\u2009\u202f]\d{3})+)(?=\D*$)", lambda m: m[1] + re.sub(r"\D", "", m[2]), text
    )
    return re.sub(r"^([-+])\s+", r"\1", text)


def _decimal(match: re.Match[str]) -> Fraction | None:
    sign, digits, exponent = match.groups()
    if len(digits) > MAX_DIGITS or (exponent and (len(exponent) > 4 or abs(int(exponent)) > MAX_EXPONENT)):
        return None
    value = Fraction(digits.rstrip(".") if digits.endswith(".") else digits) * Fraction(10) ** int(exponent or 0)
    return -value if sign == "-" else value


def _divide(left: Fraction, right: Fraction) -> Fraction | None:
    return left / right if right else None
