"""The endpoint inside the training process: environments that talk HTTP play their rollouts here.

Bound to 127.0.0.1 on a free port. A rollout has a model name of its own, <model>@<secret>: its requests are known by it
and clients share one address. The plain model name answers as any OpenAI-compatible server does.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.errors import EngineError
from shoal.server.app import make_app
from shoal.server.completions import Completions, Served
from shoal.server.listen import Listener, bind
from shoal.server.names import Names
from shoal.server.sessions import Session

HOST = "127.0.0.1"


class LocalEndpoint:
    """Starts with the first session, on the loop that asks for it. `served.model` should hold no `@`."""

    def __init__(self, served: Served) -> None:
        self.model = served.model
        self._names = Names(served.model, lambda: served.engine.version)
        self._app = make_app(Completions(served), self._names, failed=self._remember)
        self._listener: Listener | None = None
        self._starting = asyncio.Lock()
        self.failure: EngineError | None = None  # the engine's; clients only see a 500

    def _remember(self, failure: EngineError) -> None:
        self.failure = failure

    @asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """(base_url, model name) of a rollout while the block runs; its turns are then in the session."""
        base_url = await self.start()
        name = f"{self.model}@{secrets.token_urlsafe(16)}"
        self._names.sessions[name] = session
        try:
            yield base_url, name
        finally:
            session.closed = True
            del self._names.sessions[name]

    async def start(self) -> str:
        """Listen, if not yet; returns the base_url without a session."""
        async with self._starting:  # whole groups ask at once
            if self._listener is None:
                listener = Listener(self._app, bind(HOST, 0))
                await listener.start()
                self._listener = listener
        return f"http://{HOST}:{self._listener.port}/v1"

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
