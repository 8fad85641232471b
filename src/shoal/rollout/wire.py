"""JSON over HTTP to one inference server, with its failures told apart: it refused, it is gone, it took too long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from shoal.errors import DeadlineError, EngineError

SHOWN = 600  # characters of a server's own words


class Refused(EngineError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Lost(EngineError):
    """Nobody answers, or the connection broke before the answer."""


class Wire:
    def __init__(self, name: str, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.name = name
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        return await self._call("POST", path, body, timeout_s)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        limit = timeout_s or self._timeout_s
        if self._session is None:
            # As many connections as there are rollouts: who waits is decided by the server's scheduler, not by a pool.
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        timeout = aiohttp.ClientTimeout(total=limit)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as answer:
                text = await answer.text()
                if answer.status >= 400:
                    raise Refused(f"{self.name} refuses {path}: {_said(text)}", answer.status)
                return _parsed(text)
        except TimeoutError as error:
            raise DeadlineError(f"{self.name} at {self.url} did not answer {path} within {limit:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(f"{self.name} at {self.url} does not answer ({error})") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # lets the transports go before the loop does
            self._session = None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def _said(text: str) -> str:
    """The server's own message, wherever it puts it."""
    content = _parsed(text)
    for name in ("error", "detail", "message"):
        if isinstance(content, dict) and name in content:
            content = content[name]
    return " ".join(str(content).split())[:SHOWN]
