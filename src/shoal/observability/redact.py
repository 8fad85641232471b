"""Keeps secrets out of everything a run writes or shows.

A secret is the value of an environment variable whose name says so, or a value added with `add_secret`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

HIDDEN = "[hidden]"
SECRET_NAME = re.compile(r"(?:(?:_|^)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWD|CREDENTIALS?)|PASSWORD)$", re.IGNORECASE)
_SHORTEST = 8  # shorter values are words like "true", and hiding them would garble ordinary text

_added: set[str] = set()


def add_secret(value: str) -> None:
    """Hide `value` from now on (an api key given in a configuration file, say)."""
    if len(value) >= _SHORTEST:
        _added.add(value)


@lru_cache(maxsize=4096)
def _names_a_secret(name: str) -> bool:
    """Remembered: this is asked of every variable for every line a run writes."""
    return SECRET_NAME.search(name) is not None


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """All values to hide, longest first, so that one containing another is hidden whole."""
    environment = os.environ if environment is None else environment
    found = {value for name, value in environment.items() if _names_a_secret(name) and len(value) >= _SHORTEST}
    return sorted(found | _added, key=lambda value: (-len(value), value))


def redact(text: str) -> str:
    for secret in secret_values():
        text = text.replace(secret, HIDDEN)
    return text


def redact_strings(value: Any, secrets: list[str]) -> Any:
    """The same for every string inside JSON-like data; numbers are left alone, even if their digits match."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {redact_strings(key, secrets): redact_strings(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_strings(item, secrets) for item in value]
    return value
