"""Log files: logs/<component>.log gets what Shoal and its libraries say, with secrets hidden; the console gets nothing.

Called once at start by each process. Logging that fails is silent: a full disk is the run directory's to report.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from shoal.observability.atomic import storage
from shoal.observability.redact import redact

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CHATTY = ("asyncio", "urllib3", "filelock", "fsspec", "matplotlib", "aiohttp.access")


class _RedactingFormatter(logging.Formatter):
    """Hides secrets in the finished line, so arguments and tracebacks are covered too."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def setup_logging(logs: Path, component: str, level: int = logging.INFO) -> logging.Handler:
    """Send all logging of this process to logs/<component>.log. Returns the handler, for `stop_logging`."""
    if not _COMPONENT.fullmatch(component):
        raise ValueError(f"{component!r} cannot name a log file")
    with storage(f"open the log {logs / component}.log"):
        logs.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(logs / f"{component}.log", encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(name)s [%(threadName)s] %(message)s"))
    handler.setLevel(level)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(min(level, root.level or level))
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    logging.raiseExceptions = False
    return handler


def stop_logging(handler: logging.Handler) -> None:
    logging.captureWarnings(False)
    logging.getLogger().removeHandler(handler)
    handler.close()
