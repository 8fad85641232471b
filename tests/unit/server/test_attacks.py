"""Attacks on a real server on loopback. Every test asserts that /health answers within a second meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import pytest

from shoal.core.types import FinishReason, Request
from shoal.models.chat import LONGEST_TOKEN_CHARS, Chat
from shoal.server.access import Access, Listener, bind
from shoal.server.app import make_app
from shoal.server.completions import Completions, ServedModel
from shoal.server.control import Control, Names
from shoal.server.request_schema import BadRequest, CompletionBody, decode
from support.models import TOKENIZER
from support.scripted import Script, ScriptedEngine

CONTEXT_TOKENS = 2048
HEALTH_S = 1.0
MiB = 2**20
Post = Callable[..., Coroutine[Any, Any, tuple[int, Any]]]


class Watch:
    """Requests /health continuously and records the longest time between two answers."""

    def __init__(self, http: aiohttp.ClientSession, base: str) -> None:
        self._http, self._base = http, base
        self.worst_s = 0.0
        self.count = 0

    async def run(self) -> None:
        answered = time.monotonic()  # a stall may begin in the pause, before the next request is sent
        while True:
            async with self._http.get(f"{self._base}/health") as reply:
                assert reply.status == 200
            before, answered = answered, time.monotonic()
            self.worst_s = max(self.worst_s, answered - before)
            self.count += 1
            await asyncio.sleep(0.01)


def attack(
    work: Callable[[int, Post], Awaitable[None]],
    context_tokens: int = CONTEXT_TOKENS,
    script: Script = lambda _: ("hi", "stop"),
    **access: Any,
) -> None:
    """Run `work(port, post)` while /health is requested continuously."""

    async def run() -> None:
        engine: Any = ScriptedEngine(script)
        names = Names("fish", lambda: engine.version)
        completions = Completions(ServedModel(engine, Chat(TOKENIZER), "fish", context_tokens))
        app = make_app(completions, names, Control(engine, names, {}), Access(**access))
        listener = Listener(app, bind("127.0.0.1", 0))
        await listener.start()
        base = f"http://127.0.0.1:{listener.port}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:

            async def post(path: str, data: bytes, **headers: str) -> tuple[int, Any]:
                async with http.post(base + path, data=data, headers=headers) as reply:
                    return reply.status, await reply.json()

            watch = Watch(http, base)
            watching = asyncio.create_task(watch.run())
            await work(listener.port, post)
            await asyncio.sleep(0.05)
            assert not watching.done(), watching
            watching.cancel()
            assert watch.count > 0 and watch.worst_s < HEALTH_S, watch.worst_s
        await listener.close()

    asyncio.run(run())


@contextmanager
def memory_growth_below(limit_bytes: int) -> Iterator[None]:
    """Peak memory of the process, which includes the client's copies of the bodies."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < limit_bytes, f"{grown / MiB:.0f} MiB"


@contextmanager
def memory_measured() -> Iterator[None]:
    """Without the garbage collector, so that tracemalloc also counts cycles that it would free."""
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


async def rejected(post: Post, path: str, body: bytes) -> bool:
    """Whether the body is too large for the server, which may close the connection while the client still sends."""
    try:
        return (await post(path, body))[0] == 413
    except aiohttp.ClientConnectionError:
        return True


