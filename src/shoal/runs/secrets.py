"""Secrets of a run: hides them in all output, and stores the tokens that the processes of one run share.

A secret is the value of an environment variable with a name like API_KEY or TOKEN, or a value passed to `add_secret`.
Each token is a file of mode 0600 in the run directory: one for the control endpoints of the server, one for the calls
between processes over TCP, one for the weight broadcast. A process that can read the file is authorised.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from shoal.runs.files import TEMPORARY, storage

HIDDEN = "[hidden]"
SECRET_NAME = re.compile(r"(?:(?:_|^)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWD|CREDENTIALS?)|PASSWORD)$", re.IGNORECASE)
_SHORTEST = 8  # shorter values are words like "true"; hiding them would damage ordinary text

# Token files in the run directory.
CONTROL = "infer.token"  # authorises control requests to a server without an API key
CALLS = "train.token"
WEIGHTS = "weights.token"

# Names in the HTTP control protocol.
INCARNATION = "x-shoal-incarnation"  # header that identifies the server process
NO_TOKEN = "invalid_token"  # error code: missing or wrong token
STORAGE = "storage"  # error code: weights cannot be read or differ from their manifest

_added: set[str] = set()


def add_secret(value: str) -> None:
    """Hide `value` from now on, for example an API key from a configuration file."""
    if len(value) >= _SHORTEST:
        _added.add(value)


@lru_cache(maxsize=4096)
def _names_a_secret(name: str) -> bool:
    """Cached, because every written line checks every environment variable."""
    return SECRET_NAME.search(name) is not None


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """All values to hide, longest first, so that a value which contains another one is hidden completely."""
    environment = os.environ if environment is None else environment
    found = {value for name, value in environment.items() if _names_a_secret(name) and len(value) >= _SHORTEST}
    return sorted(found | _added, key=lambda value: (-len(value), value))


def redact(text: str) -> str:
    for secret in secret_values():
        text = text.replace(secret, HIDDEN)
    return text


def redact_strings(value: Any, secrets: list[str]) -> Any:
    """Redact every string in JSON-like data. Numbers stay, even if their digits match."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {redact_strings(key, secrets): redact_strings(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_strings(item, secrets) for item in value]
    return value


def write_token(path: Path) -> str:
    """Write a new random token with mode 0600, atomically."""
    token, unfinished = secrets.token_hex(32), path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    with storage(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        unfinished.replace(path)
    return token


def read_token(path: Path) -> str | None:
    """The token, or None if the file is missing or unreadable."""
    try:
        return path.read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None
