"""An app on a socket, on the loop that is running. Signals stay with the process, which may be a training run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from shoal.errors import ConfigError, EngineError

START_LIMIT_S = 30.0
OPEN_FILES = 8192
CLOSE_LIMIT_S = 5.0
KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that it is they who close it


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """The port is ours from here on, though nobody is answered yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise _taken((host, port)) from error
        raise ConfigError(f"infer.host: cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock


def _allow_connections() -> None:
    """A connection is an open file, and many systems give a process 1024 of them unless it asks for more."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now != resource.RLIM_INFINITY and now < OPEN_FILES:
        wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))


def _taken(address: tuple[str, int]) -> ConfigError:
    return ConfigError(f"infer.port: {address[1]} on {address[0]} is taken; end what holds it, or set another")


class Listener:
    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False, date_header=False,
            proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1, backlog=4096,
        )  # fmt: skip
        self._server = _Server(config)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._sock.getsockname()[1])

    async def start(self) -> None:
        _allow_connections()
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="listener")
        async with asyncio.timeout(START_LIMIT_S):
            while not self._server.started:
                if self._task.done():
                    error = self._task.exception()
                    raise (
                        _taken(self._sock.getsockname()[:2])
                        if isinstance(error, OSError)
                        else EngineError(f"no HTTP: {error}")
                    )
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Ends connections; what is being answered gets a second to finish."""
        if self._task is None:
            self._sock.close()
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_LIMIT_S)
        if not done:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._sock.close()