def chat_body(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


@pytest.mark.parametrize("path", ("/v1/completions", "/v1/chat/completions", "/tokenize"))
def test_a_20_mb_prompt_is_rejected_before_it_is_read(path: str):
    text = "x" * (20 * MiB)
    body = chat_body(text) if "chat" in path else json.dumps({"prompt": text}).encode()

    async def work(port: int, post: Post) -> None:
        assert await asyncio.gather(*(rejected(post, path, body) for _ in range(3))) == [True] * 3

    with memory_growth_below(256 * MiB):
        attack(work)


@pytest.mark.parametrize("path", ("/v1/completions", "/v1/chat/completions", "/tokenize"))
def test_prompt_with_too_many_characters_is_rejected_before_it_is_tokenised(path: str, monkeypatch: pytest.MonkeyPatch):
    """The same 20 MB where the context is so long that the body is within its limit."""
    tokens = 20 * MiB // LONGEST_TOKEN_CHARS
    text = "x" * (20 * MiB)
    body = chat_body(text) if "chat" in path else json.dumps({"prompt": text}).encode()
    encoded: list[str] = []
    monkeypatch.setattr(Chat, "encode", lambda self, text, special=False: encoded.append(text))
    monkeypatch.setattr(Chat, "_encode", lambda self, text: encoded.append(text))

    async def work(port: int, post: Post) -> None:
        status, reply = await post(path, body)
        assert status == 400 and "maximum context length" in reply["error"]["message"]

    attack(work, context_tokens=tokens)
    assert not encoded


@pytest.mark.long("tokenises half a million characters")
def test_tokenisation_runs_off_the_event_loop():
    """A text that passes the length check takes seconds to tokenise. Token-id prompts do not wait for it."""
    body = json.dumps({"prompt": "x" * (CONTEXT_TOKENS * LONGEST_TOKEN_CHARS - 1)}).encode()

    async def work(port: int, post: Post) -> None:
        slow = asyncio.create_task(post("/v1/completions", body))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        assert (await post("/v1/completions", b'{"prompt": [5, 6]}'))[0] == 200
        assert time.monotonic() - began < HEALTH_S and not slow.done()
        status, reply = await slow
        assert status == 400 and "maximum context length" in reply["error"]["message"]

    attack(work)


@pytest.mark.long("sends 90 MB")
def test_five_million_token_ids_are_rejected():
    ids = b'{"prompt": [' + b"30000," * 4_999_999 + b"30000]}"

    async def small_context(port: int, post: Post) -> None:
        assert await rejected(post, "/v1/completions", ids)

    async def long_context(port: int, post: Post) -> None:
        status, reply = await post("/v1/completions", ids)
        assert status == 400 and "maximum context length" in reply["error"]["message"]
        status, reply = await post("/detokenize", ids.replace(b"prompt", b"tokens"))
        assert status == 400 and "maximum context length" in reply["error"]["message"]

    with memory_growth_below(128 * MiB):
        attack(small_context)
    with memory_growth_below(512 * MiB):
        attack(long_context, context_tokens=131072)


def with_length(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)


def in_one_chunk(path: str, body: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
    return head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


REJECTED_REQUESTS = {
    "not JSON": with_length("/v1/completions", b"[" * (3 * MiB)),
    "not JSON, parsed inline": with_length("/v1/completions", b"[" * (MiB // 2)),
    "too many ids": with_length("/v1/completions", b'{"prompt": [' + b"7," * MiB + b"7]}"),
    "text too long": with_length("/v1/completions", json.dumps({"prompt": "x" * (3 * MiB)}).encode()),
    "chat too long": with_length("/v1/chat/completions", chat_body("x" * (3 * MiB))),
    "body too large": in_one_chunk("/v1/completions", b" " * (8 * MiB)),
}


@pytest.mark.parametrize("kind", REJECTED_REQUESTS)
def test_rejected_body_is_freed_at_once(kind: str):
    """Not by the garbage collector, which may run minutes later: meanwhile each request would occupy its memory."""
    request = REJECTED_REQUESTS[kind]

    async def send(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] in (b"400", b"413")
        writer.transport.abort()

    async def work(port: int, post: Post) -> None:
        await send(port)
        await asyncio.sleep(0.05)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            await send(port)
        await asyncio.sleep(0.05)
        grown = tracemalloc.get_traced_memory()[0] - before
        assert grown < MiB // 4, f"{grown / MiB:.1f} MiB"

    with memory_measured():
        attack(work)


@pytest.mark.parametrize("path", ("/v1/completions", "/v1/chat/completions"))
def test_body_is_freed_before_its_completion_is_sampled(path: str):
    start = b'{"messages": [{"role": "user", "content": "x"}]' if "chat" in path else b'{"prompt": [5, 6]'
    small, large = (b'%s, "metadata": [%s[]]}' % (start, b"[]," * count) for count in (0, MiB))
    held: list[int] = []

    def note_memory(request: Request) -> tuple[str, FinishReason]:
        """The lowest value within a moment: the thread that parsed the body may not have freed its variables yet."""
        samples = []
        for _ in range(20):
            time.sleep(0.01)
            samples.append(tracemalloc.get_traced_memory()[0])
        held.append(min(samples))
        return "hi", "stop"

    async def work(port: int, post: Post) -> None:
        for body in (small, large):
            assert (await post(path, body))[0] == 200

    with memory_measured():
        attack(work, script=note_memory)
    assert held[1] - held[0] < MiB // 4, f"{(held[1] - held[0]) / MiB:.1f} MiB"


@pytest.mark.parametrize("path", ("/v1/chat/completions", "/tokenize"))
def test_one_conversation_at_a_time_is_parsed(path: str):
    """A body of small lists needs 20 times its memory when it is parsed."""
    message = b'{"role": "user", "content": "x", "lists": [%s[]]}' % (b"[]," * 2**14)
    body = b'{"messages": [%s]}' % message

    async def work(port: int, post: Post) -> None:
        async def peak(clients: int) -> int:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            statuses = [status for status, _ in await asyncio.gather(*(post(path, body) for _ in range(clients)))]
            assert set(statuses) == {200}
            return tracemalloc.get_traced_memory()[1] - before

        await peak(1)
        alone, together = await peak(1), await peak(8)
        assert together - alone < 4 * MiB, f"{alone / MiB:.1f} MiB, {together / MiB:.1f} MiB together"

    with memory_measured():
        attack(work)


def test_parsing_a_body_starts_no_garbage_collection():
    """Collections of all objects, one after the other, would stop the event loop for seconds."""

    def collections() -> int:
        return sum(generation["collections"] for generation in gc.get_stats())

    body = b'{"prompt": [' + b"[]," * 100_000 + b"[]]}"
    before = collections()
    decode(body, CompletionBody)
    assert gc.isenabled() and collections() - before < 10


def test_parsing_in_two_threads_leaves_the_garbage_collector_on():
    body = b'{"prompt": [5, 6]}'

    def parse(_: int) -> None:
        for _ in range(2000):
            decode(body, CompletionBody)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(parse, range(4)))
    finally:
        sys.setswitchinterval(interval)
    enabled = gc.isenabled()
    gc.enable()
    assert enabled


@pytest.mark.parametrize("value", (b"[1,,2]", b"{1: 2}", b"nul", b'"', b"[" * 100_000))
def test_value_of_an_ignored_key_must_be_json(value: bytes):
    with pytest.raises(BadRequest):
        decode(b'{"prompt": "x", "metadata": %s}' % value, CompletionBody)


@pytest.mark.parametrize("levels", (500, 1000, 100_000))
def test_deeply_nested_json_gets_400(levels: int):
    nested = b"[" * levels + b"]" * levels
    message = b'"messages": [{"role": "user", "content": "x"'
    bodies = [
        ("/v1/chat/completions", b'{"tools": [{"a": %s}], %s}]}' % (nested, message)),
        ("/v1/chat/completions", b'{%s, "tool_calls": %s}]}' % (message, nested)),
        ("/v1/chat/completions", b'{"metadata": %s, "nothing": 1, %s}]}' % (nested, message)),
        ("/v1/chat/completions", b'{"chat_template_kwargs": {"a": %s}, "nothing": 1, %s}]}' % (nested, message)),
        ("/v1/completions", b'{"prompt": %s}' % nested),
        ("/tokenize", nested),
        ("/shoal/load", b'{"version": 1, "adapter": %s}' % nested),
        ("/v1/load_lora_adapter", b'{"lora_name": %s}' % nested),
    ]

    async def work(port: int, post: Post) -> None:
        for path, body in bodies:
            status, reply = await post(path, body, Authorization="Bearer token")
            shallow_tools = levels == 500 and (b"tool" in body or b"adapter" in body)
            assert status == 400 or (shallow_tools and status == 200), (path, body[:40], status, reply)

    attack(work, token="token")


def test_connections_with_incomplete_headers_are_closed(monkeypatch: pytest.MonkeyPatch):
    """At once, byte by byte, without any byte, and after a complete request on the same connection."""
    monkeypatch.setattr("shoal.server.access.HEADER_LIMIT_S", 0.5)
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def hold(port: int, first: bytes, head: bytes, drip: bool) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = time.monotonic()
        writer.write(first)
        await asyncio.sleep(0.1 if first else 0)
        writer.write(head)

        async def send_slowly() -> None:
            while drip:
                writer.write(b"X-a: b\r\n")
                await asyncio.sleep(0.05)

        sending = asyncio.create_task(send_slowly())
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(-1), 10)
        sending.cancel()
        writer.close()
        return time.monotonic() - began

    async def work(port: int, post: Post) -> None:
        start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        kinds = [(b"", b"", False), (b"", b"G", False), (b"", start, True)]
        kinds += [(health, start, False), (health, start, True)]
        held = await asyncio.gather(*(hold(port, *kind) for kind in kinds * 20))
        assert len(held) == 100 and max(held) < 5, held

    attack(work)


STREAM = b'{"prompt": [5, 6], "stream": true}'
CHUNKED = b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
# What is sent first, and what is repeated.
ENDLESS_HEADERS = {
    "header": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-a: ", b"a"),
    "many headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"a:b\r\n"),
    "trailers": (CHUNKED, b"a:b\r\n"),
    "URL": (b"GET /", b"a"),
    "second request": (with_length("/v1/completions", STREAM) + b"GET /health HTTP/1.1\r\nX-a: ", b"a"),
}


@pytest.mark.parametrize("kind", ENDLESS_HEADERS)
def test_connections_with_endless_headers_are_closed(kind: str):
    async def send(port: int) -> int:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        start, repeated = ENDLESS_HEADERS[kind]
        writer.write(start)
        sent, block = 0, repeated * (MiB // len(repeated))
        with suppress(ConnectionError):
            while sent < 64 * MiB:
                writer.write(block)
                await writer.drain()
                sent += len(block)
        writer.transport.abort()
        return sent

    async def work(port: int, post: Post) -> None:
        with memory_growth_below(64 * MiB):
            sent = await asyncio.gather(*(send(port) for _ in range(4)))
        assert max(sent) < 16 * MiB, sent  # what the buffers of the sockets hold

    attack(work)


def test_slow_request_is_not_cut_off_by_the_deadline_for_headers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.server.access.HEADER_LIMIT_S", 0.2)

    async def work(port: int, post: Post) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": [5, 6]}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        for _ in range(2):  # the connection may rest between requests, too
            writer.write(head)
            for byte in body:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.03)
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).startswith(b"HTTP/1.1 200")
            length = int((await reader.readuntil(b"\r\n\r\n")).lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            await asyncio.sleep(0.5)
        writer.close()

    attack(work)


def test_total_size_of_request_bodies_is_bounded():
    body = b'{"prompt": [' + b"5," * 1000 + b"5]}"

    async def work(port: int, post: Post) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b" " * 2000)  # holds 2,000 bytes of the 9,000
            writers.append(writer)
        await asyncio.sleep(0.2)
        assert (await post("/v1/completions", body))[0] == 503
        for writer in writers:
            writer.close()
        async with asyncio.timeout(10):
            while (await post("/v1/completions", body))[0] != 200:
                await asyncio.sleep(0.05)

    attack(work, total_body_bytes=9000)
