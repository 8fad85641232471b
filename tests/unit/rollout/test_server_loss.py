"""A server that is lost, fails or hangs during a control request: the SGLang test server; vLLM shares the code."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
from aiohttp import web

from shoal.core.errors import DeadlineError, EngineError
from shoal.rollout.remote.client import Address, HttpClient, Unreachable
from support.engine_servers import attached_double, publish
from support.engines import ask
from support.models import random_prompts, small_model
from support.sglang_double import SglangDouble

Handler = Callable[[web.Request], Awaitable[web.Response]]
(PROMPT,) = random_prompts(5, 12)


class Trouble:
    """Replaces a handler of the test server: the first `times` requests fail, and all are counted."""

    def __init__(self, double: SglangDouble, name: str, how: str, times: int = 1) -> None:
        self.asked = 0
        self._answering: Handler = getattr(double, name)
        self._how, self._times = how, times
        self._over = asyncio.Event()
        setattr(double, name, self)

    async def __call__(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.asked > self._times:
            return await self._answering(request)
        if self._how == "hangs":  # until the test ends
            await asyncio.wait_for(self._over.wait(), 60)
        if self._how == "fails":
            return web.json_response({"error": {"message": "See stack trace (above)"}}, status=500)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def over(self) -> None:
        self._over.set()


@pytest.mark.parametrize("name", ["model_info", "server_info"])
def test_connection_lost_during_connect_is_retried(name: str) -> None:
    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            trouble = Trouble(double, name, "is lost", times=2)  # a lost GET is repeated automatically
            await engine.connect()
            assert trouble.asked == 3 and (await engine.generate(ask("r", PROMPT))).token_ids

    asyncio.run(main())


def test_failing_server_is_not_mistaken_for_another_engine() -> None:
    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            Trouble(double, "server_info", "fails")
            await engine.connect()

    with pytest.raises(EngineError, match=r"^SGLang failed: .*refused /server_info \(status 500\)"):
        asyncio.run(main())


def test_hanging_load_times_out_once() -> None:
    """Neither the load nor the resume request is repeated: otherwise the wait for a silent server would be ten times
    as long.
    """

    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            await engine.connect()
            engine.settings = replace(engine.settings, timeout_s=0.5)
            hanging = Trouble(double, "update_weights_from_disk", "hangs")
            going_on = Trouble(double, "continue_generation", "is counted", times=0)
            began = time.monotonic()
            with pytest.raises(DeadlineError, match=r"SGLang at .* no answer to /update_.* raise orch.client.timeout"):
                await engine.load(3, publish(3, dict(small_model("qwen3", seed=9).named_parameters())))
            assert time.monotonic() - began < 5 and (hanging.asked, going_on.asked) == (1, 0)
            hanging.over()

    asyncio.run(main())


def test_cancelled_load_does_not_wait_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline of the loop ends the wait. The request to resume has a short time limit."""
    monkeypatch.setattr("shoal.rollout.remote.engine.HEALTH_S", 2)

    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            await engine.connect()
            loads = Trouble(double, "update_weights_from_disk", "hangs")
            going_on = Trouble(double, "continue_generation", "hangs")
            manifest = publish(3, dict(small_model("qwen3", seed=9).named_parameters()))
            loading = asyncio.create_task(engine.load(3, manifest))
            while not loads.asked:
                await asyncio.sleep(0.01)
            loading.cancel()
            async with asyncio.timeout(10):
                assert isinstance(*await asyncio.gather(loading, return_exceptions=True), asyncio.CancelledError)
            assert going_on.asked == 1
            loads.over()
            going_on.over()

    asyncio.run(main())


def test_lost_load_leaves_the_server_unpaused() -> None:
    """The connection broke, and the server lives: a paused server might not report that it is healthy."""

    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            await engine.connect()
            loads = Trouble(double, "update_weights_from_disk", "is lost")
            going_on = Trouble(double, "continue_generation", "is counted", times=0)
            manifest = publish(3, dict(small_model("qwen3", seed=9).named_parameters()))
            await engine.load(3, manifest)
            assert engine.version == 3
            assert loads.asked == 2 and going_on.asked == 2

    asyncio.run(main())


def test_refused_connection_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that drops packets: only a server that was reached can be slow."""
    monkeypatch.setattr("shoal.rollout.remote.client.CONNECT_S", 0.3)

    async def main(port: int) -> None:
        link = HttpClient(Address(f"http://127.0.0.1:{port}/v1"))
        try:
            with pytest.raises(Unreachable, match=r"^no connection within 0.3 s$"):
                await link.get("/health", 30)
        finally:
            await link.close()

    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # its queue is full after the first or second connection
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        asyncio.run(main(server.getsockname()[1]))


def test_refused_weights_keep_the_engine_sampling() -> None:
    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            expected = await engine.generate(ask("r", PROMPT))
            Trouble(double, "update_weights_from_disk", "fails")
            with pytest.raises(EngineError, match=r"SGLang failed: .*See stack trace"):
                await engine.load(3, publish(3, dict(small_model("qwen3", seed=9).named_parameters())))
            async with asyncio.timeout(20):
                assert (await engine.generate(ask("r", PROMPT))).token_ids == expected.token_ids

    asyncio.run(main())
