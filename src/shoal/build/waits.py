"""Whom a run waits for, told where people look: used by every layout that has a server to wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.build.run import Watching

LOADING = "is still loading"  # as it does at every start: no trouble


def tell_wait(watching: Watching, text: str) -> None:
    """Who is waited for, since when, and that it is over: on the console, in the events and in the status."""
    waits = text.startswith("waiting") and not text.endswith(LOADING)
    watching.events.emit("waiting", text, level="warning" if waits else "notice")
    if not waits:
        watching.console.note(text)
    status = watching.run_dir.status
    watching.run_dir.write_status(
        "running",
        step=status.get("step", 0),
        reason=text,
        resumable=bool(status.get("resumable")),
        next_command=status.get("next_command"),
    )
