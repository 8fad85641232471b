"""Secrets that the processes of one run share: a file in its folder, readable by its owner alone.

One for each door: the server's control plane, calls over tcp, weights by broadcast. Whoever reads the file may enter.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from shoal.observability.atomic import TEMPORARY, storage

CONTROL = "infer.token"  # of a server without a key: who may steer it
CALLS = "train.token"
WEIGHTS = "weights.token"


def write_token(path: Path) -> str:
    """A new secret for this incarnation, mode 0600 from its first byte, and there whole or not at all."""
    token, unfinished = secrets.token_hex(32), path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    with storage(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        unfinished.replace(path)
    return token


def read_token(path: Path) -> str | None:
    """None while there is none that this process may read."""
    try:
        return path.read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None
